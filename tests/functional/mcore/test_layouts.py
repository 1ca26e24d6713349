"""Record and replay under every parallel layout, recompute and dispatcher: a covering selection."""

import pytest

from megatron_router_replay.testing import GlooWorkers, ParallelSizes
from tests.functional.mcore.cases import FULL, Case, record_and_replay

BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
# From three experts on, the order of the columns shows in sums: in which order a version's top-k names them must not.
TOP4, TOP6 = {"moe_router_topk": 4}, {"moe_router_topk": 6}

CASES = {
    "single": Case(layout=ParallelSizes()),
    "single-full": Case(layout=ParallelSizes(), config=FULL),
    "single-moe-allgather": Case(layout=ParallelSizes(), config=MOE | ALLGATHER),
    "tp2-sp-block": Case(layout=ParallelSizes(tp_size=2), config=BLOCK),
    "tp2-sp-full-allgather": Case(layout=ParallelSizes(tp_size=2), config=FULL | ALLGATHER),
    "pp2": Case(layout=ParallelSizes(pp_size=2)),
    "pp2-full": Case(layout=ParallelSizes(pp_size=2), config=FULL),
    "pp2-block": Case(layout=ParallelSizes(pp_size=2), config=BLOCK),
    "pp2-vpp2-moe": Case(layout=ParallelSizes(pp_size=2, vp_size=2), config=MOE),
    "pp2-vpp2-8-full": Case(layout=ParallelSizes(pp_size=2, vp_size=2), config=FULL, num_microbatches=8),
    "ep2-moe": Case(layout=ParallelSizes(ep_size=2), config=MOE),
    "ep2-full-allgather": Case(layout=ParallelSizes(ep_size=2), config=FULL | ALLGATHER),
    "cp2-full": Case(layout=ParallelSizes(cp_size=2), config=FULL),
    "tp2-ep2-moe": Case(layout=ParallelSizes(tp_size=2, ep_size=2), config=MOE | TOP4),
    "pp2-ep2-full": Case(layout=ParallelSizes(pp_size=2, ep_size=2), config=FULL | TOP4),
    "pp2-cp2-moe": Case(layout=ParallelSizes(pp_size=2, cp_size=2), config=MOE | TOP4),
    "tp2-pp2-ep2-vpp2": Case(layout=ParallelSizes(tp_size=2, pp_size=2, ep_size=2, vp_size=2), config=TOP6),
    "tp2-pp2-ep2-vpp2-full": Case(layout=ParallelSizes(tp_size=2, pp_size=2, ep_size=2, vp_size=2), config=FULL | TOP4),
}


def recomputed_layers(case: Case, layers: list[int]) -> list[int]:
    """Which of a rank's MoE layers Megatron recomputes, by the meaning of its config."""
    if case.config.get("recompute_method") == "block":
        # The first recompute_num_layers of each chunk; layers of one chunk are neighbours.
        chunks = case.layout.num_chunks
        per_chunk = len(layers) // chunks
        return [layers[i * per_chunk] for i in range(chunks)]
    return layers if "recompute_granularity" in case.config else []


@pytest.mark.parametrize("name", CASES)
def test_replaying_what_was_recorded_changes_nothing_and_other_routes_arrive_exactly(name, request):
    case = CASES[name]
    workers: GlooWorkers = request.getfixturevalue(f"workers_{case.layout.world_size}")
    for result in workers.run(record_and_replay, case):
        layers = result["layers"]
        assert result["trace_layers"] == layers
        assert result["record_is_live"], "recording changed losses or gradients"
        assert result["replay_is_live"], "replaying the routes just recorded changed losses or gradients"
        assert result["wrong"] == {"forward": 0, "recompute": 0}
        assert result["forwards"] == dict.fromkeys(layers, case.num_microbatches)
        assert result["recomputes"] == dict.fromkeys(recomputed_layers(case, layers), case.num_microbatches)
        assert result["left_over"] == []
        split = (case.layout.tp_size if case.layout.sequence_parallel else 1) * case.layout.cp_size
        assert result["routed_rows"] == case.num_tokens // split
        report = result["report"]
        assert report["rows_replayed"] == report["tokens"] == case.num_tokens // split * case.layout.num_chunks
        assert report["rows_live"] == report["rows_padding"] == report["decisions_wrong"] == 0
        assert report["recomputes"] == len(recomputed_layers(case, layers)) * case.num_microbatches
        assert report["decisions_verified"] == (report["forwards"] + report["recomputes"]) * (
            case.num_tokens // split // case.num_microbatches
        )
