"""Cost of the hooks: one router's selection, live, with Megatron-Core's own replay and with ours.

Everything goes through Megatron-Core's routers, called as modules with their logits for an input, with a real session around
them. Queuing the micro-batch is not timed here; part step has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

import megatron_router_replay as mrr
from benchmarks.measure import Seconds, ratio, rounds, table, verdict
from megatron_router_replay.mcore import Tape
from megatron_router_replay.mcore.model.upstream import TOPK_ORDER_FOLLOWS_GRAD
from megatron_router_replay.testing import ParallelSizes
from tests.support.one_rank import only_rank
from tests.support.tiny_gpt import tiny_gpt_config

TITLE = "Router: one layer's selection, as ratios to live routing"
SOFTMAX: dict[str, Any] = {}
SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
}
ROUTERS = {"64, 6": SOFTMAX, "128, 8": SOFTMAX, "256, 8, sigmoid in groups": SIGMOID, "512, 10": SOFTMAX}
AIM = (8192, "128, 8")
SHAPES = [AIM, *itertools.product((4096, 16384), ROUTERS)]
NUM_LAYERS = 4
"""Routers of the one model chunk: they share a session's work for each chunk and micro-batch, as in a model."""
AIM_REPEATS, REPEATS = 51, 13


class Routers(torch.nn.Module):
    """Megatron's routers without the model around them: the forward is only their selection, layer by layer.

    Args:
        config: TransformerConfig.
        num_layers: routers, each on the same logits.
        recompute: select again in the backward, as a checkpoint around the routers would.
    """

    def __init__(self, config: Any, num_layers: int = NUM_LAYERS, *, recompute: bool = False) -> None:
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
        from megatron.core.transformer.moe.router import TopKRouter

        super().__init__()
        self.config = config
        groups = get_default_pg_collection()
        self.routers = torch.nn.ModuleList(TopKRouter(config, pg_collection=groups) for _ in range(num_layers))
        for number, router in enumerate(self.routers, 1):
            router.set_layer_number(number)
            router.gating = _as_it_is
        self.recompute = recompute

    def forward(self, logits: Tensor) -> list[Tensor]:
        if self.recompute:
            return [_Recomputed.apply(logits, partial(self.select, router)) for router in self.routers]
        return [self.select(router, logits) for router in self.routers]

    def select(self, router: Any, logits: Tensor) -> Tensor:
        """Return the probabilities of one router, [num_tokens, num_experts]."""
        probs: Tensor = router(logits.unsqueeze(1))[0]  # [s, b, num_experts] of one sequence
        return probs


def _as_it_is(logits: Tensor) -> Tensor:
    """Replace a router's projection: its input is the logits already."""
    return logits


class _Recomputed(torch.autograd.Function):
    """Select in the forward, and once more in the backward; with a backward of its own if `backward_too`."""

    backward_too = False

    @staticmethod
    def forward(ctx: Any, logits: Tensor, select: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.logits, ctx.select, ctx.tape = logits.detach(), select, Tape()
        with ctx.tape.forward():
            return select(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        with torch.enable_grad(), ctx.tape.recompute():
            probs = ctx.select(ctx.logits.requires_grad_(_Recomputed.backward_too))
        if _Recomputed.backward_too:
            probs.backward(grad)
        return None, None


def router_config(experts_and_topk: str, **overrides: Any) -> Any:
    """Return a TransformerConfig with the routers of a key of ROUTERS, or with softmax."""
    num_experts, topk = map(int, experts_and_topk.split(",")[:2])
    fields = {
        "num_moe_experts": num_experts,
        "moe_router_topk": topk,
        **ROUTERS.get(experts_and_topk, SOFTMAX),
        **overrides,
    }
    return tiny_gpt_config(ParallelSizes(), deterministic_mode=False, **fields)


def random_routes(num_tokens: int, num_layers: int, topk: int, num_experts: int) -> Tensor:
    """Return [num_tokens, num_layers, topk] int64, distinct in each row."""
    routes = [torch.rand(num_tokens, num_experts).topk(topk, dim=1).indices for _ in range(num_layers)]
    return torch.stack(routes, dim=1)


def measure_shape(num_tokens: int, router: str, dtype: torch.dtype, *, backward: bool, repeats: int) -> Seconds:
    """Time every alternative for one shape."""
    from megatron.core.transformer.moe import router_replay as theirs

    config = router_config(router)
    num_experts, topk = config.num_moe_experts, config.moe_router_topk
    logits = torch.randn(num_tokens, num_experts).to(dtype)
    grad = torch.randn(num_tokens, num_experts).to(dtype)
    routes = random_routes(num_tokens, NUM_LAYERS, topk, num_experts)
    rows = torch.arange(num_tokens)
    layers = range(1, NUM_LAYERS + 1)
    trace = mrr.RoutingTrace(topk_indices=routes, layer_numbers=layers, num_experts=num_experts)
    _Recomputed.backward_too = backward

    def backwards(probs: list[Tensor]) -> None:
        torch.autograd.backward(probs, [grad] * len(probs))

    def run(model: Callable[[Tensor], list[Tensor]]) -> Tensor:
        probs = model(logits.detach().requires_grad_(backward))
        if backward:
            backwards(probs)
        return probs[-1].detach()

    live, megatron, frozen = Routers(config), Routers(config), Routers(config, recompute=True)
    for layer, router_module in enumerate(megatron.routers):
        own = router_module.router_replay = theirs.RouterReplay()
        own.set_target_indices(routes[:, layer].contiguous())
        own.set_router_replay_action(theirs.RouterReplayAction.REPLAY_FORWARD)
    alternatives = {"live": partial(run, live), "Megatron's replay": partial(run, megatron)}
    prepare: dict[str, Callable[[], object]] = {}
    with ExitStack() as sessions:

        def add(name: str, open_session: Callable[[Any], Any]) -> None:
            model = Routers(config)
            session = sessions.enter_context(open_session(model))
            alternatives[name] = partial(run, model)
            prepare[name] = partial(session.microbatch, rows)

        # Random routes, which no router would choose.
        add("replay", lambda model: mrr.replay(model, trace, min_agreement=0))
        add("record", mrr.record)
        sessions.enter_context(mrr.freeze_recompute(frozen))
        forward: list[Tensor] = []
        prepare["freeze, recompute"] = lambda: forward.extend(frozen(logits.detach().requires_grad_()))
        alternatives["freeze, recompute"] = lambda: (backwards(forward), forward.clear())

        prepare["replay"]()
        reference = alternatives["Megatron's replay"]()
        # Bit for bit with Megatron-Core 0.16 and 0.17; 6e-8 apart for softmax with 0.18 and 0.19.
        tolerance = 1e-6 if TOPK_ORDER_FOLLOWS_GRAD else 0.0
        torch.testing.assert_close(alternatives["replay"](), reference, rtol=tolerance, atol=tolerance)
        return rounds(alternatives, repeats=repeats, prepare=prepare)


def measure(*, aim_repeats: int = AIM_REPEATS, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """Time every shape, dtype and pass."""
    raw = []
    with only_rank():
        ParallelSizes().initialize()
        for dtype, backward, shape in itertools.product((torch.float32, torch.bfloat16), (False, True), SHAPES):
            num_rounds = aim_repeats if shape == AIM else repeats
            seconds = measure_shape(*shape, dtype, backward=backward, repeats=num_rounds)
            what = {"tokens": shape[0], "router": shape[1], "logits": str(dtype).removeprefix("torch.")}
            raw.append({**what, "pass": "both" if backward else "forward", "seconds": seconds})
    return raw


def render(raw: list[dict[str, Any]]) -> str:
    """Return the table, and the targets under it."""
    names = ["Megatron's replay", "replay", "record", "freeze, recompute"]
    rows = []
    for case in raw:
        seconds = case["seconds"]
        ms = sorted(seconds["live"])[len(seconds["live"]) // 2] * 1000 / NUM_LAYERS
        record = ratio(seconds, "record", "live")
        cells = {name: f"{ratio(seconds, name, 'live').median:.2f}" for name in names}
        cells["record"] = f"{record.median:.3f} ({record.low:.2f} to {record.high:.2f})"
        shown = [f"{case['tokens']}, {case['router']}", case["logits"], case["pass"], f"{ms:.2f}", *cells.values()]
        rows.append([*shown, f"{ratio(seconds, 'replay', names[0]).median:.2f}"])
    head = ["tokens, experts, topk", "logits", "pass", "live ms", *names]
    head += ["replay / Megatron's"]
    aim = {
        case["pass"]: case["seconds"]
        for case in raw
        if (case["tokens"], case["router"], case["logits"]) == (*AIM, "float32")
    }
    targets = [
        verdict("replay / Megatron's replay, forward", ratio(aim["forward"], "replay", names[0]), 1.05),
        verdict("replay / Megatron's replay, both", ratio(aim["both"], "replay", names[0]), 1.05),
        verdict("record / live, forward", ratio(aim["forward"], "record", "live"), 1.03),
        verdict("record / live, both", ratio(aim["both"], "record", "live"), 1.03),
    ]
    return "\n".join(
        [
            f"{NUM_LAYERS} routers of one chunk, time a router. One thread, its processor time. A ratio is the median of the",
            "ratios within a round; its 95% confidence interval in brackets.",
            "Targets are int64 for Megatron's replay, uint8 or int16 for ours.",
            "*freeze, recompute*: the selection in a recompute under `freeze_recompute`.",
            "",
            table(head, rows),
            "",
            f"Targets, at {AIM[0]}, {AIM[1]}, float32:",
            "",
            *targets,
        ]
    )
