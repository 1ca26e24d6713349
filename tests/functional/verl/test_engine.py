"""verl's real Megatron engine with our replay: every decision at the routers, and loss and gradients to the last bit."""

import pytest

pytest.importorskip("verl", reason="verl is not installed: make test-verl")

from megatron_router_replay.testing import GlooWorkers, ParallelLayout
from tests.functional.verl.batches import Sizes
from tests.functional.verl.cases import DYNAMIC, FIXED, FULL, MOE, Case, r2, r3

CASES = {
    "single": Case(),
    "single-full": Case(config=FULL),
    "single-moe-fixed": Case(config=MOE, batching=FIXED),
    "single-padded": Case(padded=True),
    "single-padded-full-fixed": Case(padded=True, config=FULL, batching=FIXED),
    "tp2": Case(layout=ParallelLayout(tp_size=2)),
    "tp2-full": Case(layout=ParallelLayout(tp_size=2), config=FULL),
    "tp2-padded-moe": Case(layout=ParallelLayout(tp_size=2), padded=True, config=MOE),
    "pp2-moe": Case(layout=ParallelLayout(pp_size=2), config=MOE),
    "pp2-padded-full": Case(layout=ParallelLayout(pp_size=2), padded=True, config=FULL),
    "pp2-vpp2": Case(layout=ParallelLayout(pp_size=2, vp_size=2)),
    "pp2-vpp2-full-fixed": Case(layout=ParallelLayout(pp_size=2, vp_size=2), config=FULL, batching=FIXED),
    "cp2": Case(layout=ParallelLayout(cp_size=2)),
    "cp2-padded-moe": Case(layout=ParallelLayout(cp_size=2), padded=True, config=MOE),
    "ep2-full": Case(layout=ParallelLayout(ep_size=2), config=FULL),
    "ep2-padded": Case(layout=ParallelLayout(ep_size=2), padded=True),
    "tp2-cp2-full": Case(layout=ParallelLayout(tp_size=2, cp_size=2), config=FULL),
    "tp2-cp2-padded": Case(layout=ParallelLayout(tp_size=2, cp_size=2), padded=True),
}
TOKENS, SAMPLES = sum(Sizes().lengths), len(Sizes().lengths)


def workers_for(case: Case, request: pytest.FixtureRequest) -> GlooWorkers:
    return request.getfixturevalue(f"workers_{case.layout.world_size}")


def check_counts(case: Case, ranks: list[dict], name: str, *, replayed: int, live: int) -> None:
    """Every token of the batch went through every layer, on one rank of those that share it, and as it had to."""
    for rank in ranks:
        counts = rank[name]
        assert counts["wrong forward"] == counts["wrong recompute"] == counts["unfrozen"] == 0
    copies = case.layout.ep_size  # the data-parallel ranks have a batch each
    assert sum(rank[name]["replayed"] for rank in ranks) == 4 * replayed * copies
    assert sum(rank[name]["live"] for rank in ranks) == 4 * live * copies


@pytest.mark.parametrize("name", CASES)
def test_r3_is_exact_in_verls_engine(name, request):
    case = CASES[name]
    ranks = workers_for(case, request).run(r3, case)
    check_counts(case, ranks, "counts", replayed=TOKENS - SAMPLES, live=SAMPLES)
    for rank in ranks:
        assert all(rank["same"].values()), rank["same"]
        assert rank["live is other"], "the oracle would have been met without a replay"
        assert rank["left_over"] == 0
        assert (rank["recomputes"] > 0) == ("recompute_granularity" in case.config)
        assert "routing_rows" not in rank["fields"]
        assert "routed_experts" in rank["fields"]
        assert rank["flag"]
    assert sum(rank["counts"]["entered"] for rank in ranks) > 0
    metrics = ranks[-1]["metrics"]
    # One token in SAMPLES samples is live by nature; the share is of all ranks together.
    assert metrics["router_replay/replayed_share"] == [pytest.approx((TOKENS - SAMPLES) / TOKENS)]
    assert metrics["router_replay/ranks"] == [len(ranks)]
    assert metrics["router_replay/tokens_lost"] == [0.0]
    assert "router_replay/recompute_flips" not in metrics


@pytest.mark.parametrize("name", CASES)
def test_r2_is_exact_in_verls_engine_with_regrouped_micro_batches(name, request):
    case = CASES[name]
    ranks = workers_for(case, request).run(r2, case)
    check_counts(case, ranks, "recording", replayed=TOKENS, live=0)
    check_counts(case, ranks, "counts", replayed=TOKENS, live=0)
    for rank in ranks:
        assert all(rank["same"].values()), rank["same"]
        assert rank["dtype"] == "torch.uint8"
        assert rank["left_over"] == 0
    assert ranks[0]["regrouped"] or case.batching is DYNAMIC
