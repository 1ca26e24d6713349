"""What a session touches, holds and counts in a real model; recomputes use the experts of their forward."""

import functools
import gc
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_router_replay as mrr
from megatron_router_replay.mcore.batches import chunk as chunk_module
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
    same,
    watched,
    wrong_replays,
)

SINGLE = Case(config=FULL)


def test_a_session_visits_each_module_once_where_it_opens_and_once_where_it_closes(megatron, monkeypatch):
    case = Case()
    _, (model,), _ = build(case)
    trace = random_trace(case)
    del model.decoder.layers[-1]  # the last layer is another stage's
    visits: list[Any] = []
    for name in ("named_modules", "named_children"):  # modules() and children() call these

        def counted(*args: Any, original: Any, **options: Any) -> Any:
            visits.append(original)
            return original(*args, **options)

        original = getattr(nn.Module, name)
        monkeypatch.setattr(nn.Module, name, functools.partialmethod(counted, original=original))
    session = mrr.replay(model, trace)
    opened = len(visits)
    visits.clear()
    problems = session._routers.problems()
    closed = len(visits)
    session.close(verify=False)
    num_modules = len(list(model.modules()))
    assert (opened, closed, problems) == (num_modules, num_modules, [])


@pytest.mark.parametrize(("num_experts", "bytes_an_id"), [(8, 1), (258, 2)])
def test_a_session_holds_topk_compact_ids_per_token_and_layer(num_experts, bytes_an_id, megatron):
    case = Case(config=FULL | {"num_moe_experts": num_experts}, num_microbatches=3)
    config, (model,), microbatches = build(case)
    live_last = torch.arange(case.num_tokens) % case.sequence_length != case.sequence_length - 1
    trace = random_trace(case, replay_mask=live_last)
    before = {id(each) for each in gc.get_objects() if isinstance(each, LayerRoutes)}
    session = mrr.replay(model, trace, **DRAWN)

    def held() -> float:
        """Bytes of routes for each token and layer, queued and between forward and backward."""
        tensors = [entry.topk_indices for entry in alive_entries([model])]
        queued = [each for each in gc.get_objects() if isinstance(each, LayerRoutes) and id(each) not in before]
        storages = [tensor.untyped_storage() for tensor in tensors + [each.topk_indices for each in queued]]
        num_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        return num_bytes / (case.num_tokens * config.num_layers)

    for microbatch in microbatches:
        session.microbatch(microbatch["rows"])
    assert held() == config.moe_router_topk * bytes_an_id
    outputs = [model(**model_inputs(microbatch)) for microbatch in microbatches]
    assert held() == config.moe_router_topk * bytes_an_id
    while outputs:
        outputs.pop().sum().backward()
    assert held() == 0  # routes live as long as the graph
    session.close()


def test_with_replay_off_none_of_our_code_runs(megatron):
    _, chunks, microbatches = build(SINGLE)
    with mrr.replay(chunks, random_trace(SINGLE), **DRAWN) as session:
        run(chunks, SINGLE, microbatches, session)
    ours: list[str] = []
    hooks = ("hooks.py", "dispatch.py", "tape.py", "checkpoints.py", "balance.py")
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


# ---- the live router is asked


def recorded(case: Case) -> tuple[list[Any], list[dict[str, Any]], Any, mrr.RoutingTrace]:
    """Return (chunks, micro-batches, what a recorded step gave, its trace)."""
    _, chunks, microbatches = build(case)
    with mrr.record(chunks) as recording:
        live = run(chunks, case, microbatches, recording)
    return chunks, microbatches, live, recording.trace()


DAMAGED: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda routes: routes,
    "one late": lambda routes: routes.roll(1, 0),
    "layers swapped": lambda routes: routes[:, [0, 3, 2, 1]],
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_damaged_capture_raises_and_a_right_one_does_not(fault, megatron):
    case = Case(config=FULL, sequence_length=64)
    chunks, microbatches, live, trace = recorded(case)
    routes = DAMAGED[fault](trace.topk_indices)
    session = mrr.replay(chunks, mrr.RoutingTrace(topk_indices=routes, layer_numbers=range(1, 5), num_experts=8))
    replayed = run(chunks, case, microbatches, session)
    if fault:
        with pytest.raises(mrr.RouterReplayError, match="the live router agrees with the replayed routes by"):
            session.close()
    else:
        session.close()
        assert same(live, replayed)
        assert session.report.agreement.all_layers == 1.0


def test_rows_in_another_order_than_the_routers_raise(monkeypatch, megatron):
    """reshape for transpose: tokens match, and every routing map is as decided."""
    case = Case(sequence_length=64)
    chunks, microbatches, _, trace = recorded(case)
    monkeypatch.setattr(chunk_module, "rows_for_router", lambda values, **_: values.reshape(-1, *values.shape[2:]))
    session = mrr.replay(chunks, trace, verify=True)
    run(chunks, case, microbatches, session)
    with pytest.raises(mrr.RouterReplayError, match=r"in 4 of 4 layers \("):
        session.close()
    assert (session.report.decisions["wrong"], session.report.replayed_share) == (0, 1.0)


def one_stage_permutes_its_ids() -> str:
    case = Case(layout=ParallelSizes(pp_size=2), sequence_length=64)
    chunks, microbatches, _, trace = recorded(case)
    routes = (trace.topk_indices + 3 * (trace.layer_numbers == (3,))) % 8
    values = {"layer_numbers": trace.layer_numbers, "num_experts": 8, "replay_mask": trace.replay_mask}
    session = mrr.replay(chunks, mrr.RoutingTrace(topk_indices=routes, **values))
    run(chunks, case, microbatches, session)
    with pytest.raises(mrr.RouterReplayError) as error:
        session.close()
    return str(error.value)


def test_ranks_with_different_layers_raise_together(on_ranks):
    first, second = on_ranks(2, one_stage_permutes_its_ids)
    assert re.search(r"in 1 of 4 layers \(.*3: -?\d+%", first)
    assert first == second


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
    decoder = model.module.module.decoder  # traced for half a minute; `test_compile` has compiled layers
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
    with watched(chunks) as seen, mrr.freeze_recompute(chunks, verify=True) as session:
        run(chunks, case, microbatches)
        assert seen["recompute"]
        assert flips(seen) == 0
        assert alive_entries(chunks) == []
    assert session.report.decisions["wrong"] == 0
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
