"""Record and replay under a covering selection of layouts, recomputes and dispatchers; replay what another one recorded."""

from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.mcore import layer_numbers_of
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import (
    DRAWN,
    FULL,
    MOE,
    MTP_RECOMPUTE,
    Case,
    add_noise_in_recompute,
    as_map,
    build,
    moe_routers,
    random_trace,
    record_and_replay,
    rows_seen,
    run,
    watched,
    wrong_replays,
)

BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
# From three experts on, the order of the columns shows in sums: in which order a version's top-k names them must not.
TOP4, TOP6 = {"moe_router_topk": 4}, {"moe_router_topk": 6}
SIZES = {
    "single": ParallelSizes(),
    "tp2": ParallelSizes(tp_size=2),
    "pp2": ParallelSizes(pp_size=2),
    "vpp2": ParallelSizes(pp_size=2, vp_size=2),
    "ep2": ParallelSizes(ep_size=2),
    "cp2": ParallelSizes(cp_size=2),
    "tp2-ep2": ParallelSizes(tp_size=2, ep_size=2),
    "pp2-ep2": ParallelSizes(pp_size=2, ep_size=2),
    "pp2-cp2": ParallelSizes(pp_size=2, cp_size=2),
    "tp2-ep2-vpp2": ParallelSizes(tp_size=2, pp_size=2, ep_size=2, vp_size=2),
}
FIRST_DENSE = {"moe_layer_freq": [0, 1, 1, 1]}
ALL, STAGES = [[1, 2, 3, 4]], [[1, 2], [3, 4]]

# Sizes, config, MoE layers of the pipeline stages, and those that Megatron recomputes, by the meaning of its config.
CASES: list[tuple[str, dict[str, Any], list[list[int]], list[list[int]]]] = [
    ("single", {}, ALL, [[]]),
    ("single", MOE | ALLGATHER, ALL, ALL),
    ("single", FULL | TOP4 | {"moe_layer_freq": 2}, [[1, 3]], [[1, 3]]),
    ("tp2", BLOCK, ALL, [[1]]),
    ("tp2", FULL | ALLGATHER, ALL, ALL),
    ("pp2", {}, STAGES, [[], []]),
    ("pp2", BLOCK, STAGES, [[1], [3]]),
    ("pp2", FULL | {"moe_layer_freq": [1, 0, 1, 1]}, [[1], [3, 4]], [[1], [3, 4]]),
    ("pp2", {"num_layers_in_first_pipeline_stage": 1}, [[1], [2, 3, 4]], [[], []]),
    ("pp2", FULL | {"num_layers_in_first_pipeline_stage": 3, "moe_layer_freq": [0, 1, 0, 1]}, [[2], [4]], [[2], [4]]),
    ("pp2", FULL | {"moe_layer_freq": [0, 0, 1, 1]}, [[], [3, 4]], [[], [3, 4]]),
    ("vpp2", MOE, [[1, 3], [2, 4]], [[1, 3], [2, 4]]),
    ("vpp2", FULL | FIRST_DENSE, [[3], [2, 4]], [[3], [2, 4]]),
    ("ep2", FULL | ALLGATHER, ALL, ALL),
    ("cp2", FULL, ALL, ALL),
    ("tp2-ep2", MOE | TOP4, ALL, ALL),
    ("pp2-ep2", FULL | TOP4, STAGES, STAGES),
    ("pp2-cp2", MOE | TOP4, STAGES, STAGES),
    ("tp2-ep2-vpp2", TOP6, [[1, 3], [2, 4]], [[], []]),
    ("tp2-ep2-vpp2", FULL | TOP4, [[1, 3], [2, 4]], [[1, 3], [2, 4]]),
]


def one_layout(case: Case, layers_of_stage: list[list[int]], recomputed_of_stage: list[list[int]]) -> None:
    from megatron.core import parallel_state

    _, chunks, microbatches = build(case)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    layers, recomputed = layers_of_stage[stage], recomputed_of_stage[stage]
    assert [router.layer_number for router in moe_routers(chunks)] == layers
    whole = sorted(chain(*layers_of_stage))
    assert list(layer_numbers_of(chunks)) == whole, "every rank knows the layers of the whole model"
    seen, report = record_and_replay(case, chunks, microbatches, whole)
    assert {layer: len(maps) for layer, maps in seen["forward"].items()} == dict.fromkeys(layers, case.num_microbatches)
    assert {layer: len(maps) for layer, maps in seen["recompute"].items()} == dict.fromkeys(
        recomputed, case.num_microbatches
    )
    split = (case.layout.tp_size if case.layout.sequence_parallel else 1) * case.layout.cp_size
    expected = case.num_tokens // split if layers else 0
    assert report.rows_replayed == report.tokens == expected, "also where a rank has several chunks"
    total = report.reduce()
    batch = case.num_tokens * parallel_state.get_data_parallel_world_size()
    assert total.metrics()["router_replay/rows_replayed"] == total.tokens == batch, "a row counts once"
    assert total.forwards == sum(map(len, layers_of_stage)) * case.num_microbatches * case.layout.world_size // len(
        layers_of_stage
    )
    assert (report.rows_live, report.rows_padding, report.decisions["wrong"]) == (0, 0, 0)
    assert report.recomputes == len(recomputed) * case.num_microbatches
    tokens_a_call = case.num_tokens // split // case.num_microbatches
    assert report.decisions["verified"] == (report.forwards + report.recomputes) * tokens_a_call


@pytest.mark.parametrize(("sizes", "config", "layers", "recomputed"), CASES, ids=[case[0] for case in CASES])
def test_what_was_recorded_changes_nothing_and_other_routes_arrive(sizes, config, layers, recomputed, on_ranks):
    case = Case(layout=SIZES[sizes], config=config)
    on_ranks(case.layout.world_size, one_layout, case, layers, recomputed)


@pytest.mark.version
def test_an_mtp_router_stays_live_and_is_frozen_in_recomputes(megatron):
    """One layer is dense and one MTP layer routes: as many routers as layers, so counting would shift every router."""
    config = {"mtp_num_layers": 1, "num_layers": 3, "moe_layer_freq": [0, 1, 1]} | MTP_RECOMPUTE
    case = Case(config=config, num_microbatches=1)
    _, (model,), microbatches = build(case)
    explained = [(router.layer_number, router.is_mtp) for router in mrr.explain(model)]
    assert explained == [(2, False), (3, False), (4, True)]
    add_noise_in_recompute([model], mtp=True)
    maps: dict[Any, list[torch.Tensor]] = defaultdict(list)
    routers = [*moe_routers([model]), *moe_routers([model], mtp=True)]
    for router in routers:
        router.register_forward_hook(lambda router, args, output: maps[router].append(output[1].clone()))
    trace = random_trace(case, (2, 3, 4))
    with mrr.replay(model, trace, **DRAWN, verify=True) as session:
        run([model], case, microbatches, session)
    rows = rows_seen(case, microbatches[0])
    for router, layer in zip(routers, (2, 3, 4)):
        is_replayed = torch.equal(maps[router][0], as_map(trace.layer(layer)[rows]))
        assert is_replayed == (layer < 4)
    with mrr.record(model) as recording:
        run([model], case, microbatches, recording)
    assert recording.trace().layer_numbers == (2, 3)
    of_replay, its_recompute, of_recording, its_recompute_too = maps[routers[-1]]
    assert torch.equal(of_replay, its_recompute)
    assert torch.equal(of_recording, its_recompute_too)


CONFIG = {"moe_layer_freq": [0, 1, 1, 1]} | FULL
RECORDED = Case(layout=ParallelSizes(tp_size=2, pp_size=2, vp_size=2), config=CONFIG)
TARGETS = {
    "single": Case(config=CONFIG),
    "ep2": Case(layout=ParallelSizes(ep_size=2, tp_size=2), config=CONFIG),
    "cp2": Case(layout=ParallelSizes(cp_size=2), config=CONFIG),
    "pp2": Case(layout=ParallelSizes(pp_size=2), config=CONFIG),
}


def record_part(folder: Path) -> tuple[int, ...]:
    """Record one step and save this rank's part."""
    import torch.distributed as dist

    _, chunks, microbatches = build(RECORDED)
    with mrr.record(chunks) as recording:
        run(chunks, RECORDED, microbatches, recording)
    trace = recording.trace(num_tokens=RECORDED.num_tokens)
    mrr.save_trace(trace, folder / f"rank{dist.get_rank()}.safetensors")
    return trace.layer_numbers


def replay_merged(case: Case, path: Path) -> list[float]:
    """Replay a merged trace under this layout, compare every routing map with it, and return the losses."""
    _, chunks, microbatches = build(case)
    trace = mrr.load_trace(path)
    with watched(chunks) as seen, mrr.replay(chunks, trace, verify=True) as session:
        losses, _ = run(chunks, case, microbatches, session)
    assert seen["forward"]
    assert wrong_replays(case, seen, trace, microbatches) == session.report.rows_live == 0
    return [float(loss) for loss in losses]


@pytest.fixture(scope="module")
def merged(on_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    layers = on_ranks(4, record_part, folder)
    parts = [mrr.load_trace(folder / f"rank{rank}.safetensors") for rank in range(4)]
    # Virtual stages: the first pipeline rank has layers 1 and 3, the second 2 and 4; layer 1 is dense.
    assert layers == [(3,), (3,), (2, 4), (2, 4)]
    assert [int(part.replay_mask.sum()) for part in parts] == [32] * 4
    trace = mrr.merge_traces(parts)
    assert (trace.layer_numbers, trace.num_tokens, bool(trace.replay_mask.all())) == ((2, 3, 4), 64, True)
    mrr.save_trace(trace, folder / "merged.safetensors")
    return folder / "merged.safetensors"


@pytest.mark.parametrize("name", TARGETS)
def test_another_layout_uses_the_same_experts_for_every_token(name, merged, on_ranks):
    losses = on_ranks(TARGETS[name].layout.world_size, replay_merged, TARGETS[name], merged)[-1]
    if name == "pp2":
        (single,) = on_ranks(1, replay_merged, TARGETS["single"], merged)
        assert len(single) == 4
        assert losses == pytest.approx(single, abs=1e-5)
