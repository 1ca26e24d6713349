"""A tiny model with sparse attention under any layout, its steps, and the positions that its attention gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import in_backward
from tests.support.microbatches import split_microbatch
from tests.support.schedule import random_microbatches
from tests.support.tiny_dsa import build_tiny_dsa, dsa_config

ATTENTION = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
SHARED = {"dsa_indexer_topk_freq": 2}  # layers 2 and 4 attend to what layers 1 and 3 chose
TP2, CP2 = ParallelSizes(tp_size=2), ParallelSizes(cp_size=2)
Chosen = dict[str, dict[int, list[Tensor]]]
"""{"forward" | "recompute": {layer_number: positions [b, sq, k] in order of the calls}}"""


@dataclass(frozen=True, kw_only=True)
class Dsa:
    layout: ParallelSizes = ParallelSizes()
    config: dict[str, Any] = field(default_factory=dict)
    packed: bool = False


def build(case: Dsa) -> tuple[Any, list[dict[str, Any]]]:
    """Return the model and this rank's micro-batches with `routing_rows`; packed ones hold sequences of 12 and 20."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    if not parallel_state.is_initialized():
        case.layout.initialize()
    model = build_tiny_dsa(dsa_config(case.layout, **case.config))
    microbatches = random_microbatches(3, batch_size=1 if case.packed else 2, sequence_length=32)
    bounds = torch.tensor([0, 12, 32], dtype=torch.int32)
    num_rows = 0
    for microbatch in microbatches:
        tokens = microbatch["tokens"]
        microbatch["routing_rows"] = torch.arange(num_rows, num_rows + tokens.numel()).view(tokens.shape)
        num_rows += tokens.numel()
        if case.packed:
            microbatch["packed_seq_params"] = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=20, max_seqlen_kv=20
            )
    if case.layout.cp_size > 1:
        cp_rank = parallel_state.get_context_parallel_rank()
        microbatches = [split_microbatch(each, cp_rank=cp_rank, cp_size=2) for each in microbatches]
    return model, microbatches


def attentions(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ == "DSAttention"]


def add_noise_in_recompute(model: Any) -> None:
    """Let every indexer have other weights in a recompute than in its forward."""
    generator = torch.Generator().manual_seed(11)
    for attention in attentions(model):
        if attention.indexer is not None:
            attention.indexer.linear_wq_b.register_forward_hook(
                lambda module, args, output: (
                    (output[0] + torch.randn(output[0].shape, generator=generator), None) if in_backward() else None
                )
            )


@contextmanager
def watched(model: Any) -> Iterator[Chosen]:
    """Yield the positions that sparse attention gets, forwards and recomputes apart."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    seen: Chosen = {"forward": {}, "recompute": {}}
    layers: list[int] = []
    original = dsa._run_sparse_attention

    def attend(**given: Any) -> Any:
        of_layer = seen["recompute" if in_backward() else "forward"].setdefault(layers[-1], [])
        of_layer.append(given["topk_indices"].clone())
        return original(**given)

    handles = [
        each.register_forward_pre_hook(lambda module, args: layers.append(module.layer_number))
        for each in attentions(model)
    ]
    with mock.patch.object(dsa, "_run_sparse_attention", attend):
        yield seen
    for handle in handles:
        handle.remove()


def train(
    model: Any, microbatches: list[dict[str, Any]], before: Callable[[int], None] = lambda number: None
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Run all forwards, then all backwards, the youngest first, as a pipeline does; return losses and gradients.

    Args:
        before: is called with the number of each micro-batch before its forward.
    """
    model.zero_grad(set_to_none=True)
    losses = []
    for number, microbatch in enumerate(microbatches):
        before(number)
        named = {name: microbatch[name] for name in ("position_ids", "labels", "loss_mask")}
        packed = microbatch.get("packed_seq_params")
        output = model(input_ids=microbatch["tokens"], attention_mask=None, packed_seq_params=packed, **named)
        losses.append(output.mean())
    for loss in reversed(losses):
        loss.backward()
    return [each.detach() for each in losses], {name: each.grad for name, each in model.named_parameters()}


def same(one: Any, other: Any) -> bool:
    grads, others = one[1], other[1]
    return all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True)) and all(
        (grads[name] is None and others[name] is None) or torch.equal(grads[name], others[name]) for name in grads
    )
