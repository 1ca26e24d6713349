"""How much the second choice weighs that replay leaves live: a model with sparse attention (DSA) and experts.

The engine is the model in bf16, the trainer the same weights in fp32, both Megatron-Core's own classes. This library replays
routes. By hand, the functions that choose return what they returned in the engine's forward, call by call: that of positions,
and as a control that of routes, too. Needs Megatron-Core 0.19.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from tests.support.tiny_dsa import build_tiny_dsa, dsa_config

LAYOUT = ParallelSizes()
LAYERS, EXPERTS, TOPK, VOCAB = 4, 32, 4, 64
BATCH, LENGTH, INDEX_TOPK = 8, 128, 16
ARMS = ("nothing", "routes", "positions", "both", "by_hand")

Calls = list[Any]
"""What a function returned, call by call."""


def measure(steps: int, seed: int, num_batches: int) -> dict[str, Any]:
    """Train a model for some steps, and compare engine and trainer on sequences that it has not seen.

    Args:
        steps: of training with the indexers' loss; 0: random weights.
        num_batches: of 8 x 128 tokens that are compared.

    Returns:
        For each of ARMS the KL(engine || trainer) of the next-token distributions in nats, a mean for each batch; loss of the
        trainer there; flipped_routes and flipped_positions, shares of decisions in which the live trainer chose another set;
        top_tokens, the share of the KL by hand that the 1 % of tokens with most of it have.
    """
    LAYOUT.initialize(seed=seed)
    fields = {"num_layers": LAYERS, "num_moe_experts": EXPERTS, "moe_router_topk": TOPK, "dsa_indexer_topk": INDEX_TOPK}
    loss_of_indexers = {"dsa_indexer_loss_coeff": 1.0, "dsa_indexer_use_sparse_loss": False}
    trainer = build_tiny_dsa(dsa_config(LAYOUT, **fields, **loss_of_indexers), vocab_size=VOCAB, seed=seed)
    train(trainer, steps, seed)
    in_bf16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    engine = build_tiny_dsa(dsa_config(LAYOUT, **fields, **in_bf16), vocab_size=VOCAB, seed=seed).bfloat16()
    engine.load_state_dict(trainer.state_dict())
    batches = [compare(engine, trainer, repeating_batch(seed + 1_000_000 + i)) for i in range(num_batches)]
    result: dict[str, Any] = {arm: [float(each[arm].mean()) for each in batches] for arm in ARMS}
    for name in ("loss", "flipped_routes", "flipped_positions"):
        result[name] = sum(float(each[name]) for each in batches) / num_batches
    floor = torch.cat([each["by_hand"].flatten() for each in batches]).sort(descending=True).values
    return result | {"top_tokens": float(floor[: len(floor) // 100].sum() / floor.sum())}


@torch.no_grad()
def compare(engine: Any, trainer: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the KL of each token [b, s] in each arm, the loss, and the shares that flipped."""
    rows = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
    with mrr.record(engine) as recording, noted_positions() as positions:
        recording.microbatch(rows, engine)
        expected = log_probs(engine, batch)
    with noted_routes() as routes:
        assert torch.equal(log_probs(engine, batch), expected), "the engine's second forward is its first one"
    with noted_positions() as own_positions, noted_routes() as own_routes:
        own = log_probs(trainer, batch)
    result = {"nothing": divergence(expected, own)}
    for arm in ARMS[1:]:
        with ExitStack() as stack:
            if arm in ("routes", "both"):
                session = stack.enter_context(mrr.replay(trainer, recording.trace()))
                session.microbatch(rows, trainer)
            if arm == "by_hand":
                stack.enter_context(noted_routes(routes))
            if arm != "routes":
                stack.enter_context(noted_positions(positions))
            result[arm] = divergence(expected, log_probs(trainer, batch))
    result["loss"] = -own.gather(2, batch["tokens"][:, 1:].unsqueeze(2)).mean()
    return result | {
        "flipped_routes": flipped(routes, own_routes),
        "flipped_positions": flipped(positions, own_positions),
    }


@contextmanager
def noted_positions(given: Calls | None = None) -> Iterator[Calls]:
    """Note the positions that indexers choose, or give them others."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    original, noted = dsa.fused_qk_topk_naive, Calls()

    def choose(*args: Any, **kwargs: Any) -> Any:
        scores, positions = original(*args, **kwargs)
        noted.append(positions if given is None else given[len(noted)])
        return scores, noted[-1]

    with mock.patch.object(dsa, "fused_qk_topk_naive", choose):
        yield noted


@contextmanager
def noted_routes(given: Calls | None = None) -> Iterator[Calls]:
    """Note the experts that routers choose, or give them others. Only they choose among as many as there are experts."""
    original, noted = torch.topk, Calls()

    def choose(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
        chosen = original(scores, *args, **kwargs)
        if scores.shape[-1] != EXPERTS:
            return chosen
        noted.append(chosen[1] if given is None else given[len(noted)])
        return scores.gather(-1, noted[-1]), noted[-1]

    with mock.patch.object(torch, "topk", choose):
        yield noted


def flipped(some: Calls, others: Calls) -> Tensor:
    """Return the share of decisions that name another set."""
    assert len(some) == len(others) == LAYERS
    sets = [torch.stack(calls).sort(dim=-1).values for calls in (some, others)]
    return (sets[0] != sets[1]).any(dim=-1).float().mean()


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


def divergence(engine: Tensor, trainer: Tensor) -> Tensor:
    """Return KL(engine || trainer) of [b, s, vocabulary] log-probabilities, [b, s] in nats."""
    return (engine.exp() * (engine - trainer)).sum(dim=-1)


def log_probs(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return [b, s, vocabulary] log-probabilities in fp32."""
    logits: Tensor = model(**inputs(batch, LENGTH))
    return logits.float().log_softmax(dim=-1)
