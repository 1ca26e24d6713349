"""A tiny chunk whose routers balance: with an expert bias, with auxiliary losses; and what Megatron-Core logs of these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.unit.mcore.tiny_chunk import EXPERTS, KINDS, TOPK, Chunk, plain


@pytest.fixture(autouse=True)
def not_compiled() -> Iterator[None]:
    """Megatron-Core compiles the method that counts, anew for every shape: ten seconds for these few numbers."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A group of this process alone, over which Megatron-Core adds up the load for its losses."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def balanced(**options: Any) -> Chunk:
    """A chunk of 3 layers on which every balancing works without a GPU, that Megatron-Core allocates its counters on."""
    bias = options.pop("moe_router_enable_expert_bias", False)
    asked = {name: options.pop(name) for name in list(options) if name.startswith("moe_aux") or "balancing" in name}
    chunk = Chunk(**options)
    for name, value in asked.items():
        setattr(chunk.config, name, value)
    for router in chunk.routers:
        router.routing_type = chunk.config.moe_router_load_balancing_type
        for group in ("tp_group", "cp_group", "tp_cp_group", "tp_dp_cp_group"):
            setattr(router, group, dist.group.WORLD)
        if bias:
            router.enable_expert_bias = True
            router.local_tokens_per_expert = torch.zeros(EXPERTS)
            router.expert_bias = torch.linspace(-1, 1, EXPERTS)
        if router.get_aux_loss_coeff("global_aux_loss") > 0:
            router.global_tokens_per_expert = torch.zeros(EXPERTS)
            router.ga_steps = torch.tensor(0.0)
    return chunk


_KINDS = ("reentrant", "non-reentrant", "by hooks", "non-reentrant in reentrant", "reentrant in non-reentrant")
BALANCED_KINDS = {"plain": plain} | {name: KINDS[name][0] for name in _KINDS}


def counters(chunk: Chunk) -> list[list[int]]:
    """What the expert-bias counters of each layer hold."""
    return [router.local_tokens_per_expert.int().tolist() for router in chunk.routers]


def switch_loss(scores: Tensor, load: Tensor, num_tokens: float, coefficient: float) -> Tensor:
    """Megatron-Core's own loss of these tokens' scores [n, EXPERTS] and load [EXPERTS]."""
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

    return switch_load_balancing_loss_func(
        probs=scores,
        tokens_per_expert=load,
        total_num_tokens=num_tokens,
        topk=TOPK,
        num_experts=EXPERTS,
        moe_aux_loss_coeff=coefficient,
    )


def logged(name: str) -> Tensor | None:
    """What Megatron-Core has logged of an auxiliary loss since the last call, by layer; None: it was never logged."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # up to 0.17
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        values = get_moe_layer_wise_logging_tracker().get(name, {}).get("values")
    else:
        entry = get_moe_metrics_tracker().metrics.get(name)
        values = None if entry is None else entry.values
    if values is None:
        return None
    copied: Tensor = values.clone()
    values.zero_()
    return copied
