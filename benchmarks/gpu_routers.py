"""One router on a GPU, live, with Megatron-Core's own replay, with ours and fused.

Whether each is right, whether it makes the host wait, how long it takes and how much memory.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import megatron_router_replay as mrr
from benchmarks.gpu_timing import time_rounds
from benchmarks.router import SIGMOID
from megatron_router_replay.fused import route
from megatron_router_replay.testing import ParallelSizes, tiny_gpt_config

ROUTERS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "64, 6": (64, 6, {}),
    "128, 8": (128, 8, {}),
    "256, 8, sigmoid, groups, bias": (256, 8, SIGMOID),
    "512, 10": (512, 10, {}),
}
LIVE_EVERY = 1024  # rows between two without a route: the last tokens of samples


class OneRouter(torch.nn.Module):
    """Megatron's TopKRouter without a model around it: logits [num_tokens, num_experts] -> (probabilities, map)."""

    def __init__(self, config: Any, device: torch.device) -> None:
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
        from megatron.core.transformer.moe.router import TopKRouter

        super().__init__()
        self.config = config
        self.router = TopKRouter(config, pg_collection=get_default_pg_collection())
        self.router.set_layer_number(1)
        self.router.gating = lambda logits: logits
        self.to(device)
        bias = self.router.expert_bias
        if bias is not None:
            bias.copy_(torch.rand(bias.shape, generator=torch.Generator().manual_seed(3)) / 10)

    # Megatron-Core compiles the function that counts tokens for the expert bias, anew for each router: not what is measured.
    @torch.compiler.set_stance("force_eager")
    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        routed: tuple[Tensor, Tensor] = self.router(logits.unsqueeze(1))
        return routed


class Shape:
    """One router and its inputs: logits and weights of a loss, routes of a trace twice as long, rows of it."""

    def __init__(self, num_tokens: int, router: str, dtype: torch.dtype, device: torch.device) -> None:
        self.num_tokens, self.router, self.dtype, self.device = num_tokens, router, dtype, device
        self.num_experts, self.topk, options = ROUTERS[router]
        fields = {"num_moe_experts": self.num_experts, "moe_router_topk": self.topk, **options}
        self.config = tiny_gpt_config(ParallelSizes(), deterministic_mode=False, **fields)
        generator = torch.Generator().manual_seed(num_tokens)
        size = (num_tokens, self.num_experts)
        self.logits = torch.randn(size, generator=generator).to(device, dtype)
        self.weights = torch.randn(size, generator=generator).to(device, dtype)
        routes = torch.rand(2 * num_tokens, self.num_experts, generator=generator).topk(self.topk, dim=1).indices
        self.rows = torch.randperm(2 * num_tokens, generator=generator)[:num_tokens]
        self.trace = self.new_trace(routes)
        self.trace_with_live_rows = self.new_trace(routes, torch.arange(2 * num_tokens) % LIVE_EVERY != 0)
        self.topk_indices = self.trace.topk_indices[self.rows, 0].to(device)

    def new_trace(self, routes: Tensor, mask: Tensor | None = None) -> mrr.RoutingTrace:
        return mrr.RoutingTrace(
            topk_indices=routes.unsqueeze(1), layer_numbers=[1], num_experts=self.num_experts, replay_mask=mask
        )

    def name(self) -> list[str]:
        return [str(self.num_tokens), self.router, str(self.dtype).removeprefix("torch.")]


class Alternatives:
    """The ways to route one shape, each a function of the logits; sessions are open until the context ends."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.functions: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {}
        self.prepare: dict[str, Callable[[], object]] = {}
        self.sessions: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Alternatives:
        from megatron.core.transformer.moe import router_replay as theirs

        shape = self.shape
        live, megatron = OneRouter(shape.config, shape.device), OneRouter(shape.config, shape.device)
        own = megatron.router.router_replay = theirs.RouterReplay()
        own.set_target_indices(shape.topk_indices.long())
        own.set_router_replay_action(theirs.RouterReplayAction.REPLAY_FORWARD)
        self.functions["live"] = live
        self.functions["Megatron's replay"] = megatron
        self._add("replay", lambda model: mrr.replay(model, shape.trace))
        self._add("replay, live rows", lambda model: mrr.replay(model, shape.trace_with_live_rows))
        self._add("replay, compare_live", lambda model: mrr.replay(model, shape.trace, compare_live=True))
        self._add("record", mrr.record)
        fused = partial(
            route,
            topk_indices=shape.topk_indices,
            score_function=shape.config.moe_router_score_function,
        )
        self.functions["fused.route, torch"] = partial(fused, backend="torch")
        if shape.device.type == "cuda":
            self.functions["fused.route, Triton"] = partial(fused, backend="triton")
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _add(self, name: str, open_session: Callable[[Any], Any]) -> None:
        model = OneRouter(self.shape.config, self.shape.device)
        session = self.sessions[name] = self._stack.enter_context(open_session(model))
        self.functions[name] = model
        self.prepare[name] = lambda: session.microbatch(self.shape.rows)

    def run(self, name: str, *, backward: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return probabilities, map and the gradient of (probabilities * weights).sum()."""
        leaf = self.shape.logits.detach().requires_grad_(backward)
        probs, routing_map = self.functions[name](leaf)
        if backward:
            probs.backward(self.shape.weights)
        return probs.detach(), routing_map, leaf.grad

    def prepared_run(self, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
        self.prepare.get(name, lambda: None)()
        return self.run(name)


def formula(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities, map and gradient of the shape's routes by definition, in float64."""
    logits = shape.logits.double().requires_grad_()
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, shape.topk_indices.long(), True)
    is_sigmoid = shape.config.moe_router_score_function == "sigmoid"
    scores = (1 / (1 + torch.exp(-logits)) if is_sigmoid else torch.exp(logits)) * chosen
    probs = scores / scores.sum(dim=1, keepdim=True)
    probs.backward(shape.weights.double())
    assert logits.grad is not None
    return probs.detach(), chosen, logits.grad


def check_shape(shape: Shape) -> Iterator[str]:
    """Yield what is wrong: maps that are not the trace's, or values far from the float64 formula and Megatron's replay."""
    expected = formula(shape)
    # Each is rounded to its dtype several times on the way.
    limit = 16 * torch.finfo(shape.dtype).eps
    with Alternatives(shape) as alternatives:
        theirs = alternatives.prepared_run("Megatron's replay")
        for name in alternatives.functions:
            probs, routing_map, grad = alternatives.prepared_run(name)
            where = f"{name}, {', '.join(shape.name())}"
            if not bool((routing_map.sum(dim=1) == shape.topk).all()):
                yield f"{where}: a row has not topk experts"
            if name in ("live", "record", "replay, live rows"):
                continue
            if not torch.equal(routing_map, expected[1]):
                yield f"{where}: the map is not the trace's"
            assert grad is not None
            pairs = ((probs, expected[0]), (grad, expected[2]))
            errors = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs]
            if not all(error < limit for error in errors):  # NaN too
                yield f"{where}: {errors} of the largest value from the float64 formula, allowed {limit:.1e}"
            if name == "replay" and not all(torch.equal(a, b) for a, b in zip((probs, routing_map, grad), theirs)):
                yield f"{where}: not the bits of Megatron's replay"
        recording = alternatives.sessions["record"]
        recorded = recording.trace(num_tokens=2 * shape.num_tokens).topk_indices[shape.rows, 0]
        live_map = alternatives.run("live", backward=False)[1].cpu()
        if not bool(live_map.gather(1, recorded.long()).all()):
            yield f"record, {', '.join(shape.name())}: not the live choice"


def check_syncs(shape: Shape) -> Iterator[str]:
    """Yield what makes the host wait for the device: queuing and forward of each session, and targets made on the GPU."""
    from megatron_router_replay.mcore.targets import build_targets

    def on_gpu() -> None:
        trace, rows = shape.trace_with_live_rows.to(shape.device), shape.rows.to(shape.device)
        torch.cuda.synchronize()
        with no_sync():
            build_targets(trace, rows, device=shape.device, with_replayed=True)

    with Alternatives(shape) as alternatives:
        for name in alternatives.functions:
            alternatives.prepared_run(name)

        def under(name: str) -> None:
            torch.cuda.synchronize()
            with no_sync():
                alternatives.prepared_run(name)

        checks = {name: partial(under, name) for name in alternatives.functions} | {"build_targets on the GPU": on_gpu}
        for name, check in checks.items():
            try:
                check()
            except RuntimeError as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                yield f"{name}: {str(error).splitlines()[0]} ({Path(where.filename).name}:{where.lineno})"


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def time_shape(shape: Shape, *, backward: bool, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return medians of every alternative, see `time_rounds`."""
    with Alternatives(shape) as alternatives:
        functions = {name: partial(alternatives.run, name, backward=backward) for name in alternatives.functions}
        return time_rounds(
            functions, prepare=alternatives.prepare, repeats=repeats, device=shape.device, hide_launches=True
        )


def peak_memory(shape: Shape) -> dict[str, float]:
    """Return the MiB of GPU memory that queuing, forward and backward of each alternative take at their peak."""
    peaks = {}
    with Alternatives(shape) as alternatives:
        for name in alternatives.functions:
            alternatives.prepared_run(name)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            alternatives.prepared_run(name)
            torch.cuda.synchronize()
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return peaks
