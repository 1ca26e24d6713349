"""Routes follow tokens: a session on real routers finds the rows of a forward by its ids, with nothing said beside them."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, ReplayStateError, TraceError
from megatron_router_replay.mcore.batches.judge import unlike
from tests.unit.mcore.tiny_chunk import (
    EXPERTS,
    Chunk,
    as_map,
    live_maps,
    random_routes,
    watched,
)

LAYERS = (1, 2, 3)
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


def wrong(chunk: Chunk, trace: mrr.RoutingTrace, rows: list[list[int]], call: Any, **options: Any) -> tuple[int, Any]:
    """Run `call` in a session; count the decisions of forward 0 that are not those of these trace rows, by hand [b, s].

    Rows without a route, and positions of row -2, must hold what the router chooses by itself; -1 is padding, not judged.
    """
    at = torch.tensor(rows, dtype=torch.int64).t().reshape(-1)
    routed = (at >= 0) & trace.replay_mask[at.clamp(min=0)]
    live = live_maps(chunk)
    with watched(chunk) as seen, mrr.replay(chunk, trace, **(DRAWN | options)) as session:
        call(chunk)
    count = 0
    for (_, layer), maps in seen.items():
        expected = torch.where(routed.unsqueeze(1), as_map(trace.layer(layer)[at.clamp(min=0)]), live[layer][0])
        count += sum(int((each != expected).any(dim=1)[at != -1].sum()) for each in maps)
    return count, session.report


def forward(*rows: list[int], **options: Any) -> Any:
    return lambda chunk: chunk(torch.tensor(rows), **options)


def alike(samples: list[list[int]]) -> mrr.RoutingTrace:
    """A trace in which equal prefixes have equal routes, as an engine's have."""
    trace = trace_of(samples)
    first = {}
    prefixes = [tuple(sample[: end + 1]) for sample in samples for end in range(len(sample))]
    rows = [first.setdefault(prefix, row) for row, prefix in enumerate(prefixes)]
    return trace_of(samples, routes=trace.topk_indices[rows])


A, B, C = [5, 6, 7, 8], [5, 6, 9], [4, 4, 4, 1, 2]
"""Rows 0 to 3, 4 to 6 and 7 to 11."""


@pytest.mark.parametrize(
    ("tokens", "rows", "padding", "live"),
    [
        ([A, [*B, 0]], [[0, 1, 2, 3], [4, 5, 6, -1]], 1, 2),
        ([[*A, 0, 0], [*B, 0, 0, 0]], [[0, 1, 2, 3, -1, -1], [4, 5, 6, -1, -1, -1]], 5, 2),
        ([[0, 0, *A], [0, *C]], [[-1, -1, 0, 1, 2, 3], [-1, 7, 8, 9, 10, 11]], 3, 2),
        ([[5, 6]], [[0, 1]], 0, 0),
        ([[*B, 3, 0, 0], [*A, 0, 0]], [[4, 5, 6, -2, -1, -1], [0, 1, 2, 3, -1, -1]], 4, 3),
        ([[0, 0, 0, 0, 0], C], [[-1] * 5, [7, 8, 9, 10, 11]], 5, 1),
    ],
    ids=["padded by one", "padded right", "padded left", "cut on the right", "one token more", "padding alone"],
)
def test_rows_follow_tokens(tokens: list[list[int]], rows: list[list[int]], padding: int, live: int) -> None:
    chunk = Chunk()
    options = {"padding_token_ids": [0]} if tokens[-1][-1] == 0 and padding == 1 else {}
    count, report = wrong(chunk, alike([A, B, C]), rows, forward(*tokens), **options)
    assert count == 0
    assert (report.rows_padding, report.rows_live) == (padding, live)
    assert report.rows_replayed == sum(map(len, tokens)) - padding - live


def packed(*bounds: int, unpadded: list[int] | None = None) -> Any:
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    real = cu_seqlens if unpadded is None else torch.tensor(unpadded, dtype=torch.int32)
    return SimpleNamespace(cu_seqlens_q=real, cu_seqlens_q_padded=None if unpadded is None else cu_seqlens)


@pytest.mark.parametrize(
    ("tokens", "parameters", "rows"),
    [
        ([*B, *A, *C], packed(0, 3, 7, 12), [[4, 5, 6, 0, 1, 2, 3, 7, 8, 9, 10, 11]]),
        ([*B, 0, *A, 0, 0], packed(0, 4, 8), [[4, 5, 6, -1, 0, 1, 2, 3, -1, -1]]),
        ([*B, 7, 5, 6, 1, 2], packed(0, 4, 8, unpadded=[0, 3, 5]), [[4, 5, 6, -1, 0, 1, -1, -1]]),
    ],
    ids=["without padding", "with padding", "with known lengths"],
)
def test_packed_sequences(tokens: list[int], parameters: Any, rows: list[list[int]]) -> None:
    count, _ = wrong(Chunk(), alike([A, B, C]), rows, forward(tokens, packed_seq_params=parameters))
    assert count == 0


@pytest.mark.parametrize(
    ("samples", "tokens", "options", "match"),
    [
        ([A, B], [[5, 6, 7, 3]], {}, "MRR207"),
        (
            [A, B],
            [[5, 6, 7, 3]],
            {"padding_token_ids": [0]},
            r"sample 0, which has token 8 at position 3, but it has token 3",
        ),
        (
            [A, B],
            [[5, 3, 7, 8]],
            {},
            r"micro-batch 0, input_ids\[0, 1\], sequence 0: its first 1 tokens are those of sample 0.* position 1.* token 3",
        ),
        ([A, B], [A, [6, 7, 8, 0]], {}, r"input_ids\[1, 0\], sequence 1: no sample of the trace begins with token 6"),
        ([A, B], [[*A, 1, 2, 3]], {}, r"all 4 tokens of sample 0, and from position 4 on \(token 1\)"),
        ([A, B], [[*A, 0, 0], [*B, 1, 1, 1]], {}, "MRR207: .* no padding"),
        ([A, B], [[*A, 1, 1]], {"padding_token_ids": [0]}, "MRR206"),
        ([[5, 6, 7], [5, 6, 7, 0, 9]], [[5, 6, 7, 0]], {}, "MRR207: .* token 0 may be padding"),
        (
            [[5, 6, 7], [5, 6, 7, 0, 9], [4]],
            [[5, 6, 7, 0, 0], [4, 0, 0, 0, 0]],
            {},
            "MRR207: .* token 0 may be padding",
        ),
        ([[0, 5, 6], [5, 6]], [[0, 0, 5, 6]], {}, "may be padding or may belong to another sample"),
    ],
)
def test_other_tokens_raise(samples: Any, tokens: Any, options: Any, match: str) -> None:
    with pytest.raises((LayoutError, ReplayStateError), match=match):
        wrong(Chunk(), trace_of(samples), [], forward(*tokens), **options)


def test_a_padding_token_holds_for_all_forwards_of_a_session() -> None:
    def two(second: list[int]) -> Any:
        def call(chunk: Chunk) -> None:
            chunk(torch.tensor([[*A, 0, 0]]), 0)
            chunk(torch.tensor([second]), 1)

        return call

    trace = alike([A, B])
    with mrr.replay(Chunk(), trace, **DRAWN) as session:
        two([5, 6, 0, 0])(session._modules[0])  # cut on the right and padded: the token was seen as padding
    for second in ([*A, 1, 1], [5, 6, 7, 3]):
        with pytest.raises(LayoutError, match="MRR207"), mrr.replay(Chunk(), trace, **DRAWN) as session:
            two(second)(session._modules[0])


def test_padding_that_continues_a_sample_is_decided_by_its_token() -> None:
    samples = [[5, 6, 7], [5, 6, 7, 0, 9]]
    count, _ = wrong(Chunk(), trace_of(samples), [[0, 1, 2, -1]], forward([5, 6, 7, 0]), padding_token_ids=[0])
    assert count == 0


def test_equal_samples_use_the_first_and_are_counted() -> None:
    trace = trace_of([A, A])
    routes = trace.topk_indices.clone()
    routes[4:] = routes[:4]
    routes[5, 0] = routes[5, 0].flip(0)  # the same experts in another order
    like = trace_of([A, A], routes=routes)
    count, report = wrong(Chunk(), like, [[0, 1, 2, 3], [0, 1, 2, 3]], forward(A, A))
    assert (count, report.segments_ambiguous) == (0, 2)
    message = (
        r"MRR208: .*micro-batch 0, input_ids\[0, 3\], sequence 0: sample 0 and sample 1 .* different routes "
        r"\(8 of 9 decisions"
    )
    with pytest.raises(LayoutError, match=message):
        wrong(Chunk(), trace, [], forward(A))
    versions = [1] * 4 + [2] * 4
    with pytest.raises(LayoutError, match=r"MRR208: .* different weights \(1 and 2\)"):
        wrong(Chunk(), trace_of([A, A], routes=routes, weight_version=versions), [], forward(A))
    # Samples that differ later are named by their end, whatever their routes are.
    count, report = wrong(Chunk(), trace_of([A, B]), [[4, 5, 6]], forward(B))
    assert (count, report.segments_ambiguous) == (0, 0)


def test_routes_of_equal_samples_are_compared_to_their_last_token() -> None:
    one = random_routes(150, len(LAYERS), 3)
    other = torch.cat([one[:128], (one[128:] + 1) % EXPERTS])
    trace = trace_of([list(range(150))] * 2, routes=torch.cat([one, other]))
    # Tokens 128 to 148 in three layers; the last token has no route.
    assert unlike(trace, 0, 150, 150) == "have different routes (63 of 63 decisions from position 128 on)"


def test_positional_and_one_dimensional_ids() -> None:
    class Positional(Chunk):
        def forward(self, input_ids: Tensor, number: Any = None, packed_seq_params: Any = None) -> Tensor:
            return super().forward(input_ids.reshape(1, -1), number, packed_seq_params)

    def call(chunk: Chunk) -> None:
        chunk(torch.tensor([*B, *A]), 0, packed(0, 3, 7))

    count, _ = wrong(Positional(), trace_of([A, B]), [[4, 5, 6, 0, 1, 2, 3]], call)
    assert count == 0


def test_restarting_position_ids_are_segments() -> None:
    class WithPositions(Chunk):
        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(input_ids)

    rows = [[4, 5, 6, 0, 1, 2, 3, -1]]
    call = forward([*B, *A, 0], position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]]))
    count, _ = wrong(WithPositions(), trace_of([A, B]), rows, call, padding_token_ids=[0])
    assert count == 0


def test_a_padding_mask_bounds_a_sample() -> None:
    class WithMask(Chunk):
        def forward(self, input_ids: Tensor, padding_mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(input_ids)

    mask = torch.tensor([[False] * 3 + [True] * 2, [True] * 2 + [False] * 3])
    call = forward([5, 6, 7, 0, 9], [3, 2, 5, 6, 7], padding_mask=mask)
    count, report = wrong(
        WithMask(), trace_of([[5, 6, 7], [5, 6, 7, 0, 9]]), [[0, 1, 2, -1, -1], [-1, -1, 0, 1, 2]], call
    )
    assert (count, report.rows_padding) == (0, 4)


def test_a_stage_without_ids_names_itself() -> None:
    class Embeds(Chunk):
        def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(torch.tensor([A]))

    with pytest.raises(ReplayStateError, match=r"MRR424: rank 0, chunk 0, micro-batch 0: Embeds got no input_ids"):
        wrong(Embeds(), trace_of([A]), [], lambda chunk: chunk(torch.zeros(1, 4)))


def test_a_trace_without_samples_asks_for_rows() -> None:
    trace = mrr.RoutingTrace(
        topk_indices=random_routes(4, 3, 1), layer_numbers=LAYERS, num_experts=EXPERTS, token_ids=A
    )
    with pytest.raises(ReplayStateError, match=r"MRR406.*from_samples"):
        wrong(Chunk(), trace, [], forward(A))


def test_a_rank_part_of_a_recording_is_gathered_first() -> None:
    trace = mrr.RoutingTrace(
        topk_indices=random_routes(4, 3, 1),
        layer_numbers=LAYERS,
        num_experts=EXPERTS,
        token_ids=[5, -1, 7, 8],
        sequence_lengths=[4],
    )
    with pytest.raises(TraceError, match=r"MRR108.*gather"):
        wrong(Chunk(), trace, [], forward(A))


def test_the_index_is_made_once_a_trace_and_goes_with_it() -> None:
    trace = trace_of([A, B])
    wrong(Chunk(), trace, [[0, 1, 2, 3]], forward(A))
    index = trace.derived["index"]
    wrong(Chunk(), trace, [[0, 1, 2, 3]], forward(A))
    assert trace.derived["index"] is index
    assert "index" not in copy.deepcopy(trace).derived
    assert "index" not in trace.to("cpu").derived


def test_the_forward_of_the_class_is_back_when_the_session_ends() -> None:
    chunk = Chunk()
    with mrr.replay(chunk, trace_of([A]), min_replayed=0, **DRAWN):
        assert "forward" in vars(chunk)
    assert "forward" not in vars(chunk)
    with pytest.raises(ArithmeticError), mrr.replay(chunk, trace_of([A]), **DRAWN):
        chunk.fail_at = 0
        chunk(torch.tensor([A]))
    assert "forward" not in vars(chunk)


def test_a_copy_of_the_model_runs_its_own_weights() -> None:
    chunk = Chunk()
    with mrr.replay(chunk, trace_of([A]), **DRAWN):
        chunk(torch.tensor([A]))
        copied = copy.deepcopy(chunk)
        for parameter in copied.parameters():
            parameter.data.zero_()
        assert not copied(torch.tensor([A])).any()
    assert not copied(torch.tensor([A])).any()
