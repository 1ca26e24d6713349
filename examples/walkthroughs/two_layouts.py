"""Two parallel layouts give other losses. Is it routing or arithmetic?

A bf16 model runs under TP2 x PP2 and under EP2. Both record; `diff_traces` matches the recordings token by token and says
where they part. Then EP2 replays what TP2 x PP2 chose: the routes are the same, and the loss difference that is left is
arithmetic. The same replay in fp32 proves it: there next to nothing is left.

    python -m examples.walkthroughs.two_layouts              # exit code 1: routing differs
    python -m examples.walkthroughs.two_layouts --same       # TP2 x PP2 twice: nothing to report, exit code 0
"""

import sys
from typing import Any

import torch

import megatron_router_replay as mrr
from examples.walkthroughs.tiny_run import NUM_TOKENS, build, train_step
from megatron_router_replay.testing import ParallelSizes, run_ranks

TP2_PP2, EP2 = ParallelSizes(tp_size=2, pp_size=2), ParallelSizes(ep_size=2)
BF16 = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True}


def record(layout: ParallelSizes, config: dict[str, Any]) -> tuple[mrr.RoutingTrace, dict[int, float]]:
    """One rank's part of the recording, and its losses by number of the micro-batch."""
    chunks, microbatches, numbers = build(layout, **config)
    with mrr.record(chunks) as recording:
        losses = train_step(layout, chunks, microbatches, recording)
    return recording.trace(num_tokens=NUM_TOKENS), dict(zip(numbers, losses))


def replay(layout: ParallelSizes, config: dict[str, Any], trace: mrr.RoutingTrace) -> dict[int, float]:
    """One rank's losses with the trace's experts; raises if a router uses any other."""
    chunks, microbatches, numbers = build(layout, **config)
    with mrr.replay(chunks, trace, verify=True) as session:
        losses = train_step(layout, chunks, microbatches, session)
    return dict(zip(numbers, losses))


def joined(ranks: list[dict[int, float]]) -> dict[int, float]:
    """The losses of all ranks that have some."""
    return {number: loss for losses in ranks for number, loss in losses.items()}


def gap(one: dict[int, float], other: dict[int, float]) -> float:
    """Largest difference of a micro-batch's loss."""
    return max(abs(one[number] - other[number]) for number in one)


def main() -> int:
    other_layout = TP2_PP2 if "--same" in sys.argv else EP2
    layouts = (TP2_PP2, other_layout)
    first, second = (run_ranks(layout.world_size, record, layout, BF16) for layout in layouts)
    traces = [[part for part, _ in ranks] for ranks in (first, second)]
    losses = [joined([loss for _, loss in ranks]) for ranks in (first, second)]

    diff = mrr.diff_traces(*traces, name_a="TP2 x PP2", name_b="the other layout")
    print(diff)
    print(f"loss difference, each with its own routes   {gap(*losses):.1e}")
    if diff.same:
        print("verdict: routing is the same; nothing to replay")
        return 0

    merged = mrr.merge_traces(traces[0])
    in_bf16 = gap(losses[0], joined(run_ranks(other_layout.world_size, replay, other_layout, BF16, merged)))
    fp32 = [joined(run_ranks(layout.world_size, replay, layout, {}, merged)) for layout in layouts]
    print(f"loss difference, the same routes in bf16    {in_bf16:.1e}")
    in_fp32 = gap(*fp32)
    print(f"loss difference, the same routes in fp32    {in_fp32:.1e}")
    first_place = diff.first_by_layer
    assert first_place is not None, "they differ"
    print(
        f"verdict: routing differs in {diff.decisions_different} of {diff.decisions} decisions, first in layer "
        f"{first_place.layer_number}; with the same routes what is left is "
        + ("arithmetic" if in_fp32 < 1e-5 else f"NOT arithmetic alone: {in_fp32} in fp32")
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
