"""What the functional tests run on every rank: a tiny GPT, live, recorded and replayed, watched from outside.

The watching is independent of the package: forward hooks on Megatron's router modules read the routing maps that leave them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.mcore.compat import megatron_version, version_numbers
from megatron_router_replay.testing import (
    ParallelSizes,
    build_tiny_gpt,
    gradients,
    random_microbatches,
    run_schedule,
    split_microbatch,
    tiny_gpt_config,
)

MEGATRON = version_numbers(megatron_version())
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# Megatron-Core 0.18 passes its checkpointed MTP layer an argument that it does not take; not without us either.
MTP_RECOMPUTE = (
    {"recompute_granularity": "selective", "recompute_modules": ["moe"]} if MEGATRON[:2] == (0, 18) else FULL
)
LATER_SCORE_FUNCTIONS = ["sqrtsoftplus"] if MEGATRON >= (0, 18) else []
"""Score functions of moe_router_score_function besides softmax and sigmoid."""


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: ParallelSizes
    config: dict[str, Any] = field(default_factory=dict)
    num_microbatches: int = 4
    batch_size: int = 2
    sequence_length: int = 8
    fused: bool = False  # moe_router_fusion, set after building: live routing would need Transformer Engine

    @property
    def num_tokens(self) -> int:
        return self.num_microbatches * self.batch_size * self.sequence_length


def build(case: Case) -> tuple[Any, list[Any], list[dict[str, Any]]]:
    """Return (config, this rank's chunks, this rank's micro-batches with `routing_rows`)."""
    from megatron.core import parallel_state

    case.layout.initialize()
    config = tiny_gpt_config(case.layout, **case.config)
    chunks = build_tiny_gpt(config, case.layout)
    set_fusion(chunks, case.fused)
    microbatches = random_microbatches(
        case.num_microbatches,
        batch_size=case.batch_size,
        sequence_length=case.sequence_length,
        seed=parallel_state.get_data_parallel_rank(),
    )
    rows = torch.arange(case.num_tokens).view(case.num_microbatches, case.batch_size, case.sequence_length)
    for microbatch, its_rows in zip(microbatches, rows):
        microbatch["routing_rows"] = its_rows
    cp_rank = parallel_state.get_context_parallel_rank()
    if case.layout.cp_size > 1:
        microbatches = [
            split_microbatch(microbatch, cp_rank=cp_rank, cp_size=case.layout.cp_size) for microbatch in microbatches
        ]
    return config, chunks, microbatches


def run(chunks: list[Any], case: Case, microbatches: list[dict[str, Any]], session: Any = None, **options: Any) -> Any:
    """Run the schedule; with a session, queue each micro-batch's rows (and padding, if known) on every stage and chunk."""

    def queue(microbatch: dict[str, Any], model: Any) -> None:
        if session is not None:
            session.microbatch(microbatch["routing_rows"], model, padding=microbatch.get("padding"))

    losses = run_schedule(chunks, case.layout, microbatches, before_forward=queue, **options)
    return losses, ({} if options.get("forward_only") else gradients(chunks))


def moe_routers(chunks: list[Any]) -> list[Any]:
    """Every decoder TopKRouter of the chunks."""
    from megatron.core.transformer.moe.router import TopKRouter

    return [
        module
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(module, TopKRouter) and not name.startswith("mtp")
    ]


def set_fusion(chunks: list[Any], on: bool) -> None:
    """Set moe_router_fusion of built chunks."""
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "config"):
                module.config.moe_router_fusion = on


def left_over(chunks: list[Any]) -> list[Any]:
    """What a session forgot in the routers."""
    held = [getattr(router, "router_replay", None) for router in moe_routers(chunks)]
    return [replay for replay in held if replay is not None]


@contextmanager
def watched(chunks: list[Any]) -> Iterator[dict[str, dict[int, list[Tensor]]]]:
    """Yield {"forward" | "recompute": {layer_number: routing maps [num_tokens, num_experts] in order of the calls}}."""
    seen: dict[str, dict[int, list[Tensor]]] = {"forward": defaultdict(list), "recompute": defaultdict(list)}

    def hook(module: Any, args: Any, output: tuple[Tensor, Tensor]) -> None:
        phase = "recompute" if torch._C._current_graph_task_id() != -1 else "forward"
        seen[phase][module.layer_number].append(output[1].clone())

    handles = [router.register_forward_hook(hook) for router in moe_routers(chunks)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def random_routes(num_tokens: int, num_layers: int, topk: int, num_experts: int, *, seed: int = 7) -> Tensor:
    """Valid routes that no router chose: [num_tokens, num_layers, topk] distinct random ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, num_layers, num_experts, generator=generator).argsort(dim=2)[:, :, :topk]


def as_map(topk_indices: Tensor, num_experts: int) -> Tensor:
    """[n, topk] -> [n, num_experts] bool."""
    return torch.zeros(len(topk_indices), num_experts, dtype=torch.bool).scatter(1, topk_indices.long(), True)


def rows_seen(case: Case, microbatch: dict[str, Any]) -> Tensor:
    """The rows in the order this rank's routers see them, worked out by hand: s-major, then this TP rank's chunk."""
    from megatron.core import parallel_state

    rows = microbatch["routing_rows"].t().reshape(-1)
    if case.layout.sequence_parallel:
        rows = rows.chunk(case.layout.tp_size)[parallel_state.get_tensor_model_parallel_rank()]
    return rows


def same(one: Any, other: Any) -> bool:
    """Whether losses and gradients are equal to the last bit."""
    (losses_one, grads_one), (losses_other, grads_other) = one, other
    return (
        len(losses_one) == len(losses_other)
        and all(torch.equal(a, b) for a, b in zip(losses_one, losses_other))
        and grads_one.keys() == grads_other.keys()
        and all(torch.equal(grads_one[name], grads_other[name]) for name in grads_one)
    )


def record_and_replay(case: Case) -> dict[str, Any]:
    """Live, recorded, replayed and misrouted runs of one case on this rank; what the test asserts, as plain values."""
    config, chunks, microbatches = build(case)
    layers = sorted(router.layer_number for router in moe_routers(chunks))
    topk, num_experts = config.moe_router_topk, config.num_moe_experts
    live = run(chunks, case, microbatches)

    with mrr.record(chunks, verify=True) as recording:
        recorded = run(chunks, case, microbatches, recording)
    trace = recording.trace(num_tokens=case.num_tokens)
    with mrr.replay(chunks, trace, verify=True) as session:
        replayed = run(chunks, case, microbatches, session)

    # Trace layers of the whole model, as a rollout engine sends them, though this stage has some only.
    all_layers = [i + 1 for i, is_moe in enumerate(_moe_pattern(config)) if is_moe]
    other = random_routes(case.num_tokens, len(all_layers), topk, num_experts)
    other_trace = mrr.RoutingTrace(topk_indices=other, layer_numbers=all_layers, num_experts=num_experts)
    with watched(chunks) as seen, mrr.replay(chunks, other_trace) as misrouted:
        run(chunks, case, microbatches, misrouted)
    wrong = {"forward": 0, "recompute": 0}
    for phase, maps_of_layer in seen.items():
        for layer, maps in maps_of_layer.items():
            for microbatch, routing_map in zip(microbatches, maps, strict=True):
                target = other[rows_seen(case, microbatch), all_layers.index(layer)]
                wrong[phase] += int((routing_map != as_map(target, num_experts)).any(dim=1).sum())
    return {
        "layers": layers,
        "trace_layers": list(trace.layer_numbers),
        "record_is_live": same(live, recorded),
        "replay_is_live": same(live, replayed),
        "routed_rows": int(trace.replay_mask.sum()),
        "wrong": wrong,
        "forwards": {layer: len(maps) for layer, maps in seen["forward"].items()},
        "recomputes": {layer: len(maps) for layer, maps in seen["recompute"].items()},
        "report": session.report.to_dict(),
        "left_over": left_over(chunks),
        "loss": None if not live[0] else float(torch.stack([loss.float().mean() for loss in live[0]]).mean()),
    }


def _moe_pattern(config: Any) -> list[int]:
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [1 if i % frequency == 0 else 0 for i in range(config.num_layers)]
    return list(frequency)
