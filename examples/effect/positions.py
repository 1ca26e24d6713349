"""The share of the gap that the second choice causes: a model with sparse attention (DSA) and experts, in bf16 and in fp32.

The engine is the model in bf16, the trainer the same weights in fp32, both Megatron-Core's own classes. The engine's forward
is recorded, routes and positions, and replayed in the trainer's in four ways. Needs Megatron-Core 0.19.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from tests.support.tiny_dsa import build_tiny_dsa, dsa_config

LAYOUT = ParallelSizes()
LAYERS, EXPERTS, TOPK, VOCAB = 4, 32, 4, 64
BATCH, LENGTH, INDEX_TOPK = 8, 128, 16
ARMS = ("nothing", "routes", "positions", "both")


def measure(steps: int, seed: int) -> dict[str, float]:
    """Train a model for some steps, and compare engine and trainer on sequences that it has not seen.

    Args:
        steps: of training with the indexers' loss; 0: random weights.

    Returns:
        For each of ARMS the mean KL(engine || trainer) of the next-token distributions in nats, on 8 x 128 tokens; loss of
        the trainer there; flipped_routes and flipped_positions, shares of decisions in which the live trainer chose another
        set.
    """
    LAYOUT.initialize(seed=seed)
    fields = {"num_layers": LAYERS, "num_moe_experts": EXPERTS, "moe_router_topk": TOPK, "dsa_indexer_topk": INDEX_TOPK}
    loss_of_indexers = {"dsa_indexer_loss_coeff": 1.0, "dsa_indexer_use_sparse_loss": False}
    trainer = build_tiny_dsa(dsa_config(LAYOUT, **fields, **loss_of_indexers), vocab_size=VOCAB, seed=seed)
    train(trainer, steps, seed)
    in_bf16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    engine = build_tiny_dsa(dsa_config(LAYOUT, **fields, **in_bf16), vocab_size=VOCAB, seed=seed).bfloat16()
    engine.load_state_dict(trainer.state_dict())
    batch = repeating_batch(seed + 1_000_000)
    rows = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
    expected, routes, positions = recorded(engine, batch, rows)
    _, own_routes, own_positions = recorded(trainer, batch, rows)

    def none_chosen(layer: int, routes: Tensor, own: Tensor, scores: Tensor) -> Tensor:
        return torch.zeros(len(own), dtype=torch.bool)

    live_routes = {"choose": none_chosen, "min_replayed": 0.0}
    result: dict[str, float] = {}
    for arm, options in (
        ("routes", {}),
        ("positions", {"positions": positions, **live_routes}),
        ("both", {"positions": positions}),
    ):
        with mrr.replay(trainer, routes, **options) as session:
            session.microbatch(rows, trainer)
            result[arm] = divergence(expected, log_probs(trainer, batch))
    own = log_probs(trainer, batch)
    result["nothing"] = divergence(expected, own)
    result["loss"] = -float(own.gather(2, batch["tokens"][:, 1:].unsqueeze(2)).mean())
    sets = [each.topk_indices.sort(dim=2).values for each in (routes, own_routes)]
    result["flipped_routes"] = float((sets[0] != sets[1]).any(dim=2).float().mean())
    chosen = [each.rows(rows.flatten(), each.layer_numbers) for each in (positions, own_positions)]
    result["flipped_positions"] = float((chosen[0] != chosen[1]).any(dim=2).float().mean())
    return result


def train(model: Any, steps: int, seed: int) -> None:
    """Train with Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        batch = repeating_batch(seed * 10_000 + step)
        loss = model(labels=batch["tokens"][:, 1:].contiguous(), **inputs(batch, LENGTH)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def repeating_batch(seed: int) -> dict[str, Tensor]:
    """Return sequences that repeat a piece of 8 tokens: who attends to the token 7 before knows the next one."""
    generator = torch.Generator().manual_seed(seed)
    pieces = torch.randint(VOCAB, (BATCH, 8), generator=generator)
    return {"tokens": pieces.repeat(1, LENGTH // 8 + 1)[:, : LENGTH + 1]}


def inputs(batch: dict[str, Tensor], length: int) -> dict[str, Any]:
    """Return what a model's forward gets."""
    position_ids = torch.arange(length).expand(BATCH, -1)
    return {"input_ids": batch["tokens"][:, :length].contiguous(), "position_ids": position_ids, "attention_mask": None}


def divergence(engine: Tensor, trainer: Tensor) -> float:
    """Return the mean KL(engine || trainer) of [b, s, vocabulary] log-probabilities, in nats."""
    return float((engine.exp() * (engine - trainer)).sum(dim=-1).mean())


@torch.no_grad()
def log_probs(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return [b, s, vocabulary] log-probabilities in fp32."""
    logits: Tensor = model(**inputs(batch, LENGTH))
    return logits.float().log_softmax(dim=-1)


def recorded(model: Any, batch: dict[str, Tensor], rows: Tensor) -> tuple[Tensor, Any, Any]:
    """Return a forward's log-probabilities, its routes and its positions."""
    with mrr.record(model, positions=True) as recording:
        recording.microbatch(rows, model)
        seen = log_probs(model, batch)
    return seen, recording.trace(), recording.positions()
