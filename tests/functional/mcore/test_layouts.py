"""Record and replay under a covering selection of layouts, recomputes and dispatchers: each router has its own layer."""

from itertools import chain
from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import (
    FULL,
    MOE,
    MTP_RECOMPUTE,
    Case,
    as_map,
    build,
    moe_routers,
    random_trace,
    record_and_replay,
    rows_seen,
    run,
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
    ("single", FULL | {"moe_layer_freq": 2}, [[1, 3]], [[1, 3]]),
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
    seen, report = record_and_replay(case, chunks, microbatches, sorted(chain(*layers_of_stage)))
    assert {layer: len(maps) for layer, maps in seen["forward"].items()} == dict.fromkeys(layers, case.num_microbatches)
    assert {layer: len(maps) for layer, maps in seen["recompute"].items()} == dict.fromkeys(
        recomputed, case.num_microbatches
    )
    split = (case.layout.tp_size if case.layout.sequence_parallel else 1) * case.layout.cp_size
    num_chunks = sum(bool(moe_routers([chunk])) for chunk in chunks)
    assert report.rows_replayed == report.tokens == case.num_tokens // split * num_chunks
    assert (report.rows_live, report.rows_padding, report.decisions["wrong"]) == (0, 0, 0)
    assert report.recomputes == len(recomputed) * case.num_microbatches
    tokens_a_call = case.num_tokens // split // case.num_microbatches
    assert report.decisions["verified"] == (report.forwards + report.recomputes) * tokens_a_call


@pytest.mark.parametrize(("sizes", "config", "layers", "recomputed"), CASES, ids=[case[0] for case in CASES])
def test_what_was_recorded_changes_nothing_and_other_routes_arrive(sizes, config, layers, recomputed, on_ranks):
    case = Case(layout=SIZES[sizes], config=config)
    on_ranks(case.layout.world_size, one_layout, case, layers, recomputed)


# ---- layers of multi-token prediction, in a real GPTModel


def mtp_model(**config: Any) -> tuple[Case, Any, list[dict[str, Any]], dict[str, list[torch.Tensor]]]:
    """Return (case, model, micro-batches, {name of a router's module: the maps that leave it})."""
    case = Case(config={"mtp_num_layers": 1} | MTP_RECOMPUTE | config, num_microbatches=1)
    _, (model,), microbatches = build(case)
    maps: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if module in [*moe_routers([model]), *moe_routers([model], mtp=True)]:
            maps[name] = []
            module.register_forward_hook(lambda _, args, output, name=name: maps[name].append(output[1].clone()))
    return case, model, microbatches, maps


@pytest.mark.version
@pytest.mark.parametrize("mtp", [False, True])
def test_an_mtp_router_is_replayed_as_the_layer_behind_the_last_only_if_asked(mtp, megatron):
    case, model, microbatches, maps = mtp_model(num_layers=2)
    explained = [(router.layer_number, router.is_mtp) for router in mrr.explain(model)]
    assert explained == [(1, False), (2, False), (3, True)]
    trace = random_trace(case, (1, 2, 3))
    with mrr.replay(model, trace, mtp=mtp, verify=True) as session:
        run([model], case, microbatches, session)
    rows = rows_seen(case, microbatches[0])
    targets = {layer: as_map(trace.layer(layer)[rows]) for layer in (1, 2, 3)}
    (mtp_maps,) = (of_router for name, of_router in maps.items() if name.startswith("mtp"))
    used = [[layer for layer, target in targets.items() if torch.equal(each, target)] for each in mtp_maps]
    assert used == [[3] if mtp else []] * 2  # forward and recompute
    assert torch.equal(*mtp_maps)
    with mrr.record(model, mtp=mtp) as recording:
        run([model], case, microbatches, recording)
    assert recording.trace().layer_numbers == ((1, 2, 3) if mtp else (1, 2))


@pytest.mark.version
def test_as_many_routers_as_layers_by_coincidence_shift_nothing(megatron):
    """One dense layer and one MTP router: counting would shift every router by one."""
    case, model, microbatches, maps = mtp_model(num_layers=3, moe_layer_freq=[0, 1, 1])
    trace = random_trace(case, (2, 3))
    with mrr.replay(model, trace) as session:
        run([model], case, microbatches, session)
    targets = {layer: as_map(trace.layer(layer)[rows_seen(case, microbatches[0])]) for layer in (2, 3)}
    used = {name: [n for n, target in targets.items() if torch.equal(of[0], target)] for name, of in maps.items()}
    assert used.pop("decoder.layers.1.mlp.router") == [2]
    assert used.pop("decoder.layers.2.mlp.router") == [3]
    assert list(used.values()) == [[]]
