"""Training under activation checkpointing: recomputes that choose different experts than their forward, and the damage.

The cause is the one that GPUs have. There `scatter_add_`, by which Megatron-Core adds up the experts' outputs of each token,
adds in whatever order its threads arrive and rounds after every addition, so a recompute's sums differ from its forward's in
the last bit; in bf16 that bit is large enough for near-ties of the next layer's router to flip. A CPU adds in one order and
rounds once, so here the sums are made as a GPU makes them: one addition after another, in bf16, in an order drawn anew at
every call. Nothing else differs between a forward and its recompute.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from tests.support.schedule import run_schedule
from tests.support.tiny_gpt import build_tiny_gpt, tiny_gpt_config

LAYOUT = ParallelSizes()
LAYERS, EXPERTS, TOPK, VOCAB = 8, 32, 4, 64
BATCH, LENGTH = 4, 64
PER_CHECKPOINT = 4
"""Layers recomputed together: what flips in layers 2 to 4 of a checkpoint, its first layer's input being saved."""


def train(frozen: bool, steps: int, seed: int, shuffled: bool = True) -> dict[str, Any]:
    """Train for some steps and compare every step's gradients with those of the same forward without recompute.

    Args:
        frozen: under `mrr.freeze_recompute`.
        shuffled: sums come in another order each time; False: in the same, and then nothing may differ.

    Returns:
        For each step: flips (recomputed decisions with different experts than in their forward), error and router_error
        (relative L2 error of the gradient, of all parameters and of the routers'), loss. flips_of_layer over all steps;
        decisions: recomputed in a step.
    """
    LAYOUT.initialize(seed=seed)
    torch.manual_seed(seed)
    config = tiny_gpt_config(
        LAYOUT,
        num_layers=LAYERS,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=PER_CHECKPOINT,
    )
    chunks = build_tiny_gpt(config, LAYOUT, vocab_size=VOCAB, seed=seed)
    chunks[0].bfloat16()  # the norms too, as Megatron's Float16Module does
    masters = [parameter.detach().float() for parameter in chunks[0].parameters()]
    optimizer = torch.optim.Adam(masters, lr=1e-3)
    flips = FlipCounter(chunks[0])
    freeze = mrr.freeze_recompute(chunks) if frozen else None
    steps_seen = []
    for step in range(steps):
        batch = counting_batch(seed * 1000 + step)
        with shuffled_sums(seed * 1000 + step, shuffled):
            expected = gradients(chunks, batch, recompute=False)[0]
        flips.reset()
        start = time.perf_counter()
        with shuffled_sums(seed * 1000 + step, shuffled):
            seen, loss = gradients(chunks, batch, recompute=True)
        routers = [index for index, (name, _) in enumerate(chunks[0].named_parameters()) if "router" in name]
        steps_seen.append(
            {
                "flips": flips.end_step(),
                "error": relative_error(seen, expected),
                "router_error": relative_error([seen[i] for i in routers], [expected[i] for i in routers]),
                "loss": loss,
                "seconds": time.perf_counter() - start,
            }
        )
        for master, gradient in zip(masters, seen, strict=True):
            master.grad = gradient
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(chunks[0].parameters(), masters, strict=True):
                parameter.copy_(master)
    if freeze is not None:
        freeze.close()
    return {
        "steps": steps_seen,
        "flips_of_layer": {layer: flips.of_layer[layer] for layer in range(1, LAYERS + 1)},
        "decisions": BATCH * LENGTH * LAYERS,
    }


def counting_batch(seed: int) -> dict[str, Any]:
    """Return one micro-batch of sequences that count up, each by its own stride: something to learn."""
    generator = torch.Generator().manual_seed(seed)
    start, stride = (torch.randint(1, VOCAB, (BATCH, 1), generator=generator) for _ in range(2))
    tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCAB
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.ones(BATCH, LENGTH),
        "position_ids": torch.arange(LENGTH).expand(BATCH, -1).contiguous(),
    }


def gradients(chunks: Sequence[Any], batch: dict[str, Any], *, recompute: bool) -> tuple[list[Tensor], float]:
    """Return the gradient of every parameter in fp32, and the loss."""
    chunks[0].config.recompute_granularity = "full" if recompute else None
    (loss,) = run_schedule(chunks, LAYOUT, [batch])
    return [parameter.grad.float() for parameter in chunks[0].parameters()], float(loss)


def relative_error(seen: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return |seen - expected| / |expected|, L2 over all tensors."""
    difference = sum(float((a - b).square().sum()) for a, b in zip(seen, expected, strict=True))
    return float((difference / sum(float(b.square().sum()) for b in expected)) ** 0.5)


class FlipCounter:
    """Compares the experts that leave each router in a recompute with those of its forward, without this library."""

    def __init__(self, model: Any) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        self.of_layer: Counter[int] = Counter()
        self.maps: dict[int, list[Tensor]] = {}
        for router in model.modules():
            if isinstance(router, TopKRouter):
                router.register_forward_hook(self._keep)

    def _keep(self, router: Any, args: Any, output: tuple[Tensor, Tensor]) -> None:
        self.maps.setdefault(router.layer_number, []).append(output[1].detach().clone())

    def reset(self) -> None:
        """Forget the experts of the last forward."""
        self.maps.clear()

    def end_step(self) -> int:
        """Return how many decisions of the step's one micro-batch flipped."""
        flips = 0
        for layer, (forward, recompute) in self.maps.items():
            self.of_layer[layer] += (different := int((forward != recompute).any(dim=-1).sum()))
            flips += different
        self.reset()
        return flips


@contextmanager
def shuffled_sums(seed: int, shuffled: bool) -> Iterator[None]:
    """Add up each token's expert outputs one after another, in an order that is drawn anew at every call.

    The forwards of two blocks with one seed draw the same orders, and so do their recomputes; a forward and its own
    recompute draw different ones.
    """
    from megatron.core.transformer.moe import token_dispatcher

    original = token_dispatcher.unpermute
    drawn = [torch.Generator().manual_seed(2 * seed + phase) for phase in range(2)]

    def unpermute(permuted: Tensor, sorted_indices: Tensor, *, restore_shape: torch.Size, **unused: Any) -> Tensor:
        in_recompute = torch._C._current_graph_task_id() != -1
        order = torch.randperm(len(sorted_indices), generator=drawn[in_recompute])
        order = order[sorted_indices[order].argsort(stable=True)]  # by token; of one token, as drawn
        first, *others = permuted[order].view(restore_shape[0], TOPK, restore_shape[1]).unbind(dim=1)
        return sum(others, start=first)

    if shuffled:
        token_dispatcher.unpermute = unpermute
    try:
        yield
    finally:
        token_dispatcher.unpermute = original
