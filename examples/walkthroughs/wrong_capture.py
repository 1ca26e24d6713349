"""A rollout engine's capture is wrong. `diff_traces` says how, and the replay itself refuses it.

The right capture is recorded; each fault is planted in a copy: rows shifted by one, a layer that lost its data, two
layers swapped. `diff_traces` compares the copy with a recording of the trainer's own. Where there is none to compare
with, as in RL training, the session asks the live router and raises.

    python -m examples.walkthroughs.wrong_capture            # three faults, each named twice: exit code 1
    python -m examples.walkthroughs.wrong_capture --right    # the right capture: nothing to report, exit code 0
"""

import sys

import torch
from torch import Tensor

import megatron_router_replay as mrr
from examples.walkthroughs.tiny_run import NUM_TOKENS, build, train_step
from megatron_router_replay.testing import ParallelSizes, run_ranks

PP2 = ParallelSizes(pp_size=2)


def changed(trace: mrr.RoutingTrace, routes: Tensor) -> mrr.RoutingTrace:
    """The trace with other routes, as a faulty engine would send it."""
    return mrr.RoutingTrace(topk_indices=routes, layer_numbers=trace.layer_numbers, num_experts=trace.num_experts)


def shifted(trace: mrr.RoutingTrace) -> mrr.RoutingTrace:
    """Every row holds the routes of the token before it."""
    return changed(trace, trace.topk_indices.roll(1, dims=0))


def zeroed(trace: mrr.RoutingTrace) -> mrr.RoutingTrace:
    """Layer 4's buffer was never written. (Zeros in all columns would be refused at once: an expert is named twice.)"""
    routes = trace.topk_indices.clone()
    routes[:, trace.layer_numbers.index(4)] = torch.arange(trace.topk, dtype=routes.dtype)
    return changed(trace, routes)


def swapped(trace: mrr.RoutingTrace) -> mrr.RoutingTrace:
    """Layers 3 and 5 have each other's routes."""
    routes = trace.topk_indices.clone()
    one, other = trace.layer_numbers.index(3), trace.layer_numbers.index(5)
    routes[:, [one, other]] = trace.topk_indices[:, [other, one]]
    return changed(trace, routes)


FAULTS = {"rows shifted by one": shifted, "layer 4 zeroed": zeroed, "layers 3 and 5 swapped": swapped}


def record() -> mrr.RoutingTrace:
    """This rank's part of a recording."""
    chunks, microbatches, _ = build(PP2)
    with mrr.record(chunks) as recording:
        train_step(PP2, chunks, microbatches, recording)
    return recording.trace(num_tokens=NUM_TOKENS)


def replay(trace: mrr.RoutingTrace) -> str:
    """What a replay on this rank raises or, where it raises nothing, how its live router agrees."""
    chunks, microbatches, _ = build(PP2)
    session = mrr.replay(chunks, trace, verify=True)
    train_step(PP2, chunks, microbatches, session)
    try:
        session.close()
    except mrr.RouterReplayError as error:
        return f"raised: {str(error).splitlines()[1].strip()}"
    return str(session.report.agreement)


def main() -> int:
    faults = {"no fault": lambda trace: trace} if "--right" in sys.argv else FAULTS
    found = 0
    right = mrr.merge_traces(run_ranks(2, record))
    for name, plant in faults.items():
        capture = plant(right)
        diff = mrr.diff_traces(right, capture, name_a="the trainer", name_b="the engine")
        print(f"\nplanted: {name}")
        for fact in diff.facts:
            print(f"  diff: {fact}")
        said, *others = run_ranks(2, replay, capture)
        print(f"  replay {said}")
        found += len(diff.facts) + said.startswith("raised") * len([said, *others])
    print("\nverdict: " + (f"{found} findings" if found else "nothing wrong with the capture"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
