"""Programs that try to make a router use the routes of other tokens with every check green: each is exact, or it raises."""

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import megatron_router_replay as mrr
from megatron_router_replay.errors import RouterReplayError
from tests.unit.mcore.test_follow import A, B, trace_of
from tests.unit.mcore.tiny_chunk import TOPK, Chunk, as_map, disturb, reentrant

Calls = dict[tuple[int, int], list[tuple[Tensor, Tensor]]]
"""(number of the forward, layer) -> (routing map, map of the router's own top-k) of the forward and of its recomputes."""


@contextmanager
def oracle(chunk: Chunk) -> Iterator[Calls]:
    """Yield the routing maps, each with the map of the top-k by the weights of that moment."""
    calls: Calls = defaultdict(list)

    def hook(router: Any, args: Any, output: Any) -> None:
        own = (args[0].detach().flatten(0, 1) @ router.weight.detach().t()).topk(TOPK, dim=1).indices
        calls[int(args[0][0, 0, -1]), router.layer_number].append((output[1].clone(), as_map(own)))

    handles = [router.register_forward_hook(hook) for router in chunk.routers]
    yield calls
    for handle in handles:
        handle.remove()


def wrong(calls: Calls, trace: mrr.RoutingTrace, expected: dict[int, Any]) -> int:
    """Count wrong decisions.

    Args:
        expected: number of a forward -> the trace rows of its tokens, [b, s], -1: live; None: all are live.
    """
    count = 0
    assert {number for number, _ in calls} == set(expected)
    for (number, layer), ((first, own), *recomputes) in calls.items():
        rows = (
            torch.full((len(own),), -1) if expected[number] is None else torch.tensor(expected[number]).t().reshape(-1)
        )
        routed = (rows >= 0) & trace.replay_mask[rows.clamp(min=0)]
        used = torch.where(routed.unsqueeze(1), as_map(trace.layer(layer)[rows.clamp(min=0)]), own)
        count += sum(int((each != used).any(dim=1).sum()) for each in (first, *(again for again, _ in recomputes)))
    return count


class Full(Chunk):
    """With the arguments that Megatron-Core's forward has."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        number: int | None = None,
        position_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
    ) -> Tensor:
        return super().forward(input_ids, number)


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


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


def backward_in_a_pause(chunk: Chunk, session: Any) -> dict[int, Any]:
    loss = chunk(ids(A, [*B, 0]), 0).sum()
    disturb(chunk)
    with session.paused():
        loss.backward()
    return {0: [[0, 1, 2, 3], [4, 5, 6, -1]]}


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


EXACT = [
    pauses_inside_pauses,
    a_pause_inside_a_forward,
    rows_by_hand_come_first,
    backward_in_a_pause,
    other_tokens_after_a_failure,
    a_checkpoint_around_the_chunk,
    forwards_before_their_backwards,
]


def alike_in_their_prefix() -> mrr.RoutingTrace:
    """A and B, whose first two tokens have equal routes, as an engine's have."""
    trace = trace_of([A, B])
    return trace_of([A, B], routes=trace.topk_indices[[0, 1, 2, 3, 0, 1, 6]])


@pytest.mark.parametrize("program", EXACT, ids=lambda program: program.__name__)
def test_a_program_is_exact(program: Callable[[Chunk, Any], dict[int, Any]]) -> None:
    chunk, trace = Full(), alike_in_their_prefix()
    chunk.around = reentrant
    with oracle(chunk) as calls, mrr.replay(chunk, trace, min_agreement=0, padding_token_ids=[0]) as session:
        expected = program(chunk, session)
    assert wrong(calls, trace, expected) == 0


def test_sessions_of_several_traces_and_models_do_not_mix() -> None:
    """A recompute uses its own session's trace; models of two and three layers share one trace and its index."""
    traces, deep, small = [trace_of([A, B]), trace_of([B, A], seed=8)], Full(), Full(num_layers=2)
    deep.around = small.around = reentrant
    with oracle(deep) as of_deep, oracle(small) as of_small:
        with mrr.replay(deep, traces[0], min_agreement=0):
            losses = [deep(ids(A), 0).sum()]
        with mrr.replay(deep, traces[1], min_agreement=0), mrr.replay(small, traces[0], min_agreement=0):
            losses += [small(ids(B), 0).sum(), deep(ids(A), 1).sum(), small(ids(A), 1).sum()]
            disturb(deep)
            disturb(small)
            torch.stack(losses).sum().backward()
    assert wrong({at: each for at, each in of_deep.items() if at[0] == 0}, traces[0], {0: [[0, 1, 2, 3]]}) == 0
    assert wrong({at: each for at, each in of_deep.items() if at[0] == 1}, traces[1], {1: [[3, 4, 5, 6]]}) == 0
    assert wrong(of_small, traces[0], {0: [[4, 5, 6]], 1: [[0, 1, 2, 3]]}) == 0
    assert all(len(each) == 2 for each in (*of_deep.values(), *of_small.values()))


DERIVED: dict[str, tuple[Callable[[mrr.RoutingTrace], mrr.RoutingTrace], list[int], list[int]]] = {
    "copied": (copy.deepcopy, B, [4, 5, 6]),
    "pickled": (lambda trace: pickle.loads(pickle.dumps(trace)), B, [4, 5, 6]),
    "cut into other samples": (lambda trace: trace.with_samples([2, 5]), [7, 8, *B], [2, 3, 4, 5, 6]),
    "samples in another order": (lambda trace: mrr.concat_traces([*trace.samples()][::-1]), A, [3, 4, 5, 6]),
    "joined": (lambda trace: mrr.concat_traces([trace_of([[1]]), trace]), B, [5, 6, 7]),
    "without a route": (lambda trace: trace.without_routes(torch.arange(7) == 5), B, [4, 5, 6]),
    "one layer's numbers exchanged": (lambda trace: trace.renumber({1: 3, 2: 2, 3: 1}), B, [4, 5, 6]),
}


@pytest.mark.parametrize("name", DERIVED)
def test_a_trace_that_is_made_of_an_indexed_one_has_an_index_of_its_own(name: str) -> None:
    derive, tokens, rows = DERIVED[name]
    chunk, trace = Full(), trace_of([A, B])
    with mrr.replay(chunk, trace, min_agreement=0):
        chunk(ids(A), 0)
    derived = derive(trace)
    with oracle(chunk) as calls, mrr.replay(chunk, derived, min_agreement=0):
        chunk(ids(tokens), 0)
    assert wrong(calls, derived, {0: [rows]}) == 0


# ---- legal, though it looks wrong

LEGAL: dict[str, tuple[list[list[int]], list[list[int]], list[list[int]]]] = {
    "the last token is padding's": (
        [[5, 6, 0], B],
        [[5, 6, 0, 0, 0], [*B, 0, 0]],
        [[0, 1, 2, -1, -1], [3, 4, 5, -1, -1]],
    ),
    "padding's token inside": ([[5, 0, 0, 7], B], [[5, 0, 0, 7, 0, 0]], [[0, 1, 2, 3, -1, -1]]),
    "begins with padding's token": (
        [[0, 4, 4], B],
        [[0, 4, 4, 0, 0], [0, 0, *B]],
        [[0, 1, 2, -1, -1], [-1, -1, 3, 4, 5]],
    ),
    "begins with it, padded on the left": ([[0, 5, 6]], [[0, 0, 0, 5, 6]], [[-1, -1, 0, 1, 2]]),
    "one token, two tokens, none": ([[4], [], [5, 6], []], [[5, 6, 0], [4, 0, 0]], [[1, 2, -1], [0, -1, -1]]),
    "padding alone": ([A], [[0, 0, 0, 0], A], [[-1] * 4, [0, 1, 2, 3]]),
    "positions of padding": ([A, B], [[0, 0, *A], [0, 0, 0, *B]], [[-1, -1, 0, 1, 2, 3], [-1] * 3 + [4, 5, 6]]),
    "turns": ([A[:2], A], [[5, 6, 0, 0], A], [[0, 1, -1, -1], [2, 3, 4, 5]]),
}


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("name", LEGAL)
def test_what_is_legal_is_found(name: str, declared: bool) -> None:
    samples, tokens, rows = LEGAL[name]
    chunk, trace = Full(), trace_of(samples)
    # As trainers number them that count the tokens before each position which are no padding.
    positions = (ids(*tokens) != 0).cumsum(1).sub(1).clamp(min=0) if name == "positions of padding" else None
    with oracle(chunk) as calls, mrr.replay(chunk, trace, min_agreement=0, padding_token_ids=[0] if declared else None):
        chunk(ids(*tokens), 0, positions)
    assert wrong(calls, trace, {0: rows}) == 0


# ---- raises


def packed(*bounds: int, **options: Any) -> SimpleNamespace:
    return SimpleNamespace(cu_seqlens_q=torch.tensor(bounds), **options)


def mask(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.bool)


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


def rows_by_hand_of_another_forward(chunk: Chunk, session: Any, trace: Any) -> None:
    session.microbatch(torch.tensor([[0, 1, 4]]))
    chunk(ids(B))


def tokens_written_by_numpy(chunk: Chunk, session: Any, trace: Any) -> None:
    chunk(ids(A))
    trace.token_ids.numpy()[3] = 9  # torch counts no change
    chunk(ids(A))


def changed(name: str) -> Callable[..., None]:
    def program(chunk: Chunk, session: Any, trace: Any) -> None:
        chunk(ids(A))
        values = getattr(trace, name)
        values[:4] = values[:4].flip(0)
        chunk(ids(A))

    return program


def call(*rows: list[int], **options: Any) -> Callable[..., None]:
    return lambda chunk, session, trace: chunk(ids(*rows), **options)


RAISES: dict[str, tuple[Any, str]] = {
    "a pause begins inside a forward": (pause_that_begins_inside_a_forward, r"MRR407.*layer 2, layer 3"),
    "a pause ends inside a forward": (pause_that_ends_inside_a_forward, "MRR406"),
    "rows of a paused forward": (rows_by_hand_whose_forward_is_paused, "routes were queued, but no forward"),
    "rows of another forward": (rows_by_hand_of_another_forward, r"MRR203: .*\[0, 2\]"),
    "tokens written by numpy": (tokens_written_by_numpy, r"MRR203: input_ids\[0, 3\] is 8"),
    "tokens changed in place": (changed("token_ids"), "MRR110: token_ids"),
    "routes changed in place": (changed("topk_indices"), "MRR110: topk_indices"),
    "mask changed in place": (changed("replay_mask"), "MRR110: replay_mask"),
    "a step of a generation": (
        call([5], position_ids=ids([3]), inference_context=object()),
        "MRR424.*inference_context",
    ),
    "a window": (call([7, 8], position_ids=ids([2, 3])), "MRR206.*begins with token 7"),
    "cut on the left": (call(A[1:], [*B]), "MRR206.*sequence 0: no sample of the trace begins with token 6"),
    "packed without bounds": (call([*A, *B]), r"MRR206.*position 4 on \(token 5\)"),
    "positions of three axes": (
        call([*A, *B], position_ids=ids([0, 1, 2, 3, 0, 1, 2]).expand(3, 1, 7)),
        r"MRR206.*position 4 on \(token 5\)",
    ),
    "a shared prefix, packed": (
        call([*A, 7, 9], position_ids=ids([0, 1, 2, 3, 2, 3])),
        r"MRR206.*position 4 on \(token 7\)",
    ),
    "positions restart inside a sample": (
        call(A, position_ids=ids([0, 1, 0, 1])),
        r"MRR206: .*sequence 1: .*token 7",
    ),
    "sequences of one token, packed": (call(A[:2], position_ids=ids([0, 0])), "MRR206: .*position_ids restart or jump"),
    "a jump inside a sample": (call(A, position_ids=ids([0, 1, 5, 6])), "MRR206: .*position_ids restart or jump"),
    "bounds inside a sample": (call([*A, *B], packed_seq_params=packed(0, 2, 7)), "MRR206.*sequence 1.*token 7"),
    "a mask that is inverted": (
        call([*A, 0], [*B, 0, 0], padding_mask=mask([1, 1, 1, 1, 0], [1, 1, 1, 0, 0])),
        "MRR206.*sequence 0.*1 more sequences",
    ),
    "tokens under no mask": (call([*A, 3, 3], padding_mask=mask([0] * 6)), r"MRR206.*position 4 on \(token 3\)"),
}


@pytest.mark.parametrize("name", RAISES)
def test_a_program_raises(name: str) -> None:
    program, match = RAISES[name]
    chunk, trace = Full(), alike_in_their_prefix()
    with (
        pytest.raises(RouterReplayError, match=match),
        mrr.replay(chunk, trace, min_agreement=0, padding_token_ids=[0]) as session,
    ):
        program(chunk, session, trace)


def test_two_rollouts_of_a_prompt_by_other_weights_raise_however_they_were_joined() -> None:
    """Equal samples of two steps: their routes are alike, so the version alone shows them."""
    steps = [trace_of([A], weight_version=version) for version in (3, 4)]
    for trace in (mrr.concat_traces(steps), mrr.concat_traces([*steps, trace_of([B], weight_version=4)])):
        for tokens in (A, A[:2]):
            with (
                pytest.raises(RouterReplayError, match=r"MRR208.*weights \(3 and 4\)"),
                mrr.replay(Full(), trace) as each,
            ):
                each._modules[0](ids(tokens))
