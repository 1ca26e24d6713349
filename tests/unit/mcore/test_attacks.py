"""Programs that try to make a router use the routes of other tokens with every check green: each is exact, or it raises."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import megatron_router_replay as mrr
from megatron_router_replay.errors import RouterReplayError
from tests.unit.mcore.test_follow import DRAWN, A, B, alike, check, ids, oracle, trace_of, wrong
from tests.unit.mcore.tiny_chunk import Around, Chunk, disturb, non_reentrant, reentrant


def before_layer_2(chunk: Chunk, act: Callable[[], None]) -> None:
    """Run a function once, inside the next forward."""

    def hook(*_: Any) -> None:
        handle.remove()
        act()

    handle = chunk.layers[1].register_forward_pre_hook(hook)


# ---- exact


def pauses_inside_pauses(chunk: Chunk, session: Any) -> dict[int, Any]:
    with session.paused():
        with session.paused():
            losses = [chunk(ids([1, 2]), 0).sum()]
            chunk.fail_at = 1
            with pytest.raises(ArithmeticError):
                chunk(ids([1, 2]), 1)
        losses += [chunk(ids(A), 2).sum()]
    losses += [chunk(ids(A), 3).sum()]
    disturb(chunk)
    with session.paused():
        torch.stack(losses).sum().backward()
    assert (session.report.rows_replayed, session.report.rows_live) == (3, 1)
    return {0: None, 1: None, 2: None, 3: [[0, 1, 2, 3]]}


def a_pause_inside_a_forward(chunk: Chunk, session: Any) -> dict[int, Any]:
    def reference() -> None:
        with session.paused():
            chunk(ids([1, 2, 3]), 1)

    before_layer_2(chunk, reference)
    chunk(ids(A), 0)
    return {0: [[0, 1, 2, 3]], 1: None}


def rows_by_hand_come_first(chunk: Chunk, session: Any) -> dict[int, Any]:
    session.microbatch(torch.tensor([[4, 5, -1, -1]]))
    chunk(ids([5, 6, 1, 2]), 0)
    chunk(ids(A), 1)
    return {0: [[4, 5, -1, -1]], 1: [[0, 1, 2, 3]]}


def other_tokens_after_a_failure(chunk: Chunk, session: Any) -> dict[int, Any]:
    chunk.fail_at = 2
    with pytest.raises(ArithmeticError):
        chunk.forward(ids(A), 0)  # without hooks
    chunk.forward(ids(B), 1)
    return {0: [[0, 1, 2, 3]], 1: [[4, 5, 6]]}


def a_checkpoint_around_the_chunk(chunk: Chunk, session: Any) -> dict[int, Any]:
    loss = checkpoint(chunk, ids(A), 0, use_reentrant=False).sum()
    disturb(chunk)
    loss.backward()
    return {0: [[0, 1, 2, 3]]}


def forwards_before_their_backwards(chunk: Chunk, session: Any) -> dict[int, Any]:
    losses = [chunk(ids(A), 0).sum(), chunk(ids(B), 1).sum(), chunk(ids(A[:2]), 2).sum()]
    disturb(chunk)
    for loss in (losses[1], losses[2], losses[0]):
        loss.backward()
    return {0: [[0, 1, 2, 3]], 1: [[4, 5, 6]], 2: [[0, 1]]}


def rows_without_routes(chunk: Chunk, session: Any) -> dict[int, Any]:
    loss = chunk(ids(B, A[:3]), 0).sum()
    disturb(chunk)
    loss.backward()
    report = session.report
    assert (report.rows_replayed, report.rows_live, report.replayed_share) == (5, 1, 5 / 6)
    return {0: [[4, 5, 6], [0, 1, 2]]}


EXACT = [
    pauses_inside_pauses,
    a_pause_inside_a_forward,
    rows_by_hand_come_first,
    other_tokens_after_a_failure,
    a_checkpoint_around_the_chunk,
    forwards_before_their_backwards,
    rows_without_routes,
]


@pytest.mark.parametrize("around", [reentrant, non_reentrant])
@pytest.mark.parametrize("program", EXACT, ids=lambda program: program.__name__)
def test_a_program_is_exact(program: Callable[[Chunk, Any], dict[int, Any]], around: Around) -> None:
    chunk, trace = Chunk(), alike([A, B])
    chunk.around = around
    with oracle(chunk) as calls, mrr.replay(chunk, trace, padding_token_ids=[0], verify=True, **DRAWN) as session:
        expected = program(chunk, session)
    assert wrong(calls, trace, expected) == 0


def test_sessions_of_several_traces_and_models_do_not_mix() -> None:
    """A recompute uses its own session's trace; models of two and three layers share one trace and its samples."""
    traces, deep, small = [trace_of([A, B]), trace_of([B, A], seed=8)], Chunk(), Chunk(num_layers=2)
    deep.around = small.around = reentrant
    with oracle(deep) as of_deep, oracle(small) as of_small:
        with mrr.replay(deep, traces[0], **DRAWN):
            losses = [deep(ids(A), 0).sum()]
        with mrr.replay(deep, traces[1], **DRAWN), mrr.replay(small, traces[0], **DRAWN):
            losses += [small(ids(B), 0).sum(), deep(ids(A), 1).sum(), small(ids(A), 1).sum()]
            disturb(deep)
            disturb(small)
            torch.stack(losses).sum().backward()
    for number, rows in ((0, [[0, 1, 2, 3]]), (1, [[3, 4, 5, 6]])):
        of_one = {at: each for at, each in of_deep.items() if at[0] == number}
        assert wrong(of_one, traces[number], {number: rows}) == 0
    assert wrong(of_small, traces[0], {0: [[4, 5, 6]], 1: [[0, 1, 2, 3]]}) == 0
    assert all(len(each) == 2 for each in (*of_deep.values(), *of_small.values()))


DERIVED: dict[str, tuple[Callable[[mrr.RoutingTrace], mrr.RoutingTrace], list[int], list[int]]] = {
    "pickled": (lambda trace: pickle.loads(pickle.dumps(copy.deepcopy(trace))), B, [4, 5, 6]),
    "cut into other samples": (lambda trace: trace.with_samples([2, 5]), [7, 8, *B], [2, 3, 4, 5, 6]),
    "samples in another order": (lambda trace: mrr.concat_traces([*trace.samples()][::-1]), A, [3, 4, 5, 6]),
    "joined": (lambda trace: mrr.concat_traces([trace_of([[1]]), trace]), B, [5, 6, 7]),
    "without a route": (lambda trace: trace.without_routes(torch.arange(7) == 5), B, [4, 5, 6]),
    "one layer's numbers exchanged": (lambda trace: trace.renumber({1: 3, 2: 2, 3: 1}), B, [4, 5, 6]),
}


@pytest.mark.parametrize("name", DERIVED)
def test_a_trace_that_is_made_of_a_sorted_one_has_samples_of_its_own(name: str) -> None:
    derive, tokens, rows = DERIVED[name]
    trace = trace_of([A, B])
    check(trace, [A], [[0, 1, 2, 3]])
    check(derive(trace), [tokens], [rows])


# ---- raises


def pause_that_begins_inside_a_forward(chunk: Chunk, session: Any, trace: Any) -> None:
    pause = session.paused()
    before_layer_2(chunk, pause.__enter__)
    chunk(ids(A), 0)
    pause.__exit__(None, None, None)
    chunk(ids(A), 1)


def pause_that_ends_inside_a_forward(chunk: Chunk, session: Any, trace: Any) -> None:
    pause = session.paused()
    pause.__enter__()
    before_layer_2(chunk, lambda: pause.__exit__(None, None, None))
    chunk(ids(A), 0)


def rows_by_hand_whose_forward_is_paused(chunk: Chunk, session: Any, trace: Any) -> None:
    session.microbatch(torch.tensor([[4, 5, 6]]))
    with session.paused():
        chunk(ids(B))


def changed(name: str) -> Callable[..., None]:
    def program(chunk: Chunk, session: Any, trace: Any) -> None:
        chunk(ids(A))
        values = getattr(trace, name)
        values[:4] = values[:4].flip(0)
        chunk(ids(A))

    return program


RAISES: dict[str, tuple[Any, str]] = {
    "a pause begins inside a forward": (pause_that_begins_inside_a_forward, r"MRR407.*layer 2, layer 3"),
    "a pause ends inside a forward": (pause_that_ends_inside_a_forward, "MRR406"),
    "rows of a paused forward": (rows_by_hand_whose_forward_is_paused, "rows were given, but no forward"),
    "tokens changed in place": (changed("token_ids"), "MRR110: token_ids"),
    "routes changed in place": (changed("topk_indices"), "MRR110: topk_indices"),
    "mask changed in place": (changed("replay_mask"), "MRR110: replay_mask"),
}


@pytest.mark.parametrize("name", RAISES)
def test_a_program_raises(name: str) -> None:
    program, match = RAISES[name]
    chunk, trace = Chunk(), alike([A, B])
    with pytest.raises(RouterReplayError, match=match), mrr.replay(chunk, trace, **DRAWN) as session:
        program(chunk, session, trace)
