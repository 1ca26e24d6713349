"""Routes that a trainer lays out and feeds at its micro-batch: exact, proved by a stamp, or refused."""

import contextlib

import pytest
import torch
from torch import nn

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, ReplayStateError
from megatron_router_replay.mcore.batches import fed
from tests.unit.mcore.tiny_chunk import (
    Chunk,
    as_map,
    disturb,
    flips,
    non_reentrant,
    num_recomputed,
    random_routes,
    reentrant,
    tokens,
    watched,
)

IDS = tokens()  # [2, 4]
ROUTES = random_routes(8).view(2, 4, 3, 2)


def wrong(seen, routes=ROUTES, live=None):
    """How many decisions are not those of [b, s, 3, 2] routes; rows where `live` holds, [b, s], are left out."""
    known = torch.ones(8, dtype=torch.bool) if live is None else ~live.t().reshape(-1)
    count = 0
    for (_, layer), maps in seen.items():
        expected = as_map(routes.transpose(0, 1).reshape(8, 3, 2)[:, layer - 1].clamp(min=0))
        count += sum(int((routing_map[known] != expected[known]).any(dim=1).sum()) for routing_map in maps)
    return count


def stamped(routes=ROUTES, ids=IDS):
    return mrr.stamp(routes, ids)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("around", [reentrant, non_reentrant])
def test_stamped_routes_are_exact_in_forward_and_recompute(around, dtype):
    chunk = Chunk()
    chunk.around = around
    with watched(chunk) as seen, mrr.replay(chunk, min_replayed=1.0) as session:
        mrr.microbatch(chunk, routes=stamped(ROUTES.to(dtype)), stamped=True, token_ids=IDS)
        loss = chunk(IDS).square().sum()
        disturb(chunk)
        loss.backward()
    assert (wrong(seen), flips(seen), num_recomputed(seen)) == (0, 0, 3)
    assert (session.report.rows_replayed, session.report.layout_proved) == (8, True)


@pytest.mark.parametrize("order", [lambda r: r.flip(1), lambda r: r.flip(0), lambda r: r.roll(1, 1)])
def test_another_layout_than_the_tokens_is_told_by_the_stamp(order):
    chunk = Chunk()
    session = mrr.replay(chunk)
    with pytest.raises(LayoutError, match="of other tokens than the model gets at their positions"):
        mrr.microbatch(chunk, routes=order(stamped()), stamped=True, token_ids=IDS)
    mrr.close_sessions(chunk)
    assert session.report.rows_replayed == 0


def test_square_batches_that_were_transposed_are_told_by_the_stamp():
    ids = torch.arange(16).view(4, 4)
    routes = mrr.stamp(random_routes(16).view(4, 4, 3, 2), ids).transpose(0, 1)
    chunk = Chunk()
    session = mrr.replay(chunk)
    with pytest.raises(LayoutError, match="in another order than tokens"):
        mrr.microbatch(chunk, routes=routes, stamped=True, token_ids=ids)
    session.close(verify=False)


def test_a_layout_is_proved_or_trusted_by_word():
    chunk = Chunk()
    with mrr.replay(chunk) as session:
        for options in ({}, {"stamped": True, "trust_layout": True}):
            with pytest.raises(LayoutError, match="say trust_layout=True in its place"):
                mrr.microbatch(chunk, routes=ROUTES, token_ids=IDS, **options)
        with pytest.raises(LayoutError, match="give token_ids="):
            mrr.microbatch(chunk, routes=stamped(), stamped=True)
        mrr.microbatch(chunk, routes=ROUTES, trust_layout=True)
        chunk(IDS)
    assert not session.report.layout_proved
    assert "layout of routes" in str(session.report)


def test_the_stamp_is_a_layer_of_the_tokens_digits():
    routes = torch.zeros(2, 1, 3, dtype=torch.int16)
    assert mrr.stamp(routes, torch.tensor([5, 131, 9]))[:, 1].tolist() == [[5, 0, 0], [3, 1, 0]]
    with pytest.raises(LayoutError, match="one token a row"):
        mrr.stamp(routes, torch.tensor([5]))


@pytest.mark.parametrize("given", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_a_stamp_narrows_ids_that_fit_and_no_others(given):
    routes = torch.tensor([[[3, 200]], [[torch.iinfo(given).min < 0 and -1, 7]]]).to(given)
    ids = torch.tensor([5, 131])
    narrow = mrr.stamp(routes, ids, dtype=torch.int16)
    assert narrow.dtype is torch.int16
    assert torch.equal(narrow.long(), mrr.stamp(routes, ids).long())
    assert mrr.stamp(routes[:0], ids[:0], dtype=torch.int16).shape == (0, 2, 2)
    for wrong in (32768, -32769, 65541) if given in (torch.int32, torch.int64) else ():
        routes[0, 0, 1] = wrong  # a cast would make 65541 expert 5
        with pytest.raises(LayoutError, match=r"^MRR103: routes hold ids from .*, which torch.int16 does not"):
            mrr.stamp(routes, ids, dtype=torch.int16)
    with pytest.raises(LayoutError, match=r"ids from 65535 to 65535"):  # a -1 that was cast
        mrr.stamp(torch.full((2, 1, 2), 65535, dtype=torch.uint16), ids, dtype=torch.int16)
    for dtype in (torch.uint8, torch.float32):
        with pytest.raises(LayoutError, match=f"cannot stamp routes as {dtype}"):
            mrr.stamp(routes, ids, dtype=dtype)


@pytest.mark.parametrize("wrong", [-32769, 32768, None])
def test_a_gpus_ids_are_narrowed_without_a_wait_and_checked_all_the_same(wrong):
    """On a CPU the same operations assert at once."""
    routes = torch.tensor([[[3, 7 if wrong is None else wrong]]])
    with contextlib.nullcontext() if wrong is None else pytest.raises(RuntimeError, match="MRR103: routes hold ids"):
        assert fed._narrowed(routes, torch.int16, waits=False).tolist() == routes.tolist()


@pytest.mark.parametrize("topk", [1, 2])
def test_stamps_of_few_digits_tell_most_tokens_apart(topk):
    ids = torch.arange(150_000)
    digits = mrr.stamp(torch.zeros(150_000, 1, topk, dtype=torch.uint8), ids)[:, 1].long()
    number = sum(digits[:, place] << 7 * place for place in range(topk))
    alike = int((number[1:] == number[:-1]).sum())
    assert alike <= 150_000 / 128**topk * 2 + 1
    assert len(number.unique()) == 128**topk


@pytest.mark.parametrize("shape", [(8, 3, 2), (1, 8, 3, 2)])
def test_a_packed_row_may_be_flat(shape):
    chunk = Chunk()
    with watched(chunk) as seen, mrr.replay(chunk):
        mrr.microbatch(chunk, routes=ROUTES.reshape(shape), trust_layout=True)
        chunk(IDS.view(1, 8))
    for (_, layer), (routing_map,) in seen.items():
        assert torch.equal(routing_map, as_map(ROUTES.reshape(8, 3, 2)[:, layer - 1]))


def test_rows_of_minus_one_and_filler_are_live_and_padding_is_spread():
    routes = stamped(ROUTES.clone())
    routes[0, 1] = -1
    routes[1, 3] = torch.tensor([0, 1])
    padding = torch.zeros(2, 4, dtype=torch.bool)
    padding[0, 3] = True
    routes[0, 3] = 7  # whatever stands on padding
    chunk = Chunk()
    with watched(chunk) as live:
        chunk(IDS)
    with watched(chunk) as seen, mrr.replay(chunk, min_replayed=0.7) as session:
        mrr.microbatch(chunk, routes=routes, stamped=True, token_ids=IDS, padding=padding, filler=[0, 1])
        chunk(IDS)
    unrouted = torch.zeros(2, 4, dtype=torch.bool)
    unrouted[0, 1] = unrouted[1, 3] = True
    assert wrong(seen, live=unrouted | padding) == 0
    at = unrouted.t().reshape(-1)
    assert torch.equal(seen[0, 1][0][at], live[0, 1][0][at])
    report = session.report
    assert (report.rows_replayed, report.rows_live, report.rows_padding) == (5, 2, 1)


def test_a_share_is_not_judged_where_nobody_said_what_is_padding():
    routes = ROUTES.clone()
    routes[:, 2:] = -1
    chunk = Chunk()
    with (
        pytest.raises(ReplayStateError, match="cannot be judged: routes came without padding="),
        mrr.replay(chunk, min_replayed=0.9),
    ):
        mrr.microbatch(chunk, routes=routes, trust_layout=True)
        chunk(IDS)


BROKEN = {
    "outside": (lambda r: r.masked_fill(r == 3, 8), "outside 0..7"),
    "twice": (lambda r: r[..., :1].expand(-1, -1, -1, 2), "an expert twice"),
    "some layers": (lambda r: torch.cat([r[:, :, :2], r[:, :, 2:] * 0 - 1], 2), "miss some layers of a row"),
    "topk": (lambda r: torch.cat([r, r], 3), "name 4 experts a token, the model's topk is 2"),
    "layers": (lambda r: r[:, :, :2], "routes have 2 layers; the model has 3"),
    "rank": (lambda r: r[0, 0], r"must be \[b, s, layers, topk\]"),
    "float": (lambda r: r.float(), "must be integers"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_routes_that_are_none_are_refused(change, message):
    chunk = Chunk()
    session = mrr.replay(chunk)
    with pytest.raises(LayoutError, match=message):
        mrr.microbatch(chunk, routes=change(ROUTES), trust_layout=True)
    session.close(verify=False)


def test_columns_are_all_layers_with_filler_in_dense_ones_or_the_moe_layers_or_named():
    chunk = Chunk(moe_layer_freq=[0, 1, 1])
    chunk.layers = chunk.layers[1:]
    routes = ROUTES.clone()
    routes[:, :, 0] = 0
    for given, options in ((routes, {}), (ROUTES[:, :, 1:], {}), (ROUTES.flip(2), {"layer_numbers": [3, 2, 1]})):
        with watched(chunk) as seen, mrr.replay(chunk):
            mrr.microbatch(chunk, routes=given, trust_layout=True, **options)
            chunk(IDS)
        assert wrong(seen) == 0
    session = mrr.replay(chunk)
    with pytest.raises(LayoutError, match=r"dense layers \[1\] are not filler"):
        mrr.microbatch(chunk, routes=ROUTES, trust_layout=True)
    session.close(verify=False)


def test_a_stage_judges_rows_by_all_layers_of_the_model():
    chunk, routes = Chunk(), ROUTES.clone()
    chunk.layers = chunk.layers[:1]
    routes[0, 0] = torch.tensor([[0, 1], [2, 3], [4, 5]])  # layer 1 chose what the trainer's filler is
    with watched(chunk) as seen, mrr.replay(chunk) as session:
        mrr.microbatch(chunk, routes=routes, trust_layout=True, filler=[0, 1])
        chunk(IDS)
    assert (wrong(seen, routes), session.report.rows_live) == (0, 0)
    routes[0, 0, 0] = -1
    session = mrr.replay(chunk)
    with pytest.raises(LayoutError, match="miss some layers of a row"):
        mrr.microbatch(chunk, routes=routes, trust_layout=True)
    session.close(verify=False)


def test_queueing_ahead_is_said_by_a_word():
    chunk = Chunk()
    with watched(chunk) as seen, mrr.replay(chunk):
        mrr.microbatch(chunk, routes=ROUTES, trust_layout=True)
        with pytest.raises(ReplayStateError, match="say ahead=True"):
            mrr.microbatch(chunk, routes=ROUTES.flip(1), trust_layout=True)
        mrr.microbatch(chunk, routes=ROUTES.flip(1), trust_layout=True, ahead=True)
        chunk(IDS, 0)
        chunk(IDS, 1)
    assert wrong({key: maps for key, maps in seen.items() if key[0] == 0}) == 0
    assert wrong({key: maps for key, maps in seen.items() if key[0] == 1}, ROUTES.flip(1)) == 0


def test_tokens_are_compared_with_what_the_forward_gets():
    chunk = Chunk()
    with pytest.raises(LayoutError, match="got other input_ids than were queued"), mrr.replay(chunk):
        mrr.microbatch(chunk, routes=stamped(), stamped=True, token_ids=IDS)
        chunk(IDS.flip(1))


def test_rows_beside_routes_are_not_dropped_in_silence():
    chunk = Chunk()
    with pytest.raises(LayoutError, match="routing_rows and routes= were given"), mrr.replay(chunk) as session:
        session.microbatch(torch.arange(8).view(2, 4), chunk, routes=ROUTES, trust_layout=True)


def test_a_pass_that_shall_not_replay_drops_what_it_is_fed():
    chunk = Chunk()
    with watched(chunk) as live:
        chunk(IDS)
    with watched(chunk) as seen, mrr.replay(chunk, enabled=False) as session:
        mrr.microbatch(chunk, routes=ROUTES, trust_layout=True)
        session.microbatch("what is dropped is not looked at")
        chunk(IDS)
        attached = mrr.attach(chunk)
        chunk(IDS, 1, routing_rows=torch.arange(8).view(2, 4))
        attached.close()
    assert torch.equal(seen[0, 1][0], live[0, 1][0])
    assert torch.equal(seen[1, 1][0], live[0, 1][0])
    assert session.report.forwards == 0
    with pytest.raises(ReplayStateError, match="no session holds this Chunk"):
        mrr.microbatch(chunk, routes=ROUTES, trust_layout=True)


def test_wrappers_of_the_chunk_find_the_session():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args):
            return self.module(*args)

    chunk = Chunk()
    model = Wrapper(Wrapper(chunk))
    for level in (model, model.module, chunk):
        with watched(chunk) as seen, mrr.replay(model):
            mrr.microbatch(level, routes=ROUTES, trust_layout=True)
            model(IDS)
        assert wrong(seen) == 0


def test_a_buffer_that_the_trainer_writes_again_changes_nothing():
    chunk, routes = Chunk(), ROUTES.clone()
    with watched(chunk) as seen, mrr.replay(chunk):
        mrr.microbatch(chunk, routes=routes, trust_layout=True)
        routes.zero_()
        chunk(IDS)
    assert wrong(seen) == 0


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_stage_keeps_its_own_layers_alone_and_nothing_of_the_trainers(num_layers):
    chunk, routes = Chunk(), ROUTES.to(torch.uint8).view(1, 8, 3, 2)
    chunk.layers = chunk.layers[:num_layers]
    session = mrr.replay(chunk)
    mrr.microbatch(chunk, routes=routes, trust_layout=True)
    kept = session._chunks[0].queue._waiting[0].routes.compact.untyped_storage()
    assert kept.nbytes() == 8 * num_layers * 2
    assert kept.data_ptr() != routes.untyped_storage().data_ptr()
    session.close(verify=False)


def test_a_trained_position_needs_a_route_and_a_trace_and_fed_routes_do_not_mix():
    chunk, routes = Chunk(), ROUTES.clone()
    routes[0, 0] = -1
    with (
        mrr.replay(chunk, min_replayed=0) as session,
        pytest.raises(LayoutError, match="a trained position has no route"),
    ):
        session.microbatch(routes=routes, trust_layout=True, trained=torch.ones(2, 4))
    trace = mrr.RoutingTrace(topk_indices=random_routes(8), layer_numbers=[1, 2, 3], num_experts=8)
    with mrr.replay(chunk, trace), pytest.raises(LayoutError, match="this session replays a trace"):
        mrr.microbatch(chunk, routes=ROUTES, trust_layout=True)
    with mrr.replay(chunk) as session, pytest.raises(LayoutError, match="this session has no trace"):
        session.microbatch(torch.arange(8).view(2, 4))
    with mrr.record(chunk), pytest.raises(LayoutError, match="takes routing_rows"):
        mrr.microbatch(chunk, routes=ROUTES, trust_layout=True)


FILLER = torch.tensor([0, 1])


def routes_behind(first_column):
    """[2, 4, 3, 2] routes of layers 2 and 3; layer 1 holds `first_column`."""
    routes = random_routes(8).view(2, 4, 3, 2)
    routes[:, :, 0] = first_column
    return routes


def layers_2_and_3(**options):
    chunk = Chunk(**options)
    chunk.layers = chunk.layers[1:]
    return chunk


def check_replay(chunk, routes, *, live=(), padding=None, **options):
    """Every row but those of `live`, (b, s) each, and padding is exactly the routes'."""
    unknown = torch.zeros(2, 4, dtype=torch.bool) if padding is None else padding.clone()
    for place in live:
        unknown[place] = True
    with watched(chunk) as seen, mrr.replay(chunk) as session:
        mrr.microbatch(chunk, routes=routes, trust_layout=True, padding=padding, **options)
        chunk(IDS)
    known = ~unknown.t().reshape(-1)
    for (_, layer), (routing_map,) in seen.items():
        expected = as_map(routes[:, :, layer - 1].transpose(0, 1).reshape(8, 2).clamp(0, 7))
        assert torch.equal(routing_map[known], expected[known])
    report = session.report
    assert (report.rows_replayed, report.rows_live) == (int(known.sum()), len(live))


@pytest.mark.parametrize("dense", [0, -1])
def test_a_trainers_filler_may_stand_in_dense_layers_of_rows_without_a_route(dense):
    routes = routes_behind(dense)
    routes[0, 1] = routes[1, 3] = FILLER
    check_replay(layers_2_and_3(moe_layer_freq=[0, 1, 1]), routes, live=[(0, 1), (1, 3)], filler=FILLER)


def test_dense_layers_of_padding_are_not_looked_at():
    routes, padding = routes_behind(0), torch.zeros(2, 4, dtype=torch.bool)
    padding[0, 3] = True
    routes[0, 3] = torch.tensor([5, 6])
    check_replay(layers_2_and_3(moe_layer_freq=[0, 1, 1]), routes, padding=padding)


def test_a_route_in_a_dense_layer_beside_rows_of_filler_raises():
    routes = routes_behind(0)
    routes[0, 1] = FILLER
    routes[1, 2, 0] = torch.tensor([5, 6])
    chunk = layers_2_and_3(moe_layer_freq=[0, 1, 1])
    with pytest.raises(LayoutError, match=r"dense layers \[1\] are not filler"), mrr.replay(chunk):
        mrr.microbatch(chunk, routes=routes, trust_layout=True, filler=FILLER)
    mrr.close_sessions(chunk)


def test_hash_layers_do_not_tell_whether_a_row_holds_a_route():
    chunk = layers_2_and_3()
    chunk.config.moe_n_hash_layers = 1
    routes = routes_behind(0)
    routes[0, 1, 1:] = -1
    check_replay(chunk, routes, live=[(0, 1)])


@pytest.mark.parametrize("columns", [slice(0, 3), slice(1, 3)], ids=["all layers", "the MoE layers"])
def test_the_routers_config_counts_the_layers_where_the_model_has_none(columns):
    chunk = layers_2_and_3(moe_layer_freq=[0, 1, 1])
    del chunk.config  # as an actor-critic's model, which holds the language model and no config
    routes = routes_behind(0)
    with watched(chunk) as seen, mrr.replay(chunk):
        mrr.microbatch(chunk, routes=routes[:, :, columns], trust_layout=True)
        chunk(IDS)
    for (_, layer), (routing_map,) in seen.items():
        assert torch.equal(routing_map, as_map(routes[:, :, layer - 1].transpose(0, 1).reshape(8, 2)))


def test_255_in_a_dense_layer_is_no_filler():
    """torch takes 255 for -1 where it compares uint8 with a number."""
    chunk = layers_2_and_3(moe_layer_freq=[0, 1, 1])
    with pytest.raises(LayoutError, match=r"dense layers \[1\] are not filler"), mrr.replay(chunk):
        mrr.microbatch(chunk, routes=routes_behind(0).to(torch.uint8).index_fill(2, ZERO, 255), trust_layout=True)


ZERO = torch.tensor([0])
FAULTS = {
    "none": lambda rows: rows,
    "another expert in one layer of filler": lambda rows: rows.index_fill(0, ZERO, 0) + torch.tensor([0, 1]),
    "a layer is missing": lambda rows: rows.index_fill(0, torch.tensor([2]), -1),
    "the first layer is missing": lambda rows: rows.index_fill(0, ZERO, -1),
    "one id is missing": lambda rows: rows * torch.tensor([1, 0]) - torch.tensor([0, 1]),
    "an id too high": lambda rows: rows.index_fill(0, torch.tensor([1]), 8),
    "an expert twice in the last layer": lambda rows: rows.index_fill(0, torch.tensor([2]), 3),
    "no route": lambda rows: rows * 0 - 1,
    "filler": lambda rows: rows * 0 + FILLER,
}


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("is_padding", [False, True])
def test_each_row_is_replayed_live_or_refused_as_a_plain_reading_of_it_says(fault, is_padding, dtype):
    routes, padding = random_routes(8).view(2, 4, 3, 2), torch.zeros(2, 4, dtype=torch.bool)
    routes[1, 2] = row = FAULTS[fault](routes[1, 2])
    padding[1, 2] = is_padding
    layers = row.tolist()
    is_live = all(layer == [0, 1] for layer in layers) or all(each < 0 for layer in layers for each in layer)
    is_legal = all(0 <= each < 8 and layer.count(each) == 1 for layer in layers for each in layer)
    if not (is_live or is_legal or is_padding):
        with pytest.raises(LayoutError, match="MRR103"), mrr.replay(Chunk()) as session:
            session.microbatch(routes=routes.to(dtype), trust_layout=True, padding=padding, filler=FILLER)
        return
    live = [(1, 2)] if is_live and not is_padding else []
    check_replay(Chunk(), routes.to(dtype), live=live, padding=padding, filler=FILLER)
