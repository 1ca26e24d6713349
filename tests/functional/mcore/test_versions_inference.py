"""Megatron's own inference, since 0.17: its recorder under install(), and its routers in models that are trained."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import MEGATRON, Case, build, moe_routers, random_routes, run, same, watched

pytestmark = pytest.mark.skipif(
    MEGATRON < (0, 17), reason="Megatron-Core records routes in inference, with routers of its own, since 0.17"
)

SINGLE = ParallelSizes()
ROUTER_REPLAY = "megatron.core.transformer.moe.router_replay"
HOLDERS = [
    "megatron.core.inference.contexts.routing_metadata",
    "megatron.core.inference.text_generation_controllers.text_generation_controller",
]
"""Modules of Megatron's inference that hold the names of the router_replay module; loaded before install()."""


class Context:
    """What RoutingMetadata reads of an inference context; `graphed` is whether this step runs as a CUDA graph."""

    max_tokens = 24
    active_token_count = 12

    def __init__(self, graphed: bool) -> None:
        self.graphed = graphed

    def using_cuda_graph_this_step(self) -> bool:
        return self.graphed


def recorded_by_inference(graphed: bool) -> dict[str, Any]:
    """Build under install(), and record one forward as Megatron's inference does, through its own names."""
    modules = [import_module(name) for name in HOLDERS]
    mrr.install()
    try:
        import_module(ROUTER_REPLAY).RouterReplay.clear_global_router_replay_instances()
        case = Case(layout=SINGLE, config={"moe_enable_routing_replay": True}, num_microbatches=1, sequence_length=6)
        _, chunks, microbatches = build(case)
        metadata = modules[0].RoutingMetadata(Context(graphed), moe_router_topk=2)
        modules[1].RouterReplay.set_global_router_replay_action(modules[1].RouterReplayAction.RECORD)
        if graphed:
            metadata.enable_static_buffer_recording()
        with watched(chunks) as seen:
            run(chunks, case, microbatches, forward_only=True)
        routes = metadata.get_routing_indices()
        if graphed:
            metadata.disable_static_buffer_recording()
        maps = [seen["forward"][layer][0] for layer in (1, 2, 3, 4)]
        return {
            "shape": None if routes is None else list(routes.shape),
            "in the buffer": routes is not None and routes.data_ptr() == metadata.routing_indices_buffer.data_ptr()
            if graphed
            else None,
            "as routed": routes is not None
            and all(bool(maps[i].gather(1, routes[:, i].long()).all()) for i in range(len(maps))),
            "numbered": [router.router_replay.layer_number for router in moe_routers(chunks)],
        }
    finally:
        mrr.uninstall()


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "static buffer"])
def test_megatrons_inference_records_under_install(graphed, workers_1):
    (result,) = workers_1.run(recorded_by_inference, graphed)
    assert result == {
        "shape": [12, 4, 2],
        "in the buffer": True if graphed else None,
        "as routed": True,
        "numbered": [1, 2, 3, 4] if MEGATRON >= (0, 19) else [None] * 4,  # Megatron-Core numbers them since 0.19
    }


def names_after_install() -> list[str]:
    """Return the loaded modules of Megatron that hold a name of the original router_replay module under install()."""
    import sys

    for name in HOLDERS:
        import_module(name)
    module = import_module(ROUTER_REPLAY)
    originals = [module.RouterReplay, module.RouterReplayAction]
    mrr.install()
    try:
        return sorted(
            f"{holder}.{name}"
            for holder, loaded in list(sys.modules.items())
            if holder.startswith("megatron.") and loaded is not None
            for name, value in list(vars(loaded).items())
            if any(value is original for original in originals)
        )
    finally:
        mrr.uninstall()


def test_under_install_no_module_of_megatron_holds_the_originals(workers_1):
    assert workers_1.run(names_after_install) == [[]]


def upstream_names() -> list[str]:
    """Return the public names of Megatron's RouterReplay that ours has not."""
    theirs = import_module(ROUTER_REPLAY).RouterReplay
    ours = mrr.RouterReplay
    of_instances = [name for name in vars(theirs()) if not hasattr(ours(), name)]
    return sorted(
        [name for name in vars(theirs) if not name.startswith("_") and not hasattr(ours, name)] + of_instances
    )


def test_every_name_of_megatrons_router_replay_is_there(workers_1):
    assert workers_1.run(upstream_names) == [[]]


def as_inference_router(router: Any) -> None:
    from megatron.core.transformer.moe.router import InferenceTopKRouter

    router.__class__ = InferenceTopKRouter
    if MEGATRON < (0, 18):
        router.is_inference_cuda_graphed_iteration = False


def train_with_inference_routers() -> dict[str, Any]:
    """Train with routers that Megatron's RL trains with: InferenceTopKRouter, while no engine runs."""
    case = Case(layout=SINGLE, config={"moe_router_topk": 2})
    _, chunks, microbatches = build(case)
    for router in moe_routers(chunks):
        as_inference_router(router)
    live = run(chunks, case, microbatches)
    with mrr.record(chunks, verify=True) as recording:
        recorded = run(chunks, case, microbatches, recording)
    with mrr.replay(chunks, recording.trace(), verify=True) as session:
        replayed = run(chunks, case, microbatches, session)
    return {
        "explained": {router.router_class for router in mrr.explain(chunks) if router.replayable},
        "record_is_live": same(live, recorded),
        "replay_is_live": same(live, replayed),
        "verified": session.report.decisions_verified,
    }


def test_inference_routers_are_replayed_while_inference_mode_is_off(workers_1):
    (result,) = workers_1.run(train_with_inference_routers)
    assert result == {
        "explained": {"InferenceTopKRouter"},
        "record_is_live": True,
        "replay_is_live": True,
        "verified": 4 * 64,
    }


def inference_mode_on() -> dict[str, str]:
    _, (model,), _ = build(Case(layout=SINGLE))
    for router in moe_routers([model]):
        as_inference_router(router)
    messages = {}

    def start(name: str) -> None:
        try:
            mrr.freeze_recompute(model)._detach()
            messages[name] = "started"
        except mrr.RouterReplayError as error:
            messages[name] = f"{type(error).__name__}: {error}"

    if MEGATRON < (0, 18):
        for router in moe_routers([model]):
            router.set_inference_cuda_graphed_iteration()
        start("on")
        model.eval()
        start("on and in eval")
        return messages
    from megatron.core.inference.utils import InferenceMode

    with InferenceMode.active():
        start("on")
    start("off")
    return messages


def test_inference_routers_are_refused_while_inference_mode_is_on(workers_1):
    (messages,) = workers_1.run(inference_mode_on)
    refused = "layer 1 (decoder.layers.0.mlp.router): router class InferenceTopKRouter routes without the session"
    if MEGATRON < (0, 18):  # the flag of 0.17 counts outside of training only
        assert messages["on"] == "started"
        assert refused in messages["on and in eval"]
    else:
        assert messages["off"] == "started"
        assert refused in messages["on"]


@contextmanager
def inference_switched_on(model: Any) -> Iterator[None]:
    """Megatron's inference mode, without the compiler that its routers call there."""
    with torch.compiler.set_stance("force_eager"):
        if MEGATRON < (0, 18):
            for router in moe_routers([model]):
                router.set_inference_cuda_graphed_iteration()
            model.eval()
            yield
            return
        from megatron.core.inference.utils import InferenceMode

        with InferenceMode.active():
            yield


def switched_on_inside(kind: str) -> str:
    """Switch inference mode on inside a session, and route as an engine's step does: tokens alone, no sequences."""
    case = Case(layout=SINGLE)
    config, (model,), _ = build(case)
    router = moe_routers([model])[0]
    for each in moe_routers([model]):
        as_inference_router(each)
    rows, hidden = torch.arange(6).view(1, 6), torch.randn(6, 1, config.hidden_size)
    routes = random_routes(6, 4, config.moe_router_topk, config.num_moe_experts)
    trace = mrr.RoutingTrace(topk_indices=routes, layer_numbers=[1, 2, 3, 4], num_experts=config.num_moe_experts)
    with inference_switched_on(model), torch.no_grad():
        plain = router(hidden)[1]
    model.train()
    session = {
        "record": mrr.record,
        "replay": lambda chunks: mrr.replay(chunks, trace),
        "freeze": mrr.freeze_recompute,
    }[kind](model)
    try:
        if kind != "freeze":
            session.microbatch(rows, model)
        with inference_switched_on(model), torch.no_grad():
            return "as without" if torch.equal(router(hidden)[1], plain) else "routed otherwise"
    except mrr.RouterReplayError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        session._detach()


@pytest.mark.parametrize("kind", ["record", "replay"])
def test_inference_mode_that_is_switched_on_inside_a_session_raises(kind, workers_1):
    (said,) = workers_1.run(switched_on_inside, kind)
    assert said.startswith("UnsupportedRouterError: layer 1 (decoder.layers.0.mlp.router): router class")
    assert "InferenceTopKRouter routes without the session while Megatron's inference mode is on" in said


def test_a_frozen_run_may_generate_between_its_steps(workers_1):
    assert workers_1.run(switched_on_inside, "freeze") == ["as without"]


def changed_inference_router() -> str:
    from megatron.core.transformer.moe.router import InferenceTopKRouter

    class Overriding(InferenceTopKRouter):
        def forward(self, input: torch.Tensor, padding_mask: Any = None) -> Any:
            return super().forward(input, padding_mask)

    _, (model,), _ = build(Case(layout=SINGLE))
    for router in moe_routers([model]):
        as_inference_router(router)
        router.__class__ = Overriding
    return "; ".join({router.reason for router in mrr.explain(model)})


def test_a_class_below_the_inference_router_that_routes_otherwise_is_refused(workers_1):
    assert workers_1.run(changed_inference_router) == ["router class Overriding overrides TopKRouter.forward"]


def suspended_request() -> dict[str, str]:
    """A request that was suspended after 3 of 5 generated tokens and prefilled again, merged by Megatron's own record."""
    from megatron.core.inference.inference_request import DynamicInferenceRequest, DynamicInferenceRequestRecord
    from megatron.core.inference.sampling_params import SamplingParams

    routes = torch.tensor([[[i % 8, (i + 1) % 8], [i % 8, (i + 3) % 8]] for i in range(8)], dtype=torch.int16).numpy()
    first = DynamicInferenceRequest(
        request_id=1,
        prompt_tokens=torch.arange(4),
        sampling_params=SamplingParams(num_tokens_to_generate=5),
        generated_tokens=[4, 5, 6],
    )
    record = DynamicInferenceRequestRecord.from_request(first)
    record.checkpoint()
    second = record[-1]
    assert second.prompt_tokens.tolist() == [0, 1, 2, 3, 4, 5, 6]
    second.generated_tokens = [7, 8]
    # As 0.17 leaves it, where each part holds the rows of every token it ran; 0.18 and 0.19 leave None, which has no routes.
    first.routing_indices, second.routing_indices = routes[:6], routes
    if MEGATRON < (0, 18):
        first.routing_indices, second.routing_indices = map(torch.from_numpy, (routes[:6], routes))
    model = mrr.engines.ModelRoutingInfo(num_layers=2, moe_layer_numbers=(1, 2), num_experts=8, topk=2)
    said = {}
    for name, options in (("merged", {}), ("with surplus allowed", {"allow_surplus_rows": True})):
        try:
            mrr.engines.megatron.decode(record.merge(), model=model, **options)
            said[name] = "decoded"
        except mrr.RouterReplayError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def test_the_routes_of_a_request_that_was_suspended_are_refused(workers_1):
    (said,) = workers_1.run(suspended_request)
    assert said["merged"].startswith(
        "PayloadError: Megatron: routing_indices of the request: has 14 rows for tokens 0..8"
    )


def test_surplus_rows_of_a_suspended_request_are_refused_too(workers_1):
    (said,) = workers_1.run(suspended_request)
    assert said["with surplus allowed"].startswith("PayloadError")
