"""Sessions and torch.compile: the choice of experts is never part of a compiled graph, so none can repeat an old one.

Routes are random, so live or stale ones would change every loss; losses and gradients are compared with an eager model's.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError
from tests.functional.mcore.cases import (
    DRAWN,
    MOE,
    Case,
    as_map,
    build,
    model_inputs,
    moe_routers,
    random_routes,
    random_trace,
)
from tests.support.tiny_gpt import build_tiny_gpt, tiny_gpt_config

NUM_LAYERS = 2
CASE = Case(config={"num_layers": NUM_LAYERS}, batch_size=1)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(model: Any, microbatches: list[dict[str, Any]], session: Any = None) -> list[Tensor]:
    """Forwards and backwards in the order of a pipeline stage: F0 F1 B0 F2 B1 F3 B2 B3. Losses and gradients."""
    model.zero_grad(set_to_none=True)
    losses: list[Tensor] = []
    for i, microbatch in enumerate(microbatches):
        if session is not None:
            session.microbatch(microbatch["rows"], model)
        losses.append(model(**model_inputs(microbatch)).mean())
        if i:
            losses[i - 1].backward()
    losses[-1].backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return [*(loss.detach() for loss in losses), *(grad for _, grad in sorted(gradients.items()) if grad is not None)]


def test_compiled_routers_under_sessions_do_as_eager_ones(megatron):
    """Two replays, a recording and a freeze, against those of an eager model with the same weights."""
    case = Case(config=CASE.config | MOE | {"num_moe_experts": 4}, batch_size=1)
    _, (eager,), microbatches = build(case)
    (model,) = build_tiny_gpt(tiny_gpt_config(case.layout, **case.config), case.layout)
    for router in moe_routers([model]):
        router.compile(backend="aot_eager")
    live = step(eager, microbatches)

    def check(expected: list[Tensor], actual: list[Tensor]) -> None:
        for one, other in zip(expected, actual, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)

    def check_report(report: Any) -> None:
        forwards = NUM_LAYERS * case.num_microbatches
        assert (report.forwards, report.recomputes) == (forwards, forwards)
        if report.kind == "replay":
            assert report.decisions["wrong"] == 0
            assert report.decisions["verified"] > 0

    for seed in (7, 8):
        mask = torch.arange(case.num_tokens) % 5 != 0
        trace = random_trace(case, (1, 2), seed=seed, replay_mask=mask)
        with mrr.replay(eager, trace, **DRAWN) as session:
            expected = step(eager, microbatches, session)
        assert max(float((a - b).abs().max()) for a, b in zip(expected, live)) > 1e-3
        with mrr.replay(model, trace, **DRAWN, verify=True) as session:
            check(expected, step(model, microbatches, session))
        check_report(session.report)
    recordings = []
    for each in (eager, model):
        with mrr.record(each) as recording:
            check(live, step(each, microbatches, recording))
        recordings.append(recording.trace().topk_indices)
    assert torch.equal(*recordings)
    with mrr.freeze_recompute(model) as freeze:
        check(live, step(model, microbatches))
    check_report(freeze.report)
    check(live, step(model, microbatches))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


class OneRouter(torch.nn.Module):
    """A router inside a non-reentrant checkpoint."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.router = router

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(self.router, hidden, use_reentrant=False)[0]


@pytest.mark.parametrize("left", [False, True])
def test_a_recompute_under_compiled_autograd_raises(left, megatron):
    _, (model,), _ = build(CASE)
    freeze = mrr.freeze_recompute(model)
    loss = OneRouter(moe_routers([model])[0])(torch.zeros(8, 1, 64, requires_grad=True)).square().sum()
    if left:
        freeze.close()
    with (
        pytest.raises(ReplayStateError, match="compiled autograd: turn it off"),
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
    ):
        loss.backward()
    mrr.close_sessions(model)


def test_the_drop_in_follows_its_target_inside_a_compiled_function():
    replay = mrr.mcore.RouterReplay()
    mrr.mcore.RouterReplay.clear_global_router_replay_instances()

    def live_topk(scores: Tensor, topk: int, **groups: Any) -> tuple[Tensor, Tensor]:
        assert not torch.compiler.is_compiling()
        return scores.topk(topk)

    @torch.compile(backend="eager")
    def route(scores: Tensor) -> Tensor:
        _, indices = replay.get_replay_topk(scores * 2, 2, default_compute_topk=live_topk)
        return torch.zeros_like(scores, dtype=torch.bool).scatter(1, indices, True)

    scores = torch.rand(16, 8)
    for seed in (1, 2, 3):
        assert torch.equal(route(scores), as_map(scores.topk(2).indices))
        target = random_routes(16, 1, seed=seed)[:, 0]
        replay.set_target_indices(target)
        replay.set_router_replay_action(mrr.mcore.RouterReplayAction.REPLAY_FORWARD)
        assert torch.equal(route(scores), as_map(target))
        replay.set_router_replay_action(mrr.mcore.RouterReplayAction.RECORD)
        assert torch.equal(route(scores), as_map(replay.get_recorded_indices()))
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
        lambda module, scores: torch.jit.trace(module, (scores,)),
        lambda module, scores: torch.export.export(module, (scores,), strict=False),
    ],
    ids=["jit.trace", "export"],
)
def test_the_drop_in_refuses_to_be_captured(capture):
    replay = mrr.mcore.RouterReplay()
    mrr.mcore.RouterReplay.clear_global_router_replay_instances()
    replay.set_target_indices(random_routes(16, 1)[:, 0])
    replay.set_router_replay_action(mrr.mcore.RouterReplayAction.REPLAY_FORWARD)
    with pytest.raises(ReplayStateError, match="a RouterReplay is captured into a graph"):
        capture(Selection(replay), torch.rand(16, 8))
