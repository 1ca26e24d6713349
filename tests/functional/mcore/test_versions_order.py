"""Bit for bit at top-4: sessions have the column order of the run that they imitate, whatever order a version's top-k has.

From Megatron-Core 0.18 on the top-k is sorted only where gradients are on: a forward that is checkpointed has other columns
than its recompute: equal sets, but sums in another order.
"""

from typing import Any

import pytest

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import FULL, Case, build, run, same

MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
TOPK = 4


def sessions_beside_a_plain_run(recompute: dict[str, Any], kind: str) -> bool:
    case = Case(layout=ParallelSizes(), config=recompute | {"moe_router_topk": TOPK})
    config, chunks, microbatches = build(case)
    plain = run(chunks, case, microbatches)
    if kind == "freeze":
        with mrr.freeze_recompute(chunks):
            return same(plain, run(chunks, case, microbatches))
    with mrr.record(chunks) as recording:
        recorded = run(chunks, case, microbatches, recording)
    if kind == "record":
        return same(plain, recorded)
    trace = recording.trace(num_tokens=case.num_tokens)
    if kind == "replay of live rows":
        mask = trace.replay_mask.clone()
        mask[::2] = False
        trace = mrr.RoutingTrace(
            topk_indices=trace.topk_indices,
            layer_numbers=trace.layer_numbers,
            num_experts=trace.num_experts,
            replay_mask=mask,
        )
    with mrr.replay(chunks, trace) as session:
        return same(plain, run(chunks, case, microbatches, session))


@pytest.mark.parametrize("kind", ["freeze", "record", "replay", "replay of live rows"])
@pytest.mark.parametrize("recompute", [{}, MOE, FULL], ids=["none", "moe", "full"])
def test_a_session_is_bit_identical_to_the_run_without_it(recompute, kind, workers_1):
    assert workers_1.run(sessions_beside_a_plain_run, recompute, kind) == [True]
