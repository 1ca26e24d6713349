"""Recomputes of real models use the experts of their forward, whatever happens to the logits in between."""

from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import (
    FULL,
    MOE,
    Case,
    add_noise_in_recompute,
    alive_entries,
    build,
    flips,
    random_trace,
    run,
    watched,
)

FULL_2 = FULL | {"recompute_num_layers": 2}
VPP2 = ParallelSizes(pp_size=2, vp_size=2)


def start(kind: str, chunks: list[Any], trace: mrr.RoutingTrace) -> Any:
    if kind == "freeze":
        return mrr.freeze_recompute(chunks, verify=True)
    if kind == "record":
        return mrr.record(chunks, verify=True)
    mask = torch.arange(trace.num_tokens) % 2 == 0  # every second row is live
    values = {"layer_numbers": trace.layer_numbers, "num_experts": trace.num_experts, "replay_mask": mask}
    return mrr.replay(chunks, mrr.RoutingTrace(topk_indices=trace.topk_indices, **values), verify=True)


def noise_flips_nothing(case: Case, kind: str) -> None:
    """Run one step with noisy recomputes; without a session the same noise flips routes."""
    _, chunks, microbatches = build(case)
    add_noise_in_recompute(chunks)
    with watched(chunks) as seen, start(kind, chunks, random_trace(case)) as session:
        run(chunks, case, microbatches, session if session.queued else None)
        assert seen["recompute"]
        assert flips(seen) == 0
        assert alive_entries(chunks) == []
    assert session.report.decisions["wrong"] == 0
    assert (session.report.rows_live > 0) == (kind != "freeze")
    if not case.fused:  # live routing would need Transformer Engine
        with watched(chunks) as seen:
            run(chunks, case, microbatches)
        assert flips(seen) > 0


@pytest.mark.version
@pytest.mark.parametrize("kind", ["freeze", "record", "replay"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_noise_between_forward_and_recompute_flips_nothing(kind, fused, megatron):
    noise_flips_nothing(Case(config=FULL if fused else FULL_2, fused=fused), kind)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (Case(layout=ParallelSizes(pp_size=2), config=FULL), "freeze"),
        (Case(layout=VPP2, config=MOE), "record"),
        (Case(layout=VPP2, config=MOE, fused=True), "replay"),
        (Case(layout=ParallelSizes(tp_size=2), config=FULL), "replay"),
    ],
    ids=["pp2-full", "vpp2-moe", "vpp2-moe-fused", "tp2-full"],
)
def test_over_ranks_noise_flips_nothing(case, kind, on_ranks):
    on_ranks(2, noise_flips_nothing, case, kind)
