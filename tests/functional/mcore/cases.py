"""What the functional tests run on every rank: a tiny GPT, live, recorded and replayed, watched from outside.

The watching is independent of the package: forward hooks on Megatron's router modules read the routing maps that leave them.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.mcore.core.hooks import sources_of
from megatron_router_replay.mcore.core.tape import Entry
from megatron_router_replay.mcore.model.upstream import megatron_version, version_numbers
from megatron_router_replay.testing import ParallelSizes
from tests.support.gradients import gradients
from tests.support.microbatches import split_microbatch
from tests.support.schedule import random_microbatches, run_schedule
from tests.support.tiny_gpt import build_tiny_gpt, tiny_gpt_config
from tests.unit.mcore.tiny_chunk import as_map, random_routes

MEGATRON = version_numbers(megatron_version())
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
# Megatron-Core 0.18 passes its checkpointed MTP layer an argument that it does not take; not without us either.
MTP_RECOMPUTE = MOE if MEGATRON[:2] == (0, 18) else FULL
DRAWN: dict[str, Any] = {"min_agreement": 0}
"""Of sessions that replay routes drawn at random, so that none is what the router would choose: nobody shall ask it."""
Watched = dict[str, dict[int, list[Tensor]]]
"""{"forward" | "recompute": {layer_number: routing maps [num_tokens, num_experts] in order of the calls}}"""


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: ParallelSizes = ParallelSizes()
    config: dict[str, Any] = field(default_factory=dict)
    num_microbatches: int = 4
    batch_size: int = 2
    sequence_length: int = 8
    fused: bool = False  # moe_router_fusion, set after building: live routing would need Transformer Engine

    @property
    def num_tokens(self) -> int:
        return self.num_microbatches * self.batch_size * self.sequence_length


def build(case: Case) -> tuple[Any, list[Any], list[dict[str, Any]]]:
    """Return (config, this rank's chunks, this rank's micro-batches with `rows`)."""
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():  # a test may build several models
        case.layout.initialize()
    config = tiny_gpt_config(case.layout, **case.config)
    chunks = build_tiny_gpt(config, case.layout)
    set_in_configs(chunks, moe_router_fusion=case.fused)
    microbatches = random_microbatches(
        case.num_microbatches,
        batch_size=case.batch_size,
        sequence_length=case.sequence_length,
        seed=parallel_state.get_data_parallel_rank(),
    )
    rows = torch.arange(case.num_tokens).view(case.num_microbatches, case.batch_size, case.sequence_length)
    for microbatch, its_rows in zip(microbatches, rows):
        microbatch["rows"] = its_rows
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
            session.microbatch(microbatch["rows"], model, padding=microbatch.get("padding"))

    losses = run_schedule(chunks, case.layout, microbatches, before_forward=queue, **options)
    return losses, ({} if options.get("forward_only") else gradients(chunks))


def model_inputs(microbatch: dict[str, Any]) -> dict[str, Any]:
    """What a GPTModel is called with to return losses."""
    named = {"input_ids": microbatch["tokens"], "attention_mask": None}
    return named | {name: microbatch[name] for name in ("position_ids", "labels", "loss_mask")}


def moe_routers(chunks: list[Any], *, mtp: bool = False) -> list[Any]:
    """Every TopKRouter of the chunks' decoders, or of their MTP layers."""
    from megatron.core.transformer.moe.router import TopKRouter

    named = [each for chunk in chunks for each in chunk.named_modules()]
    return [module for name, module in named if isinstance(module, TopKRouter) and name.startswith("mtp") == mtp]


def set_in_configs(chunks: list[Any], **fields: Any) -> None:
    """Set what the config's own checks would refuse here, in every config of built chunks."""
    for chunk in chunks:
        for module in chunk.modules():
            for name, value in fields.items() if hasattr(module, "config") else ():
                setattr(module.config, name, value)


def left_over(chunks: list[Any]) -> list[Any]:
    """Who still holds the routers."""
    return [holder for router in moe_routers(chunks) for holder in sources_of(router)]


def alive_entries(chunks: list[Any]) -> list[Entry]:
    """Return the calls of these chunks' routers that tapes hold now, over all graphs that live."""
    gc.collect()
    routers = moe_routers(chunks)
    entries = [each for each in gc.get_objects() if isinstance(each, Entry)]
    return [entry for entry in entries if any(entry.router is router for router in routers)]


# ---- the oracle


def in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


@contextmanager
def watched(chunks: list[Any], *, mtp: bool = False) -> Iterator[Watched]:
    """Yield the routing maps that leave the routers of decoders, or of MTP layers, forwards and recomputes apart."""
    seen: Watched = {"forward": defaultdict(list), "recompute": defaultdict(list)}

    @torch.compiler.disable
    def hook(module: Any, args: Any, output: tuple[Tensor, Tensor]) -> None:
        seen["recompute" if in_backward() else "forward"][module.layer_number].append(output[1].clone())

    handles = [router.register_forward_hook(hook) for router in moe_routers(chunks, mtp=mtp)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def add_noise_in_recompute(chunks: list[Any], *, mtp: bool = False) -> None:
    """Let every router see other logits in a recompute than in its forward."""
    generator = torch.Generator().manual_seed(11)
    for router in moe_routers(chunks, mtp=mtp):

        def noisy(hidden: Tensor, gating: Any = router.gating) -> Tensor:
            logits = gating(hidden)
            return logits + 2 * torch.randn(logits.shape, generator=generator) if in_backward() else logits

        router.gating = noisy


def flips(seen: Watched) -> int:
    """How many recomputed decisions are not their forward's, where recomputes come in the order of the forwards."""
    return sum(
        int((one != other).any(dim=1).sum())
        for layer, recomputed in seen["recompute"].items()
        for one, other in zip(seen["forward"][layer], recomputed, strict=True)
    )


def random_trace(case: Case, layers: Any = range(1, 5), **options: Any) -> mrr.RoutingTrace:
    """Return a trace of random routes for every token of the case, of these layers."""
    topk, num_experts = case.config.get("moe_router_topk", 2), case.config.get("num_moe_experts", 8)
    seed = options.pop("seed", 7)
    routes = random_routes(case.num_tokens, len(layers), seed, topk=topk, num_experts=num_experts)
    return mrr.RoutingTrace(topk_indices=routes, layer_numbers=layers, num_experts=num_experts, **options)


def rows_seen(case: Case, microbatch: dict[str, Any]) -> Tensor:
    """The rows in the order this rank's routers see them, worked out by hand: s-major, then this TP rank's chunk."""
    from megatron.core import parallel_state

    rows = microbatch["rows"].t().reshape(-1)
    if case.layout.sequence_parallel:
        rows = rows.chunk(case.layout.tp_size)[parallel_state.get_tensor_model_parallel_rank()]
    return rows


def wrong_replays(case: Case, seen: Watched, trace: mrr.RoutingTrace, microbatches: list[dict[str, Any]]) -> int:
    """How many decisions are not the trace's, in forwards and recomputes; rows without a route are not judged."""
    wrong = 0
    for maps_of_layer in seen.values():
        for layer, maps in maps_of_layer.items():
            for microbatch, routing_map in zip(microbatches, maps, strict=True):
                rows = rows_seen(case, microbatch)
                routed = (rows >= 0) & trace.replay_mask[rows.clamp(min=0)]
                target = as_map(trace.layer(layer)[rows[routed]], routing_map.shape[1])
                wrong += int((routing_map[routed] != target).any(dim=1).sum())
    return wrong


def same(one: Any, other: Any) -> bool:
    """Whether losses and gradients are equal to the last bit."""
    (losses_one, grads_one), (losses_other, grads_other) = one, other
    return (
        len(losses_one) == len(losses_other)
        and all(torch.equal(a, b) for a, b in zip(losses_one, losses_other))
        and grads_one.keys() == grads_other.keys()
        and all(torch.equal(grads_one[name], grads_other[name]) for name in grads_one)
    )


def record_and_replay(case: Case, chunks: list[Any], microbatches: list[dict[str, Any]], whole: Any) -> Any:
    """Live, recorded, replayed and misrouted steps on this rank: the first three alike, the last as it was told.

    Args:
        whole: the numbers of the MoE layers of the whole model: a rollout sends all, though a stage has some only.

    Returns:
        What each recompute and forward routed under random routes, and the report of the replay.
    """
    live = run(chunks, case, microbatches)
    with mrr.record(chunks) as recording:
        recorded = run(chunks, case, microbatches, recording)
    assert same(live, recorded), "recording changed losses or gradients"
    trace = recording.trace(num_tokens=case.num_tokens)
    split = (case.layout.tp_size if case.layout.sequence_parallel else 1) * case.layout.cp_size
    assert int(trace.replay_mask.sum()) == case.num_tokens // split
    with mrr.replay(chunks, trace, verify=True) as session:
        replayed = run(chunks, case, microbatches, session)
    assert same(live, replayed), "replaying the routes just recorded changed losses or gradients"
    layers = sorted(router.layer_number for router in moe_routers(chunks))
    assert list(trace.layer_numbers) == layers
    other = random_trace(case, whole)
    with watched(chunks) as seen, mrr.replay(chunks, other, **DRAWN) as misrouted:
        run(chunks, case, microbatches, misrouted)
    assert wrong_replays(case, seen, other, microbatches) == 0
    assert sorted(seen["forward"]) == layers
    assert left_over(chunks) == []
    return seen, session.report
