"""Megatron's own inference, since 0.17: its recorder under install(), and its routers in models that are trained."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import PayloadError, UnsupportedRouterError
from tests.functional.mcore.cases import DRAWN, MEGATRON, Case, build, moe_routers, random_trace, run, same, watched

pytestmark = [
    pytest.mark.version,
    pytest.mark.usefixtures("megatron"),
    pytest.mark.skipif(
        MEGATRON < (0, 17), reason="Megatron-Core records routes in inference, with routers of its own, since 0.17"
    ),
]
CASE = Case()
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


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "static buffer"])
def test_megatrons_inference_records_under_install(graphed):
    """Build under install(), and record one forward as Megatron's inference does, through its own names."""
    modules = [import_module(name) for name in HOLDERS]
    mrr.install()
    try:
        case = Case(config={"moe_enable_routing_replay": True}, num_microbatches=1, sequence_length=6)
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
            assert routes.data_ptr() == metadata.routing_indices_buffer.data_ptr()
        assert routes.shape == (12, 4, 2)
        for layer in (1, 2, 3, 4):
            assert seen["forward"][layer][0].gather(1, routes[:, layer - 1].long()).all()
        # Megatron-Core numbers them since 0.19.
        numbers = [router.router_replay.layer_number for router in moe_routers(chunks)]
        assert numbers == ([1, 2, 3, 4] if MEGATRON >= (0, 19) else [None] * 4)
    finally:
        mrr.uninstall()


def with_inference_routers() -> tuple[Any, list[dict[str, Any]]]:
    """Return (model, micro-batches); its routers are those that Megatron's RL trains with."""
    from megatron.core.transformer.moe.router import InferenceTopKRouter

    _, (model,), microbatches = build(CASE)
    for router in moe_routers([model]):
        router.__class__ = InferenceTopKRouter
        if MEGATRON < (0, 18):
            router.is_inference_cuda_graphed_iteration = False
    return model, microbatches


def test_inference_routers_are_replayed_while_inference_mode_is_off():
    model, microbatches = with_inference_routers()
    assert [(each.router_class, each.replayable) for each in mrr.explain(model)] == [("InferenceTopKRouter", True)] * 4
    live = run([model], CASE, microbatches)
    with mrr.record(model, verify=True) as recording:
        assert same(live, run([model], CASE, microbatches, recording))
    with mrr.replay(model, recording.trace(), verify=True) as session:
        assert same(live, run([model], CASE, microbatches, session))
    assert session.report.decisions["verified"] == 4 * 64


@contextmanager
def inference_switched_on(model: Any) -> Iterator[None]:
    """Megatron's inference mode, without the compiler that its routers call there."""
    with torch.compiler.set_stance("force_eager"):
        if MEGATRON < (0, 18):
            for router in moe_routers([model]):
                router.set_inference_cuda_graphed_iteration()
            model.eval()  # the flag of 0.17 counts outside of training only
            yield
            return
        from megatron.core.inference.utils import InferenceMode

        with InferenceMode.active():
            yield


ALONE = r"router class\s+InferenceTopKRouter routes without the session while Megatron's inference mode is on"


def test_inference_routers_are_refused_while_inference_mode_is_on():
    model, _ = with_inference_routers()
    with inference_switched_on(model), pytest.raises(UnsupportedRouterError, match=r"layers? 1.*: " + ALONE):
        mrr.freeze_recompute(model)
    model.train()
    if MEGATRON >= (0, 18):
        mrr.freeze_recompute(model).close(verify=False)


@pytest.mark.parametrize("kind", ["record", "replay", "freeze"])
def test_inference_mode_that_is_switched_on_inside_a_session_raises_or_is_live(kind):
    """Route as an engine's step does: tokens alone, no sequences. A frozen run may generate between its steps."""
    model, _ = with_inference_routers()
    router, hidden = moe_routers([model])[0], torch.randn(6, 1, model.config.hidden_size)
    with inference_switched_on(model), torch.no_grad():
        plain = router(hidden)[1]
    model.train()
    trace = random_trace(CASE)
    starts = {"record": mrr.record, "replay": lambda m: mrr.replay(m, trace, **DRAWN), "freeze": mrr.freeze_recompute}
    session = starts[kind](model)
    if session._takes_microbatches:
        session.microbatch(torch.arange(6).view(1, 6), model)
    with inference_switched_on(model), torch.no_grad():
        if session._takes_microbatches:
            with pytest.raises(UnsupportedRouterError, match="^MRR401: layer 1: " + ALONE):
                router(hidden)
        else:
            assert torch.equal(router(hidden)[1], plain)
    session.close(verify=False)


def test_the_routes_of_a_request_that_was_suspended_are_refused():
    """Suspended after 3 of 5 generated tokens and prefilled again, merged by Megatron's own record."""
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
    with pytest.raises(
        PayloadError, match=r"Megatron: routing_indices of (the )?request.*: has 14 rows for tokens 0\.\.8"
    ):
        mrr.engines.megatron.decode(record.merge(), model=model)
