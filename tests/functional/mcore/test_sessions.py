"""What a session touches, holds and counts in a real model; recomputes use the experts of their forward."""

import gc
import re
import sys
from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.mcore.batches.upload import LayerRoutes
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import (
    DRAWN,
    FULL,
    MOE,
    Case,
    add_noise_in_recompute,
    alive_entries,
    build,
    flips,
    model_inputs,
    moe_routers,
    random_trace,
    run,
    watched,
    wrong_replays,
)

SINGLE = Case(config=FULL)


@pytest.mark.parametrize(("num_experts", "bytes_an_id"), [(8, 1), (258, 2)])
def test_a_session_holds_topk_compact_ids_per_token_and_layer(num_experts, bytes_an_id, megatron):
    case = Case(config=FULL | {"num_moe_experts": num_experts, "num_layers": 2}, num_microbatches=2)
    config, (model,), microbatches = build(case)
    live_last = torch.arange(case.num_tokens) % case.sequence_length != case.sequence_length - 1
    trace = random_trace(case, [1, 2], replay_mask=live_last)
    before = {id(each) for each in gc.get_objects() if type(each) is LayerRoutes}
    session = mrr.replay(model, trace, **DRAWN)

    def held() -> float:
        """Bytes of routes for each token and layer, given and between forward and backward."""
        tensors = [entry.topk_indices for entry in alive_entries([model])]
        given = [each for each in gc.get_objects() if type(each) is LayerRoutes and id(each) not in before]
        storages = [tensor.untyped_storage() for tensor in tensors + [each.topk_indices for each in given]]
        num_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        return num_bytes / (case.num_tokens * config.num_layers)

    outputs, share = [], 1 / len(microbatches)
    for number, microbatch in enumerate(microbatches, 1):
        session.microbatch(microbatch["rows"])
        assert held() == number * share * config.moe_router_topk * bytes_an_id
        outputs.append(model(**model_inputs(microbatch)))
        assert held() == number * share * config.moe_router_topk * bytes_an_id
    while outputs:
        outputs.pop().sum().backward()
    assert held() == 0  # routes live as long as the graph
    session.close()


def test_with_replay_off_none_of_our_code_runs(megatron):
    _, chunks, microbatches = build(SINGLE)
    with mrr.replay(chunks, random_trace(SINGLE), **DRAWN) as session:
        run(chunks, SINGLE, microbatches, session)
    ours: list[str] = []
    hooks = ("hooks.py", "dispatch.py", "tape.py", "checkpoints.py")
    pass_calls_on = ("/testing/", *(f"/core/{name}" for name in hooks))

    def profile(frame: Any, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and "/megatron_router_replay/" in path and not any(each in path for each in pass_calls_on):
            ours.append(f"{path}:{frame.f_code.co_name}")

    sys.setprofile(profile)
    try:
        run(chunks, SINGLE, microbatches)
    finally:
        sys.setprofile(None)
    assert ours == []


def one_stage_permutes_its_ids() -> str:
    case = Case(layout=ParallelSizes(pp_size=4), sequence_length=64)
    _, chunks, microbatches = build(case)
    with mrr.record(chunks) as recording:
        run(chunks, case, microbatches, recording)
    trace = recording.trace()
    routes = (trace.topk_indices + 3 * (trace.layer_numbers == (3,))) % 8
    values = {"layer_numbers": trace.layer_numbers, "num_experts": 8, "replay_mask": trace.replay_mask}
    session = mrr.replay(chunks, mrr.RoutingTrace(topk_indices=routes, **values))
    run(chunks, case, microbatches, session)
    with pytest.raises(mrr.RouterReplayError) as error:
        session.close()
    return str(error.value)


def test_four_ranks_with_different_layers_raise_together(on_ranks):
    first, *others = on_ranks(4, one_stage_permutes_its_ids)
    assert re.search(r"in 1 of 4 layers \(.*3: -?\d+%", first)
    assert others == [first] * 3


# ---- wrappers: the forward step is `output = model(**batch)`, replay on or off


def bfloat16(model: Any, config: Any) -> Any:
    from megatron.core.transformer.module import Float16Module

    return Float16Module(config, model.bfloat16())


def data_parallel(model: Any, config: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)
    return DistributedDataParallel(config, options, model)


def compiled(model: Any) -> Any:
    torch._dynamo.reset()
    decoder = model.module.module.decoder  # traced for half a minute; `test_compile` compiles routers
    decoder.forward = torch._dynamo.disable(decoder.forward)
    return torch.compile(model, backend="eager")


def test_rows_are_found_through_any_wrapper(megatron):
    half = {"bf16": True, "params_dtype": torch.bfloat16}
    case = Case(config={"num_layers": 2, **FULL, **half}, num_microbatches=2)
    config, (inner,), microbatches = build(case)
    model = compiled(data_parallel(bfloat16(inner, config), config))

    def step() -> list[float]:
        losses = []
        for microbatch in microbatches:
            loss = model(**model_inputs(microbatch)).float().mean()
            loss.backward()
            losses.append(float(loss.detach()))
        return losses

    off = step()
    tokens = torch.cat([microbatch["tokens"].reshape(-1) for microbatch in microbatches])
    trace = random_trace(case, (1, 2), token_ids=tokens, sequence_lengths=[case.sequence_length] * 4)
    with watched([inner]) as seen, mrr.replay(model, trace, **DRAWN, verify=True, min_replayed=1.0) as session:
        on = step()
    assert wrong_replays(case, seen, trace, microbatches) == 0
    assert len(seen["forward"]) == len(seen["recompute"]) == len(moe_routers([inner])) == 2
    assert session.report.rows_replayed == 32
    assert on != off == step()


def noise_flips_nothing(case: Case) -> None:
    """Run one step with noisy recomputes under a freeze; without a session the same noise flips routes."""
    _, chunks, microbatches = build(case)
    add_noise_in_recompute(chunks)
    with watched(chunks) as seen, mrr.freeze_recompute(chunks):
        run(chunks, case, microbatches)
        assert seen["recompute"]
        assert flips(seen) == 0
        assert alive_entries(chunks) == []
    if not case.fused:  # live routing would need Transformer Engine
        with watched(chunks) as seen:
            run(chunks, case, microbatches)
        assert flips(seen) > 0


NOISY = {
    "two layers a checkpoint": Case(config=FULL | {"recompute_num_layers": 2}),
    "fused": Case(config=FULL, fused=True),
    "vpp2": Case(layout=ParallelSizes(pp_size=2, vp_size=2), config=MOE),
    "tp2": Case(layout=ParallelSizes(tp_size=2), config=FULL),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.version] * (case.layout.world_size == 1)) for name, case in NOISY.items()],
)
def test_noise_between_forward_and_recompute_flips_nothing(name, on_ranks):
    """Of record and replay, `test_layouts` compares each recompute with the trace."""
    on_ranks(NOISY[name].layout.world_size, noise_flips_nothing, NOISY[name])
