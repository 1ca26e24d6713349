"""Memory of replay: bytes a token and layer that are alive with it and not without, ours and Megatron-Core's own.

Counted, not computed: the storages of all tensors that the garbage collector lists, and of those saved for the backward.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import megatron_router_replay as mrr
from benchmarks.measure import table
from benchmarks.step import FULL
from megatron_router_replay.testing import ParallelSizes
from tests.support.one_rank import only_rank
from tests.support.schedule import default_forward_step, random_microbatches
from tests.support.tiny_gpt import build_tiny_gpt, tiny_gpt_config

TITLE = "Memory: bytes held a token and layer"
LAYERS, EXPERTS, TOPK, MICROBATCHES, TOKENS = 4, 128, 8, 4, 512
KINDS = ["ours, record", "ours, replay", "ours, freeze", "Megatron's, record", "Megatron's, replay"]


@dataclass
class Held:
    """Bytes alive, by where they are looked at."""

    saved: dict[int, int] = field(default_factory=dict)
    """data pointer -> bytes of what autograd saved."""

    def save(self, tensor: Tensor) -> Tensor:
        """Note a tensor that autograd saves for the backward."""
        self.saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def count(self) -> int:
        """Return the bytes of every storage that is alive, each counted once."""
        gc.collect()
        alive = dict(self.saved)
        for item in gc.get_objects():
            # Others, such as torch.compile's fake ones and sparse ones, have no storage.
            if type(item) in (Tensor, torch.nn.Parameter) and item.layout is torch.strided:
                storage = item.untyped_storage()
                alive[storage.data_ptr()] = storage.nbytes()
        return sum(alive.values())


class MegatronReplay:
    """Megatron-Core's RouterReplay as in its guide, with compact routes widened a micro-batch at a time."""

    def __init__(self, model: Any, routes: Tensor | None) -> None:
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        self.routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
        self.instances = [RouterReplay() for _ in self.routers]
        self.actions = RouterReplayAction
        self.routes = routes
        self.recorded: list[list[Tensor]] = []
        for router, instance in zip(self.routers, self.instances):
            router.router_replay = instance
        self._act(RouterReplayAction.RECORD if routes is None else RouterReplayAction.REPLAY_FORWARD)

    def microbatch(self, rows: Tensor) -> None:
        if self.routes is not None:
            for layer, instance in enumerate(self.instances):
                instance.set_target_indices(self.routes[rows.view(-1), layer].to(torch.int64))

    def forwarded(self) -> None:
        if self.routes is None:
            self.recorded.append([instance.get_recorded_indices() for instance in self.instances])

    def before_backward(self) -> None:
        if self.routes is not None:
            self._act(self.actions.REPLAY_BACKWARD)

    def close(self) -> None:
        for router, instance in zip(self.routers, self.instances):
            router.router_replay = None
            instance.clear_indices()
        self.recorded.clear()

    def _act(self, action: Any) -> None:
        for instance in self.instances:
            instance.set_router_replay_action(action)


@contextmanager
def opened(kind: str | None, model: Any, trace: Any) -> Iterator[Any]:
    """Yield the session, or Megatron's object, of a kind of KINDS; None: nothing."""
    if kind is None or kind.startswith("ours"):
        sessions = {
            None: lambda: None,
            "ours, record": lambda: mrr.record(model),
            "ours, replay": lambda: mrr.replay(model, trace),
            "ours, freeze": lambda: mrr.freeze_recompute(model),
        }
        session = sessions[kind]()
    else:
        session = MegatronReplay(model, None if "record" in kind else trace.topk_indices)
    yield session
    if session is not None:
        session.close()


def step(kind: str | None, model: Any, batch: list[dict[str, Any]], trace: Any) -> dict[str, int]:
    """Run all forwards, then all backwards; return the bytes alive in between, after, and with the session closed."""
    model.zero_grad(set_to_none=True)
    held = Held()
    found = {}
    with opened(kind, model, trace) as session:
        with torch.autograd.graph.saved_tensors_hooks(held.save, lambda tensor: tensor):
            losses = []
            for microbatch in batch:
                if hasattr(session, "microbatch") and kind != "ours, freeze":
                    session.microbatch(microbatch["rows"])
                output, loss_func = default_forward_step(iter([microbatch]), model)
                losses.append(loss_func(output)[0])
                if isinstance(session, MegatronReplay):
                    session.forwarded()
            del output, loss_func
        found["between"] = held.count()
        if isinstance(session, MegatronReplay):
            session.before_backward()
        held.saved.clear()
        for loss in losses:
            loss.backward()
        del losses, loss
        model.zero_grad(set_to_none=True)
        found["behind"] = held.count()
    found["closed"] = held.count()
    return found


def measure_recompute(*, recompute: bool) -> dict[str, dict[str, int]]:
    """Return the bytes alive by kind; "off" among them."""
    layout = ParallelSizes()
    layout.initialize()
    config = tiny_gpt_config(
        layout, num_layers=LAYERS, num_moe_experts=EXPERTS, moe_router_topk=TOPK, **(FULL if recompute else {})
    )
    (model,) = build_tiny_gpt(config, layout)
    batch = random_microbatches(MICROBATCHES, sequence_length=TOKENS)
    for number, microbatch in enumerate(batch):
        microbatch["rows"] = torch.arange(number * TOKENS, (number + 1) * TOKENS).view(1, -1)
    with torch.no_grad(), mrr.record(model) as recording:
        for microbatch in batch:
            recording.microbatch(microbatch["rows"])
            default_forward_step(iter([microbatch]), model)
    trace = recording.trace()
    del recording
    step(None, model, batch, trace)
    found = {kind or "off": step(kind, model, batch, trace) for kind in (None, *KINDS)}
    return found | {"routes": {"trace": trace.topk_indices.untyped_storage().nbytes()}}


def measure() -> dict[str, Any]:
    """Count without and with full recompute, each in its own Megatron state."""
    raw = {}
    for name, recompute in (("none", False), ("full", True)):
        with only_rank():
            raw[name] = measure_recompute(recompute=recompute)
    return raw


def render(raw: dict[str, Any]) -> str:
    """Return the table."""
    decisions = MICROBATCHES * TOKENS * LAYERS
    formulas = {
        "ours, record": "k; the recording keeps them",
        "ours, replay": "k",
        "ours, freeze": "k",
        "Megatron's, record": "8 k; the caller keeps them",
        "Megatron's, replay": "8 k; until cleared, what no recompute took",
    }
    rows = []
    for kind in KINDS:
        cells = [
            f"{(raw[recompute][kind][when] - raw[recompute]['off'][when]) / decisions:.1f}"
            for recompute in ("none", "full")
            for when in ("between", "behind", "closed")
        ]
        rows.append([kind, *cells, formulas[kind]])
    head = ["", "in flight", "idle", "closed"]
    head += [f"{name}, full recompute" for name in head[1:]] + [f"by formula, bytes (k = {TOPK})"]
    routes = raw["none"]["routes"]["trace"] / decisions
    lines = [
        f"{MICROBATCHES} micro-batches of {TOKENS} tokens in flight, {LAYERS} layers, top-{TOPK} of {EXPERTS}: bytes a token "
        "and layer more than without. *In flight*: after all forwards, before the first backward; *idle*: after the step, "
        f"session open; *closed*: after it. The batch's own routes, {routes:.1f} bytes in uint8, are alive in every row and "
        "not counted.",
        "",
        table(head, rows),
    ]
    whose = [
        of
        for of in ("ours", "Megatron's")
        if raw["none"][f"{of}, replay"]["between"] - raw["none"]["off"]["between"] >= 4 * EXPERTS * decisions
    ]
    if whose:
        lines += [
            "",
            f"Without recompute, {4 * EXPERTS} of the bytes of a replay ({' and '.join(whose)}) are the router's float32 "
            "scores: autograd keeps the input of a gather, not that of a top-k. So it is with a softmax after the top-k; "
            "other score functions keep their scores without replay, too.",
        ]
    return "\n".join(lines)
