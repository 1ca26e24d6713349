"""Host time of replay: what a router and micro-batch take beyond arithmetic, beside Megatron-Core's own replay.

Real routers in layers with a token dispatcher, few tokens, without a checkpoint and with each kind of one around every layer.
A micro-batch is its targets or rows by hand, a forward and a backward. `python -m benchmarks.host` prints the table.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megatron_router_replay as mrr
from benchmarks.measure import Seconds, environment, ratio, rounds, table
from benchmarks.router import random_routes, router_config
from megatron_router_replay.mcore import RouterReplay, RouterReplayAction
from megatron_router_replay.testing import ParallelSizes
from tests.support.one_rank import only_rank

NUM_TOKENS, NUM_LAYERS = 16, 16
ROUTERS = ["8, 2", "64, 6"]
CHECKPOINTS = {"none": None, "reentrant": True, "non-reentrant": False}
BASE = "Megatron's replay"
REPEATS = 201


class Dispatcher:
    """The part of a token dispatcher that a session checks."""

    def dispatch_preprocess(self, hidden: Tensor, routing_map: Tensor, probs: Tensor) -> Tensor:
        """Return the probabilities, [num_tokens, num_experts]."""
        return probs


class Layer(nn.Module):
    """A router and its dispatcher: logits [s, b, num_experts] to the same shape."""

    def __init__(self, config: Any, layer_number: int) -> None:
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
        from megatron.core.transformer.moe.router import TopKRouter

        super().__init__()
        self.router = TopKRouter(config, pg_collection=get_default_pg_collection())
        self.router.set_layer_number(layer_number)
        self.router.gating = lambda logits: logits
        self.token_dispatcher = Dispatcher()

    def forward(self, hidden: Tensor) -> Tensor:
        probs, routing_map = self.router(hidden)
        return hidden + self.token_dispatcher.dispatch_preprocess(hidden, routing_map, probs).view(hidden.shape)


class Model(nn.Module):
    """Layers in a row.

    Args:
        use_reentrant: of the checkpoint around every layer; None: there is no checkpoint.
    """

    def __init__(self, config: Any, use_reentrant: bool | None) -> None:
        super().__init__()
        self.config, self.use_reentrant = config, use_reentrant
        self.layers = nn.ModuleList(Layer(config, number) for number in range(1, NUM_LAYERS + 1))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            if self.use_reentrant is None:
                hidden = layer(hidden)
            else:
                hidden = checkpoint(layer, hidden, use_reentrant=self.use_reentrant)
        return hidden


class Replays:
    """Models that run a micro-batch: live, and under each way to replay.

    Args:
        router: experts and topk.
        use_reentrant: see `Model`.
        sessions: closes those that are opened.

    Attributes:
        runs: name -> the function that runs a micro-batch.
        prepare: name -> the function that must run before it.
    """

    def __init__(self, router: str, use_reentrant: bool | None, sessions: ExitStack) -> None:
        from megatron.core.transformer.moe import router_replay as upstream

        config = router_config(router, num_layers=NUM_LAYERS)
        num_experts, topk = config.num_moe_experts, config.moe_router_topk
        self.logits = torch.randn(NUM_TOKENS, 1, num_experts)
        self.grad = torch.randn(NUM_TOKENS, 1, num_experts)
        self.use_reentrant = use_reentrant
        routes = random_routes(NUM_TOKENS, NUM_LAYERS, topk, num_experts)
        targets = [routes[:, layer].contiguous() for layer in range(NUM_LAYERS)]
        rows = torch.arange(NUM_TOKENS)
        trace = mrr.RoutingTrace(topk_indices=routes, layer_numbers=range(1, NUM_LAYERS + 1), num_experts=num_experts)
        self.runs: dict[str, Callable[[], object]] = {"live": partial(self._run, Model(config, use_reentrant))}
        self.prepare: dict[str, Callable[[], object]] = {}
        for name, kind in ((BASE, upstream.RouterReplay), ("drop-in", RouterReplay)):
            model = Model(config, use_reentrant)
            for layer in model.layers:
                layer.router.router_replay = kind()
            replays = [layer.router.router_replay for layer in model.layers]
            # One list for the process: the static helpers drive the instances of one model at a time.
            self.prepare[name] = partial(kind.global_router_replay_instances.__setitem__, slice(None), replays)
            self.runs[name] = partial(self._drive, model, kind, targets)
        options: dict[str, dict[str, Any]] = {"replay": {}, "replay, min_agreement=0": {"min_agreement": 0}}
        for name, chosen in options.items():
            model = Model(config, use_reentrant)
            session = mrr.replay(model, trace, **chosen)
            # Random routes, which no router would choose: they are compared, and not judged.
            sessions.callback(session.close, check=False)
            self.runs[name] = partial(self._follow, model, session, rows)

    def _run(self, model: Model) -> None:
        model(self.logits.detach().requires_grad_()).backward(self.grad)

    def _drive(self, model: Model, kind: Any, targets: list[Tensor]) -> None:
        kind.set_replay_data(targets)
        kind.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        outputs = model(self.logits.detach().requires_grad_())
        kind.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        outputs.backward(self.grad)
        kind.clear_global_router_replay_action()
        kind.clear_global_indices()

    def _follow(self, model: Model, session: Any, rows: Tensor) -> None:
        session.microbatch(rows)
        self._run(model)


def measure(router: str, kind: str, *, repeats: int = REPEATS) -> Seconds:
    """Return the seconds of a micro-batch for each alternative, with a kind of checkpoint."""
    with only_rank(), ExitStack() as sessions:
        ParallelSizes().initialize()
        replays = Replays(router, CHECKPOINTS[kind], sessions)
        return rounds(replays.runs, repeats=repeats, prepare=replays.prepare)


def render(raw: dict[tuple[str, str], Seconds]) -> str:
    """Return the table."""
    names = ["live", "drop-in", "replay", "replay, min_agreement=0"]
    rows = []
    for case, seconds in raw.items():
        microseconds = sorted(seconds[BASE])[len(seconds[BASE]) // 2] * 1e6 / NUM_LAYERS
        rows.append([*case, f"{microseconds:.0f}", *(str(ratio(seconds, name, BASE)) for name in names)])
    return table(["experts, topk", "checkpoint", f"{BASE}, us", *names], rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=REPEATS, help="rounds of each alternative")
    args = parser.parse_args()
    print(f"{environment()}; {NUM_LAYERS} routers, {NUM_TOKENS} tokens; ratios to {BASE}, time a router\n")
    cases = itertools.product(ROUTERS, CHECKPOINTS)
    print(render({case: measure(*case, repeats=args.repeats) for case in cases}))


if __name__ == "__main__":
    main()
