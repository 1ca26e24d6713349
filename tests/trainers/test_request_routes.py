"""The routes of requests go from the ranks that generated them to those that train them, by rank, layer and row."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_router_replay.errors import PayloadError, RouterReplayError
from megatron_router_replay.trainers import megatron_rl, request_routes
from megatron_router_replay.trainers.request_routes import Piece, RequestRoutes, Ticket, _queries

EXPERTS, TOPK = 16, 4
ENGINES = ((0, (2,)), (0, (3, 4)), (2, (2,)), (2, (3, 4)))
"""Of each of four ranks: two engines of two pipeline stages."""


def routes_of(request_id: int, length: int, layers: tuple[int, ...], experts: int = EXPERTS) -> torch.Tensor:
    """Return [length - 1, layers, TOPK]: each value tells its request, row, layer and place, modulo `experts`."""
    rows, numbers, places = torch.arange(length - 1), torch.tensor(layers), torch.arange(TOPK)
    return (7 * request_id + 5 * rows[:, None, None] + 3 * numbers[:, None] + places) % experts


def filled(rank: int, skip: int = -1, experts: int = EXPERTS) -> RequestRoutes:
    """Return a rank's store: engine 0 finished requests 1 and 2, engine 2 others of these numbers, twice as long."""
    store = RequestRoutes()
    store.engine, store.layers = ENGINES[rank]
    for number in (1, 2):
        length = 6 * number + store.engine
        if number != skip:
            rows = routes_of(10 * store.engine + number, length, store.layers, experts)
            store.keep(number, torch.arange(length), rows, num_experts=experts)
    return store


def exchanged(small: bool, experts: int, dtype: torch.dtype) -> tuple[bool, int]:
    rank = torch.distributed.get_rank()
    store, layers = filled(rank, experts=experts), (2,) if rank < 2 else (3, 4)
    wanted = {
        0: [(0, 1, 0, 5), (2, 1, 3, 7), (2, 2, 0, 13)],  # two requests of one rank, more than any rank has itself
        1: [],
        2: [(0, 2, 1, 4)],
        3: [(2, 1, 0, 7), (0, 1, 2, 2), (0, 2, 4, 11)],
    }[rank]
    pieces = [Piece(Ticket(engine, number, 0), begin, end) for engine, number, begin, end in wanted]
    with mock.patch.object(request_routes, "_MESSAGE_BYTES", 20 if small else 1 << 20):
        parts = store.fetch(pieces, layers, topk=TOPK, num_experts=experts)
    same = [
        torch.equal(part, routes_of(10 * engine + number, 6 * number + engine, layers, experts)[begin:end].to(dtype))
        for part, (engine, number, begin, end) in zip(parts, wanted, strict=True)
    ]
    return all(same), store.bytes_received


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(("experts", "dtype"), [(EXPERTS, torch.uint8), (300, torch.int16)])
def test_each_rank_gets_its_rows_and_layers_and_no_other_byte(small, experts, dtype, on_ranks):
    # Rows x layers x TOPK from other ranks, a byte or two an expert; what a rank has itself is not sent.
    expected = [(13 + 4) * 1 * TOPK, 0, 3 * 2 * TOPK, 7 * 2 * TOPK]
    assert on_ranks(4, exchanged, small, experts, dtype) == [(True, size * dtype.itemsize) for size in expected]


def refused(layers: tuple[int, ...], skip: int) -> str:
    rank = torch.distributed.get_rank()
    store = filled(rank, skip if rank == 1 else -1)
    pieces = [Piece(Ticket(0, 1, 0), 0, 5)] if rank == 3 else []
    try:
        store.fetch(pieces, layers, topk=TOPK, num_experts=EXPERTS)
    except PayloadError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("layers", "skip", "text"),
    [
        ((2, 5), -1, "MRR802: layer 5 of the trained model has no routes"),
        ((3,), 1, "MRR802: rank 1 has no routes of req"),
    ],
)
def test_routes_that_nobody_has_raise_on_all_ranks(layers, skip, text, on_ranks):
    failing = 3 if skip < 0 else 1
    of_peers = f"MRR802: the routes of requests cannot be fetched; rank {failing}: {text.removeprefix('MRR802: ')}"
    texts = on_ranks(4, refused, layers, skip)
    assert [each.startswith(text if rank == failing else of_peers) for rank, each in enumerate(texts)] == [True] * 4


def test_a_rank_queries_itself_first_and_else_spreads_over_the_ranks_that_have_a_layer():
    engines = ((0, (2,)), (0, (3, 4)), (0, (3, 4)), (2, (2, 3, 4)))
    pieces = [Piece(Ticket(0, 1, 0), 0, 5), Piece(Ticket(2, 7, 0), 3, 3), Piece(Ticket(2, 8, 0), 3, 9)]
    of_engine_0 = ((0, 1), (0, 1), (0,), ((1, 0, 5),))  # places there, layers here, pieces here, rows
    of_engine_2 = ((1, 2), (0, 1), (2,), ((8, 3, 9),))  # an empty piece has no row
    assert _queries(pieces, (3, 4), engines, 2) == {2: of_engine_0, 3: of_engine_2}
    assert _queries(pieces, (3, 4), engines, 3) == {2: of_engine_0, 3: of_engine_2}
    assert _queries(pieces, (3, 4), engines, 0) == {1: of_engine_0, 3: of_engine_2}
    assert _queries(pieces[:1], (4, 2), engines, 1) == {
        1: ((1,), (0,), (0,), ((1, 0, 5),)),
        0: ((0,), (1,), (0,), ((1, 0, 5),)),
    }


def test_the_dtype_is_as_narrow_as_the_experts_allow():
    for experts, dtype in ((256, torch.uint8), (257, torch.int16)):
        store = RequestRoutes()
        store.layers = (1,)
        store.keep(1, torch.arange(3), torch.full((2, 1, TOPK), experts - 1), num_experts=experts)
        assert store._requests[1].routes.dtype == dtype
        assert int(store._requests[1].routes.max()) == experts - 1


@pytest.mark.parametrize("shape", [(3, 1, TOPK), (2, 2, TOPK)])
def test_routes_of_another_length_or_model_raise(shape):
    store = RequestRoutes()
    store.layers = (1,)
    with pytest.raises(PayloadError, match="MRR802: request 7 has 3 tokens, so its routes must be 2 rows of 1 layers"):
        store.keep(7, torch.arange(3), torch.zeros(shape), num_experts=EXPERTS)


def test_routes_go_when_they_were_trained_or_are_too_old():
    store = filled(0)
    store.collection = 5
    store.keep(3, torch.arange(4), routes_of(3, 4, (2,)), num_experts=EXPERTS)
    store.keep(4, torch.arange(4), routes_of(4, 4, (2,)), num_experts=EXPERTS)
    store.forget([Ticket(0, 3, 5), Ticket(2, 4, 5)], before=1)  # request 4 of the other engine
    store.forget([], before=5)  # it is of collection 5 itself
    assert [store.ticket(number) for number in (1, 2, 3, 4)] == [None, None, None, Ticket(0, 4, 5)]


def test_a_request_of_other_tokens_is_named_with_the_position():
    store = filled(0)
    store.check_tokens(Ticket(0, 1, 0), torch.arange(6), "rollout 9")
    store.check_tokens(Ticket(2, 1, 0), torch.arange(5), "rollout 9")  # another engine's
    for ids, where in (([0, 1, 2, 9, 4, 5], "position 3"), ([0, 1, 2], "their lengths, 6 and 3")):
        with pytest.raises(PayloadError, match=f"MRR802: rollout 9: .* different tokens: {where}"):
            store.check_tokens(Ticket(0, 1, 0), torch.tensor(ids), "rollout 9")


A, B = Ticket(0, 1, 0), Ticket(0, 2, 0)


@pytest.mark.parametrize(
    ("tickets", "pieces"),
    [
        ([A, B], [Piece(A, 0, 3), Piece(B, 3, 8)]),  # a token keeps the routes of its first turn
        ([None, B], [Piece(B, 0, 8)]),  # the first request was evicted, and the second one prefilled its tokens
        ([A, None], [Piece(A, 0, 3)]),
        ([None, None], []),
    ],
)
def test_a_row_of_several_turns_has_the_routes_of_all_requests_that_kept_theirs(tickets, pieces):
    rollout = SimpleNamespace(trajectory=[[5, 6, 7, 8], [5, 6, 7, 8, 9, 10, 11, 12, 13]], completion_ids=["a", "b"])
    ledger = {name: SimpleNamespace(mrr_ticket=ticket) for name, ticket in zip("ab", tickets)}
    collection = collection_of(rollout, ledger, filled(0))
    assert list(collection._pieces(megatron_rl._Row(0, -1))) == pieces


def collection_of(rollout, ledger, store):
    trainer = SimpleNamespace(get_args=SimpleNamespace)
    with mock.patch.dict(sys.modules, {megatron_rl.RL: trainer}), mock.patch.object(megatron_rl, "_store", store):
        return megatron_rl._Collection(None, [[rollout]], ledger, None)


@pytest.mark.parametrize(
    ("names", "collection", "row", "text"),
    [
        ("xy", 0, None, "MRR802: no request of this rollout has routes"),
        ("", 0, None, r"MRR802: no request of this rollout has routes.* recovers from a rollout bank"),
        ("ab", 8, None, None),
        ("ab", 9, None, "MRR802: no request of this rollout has routes"),  # kept for eight collections
        ("a", 0, None, "MRR802: rollout 0 has 2 turns and 1 completion ids"),
        ("ab", 0, SimpleNamespace(), "MRR808: .* gets rows of a SimpleNamespace that is not of this collection"),
    ],
)
def test_a_collection_that_is_not_that_of_its_requests_raises(names, collection, row, text):
    rollout = SimpleNamespace(trajectory=[range(6), range(12)], completion_ids=list(names))
    store = filled(0)
    store.collection = collection
    of_rollout = collection_of(rollout, {"a": SimpleNamespace(mrr_ticket=A), "b": SimpleNamespace(mrr_ticket=B)}, store)
    of_rollout.rows = [row, rollout, (rollout, 1)]
    with mock.patch.object(megatron_rl, "_store", store), mock.patch.object(of_rollout, "_fetch") as fetch:
        if text is None:
            of_rollout.trace(None)
            assert fetch.call_args.args == ([megatron_rl._Row(0, -1), megatron_rl._Row(0, 1)],)
            assert (store.collection, store.ticket(1)) == (collection + 1, None)
        else:
            with pytest.raises(RouterReplayError, match=text):
                of_rollout.trace(None)
            assert store.ticket(1) is not None


def test_a_turn_of_other_tokens_than_its_request_raises():
    rollout = SimpleNamespace(trajectory=[range(6), [*range(11), 99]], completion_ids=["a", "b"])
    ledger = {"a": SimpleNamespace(mrr_ticket=None), "b": SimpleNamespace(mrr_ticket=B)}
    collection = collection_of(rollout, ledger, filled(0))
    with mock.patch.object(megatron_rl, "_store", filled(0)), pytest.raises(PayloadError, match="rollout 0, turn 1"):
        collection.trace(None)


def test_a_pipeline_stage_without_routers_keeps_the_tokens_of_a_request():
    request = SimpleNamespace(request_id=5, prompt_tokens=[1, 2], generated_tokens=[3], routing_indices=None)
    store = RequestRoutes()
    store.engine, store.layers = 0, ()
    config = SimpleNamespace(num_moe_experts=EXPERTS, moe_router_topk=TOPK)
    with mock.patch.object(megatron_rl, "_store", store):
        megatron_rl._keep(SimpleNamespace(requests=[request]), config)
    store.check_tokens(Ticket(0, 5, 0), torch.tensor([1, 2, 3]), "rollout 0")
    with pytest.raises(PayloadError, match="position 2"):
        store.check_tokens(Ticket(0, 5, 0), torch.tensor([1, 2, 4]), "rollout 0")


@pytest.mark.parametrize("num_requests", [1, 2])
def test_a_request_that_was_evicted_keeps_no_routes(num_requests):
    """The engine did not record all of its forwards."""
    requests = [
        SimpleNamespace(
            request_id=5,
            prompt_tokens=[1, 2],
            generated_tokens=[3],
            routing_indices=routes_of(5, 3, (2,)).to(torch.uint8),
        )
        for _ in range(num_requests)
    ]
    store = RequestRoutes()
    store.engine, store.layers = ENGINES[0]
    config = SimpleNamespace(num_moe_experts=EXPERTS, moe_router_topk=TOPK)
    with mock.patch.object(megatron_rl, "_store", store):
        megatron_rl._keep(SimpleNamespace(requests=requests), config)
    assert (store.ticket(5) is not None) == (num_requests == 1)
    assert [each.routing_indices for each in requests] == [None] * num_requests
