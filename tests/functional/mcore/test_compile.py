"""Sessions and torch.compile: the choice of experts is never part of a compiled graph, so none can repeat an old one.

Routes are random, so live or stale ones would change every loss; losses and gradients are compared with an eager model's.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.testing import ParallelSizes, build_tiny_gpt, tiny_gpt_config
from tests.functional.mcore.cases import FULL, Case, as_map, build, moe_routers, random_routes
from tests.functional.mcore.test_recompute import MOE, add_noise_in_recompute

NUM_LAYERS = 2
CASE = Case(layout=ParallelSizes(), config={"num_layers": NUM_LAYERS}, num_microbatches=4, batch_size=1)


def step(model: Any, microbatches: list[dict[str, Any]], session: Any = None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Forwards and backwards in the order of a pipeline stage: F0 F1 B0 F2 B1 F3 B2 B3. (losses, gradients)."""
    model.zero_grad(set_to_none=True)
    losses: list[Tensor] = []

    def forward(microbatch: dict[str, Any]) -> None:
        if session is not None:
            session.microbatch(microbatch["routing_rows"], model)
        output = model(
            input_ids=microbatch["tokens"],
            position_ids=microbatch["position_ids"],
            attention_mask=None,
            labels=microbatch["labels"],
        )
        losses.append(output.mean())

    forward(microbatches[0])
    for i, microbatch in enumerate(microbatches[1:]):
        forward(microbatch)
        losses[i].backward()
    losses[-1].backward()
    gradients = {name.removeprefix("_orig_mod."): parameter.grad for name, parameter in model.named_parameters()}
    return [loss.detach() for loss in losses], {name: grad for name, grad in gradients.items() if grad is not None}


def difference(one: Any, other: Any) -> float:
    assert one[1].keys() == other[1].keys()
    pairs = [*zip(one[0], other[0], strict=True), *((one[1][name], other[1][name]) for name in one[1])]
    return max(float((a - b).abs().max()) for a, b in pairs)


def compile_routers(model: Any, backend: str) -> Any:
    for router in moe_routers([model]):
        router.compile(backend=backend)
    return model


def compile_layers(model: Any, backend: str) -> Any:
    for layer in model.decoder.layers:
        layer.compile(backend=backend)
    return model


def compile_model(model: Any, backend: str) -> Any:
    return torch.compile(model, backend=backend)


def sessions_of_a_compiled_model(
    compile_parts: Callable[[Any, str], Any], recompute: dict[str, Any], inside: bool, backend: str
) -> dict[str, Any]:
    """Two replays, a recording and a freeze of one compiled model, against those of an eager one with the same weights."""
    torch._dynamo.reset()
    case = Case(
        layout=CASE.layout, config={**CASE.config, **recompute}, num_microbatches=CASE.num_microbatches, batch_size=1
    )
    config, (eager,), microbatches = build(case)
    (compiled,) = build_tiny_gpt(tiny_gpt_config(case.layout, **case.config), case.layout)
    model = compiled if inside else compile_parts(compiled, backend)
    result: dict[str, Any] = {"differences": []}
    live = step(eager, microbatches)
    if not inside:
        result["differences"].append(difference(step(model, microbatches), live))
    for seed in (7, 8):
        trace = mrr.RoutingTrace(
            topk_indices=random_routes(case.num_tokens, NUM_LAYERS, 2, 8, seed=seed),
            layer_numbers=range(1, NUM_LAYERS + 1),
            num_experts=8,
            replay_mask=torch.arange(case.num_tokens) % 5 != 0,
        )
        with mrr.replay(eager, trace) as session:
            expected = step(eager, microbatches, session)
        assert difference(expected, live) > 1e-3
        with mrr.replay(model, trace, verify=True) as session:
            if inside and seed == 7:
                model = compile_parts(compiled, backend)
            actual = step(model, microbatches, session)
        result["differences"].append(difference(actual, expected))
        result["replay"] = session.report.to_dict()
    with mrr.record(eager) as recording:
        step(eager, microbatches, recording)
    expected_trace = recording.trace()
    with mrr.record(model) as recording:
        result["differences"].append(difference(step(model, microbatches, recording), live))
    result["recorded"] = torch.equal(recording.trace().topk_indices, expected_trace.topk_indices)
    with mrr.freeze_recompute(model, verify=True) as session:
        result["differences"].append(difference(step(model, microbatches), live))
    result["freeze"] = session.report.to_dict()
    result["differences"].append(difference(step(model, microbatches), live))
    result["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return result


@pytest.mark.parametrize(
    ("compile_parts", "recompute", "inside", "backend"),
    [
        (compile_routers, MOE, False, "aot_eager"),
        (compile_routers, FULL, True, "aot_eager"),
        pytest.param(compile_layers, MOE, False, "aot_eager", marks=pytest.mark.slow),
        pytest.param(compile_layers, {}, True, "aot_eager", marks=pytest.mark.slow),
        pytest.param(compile_layers, FULL, False, "inductor", marks=pytest.mark.slow),
        pytest.param(compile_model, {}, False, "aot_eager", marks=pytest.mark.slow),
        pytest.param(compile_model, FULL, True, "aot_eager", marks=pytest.mark.slow),
        pytest.param(compile_model, MOE, False, "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_under_sessions_is_the_eager_one(compile_parts, recompute, inside, backend, workers_1):
    (result,) = workers_1.run(sessions_of_a_compiled_model, compile_parts, recompute, inside, backend, timeout_s=600)
    assert result["graphs"] > 0
    assert max(result["differences"]) < 1e-5
    assert result["recorded"]
    forwards = NUM_LAYERS * CASE.num_microbatches
    for report in (result["replay"], result["freeze"]):
        assert report["forwards"] == forwards
        assert report["recomputes"] == (forwards if recompute else 0)
        assert report["decisions_wrong"] == 0
        assert report["decisions_verified"] > 0


class OneRouter(torch.nn.Module):
    """A router, inside a non-reentrant checkpoint if asked for."""

    def __init__(self, router: Any, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.router = router
        self.checkpointed = checkpointed

    def forward(self, hidden: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.router, hidden, use_reentrant=False)[0]
        return self.router(hidden)[0]


def maps_seen(routers: list[Any]) -> dict[tuple[int, bool], list[Tensor]]:
    """(layer number, is a recompute) -> routing maps in order, filled by hooks that are never compiled."""
    seen: dict[tuple[int, bool], list[Tensor]] = {}

    @torch.compiler.disable
    def hook(router: Any, args: Any, output: Any) -> None:
        is_recompute = torch._C._current_graph_task_id() != -1
        seen.setdefault((router.layer_number, is_recompute), []).append(output[1].clone())

    for router in routers:
        router.register_forward_hook(hook)
    return seen


def checkpoint_inside_the_compiled_module(backend: str) -> list[bool]:
    """For two micro-batches in flight, with noise in recomputes: is each recompute its forward?"""
    torch._dynamo.reset()
    _, (model,), _ = build(CASE)
    add_noise_in_recompute([model], scale=2.0)
    router = moe_routers([model])[0]
    seen = maps_seen([router])
    module = OneRouter(router, checkpointed=True)
    compiled = torch.compile(module, backend=backend)
    with mrr.freeze_recompute(compiled), set_checkpoint_early_stop(False):
        losses = [compiled(torch.randn(8, 1, 64, requires_grad=True)).square().sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
    torch._dynamo.reset()
    return [torch.equal(*pair) for pair in zip(seen[1, False], seen[1, True], strict=True)]


def test_a_recompute_inside_a_compiled_module_uses_its_forwards_experts(workers_1):
    assert workers_1.run(checkpoint_inside_the_compiled_module, "eager") == [[True, True]]


def noisy_recomputes_of_compiled_routers() -> int:
    """Routing maps of recomputes that are not their forward's, in a compiled model whose recomputes see other logits."""
    torch._dynamo.reset()
    case = Case(layout=CASE.layout, config={**CASE.config, **FULL}, num_microbatches=4, batch_size=1)
    _, (model,), microbatches = build(case)
    add_noise_in_recompute([model], scale=2.0)
    seen = maps_seen(moe_routers([model]))
    compile_routers(model, "eager")
    with mrr.freeze_recompute(model):
        step(model, microbatches)
    wrong = 0
    for layer in range(1, NUM_LAYERS + 1):
        pairs = zip(seen[layer, False], seen[layer, True], strict=True)
        wrong += sum(int((one != other).any(dim=1).sum()) for one, other in pairs)
    torch._dynamo.reset()
    return wrong


def test_recomputes_of_compiled_routers_use_their_forwards_experts(workers_1):
    assert workers_1.run(noisy_recomputes_of_compiled_routers) == [0]


def what_is_said(kind: str) -> str:
    """The error of a session whose router goes into one graph, or whose backward is compiled."""
    torch._dynamo.reset()
    config, (model,), microbatches = build(CASE)
    trace = mrr.RoutingTrace(
        topk_indices=random_routes(CASE.num_tokens, NUM_LAYERS, 2, 8),
        layer_numbers=range(1, NUM_LAYERS + 1),
        num_experts=8,
    )
    hidden = torch.zeros(8, 1, 64, requires_grad=True)
    router, other_router = moe_routers([model])[0], moe_routers(build_tiny_gpt(config, CASE.layout))[0]
    with pytest.raises(Exception) as raised, mrr.replay(model, trace) as session:  # noqa: PT012
        session.microbatch(microbatches[0]["routing_rows"])
        if kind == "fullgraph":
            # The router itself asks for its device, which breaks a graph on a CPU anyway.
            from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

            route = torch.compile(topk_routing_with_score_function, backend="eager", fullgraph=True)
            assert route(torch.zeros(8, 8), 2)[1].sum() == 16
            route(torch.zeros(8, 8), 2, router_replay=router.router_replay)
        elif kind == "make_fx":
            with torch._dynamo.config.patch(error_on_nested_fx_trace=False):
                torch.fx.experimental.proxy_tensor.make_fx(router)(hidden)
        else:
            assert kind == "compiled autograd"
            with mrr.freeze_recompute(OneRouter(other_router, checkpointed=True)) as freeze:
                loss = freeze._chunks[0].module(hidden).square().sum()
                with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
                    loss.backward()
    torch._dynamo.reset()
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("fullgraph", "Unsupported", "`SessionRouter.get_replay_topk`"),
        ("make_fx", "ReplayStateError", "layer 1 (decoder.layers.0.mlp.router) is captured into a graph"),
        ("compiled autograd", "ReplayStateError", "compiled autograd: turn it off"),
    ],
)
def test_what_would_put_the_choice_into_a_graph_raises(kind, error, said, workers_1):
    (message,) = workers_1.run(what_is_said, kind)
    assert message.startswith(f"{error}: ")
    assert said in message


def test_the_drop_in_follows_its_target_inside_a_compiled_function():
    torch._dynamo.reset()
    replay = mrr.RouterReplay()
    mrr.RouterReplay.clear_global_router_replay_instances()

    def live_topk(scores: Tensor, topk: int, **groups: Any) -> tuple[Tensor, Tensor]:
        assert not torch.compiler.is_compiling()
        return scores.topk(topk)

    @torch.compile(backend="eager")
    def route(scores: Tensor) -> Tensor:
        _, indices = replay.get_replay_topk(scores * 2, 2, default_compute_topk=live_topk)
        return torch.zeros_like(scores, dtype=torch.bool).scatter(1, indices, True)

    scores = torch.rand(16, 8)
    for seed in (1, 2, 3):
        assert torch.equal(route(scores), as_map(scores.topk(2).indices, 8))
        target = random_routes(16, 1, 2, 8, seed=seed)[:, 0]
        replay.set_target_indices(target)
        replay.set_router_replay_action(mrr.RouterReplayAction.REPLAY_FORWARD)
        assert torch.equal(route(scores), as_map(target, 8))
        replay.set_router_replay_action(mrr.RouterReplayAction.RECORD)
        assert torch.equal(route(scores), as_map(replay.get_recorded_indices(), 8))
        replay.clear_router_replay_action()


class Selection(torch.nn.Module):
    def __init__(self, replay: Any) -> None:
        super().__init__()
        self.replay = replay

    def forward(self, scores: Tensor) -> Tensor:
        return self.replay.get_replay_topk(scores, 2)[0]


@pytest.mark.parametrize(
    "capture",
    [
        lambda module, scores: torch.fx.experimental.proxy_tensor.make_fx(module)(scores),
        lambda module, scores: torch.jit.trace(module, (scores,)),
        lambda module, scores: torch.export.export(module, (scores,), strict=False),
    ],
    ids=["make_fx", "jit.trace", "export"],
)
def test_the_drop_in_refuses_to_be_captured(capture):
    replay = mrr.RouterReplay()
    mrr.RouterReplay.clear_global_router_replay_instances()
    replay.set_target_indices(random_routes(16, 1, 2, 8)[:, 0])
    replay.set_router_replay_action(mrr.RouterReplayAction.REPLAY_FORWARD)
    with pytest.raises(ReplayStateError, match="REPLAY_FORWARD is captured into a graph"):
        capture(Selection(replay), torch.rand(16, 8))
