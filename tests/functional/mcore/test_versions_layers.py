"""Layers of hybrid models, which Megatron-Core has since 0.18."""

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
    MEGATRON,
    Case,
    as_map,
    build,
    moe_routers,
    random_trace,
    record_and_replay,
    rows_seen,
    run,
)
from tests.support.tiny_gpt import tiny_gpt_config
from tests.support.tiny_hybrid import build_tiny_hybrid

pytestmark = pytest.mark.version
PP2 = ParallelSizes(pp_size=2)
needs_hybrid = pytest.mark.skipif(MEGATRON < (0, 18), reason="Megatron-Core has no HybridModel before 0.18")


def hybrid(case: Case, pattern: str) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return (this rank's chunks, micro-batches with rows) of a hybrid model."""
    _, _, microbatches = build(case)
    num_layers = len(pattern.split("/")[0].replace("|", ""))
    config = tiny_gpt_config(case.layout, **{**case.config, "num_layers": num_layers})
    return build_tiny_hybrid(config, case.layout, pattern), microbatches


def hybrid_replay(case: Case, pattern: str, numbers: tuple[int, ...], layers_of_stage: list[list[int]]) -> None:
    """Record a hybrid model, replay that, and replay routes that no router chose, in the numbers of a GPT model."""
    from megatron.core import parallel_state

    chunks, microbatches = hybrid(case, pattern)
    assert layer_numbers_of(chunks) == numbers
    here = layers_of_stage[parallel_state.get_pipeline_model_parallel_rank()]
    seen, _ = record_and_replay(case, chunks, microbatches, numbers)
    assert sorted(seen["forward"]) == here
    assert sorted(seen["recompute"]) == (here if FULL.items() <= case.config.items() else [])


@needs_hybrid
@pytest.mark.parametrize(
    ("pattern", "topk", "numbers", "recompute"), [("*E*E*E", 2, (2, 4, 6), {}), ("MEM*EME", 4, (2, 5, 7), FULL)]
)
def test_a_hybrid_model_routes_in_the_layers_of_its_pattern(pattern, topk, numbers, recompute, megatron):
    """A GPT model that became a hybrid one routes in layers 2, 4 and 6; Mamba layers count, and have no routes."""
    hybrid_replay(Case(config=recompute | {"moe_router_topk": topk}), pattern, numbers, [list(numbers)])


@needs_hybrid
@pytest.mark.parametrize(
    ("pattern", "recompute", "stages"),
    [("MEM*|MEME", {}, [[2], [6, 8]]), ("*E*E|*EE", FULL, [[2, 4], [6, 7]])],
)
def test_every_stage_knows_the_layers_of_the_whole_hybrid_model(pattern, recompute, stages, on_ranks):
    on_ranks(2, hybrid_replay, Case(layout=PP2, config=recompute), pattern, tuple(chain(*stages)), stages)


@needs_hybrid
def test_each_moe_layer_of_an_mtp_block_has_its_own_number_and_is_live(megatron):
    case = Case(config={"mtp_num_layers": 2}, num_microbatches=1)
    (model,), microbatches = hybrid(case, "*E*E/*EE/*EE")
    # Four decoder layers; then attention 5, experts 6 and 7 of the first MTP layer, 8 to 10 of the second.
    explained = [(router.layer_number, router.is_mtp) for router in mrr.explain(model)]
    assert explained == [(2, False), (4, False), (6, True), (7, True), (9, True), (10, True)]
    assert layer_numbers_of(model) == (2, 4)
    trace = random_trace(case, [number for number, _ in explained])
    maps: list[torch.Tensor] = []
    for router in moe_routers([model]) + moe_routers([model], mtp=True):
        router.register_forward_hook(lambda module, args, output: maps.append(output[1].clone()))
    with mrr.replay(model, trace, **DRAWN, verify=True) as session:
        run([model], case, microbatches, session)
    rows = rows_seen(case, microbatches[0])
    targets = {number: as_map(trace.layer(number)[rows]) for number in trace.layer_numbers}
    used = [[number for number, target in targets.items() if torch.equal(each, target)] for each in maps]
    assert used == [[2], [4], [], [], [], []], "those of MTP layers are live"
