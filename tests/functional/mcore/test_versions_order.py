"""Bit for bit at top-4: sessions have the column order of the run that they imitate, whatever order a version's top-k has.

From Megatron-Core 0.18 on the top-k is sorted only where gradients are on: a forward that is checkpointed has other columns
than its recompute: equal sets, but sums in another order.
"""

import pytest
import torch

import megatron_router_replay as mrr
from tests.functional.mcore.cases import FULL, MOE, Case, build, run, same

pytestmark = pytest.mark.version


@pytest.mark.parametrize("recompute", [{}, MOE, FULL], ids=["none", "moe", "full"])
def test_a_session_is_bit_identical_to_the_run_without_it(recompute, megatron):
    case = Case(config=recompute | {"moe_router_topk": 4})
    _, chunks, microbatches = build(case)
    plain = run(chunks, case, microbatches)
    with mrr.freeze_recompute(chunks):
        assert same(plain, run(chunks, case, microbatches))
    with mrr.record(chunks) as recording:
        assert same(plain, run(chunks, case, microbatches, recording))
    trace = recording.trace()
    for kept in (trace, trace.keep(torch.arange(case.num_tokens) % 2 == 0)):  # every second row is routed live
        with mrr.replay(chunks, kept) as session:
            assert same(plain, run(chunks, case, microbatches, session))
