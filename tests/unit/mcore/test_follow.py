"""Routes follow tokens: a session on real routers finds the rows of a forward by its ids, or raises."""

import copy
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.checks import _warned
from megatron_router_replay.errors import LayoutError, ReplayStateError, RouterReplayError, TraceError
from tests.unit.mcore.tiny_chunk import EXPERTS, TOPK, Chunk, as_map, random_routes

LAYERS = (1, 2, 3)
A, B, C = [5, 6, 7, 8], [5, 6, 9], [4, 4, 4, 1, 2]
DRAWN: dict[str, Any] = {"min_agreement": 0}
"""Routes are drawn at random, so the live router agrees with none."""


def trace_of(samples: list[list[int]], *, seed: int = 3, **options: Any) -> mrr.RoutingTrace:
    """Random routes for these samples; the last token of each has none, as engines send it."""
    num_tokens = sum(map(len, samples))
    last = torch.tensor([len(sample) for sample in samples]).cumsum(0) - 1
    mask = torch.ones(num_tokens, dtype=torch.bool)
    mask[last[[bool(sample) for sample in samples]]] = False
    return mrr.RoutingTrace(
        topk_indices=options.pop("routes", random_routes(num_tokens, len(LAYERS), seed)),
        layer_numbers=LAYERS,
        num_experts=EXPERTS,
        token_ids=[token for sample in samples for token in sample],
        sequence_lengths=[len(sample) for sample in samples],
        replay_mask=options.pop("replay_mask", mask),
        **options,
    )


def alike(samples: list[list[int]]) -> mrr.RoutingTrace:
    """A trace in which equal prefixes have equal routes, as an engine's have."""
    trace = trace_of(samples)
    first: dict[tuple[int, ...], int] = {}
    prefixes = [tuple(sample[: end + 1]) for sample in samples for end in range(len(sample))]
    rows = [first.setdefault(prefix, row) for row, prefix in enumerate(prefixes)]
    return trace_of(samples, routes=trace.topk_indices[rows])


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
        expected: number of a forward -> the trace rows of its tokens, [b, s], below 0: live; None: all are live.
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


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


def packed(*bounds: int, unpadded: list[int] | None = None) -> dict[str, Any]:
    real = torch.tensor(bounds if unpadded is None else unpadded, dtype=torch.int32)
    padded = None if unpadded is None else torch.tensor(bounds, dtype=torch.int32)
    return {"packed_seq_params": SimpleNamespace(cu_seqlens_q=real, cu_seqlens_q_padded=padded)}


def positions(*rows: list[int]) -> dict[str, Any]:
    return {"position_ids": ids(*rows)}


def mask(*rows: list[int]) -> dict[str, Any]:
    return {"padding_mask": ids(*rows).bool()}


def check(trace: mrr.RoutingTrace, tokens: list[list[int]], rows: list[list[int]], **call: Any) -> Any:
    """Compare one forward with these rows: -1 on padding, -2 on a token of no row; return the session's report."""
    chunk, options = Chunk(), DRAWN | call.pop("options", {})
    with oracle(chunk) as calls, mrr.replay(chunk, trace, **options) as session:
        chunk(ids(*tokens), 0, **call)
    assert wrong(calls, trace, {0: rows}) == 0
    at, report = ids(*rows), session.report
    num_routed = int(((at >= 0) & trace.replay_mask[at.clamp(min=0)]).sum())
    num_padding = int((at == -1).sum())
    assert (report.rows_replayed, report.rows_padding) == (num_routed, num_padding)
    assert report.rows_live == at.numel() - num_routed - num_padding
    return report


Tokens = list[list[int]]
DECLARED = {"options": {"padding_token_ids": [0]}}
NONE = {"options": {}}
LONGER, FROM_ZERO = [[5, 6, 7], [5, 6, 7, 0, 9]], [[0, 5, 6], [5, 6]]
FOUND: dict[str, tuple[Tokens, Tokens, Tokens, dict[str, Any]]] = {
    # samples, tokens of a forward, their rows, other arguments; the padding token is declared unless these say otherwise
    "cut on the right": ([A, B], [[5, 6]], [[0, 1]], {}),
    "one token more": ([A, B], [[*B, 3, 0, 0], [*A, 0, 0]], [[4, 5, 6, -2, -1, -1], [0, 1, 2, 3, -1, -1]], {}),
    "ends with padding's token": ([[5, 6, 0], B], [[5, 6, 0, 0, 0]], [[0, 1, 2, -1, -1]], {}),
    "padding's token inside": ([[5, 0, 0, 7], B], [[5, 0, 0, 7, 0, 0]], [[0, 1, 2, 3, -1, -1]], {}),
    "begins with padding's token": ([[0, 4, 4], B], [[0, 4, 4, 0, 0]], [[0, 1, 2, -1, -1]], {}),
    "begins with it, padded on the left": ([[0, 5, 6]], [[0, 0, 0, 5, 6]], [[-1, -1, 0, 1, 2]], {}),
    "padding on both sides": ([A[:3], B], [[0, 0, *A[:3], 0]], [[-1, -1, 0, 1, 2, -1]], {}),
    "one token, two tokens, none": ([[4], [], [5, 6], []], [[5, 6, 0], [4, 0, 0]], [[1, 2, -1], [0, -1, -1]], {}),
    "padding alone": ([A], [[0, 0, 0, 0], A], [[-1] * 4, [0, 1, 2, 3]], {}),
    "turns": ([A[:2], A], [[5, 6, 0, 0], A], [[0, 1, -1, -1], [2, 3, 4, 5]], {}),
    "turns, and another end": ([A[:2], A, [*A[:3], 9]], [[5, 6, 7, 9, 0, 0]], [[6, 7, 8, 9, -1, -1]], {}),
    # As trainers number them that count the tokens before each position which are no padding.
    "positions of padding": (
        [A, B],
        [[0, 0, *A], [0, 0, 0, *B]],
        [[-1, -1, 0, 1, 2, 3], [-1, -1, -1, 4, 5, 6]],
        positions([0, 0, 0, 1, 2, 3], [0, 0, 0, 0, 1, 2]),
    ),
    "positions restart": (
        [A, B],
        [[*B, *A, 0]],
        [[4, 5, 6, 0, 1, 2, 3, -1]],
        positions([0, 1, 2, 0, 1, 2, 3, 0]) | DECLARED,
    ),
    "packed": ([A, B, C], [[*B, *A, *C]], [[4, 5, 6, 0, 1, 2, 3, 7, 8, 9, 10, 11]], packed(0, 3, 7, 12)),
    "packed with padding": ([A, B], [[*B, 0, 0, *A, 0]], [[4, 5, 6, -1, -1, 0, 1, 2, 3, -1]], packed(0, 5, 9)),
    "packed with known lengths": (
        [A, B],
        [[*B, 7, 5, 6, 1, 2]],
        [[4, 5, 6, -1, 0, 1, -1, -1]],
        packed(0, 4, 8, unpadded=[0, 3, 5]),
    ),
    "packed with known lengths, one of them of padding's token": (
        [A, B],
        [[*B, 7, 0, 0, 0]],
        [[4, 5, 6, -1, -1, -1, -1]],
        packed(0, 4, 7, unpadded=[0, 3, 6]),
    ),
    "packed with known lengths, one of them of padding's token that is a sample": (
        [[0, 0], B],
        [[*B, 7, 0, 0, 7]],
        [[2, 3, 4, -1, 0, 1, -1]],
        packed(0, 4, 7, unpadded=[0, 3, 5]),
    ),
    "a mask": (
        LONGER,
        [[5, 6, 7, 0, 9], [3, 2, 5, 6, 7]],
        [[0, 1, 2, -1, -1], [-1, -1, 0, 1, 2]],
        mask([0, 0, 0, 1, 1], [1, 1, 0, 0, 0]),
    ),
    "a mask decides where a sample begins": (
        FROM_ZERO,
        [[0, 0, 5, 6], [0, 0, 5, 6]],
        [[-1, -1, 3, 4], [-1, 0, 1, 2]],
        mask([1, 1, 0, 0], [1, 0, 0, 0]),
    ),
    "one token more than a sample in a mask": ([B], [[*B, 0, 3, 9]], [[0, 1, 2, -2, -1, -1]], mask([0, 0, 0, 0, 1, 1])),
    "a mask of padding's token, inside and at the end too": (
        [[5, 0, 7, 0]],
        [[5, 0, 7, 0, 0]],
        [[0, 1, 2, -1, -1]],
        mask([0, 1, 0, 1, 1]),
    ),
    # The longest reading wins.
    "padding that would continue a sample": (LONGER, [[5, 6, 7, 0]], [[3, 4, 5, 6]], {}),
    "padding that would continue a sample, and more": (LONGER, [[5, 6, 7, 0, 0, 0]], [[3, 4, 5, 6, -1, -1]], {}),
    "a token of padding that may end a sample": ([A, [*A, 0]], [[*A, 0]], [[4, 5, 6, 7, 8]], {}),
    "padding continues two samples": ([A, [*A, 0], [*A, 0, 0]], [[*A, 0, 0, 0]], [[9, 10, 11, 12, 13, 14, -1]], {}),
    "packed without padding, beside one more token": (
        [[5, 6], [5, 6, 9]],
        [[5, 6, 5, 6, 9]],
        [[0, 1, 2, 3, 4]],
        packed(0, 2, 5) | NONE,
    ),
    "undeclared, one token that continues a sample": (LONGER, [[5, 6, 7, 0]], [[3, 4, 5, 6]], NONE),
    "undeclared, equal tokens at a sample's end": ([[5, 6, 6], A], [[5, 6, 6], A[:3]], [[0, 1, 2], [3, 4, 5]], NONE),
    "undeclared, one token behind a whole sample": ([A], [[*A, 9]], [[0, 1, 2, 3, -2]], NONE),
    "undeclared, one token before a sample that begins so": (FROM_ZERO, [[0, 5, 6]], [[0, 1, 2]], NONE),
    "positions that are all equal": ([A, B], [A, [*B, 0]], [[0, 1, 2, 3], [4, 5, 6, -1]], positions([0] * 4, [0] * 4)),
    "two tokens of padding": (
        [A, B],
        [[9, 9, *A, 0, 0]],
        [[-1, -1, 0, 1, 2, 3, -1, -1]],
        {"options": {"padding_token_ids": [0, 9]}},
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_rows_follow_tokens(name: str) -> None:
    """Rows without a route, and padding, are routed live; the report counts each."""
    samples, tokens, rows, call = FOUND[name]
    check(alike(samples), tokens, rows, **DECLARED | call)


@pytest.mark.parametrize(
    "name",
    [
        "cut on the right", "packed", "packed with known lengths", "a mask", "a mask decides where a sample begins",
        "one token more than a sample in a mask", "a mask of padding's token, inside and at the end too",
    ],
)  # fmt: skip
def test_a_batch_without_padding_or_with_lengths_needs_no_declared_token(name: str) -> None:
    samples, tokens, rows, call = FOUND[name]
    check(alike(samples), tokens, rows, **call)


def test_the_longest_reading_is_counted_as_ambiguous_where_a_shorter_sample_ends() -> None:
    for tokens, options in ((([5, 6, 7, 0], DECLARED)), ([5, 6, 7, 0], NONE), ([5, 6, 7, 0, 0], DECLARED)):
        rows = [3, 4, 5, 6, -1][: len(tokens)]
        assert check(alike(LONGER), [tokens], [rows], **options).segments_ambiguous == 1
    assert check(alike(LONGER), [[5, 6, 7]], [[0, 1, 2]]).segments_ambiguous == 0
    prompt = list(range(1, 18))
    with pytest.raises(
        LayoutError, match=r"MRR208: .* sample 1 and sample 0 of the trace begin with the same 17 tokens"
    ):
        check(trace_of([prompt, [*prompt, 0, 9]]), [[*prompt, 0]], [], **DECLARED)


def test_a_shorter_sample_is_another_reading_only_where_equal_tokens_end_the_sequence() -> None:
    """Only its last token, and equal ones in front of it, may be padding that nobody declared."""
    for samples, tokens, expected in (
        ([[5, 6], [5, 6, 7, 8]], [5, 6, 7, 8], 0),
        ([[5, 6, 7], [5, 6, 7, 8]], [5, 6, 7, 8], 1),
        ([[5, 6], [5, 6, 8, 8]], [5, 6, 8, 8], 1),
        ([[5], [5, 6, 8, 8]], [5, 6, 8, 8], 0),
    ):
        first = len(samples[0])
        report = check(alike(samples), [tokens], [list(range(first, first + 4))])
        assert report.segments_ambiguous == expected, samples


MAY_BE_OF_A_SAMPLE = "MRR206: .* may be padding or may belong to another sample"
RAISES: dict[str, tuple[Tokens, Tokens, dict[str, Any], str]] = {
    # samples, tokens of a forward, other arguments, the error
    "a last token of no sample": (
        [A, B],
        [[5, 6, 7, 3]],
        {},
        "MRR206: .* token 3 .*If token 3 is padding, say padding_tok",
    ),
    "a last token that is no padding": (
        [A, B],
        [[5, 6, 7, 3]],
        DECLARED,
        r"MRR206: .*sample 0, which has token 8 at position 3, but it has token 3",
    ),
    "a token inside": (
        [A, B],
        [[5, 3, 7, 8]],
        {},
        r"micro-batch 0, input_ids\[0, 1\], sequence 0: its first 1 tokens are those of sample 0.* position 1.* token 3",
    ),
    "undeclared padding": (
        [A, B],
        [A, [*B[:2], 0, 0]],
        {},
        r"MRR207: .*input_ids\[1, 2\], sequence 1: token 0 comes 2 times .*the first 2 .* say padding_token_ids=\[0\]",
    ),
    "undeclared padding behind a whole sample": (
        [A, B],
        [[*A, 0], [*B, 0, 0]],
        {},
        r"MRR207: .*input_ids\[1, 3\], sequence 1: token 0 comes 2 times .*all tokens .*padding_token_ids=\[0\]",
    ),
    "undeclared padding in front": (
        [A, B],
        [A, [9, 9, *B[:2]]],
        {},
        r"MRR207: .*input_ids\[1, 0\], .*token 9 comes 2 times in front of it.* say padding_token_ids=\[9\]",
    ),
    "undeclared padding, a row": (
        [A],
        [A, [0] * 4],
        {},
        r"MRR207: .*\[1, 0\], .*token 0 fills it.*padding_token_ids=\[0\]",
    ),
    "undeclared padding, packed": (
        [A, B],
        [[*A, *B, 0, 0]],
        packed(0, 4, 9),
        r"MRR207: .*input_ids\[0, 7\], sequence 1: token 0 .*padding_token_ids=\[0\]",
    ),
    "undeclared padding, one token that is a packed sequence": (
        [A, B],
        [[*A, *B, 0]],
        packed(0, 4, 7, 8),
        r"MRR207: .*input_ids\[0, 7\], sequence 2: token 0 fills it.* say padding_token_ids=\[0\]",
    ),
    "two padding tokens around a sample": (
        [A, B],
        [[9, 9, *A, 0, 0]],
        {"options": {"padding_token_ids": [9]}},
        r"MRR207: .*token 0 .* say padding_token_ids=\[9, 0\]",
    ),
    "a BOS token in front": (
        [A, B],
        [[3, *A], [3, *A]],
        {},
        r"MRR206: .*input_ids\[0, 0\], .*sample 0. Is it a BOS token.*differ\. If it is padding, give .* padding_mask\. \(1",
    ),
    "a BOS token in front, packed": (
        [A, B],
        [[*A, 3, *B]],
        packed(0, 4, 8),
        r"MRR206: .*input_ids\[0, 4\], sequence 1: .*token 3, .*sample 1. Is it a BOS token.*without it differ\.$",
    ),
    "two equal tokens in front of no sample, packed": (
        [A, B],
        [[3, 3, 9, 9]],
        packed(0, 4) | {"options": {"padding_token_ids": [3]}},
        r"MRR206: .*input_ids\[0, 0\], .*token 3, nor with what follows it.*`with session.paused\(\):`\.$",
    ),
    "another sample begins": (
        [A, B],
        [[*A, *B]],
        {},
        r"MRR206: .*input_ids\[0, 4\], .*all 4 tokens of sample 0, and sample 1 begins here: give .*packed_seq_params",
    ),
    "a prompt cut on the left, and a chance match": (
        [[4, 1, 5, 2, 3], [5, 9, 9]],
        [[5, 2, 3]],
        {},
        r"MRR206: .*input_ids\[0, 0\], .*tokens of sample 0 from position 2 on: it was cut on the left",
    ),
    "a mask over a sample's own tokens": (
        [A, B],
        [A, [*B, 0]],
        mask([0, 0, 1, 1], [0, 0, 0, 1]),
        r"MRR207: .*input_ids\[0, 2\], .*after 2 tokens of sample 0, and the next 2 tokens are the sample's own.*loss mask",
    ),
    "a mask over tokens of the only sample that begins so": (
        [A],
        [A],
        mask([0, 0, 1, 1]),
        r"MRR207: .*input_ids\[0, 2\], .*after 2 tokens of sample 0, and the next 2 tokens are the sample's own",
    ),
    "a mask over the tokens of another sample with the same beginning": (
        [A, B, [5, 6, 1, 2, 3]],
        [[5, 6, 1, 2]],
        mask([0, 0, 1, 1]),
        r"MRR207: .*the next 2 tokens are the sample's own",
    ),
    "a token beyond 32 bits": (
        [A],
        [[5, 6 + (1 << 32), 7]],
        {},
        r"MRR201: .*input_ids\[0, 1\] is 4294967302: token ids must",
    ),
    "a token below 0": ([A], [[5, 6, -3]], {}, r"MRR201: .*input_ids\[0, 2\] is -3"),
    "another padding token": ([A, B], [[*A, 1, 1]], DECLARED, r"MRR207: .*say padding_token_ids=\[0, 1\]"),
    "padding before, or a sample's": (FROM_ZERO, [[0, 0, 5, 6]], DECLARED, MAY_BE_OF_A_SAMPLE),
    "a sample's beginning, or padding": (FROM_ZERO, [[0, 5, 6]], DECLARED, MAY_BE_OF_A_SAMPLE),
    # A sample begins with nine equal tokens, eight others with 1 to 8: all of these beginnings are tried.
    "a run of equal tokens": (
        [*([7] * length + [length] for length in range(1, 9)), [0] * 9 + [5, 6], [5, 6]],
        [[0] * 12 + [5, 6]],
        DECLARED,
        MAY_BE_OF_A_SAMPLE,
    ),
    "of no sample at all": ([[], []], [[1, 2, 3]], {}, "MRR206: .*no sample"),
    "cut on the left": (
        [A, B],
        [A, [*A[1:], 0]],
        {},
        r"MRR206: .*input_ids\[1, 0\], .*tokens of sample 0 from position 1 on: it was cut on the left",
    ),
    "positions of three axes": (
        [A, B],
        [[*A, *B]],
        {"position_ids": ids([0, 1, 2, 3, 0, 1, 2]).expand(3, 1, 7)},
        r"MRR206.*sample 1 begins here",
    ),
    "a shared prefix, packed": (
        [A, B],
        [[*A, 7, 9]],
        positions([0, 1, 2, 3, 2, 3]) | DECLARED,
        r"MRR206.*position 4 on \(token 7\)",
    ),
    "positions restart inside a sample": (
        [A, B],
        [A],
        positions([0, 1, 0, 1]),
        "MRR206: .*sequence 1: .*cut on the left",
    ),
    "sequences of one token": ([A, B], [A[:3]], positions([1, 1, 2]), "MRR206: .*position_ids restart or jump"),
    "a jump inside a sample": ([A, B], [A], positions([0, 1, 5, 6]), "MRR206: .*position_ids restart or jump"),
    "bounds inside a sample": ([A, B], [[*A, *B]], packed(0, 2, 7), "MRR206.*sequence 1.*cut on the left"),
    "a mask that is inverted": (
        [A, B],
        [[*A, 0], [*B, 0, 0]],
        mask([1, 1, 1, 1, 0], [1, 1, 1, 0, 0]),
        "MRR206.*sequence 0.*1 more sequences",
    ),
    "tokens under no mask": ([A, B], [[*A, 3, 3]], mask([0] * 6), r"MRR206.*position 4 on \(token 3\)"),
    "a step of a generation": (
        [A, B],
        [[5]],
        positions([3]) | {"inference_context": object()},
        "MRR424.*inference_context",
    ),
    "a step of a generation, by the former name of its cache": (
        [A, B],
        [[5]],
        positions([3]) | {"inference_params": object()},
        "MRR424.*its cache has the tokens before",
    ),
}


@pytest.mark.parametrize("name", RAISES)
def test_other_tokens_raise(name: str) -> None:
    samples, tokens, call, match = RAISES[name]
    with pytest.raises(RouterReplayError, match=match):
        check(alike(samples), tokens, [], **call)


def test_a_sample_that_padding_mask_alone_hides_is_live_with_a_warning() -> None:
    """SkyRL fills batches with copies of a sample, all of them padding for its routers."""
    _warned.discard("a masked sample")
    rows = [[0, 1, 2, 3], [-1] * 4, [-1] * 4]
    with pytest.warns(
        RuntimeWarning, match=r"\[1, 0\], sequence 1: a mask calls .* the first 4 of sample 0, which would"
    ):
        check(trace_of([A, B]), [A, A, [0, 0, 0, 5]], rows, **mask([0] * 4, [1] * 4, [1] * 4))
    _warned.discard("a masked sample")
    # A short prefix may be equal by chance.
    check(trace_of([A, B]), [A, [5, 6, 1, 1]], rows[:2], **mask([0] * 4, [1] * 4))
    assert "a masked sample" not in _warned


def test_one_declared_token_in_front_of_every_sequence_may_be_a_bos_token(caplog: Any) -> None:
    def warned(*tokens: list[int]) -> bool:
        _warned.discard("a token in front")
        caplog.clear()
        with pytest.warns(RuntimeWarning) if tokens[0][0] == 3 else nullcontext():
            check(alike([A, B]), list(tokens), [[-1, 0, 1, 2, 3], [-1, 4, 5, 6, -1]][: len(tokens)], options=options)
        return "input_ids[0, 0]: each sequence begins with one token 3, declared as padding" in caplog.text

    options: dict[str, Any] = {"padding_token_ids": [3, 0]}
    assert warned([3, *A], [3, *B, 0])
    _warned.discard("a token in front")
    check(alike([A, B]), [[3, *A], [3, 3, *B]], [[-1, 0, 1, 2, 3], [-1, -1, 4, 5, 6]], options=options)
    assert "a token in front" not in _warned


TEMPLATE = [17, 18]
"""Two tokens that a trainer puts in front of each sample."""


def test_a_second_chat_template_is_not_offered_as_padding_and_warns_where_it_is_declared(caplog: Any) -> None:
    tokens = [[*TEMPLATE, *A], [*TEMPLATE, *B, 0]]
    for declared in ([0], [0, 17]):
        with pytest.raises(LayoutError, match="MRR206") as raised:
            check(alike([A, B]), tokens, [], options={"padding_token_ids": declared})
        assert "padding_token_ids" not in str(raised.value)
    _warned.discard("a token in front")
    expected = [[-1, -1, 0, 1, 2, 3], [-1, -1, 4, 5, 6, -1]]
    with pytest.warns(RuntimeWarning, match=r"each sequence begins with the tokens 17, 18, declared as padding\. If"):
        check(alike([A, B]), tokens, expected, options={"padding_token_ids": [0, *TEMPLATE]})
    _warned.discard("a token in front")
    runs = [[3, 3, *A], [3, 3, *B, 3]]  # of one token, as padding is
    check(alike([A, B]), runs, expected, options={"padding_token_ids": [3]})
    assert "a token in front" not in _warned


@pytest.mark.parametrize(("tokens", "offers"), [([[3, *A], [3, 3, *B]], True), ([[3, *A], [3, *B, 3]], False)])
def test_one_token_in_front_is_offered_as_padding_where_runs_differ(tokens: Any, offers: bool) -> None:
    with pytest.raises(LayoutError, match=r"MRR206: .*input_ids\[0, 0\], .*a BOS token") as raised:
        check(alike([A, B]), tokens, [])
    assert ("say padding_token_ids=[3]" in str(raised.value)) == offers


@pytest.mark.parametrize(
    ("layout", "fact"),
    [
        ("left", "padding is in front of sequences: if attention sees it"),
        ("right", ""),
        ("cut", "position_ids alone separate the sequences of a row: give the model packed_seq_params"),
    ],
)
def test_little_agreement_names_a_layout_that_attention_may_see(layout: str, fact: str) -> None:
    """Routes are drawn, so the live router agrees with none; what the forwards looked like is said, and nothing else."""
    tokens = torch.randint(1, 32, (2, 200), generator=torch.Generator().manual_seed(0))
    trace, chunk, padding = trace_of(tokens.tolist()), Chunk(), torch.zeros(2, 3, dtype=torch.int64)
    arguments: dict[str, Any] = {}
    if layout == "cut":
        given = tokens.reshape(1, -1)
        arguments["position_ids"] = torch.arange(200).repeat(2)[None]
    else:
        given = torch.cat([padding, tokens] if layout == "left" else [tokens, padding], dim=1)
    with pytest.raises(ReplayStateError, match=r"(?s)MRR419.*by less than min_agreement") as raised:  # noqa: SIM117
        with mrr.replay(chunk, trace, padding_token_ids=[0], ask_every_layer=True) as session:
            chunk(given, **arguments)
    assert (
        (fact in str(raised.value))
        if fact
        else not re.search("padding is in front|position_ids alone", str(raised.value))
    )
    assert fact in str(session.report)


@pytest.mark.parametrize(
    ("trace", "options", "error", "match"),
    [
        (
            [A, B],
            {"padding_token_ids": [None]},
            LayoutError,
            r"MRR101: padding_token_ids=\[None\]: a tokenizer without a pad",
        ),
        (None, {}, TraceError, r"MRR101: cannot replay 2 traces: pass concat_traces\(traces\)"),
    ],
    ids=["no pad token", "a list of traces"],
)
def test_what_a_first_program_passes_is_named(trace: Any, options: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        mrr.replay(Chunk(), [trace_of([A]), trace_of([B])] if trace is None else trace_of(trace), **options)


def test_positional_and_one_dimensional_ids() -> None:
    chunk, trace, parameters = Chunk(), trace_of([A, B]), packed(0, 3, 7)["packed_seq_params"]
    with oracle(chunk) as calls, mrr.replay(chunk, trace, **DRAWN):
        chunk(torch.tensor([*B, *A]), 0, parameters)
    assert wrong(calls, trace, {0: [[4, 5, 6, 0, 1, 2, 3]]}) == 0


def test_a_stage_without_ids_names_itself() -> None:
    class Embeds(Chunk):
        def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(ids(A))

    with (
        pytest.raises(
            ReplayStateError,
            match=r"MRR424: rank 0, chunk 0, micro-batch 0: Embeds got no input_ids.*not on a part of it",
        ),
        mrr.replay(chunk := Embeds(), trace_of([A]), **DRAWN),
    ):
        chunk(torch.zeros(1, 4))


@pytest.mark.parametrize(
    ("token_ids", "samples", "error", "match"),
    [
        (A, None, ReplayStateError, r"MRR406.*has token ids and no samples: trace\.with_samples\(lengths\)"),
        (
            None,
            [4],
            ReplayStateError,
            r"MRR406.*has no token ids.*\"return_token_ids\": true, SGLang.s /generate \"return_logprob\".*session\.microb",
        ),
        ([5, -1, 7, 8], [4], TraceError, "MRR108.*gather"),
    ],
    ids=["no samples", "no tokens", "a rank's part of a recording"],
)
def test_a_trace_without_whole_samples_is_refused(token_ids: Any, samples: Any, error: Any, match: str) -> None:
    options: Any = {"token_ids": token_ids, "sequence_lengths": samples}
    trace = mrr.RoutingTrace(topk_indices=random_routes(4), layer_numbers=LAYERS, num_experts=EXPERTS, **options)
    with pytest.raises(error, match=match):
        check(trace, [A], [])


def test_samples_are_sorted_once_a_trace_and_go_with_it() -> None:
    trace = trace_of([A, B])
    check(trace, [A], [[0, 1, 2, 3]])
    samples = trace.derived["samples"]
    check(trace, [A], [[0, 1, 2, 3]])
    assert trace.derived["samples"] is samples
    assert "samples" not in copy.deepcopy(trace).derived
    assert "samples" not in trace.to("cpu").derived


def test_the_forward_of_the_class_is_back_when_the_session_ends() -> None:
    chunk = Chunk()
    with mrr.replay(chunk, trace_of([A]), min_replayed=0, **DRAWN):
        assert "forward" in vars(chunk)
    assert "forward" not in vars(chunk)
    chunk.fail_at = 0
    with pytest.raises(ArithmeticError), mrr.replay(chunk, trace_of([A]), **DRAWN):
        chunk(ids(A))
    assert "forward" not in vars(chunk)


def test_a_copy_of_the_model_runs_its_own_weights() -> None:
    chunk = Chunk()
    with mrr.replay(chunk, trace_of([A]), **DRAWN):
        chunk(ids(A))
        copied = copy.deepcopy(chunk)
        for parameter in copied.parameters():
            parameter.data.zero_()
        assert not copied(ids(A)).any()
    assert not copied(ids(A)).any()
