"""Record and replay under a covering selection of layouts, recomputes and dispatchers."""

from collections import defaultdict
from itertools import chain
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
)

BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
# From three experts on, the order of the columns shows in sums: in which order a version's top-k names them must not.
TOP4, TOP6 = {"moe_router_topk": 4}, {"moe_router_topk": 6}
FIRST_DENSE = {"moe_layer_freq": [0, 1, 1, 1]}
ALL, STAGES = [[1, 2, 3, 4]], [[1, 2], [3, 4]]
PP2 = {"pp_size": 2}
VPP2 = {"pp_size": 2, "vp_size": 2}

# Sizes, config, MoE layers of the pipeline stages, and those that Megatron recomputes, by the meaning of its config.
CASES: list[tuple[dict[str, int], dict[str, Any], list[list[int]], list[list[int]]]] = [
    ({}, {}, ALL, [[]]),
    ({}, FULL | TOP4 | {"moe_layer_freq": 2}, [[1, 3]], [[1, 3]]),
    ({"tp_size": 2}, BLOCK | ALLGATHER, ALL, [[1]]),
    (PP2, {"num_layers_in_first_pipeline_stage": 1}, [[1], [2, 3, 4]], [[], []]),
    (PP2, FULL | {"moe_layer_freq": [0, 0, 1, 1]}, [[], [3, 4]], [[], [3, 4]]),
    (VPP2, FULL | FIRST_DENSE, [[3], [2, 4]], [[3], [2, 4]]),
    ({"ep_size": 2}, FULL | ALLGATHER, ALL, ALL),
    ({"cp_size": 2}, FULL, ALL, ALL),
    (PP2 | {"cp_size": 2}, MOE | TOP4, STAGES, STAGES),
    (VPP2 | {"tp_size": 2, "ep_size": 2}, FULL | TOP6, [[1, 3], [2, 4]], [[1, 3], [2, 4]]),
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
    assert total.microbatches == case.num_microbatches * parallel_state.get_data_parallel_world_size()
    assert total.forwards == sum(map(len, layers_of_stage)) * case.num_microbatches * case.layout.world_size // len(
        layers_of_stage
    )
    assert (report.rows_live, report.rows_padding, report.decisions["wrong"]) == (0, 0, 0)
    assert report.recomputes == len(recomputed) * case.num_microbatches
    tokens_a_call = case.num_tokens // split // case.num_microbatches
    assert report.decisions["verified"] == (report.forwards + report.recomputes) * tokens_a_call


@pytest.mark.parametrize(("sizes", "config", "layers", "recomputed"), CASES, ids=[str(case[0]) for case in CASES])
def test_what_was_recorded_changes_nothing_and_other_routes_arrive(sizes, config, layers, recomputed, on_ranks):
    case = Case(layout=ParallelSizes(**sizes), config=config)
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
