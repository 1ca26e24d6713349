"""Megatron-Core's own balancing runs under sessions as without them. Numbers by hand."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_router_replay as mrr
from tests.unit.mcore.tiny_chunk import EXPERTS, ROWS, Chunk, non_reentrant, plain, random_trace, reentrant, tokens

pytestmark = pytest.mark.version
TIMES = {"plain": (plain, 1), "reentrant": (reentrant, 1), "non-reentrant": (non_reentrant, 2)}
"""Kind of checkpoint -> how often Megatron-Core counts a token: in each run of the router with gradients."""
OF_MEGATRON = [2, 1, 2, 3, 3, 4, 5, 6]  # counts that were there before the step


@pytest.fixture(autouse=True)
def _not_compiled(one_rank):
    """Megatron-Core compiles the method that counts, anew for every shape."""
    with torch.compiler.set_stance("force_eager"):
        yield


def balanced(coefficient: float = 0.0) -> Chunk:
    chunk = Chunk(moe_router_score_function="sigmoid")
    chunk.config.moe_router_load_balancing_type, chunk.config.moe_aux_loss_coeff = "aux_loss", coefficient
    for router in chunk.routers:
        router.routing_type = "aux_loss"
        for group in ("tp_group", "cp_group", "tp_cp_group", "tp_dp_cp_group"):
            setattr(router, group, dist.group.WORLD)
        router.enable_expert_bias, router.expert_bias = True, torch.linspace(-1, 1, EXPERTS)
        router.local_tokens_per_expert = torch.tensor(OF_MEGATRON, dtype=torch.float32)
    return chunk


def step(chunk: Chunk, session: Any = None) -> list[Tensor]:
    """Run one forward and backward; return the gradients of the routers."""
    if session is not None and session.kind != "freeze_recompute":
        session.microbatch(ROWS, padding=ROWS == -1)
    chunk(tokens(), 0).square().sum().backward()
    return [router.weight.grad for router in chunk.routers]


def counts(chunk: Chunk) -> list[list[int]]:
    """Return the tokens that each layer has counted since `balanced`."""
    before = torch.tensor(OF_MEGATRON)
    return [(router.local_tokens_per_expert.int() - before).tolist() for router in chunk.routers]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("kind", TIMES)
def test_the_expert_bias_counts_the_replayed_experts_as_megatron_core_does(kind):
    chunk, trace = balanced(), random_trace(8)
    chunk.around, times = TIMES[kind]
    with mrr.replay(chunk, trace) as session:
        step(chunk, session)
    by_hand = [torch.bincount(trace.layer(layer).flatten().int(), minlength=EXPERTS) * times for layer in (1, 2, 3)]
    assert counts(chunk) == [layer.tolist() for layer in by_hand]


@pytest.mark.parametrize("start", [mrr.record, mrr.freeze_recompute])
def test_record_and_freeze_change_neither_counts_nor_losses(start):
    live, chunk = balanced(0.5), balanced(0.5)
    live.around = chunk.around = reentrant
    expected = step(live)
    with start(chunk) as session:
        assert same(step(chunk, session), expected)
    assert counts(chunk) == counts(live)
    assert not same(expected, step(balanced())), "the loss reaches the routers"
