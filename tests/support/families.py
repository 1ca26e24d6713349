"""The routing options of model families that people train, as fields of Megatron-Core's TransformerConfig.

Source: the model scripts of miles 31f1ca96 and slime 624b824a, and Megatron-Bridge 067f987d. Sizes are the tests' own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

MLA: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
}
MLA |= {"v_head_dim": 16, "num_query_groups": None}
SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_pre_softmax": True,
}
SIGMOID |= {"moe_router_load_balancing_type": "seq_aux_loss", "moe_router_bias_update_rate": 0}
ONE_GROUP = {"moe_router_num_groups": 1, "moe_router_group_topk": 1}
GROUPS = {"moe_router_num_groups": 8, "moe_router_group_topk": 4}
SHARED = {"moe_shared_expert_intermediate_size": 8}
GATED = SHARED | {"moe_shared_expert_gate": True}
DENSE_FIRST = {"num_layers": 3, "moe_layer_freq": [0, 1, 1]}
MTP = {"mtp_num_layers": 1}


def of(
    topk: int, num_experts: int, *options: dict[str, Any], scaling: float | None = None, **more: Any
) -> dict[str, Any]:
    """Return the fields of a config."""
    merged = {name: value for each in options for name, value in each.items()}
    return (
        merged
        | {"moe_router_topk": topk, "num_moe_experts": num_experts, "moe_router_topk_scaling_factor": scaling}
        | more
    )


FAMILIES = {
    "Mixtral": of(2, 8),
    "Qwen3-MoE, Qwen3-VL": of(8, 128),
    "Qwen3-Next": of(10, 512, GATED, MTP),
    "Qwen3.5, Qwen3.6": of(8, 256, GATED, MTP),
    "gpt-oss": of(4, 32, router_bias=True),
    "DeepSeek-V3, V3.2": of(8, 256, SIGMOID, GROUPS, SHARED, MLA, DENSE_FIRST, MTP, scaling=2.5),
    "DeepSeek-V4": of(
        6, 256, SIGMOID, SHARED, MLA, scaling=1.5, moe_router_score_function="sqrtsoftplus", hash_layers=1
    ),
    "Kimi-K2, K2.5": of(8, 384, SIGMOID, ONE_GROUP, SHARED, MLA, DENSE_FIRST, scaling=2.827),
    "Moonlight": of(6, 64, SIGMOID, ONE_GROUP, SHARED, MLA, DENSE_FIRST, scaling=2.446),
    "JoyAI": of(8, 256, SIGMOID, ONE_GROUP, SHARED, MLA, DENSE_FIRST, scaling=2.5),
    "GLM-4.5, 4.7": of(8, 128, SIGMOID, SHARED, DENSE_FIRST, MTP, add_qkv_bias=True),
    "GLM-4.7-Flash": of(4, 64, SIGMOID, SHARED, MLA, DENSE_FIRST, MTP, scaling=1.8),
    "GLM-5": of(8, 256, SIGMOID, SHARED, MLA, DENSE_FIRST, scaling=2.5),
    "MiniMax-M2": of(8, 256, SIGMOID),
    "MiniMax-M3": of(4, 128, SIGMOID, SHARED, DENSE_FIRST),
    "Nemotron-3-Nano": of(6, 128, SIGMOID, ONE_GROUP, SHARED, scaling=2.5, pattern="MEM*EME"),
    "Nemotron-3-Super": of(22, 512, SIGMOID, ONE_GROUP, SHARED, scaling=5.0, pattern="MEM*EME", moe_latent_size=16),
}
"""Family -> fields of its config; a list of layers stands for its first dense ones.

Three are not Megatron-Core's: `pattern` of hybrid layers, `hash_layers` that a table of tokens routes, `router_bias`.
"""


def routing_options(family: str) -> dict[str, Any]:
    """Return the fields of a family's config without those of its size."""
    sizes = ("moe_router_topk", "num_moe_experts", "num_layers", "moe_layer_freq", "hash_layers", "pattern")
    return {name: value for name, value in FAMILIES[family].items() if name not in sizes}


class _Linear(torch.nn.Linear):
    """Stands for Transformer Engine's linear layer."""

    def __init__(self, size: int, output_size: int, *, bias: bool, **options: Any) -> None:
        super().__init__(size, output_size, bias=bias)

    def forward(self, hidden: Tensor) -> Any:
        return super().forward(hidden), None


@contextmanager
def latent_projections() -> Iterator[None]:
    """Let a latent MoE be built, whose projections Megatron-Core makes of Transformer Engine's linear layers alone."""
    from megatron.core.transformer.moe import moe_layer

    with (
        mock.patch.object(moe_layer, "HAVE_TE", True),
        mock.patch.object(moe_layer, "TELinear", _Linear, create=True),
    ):
        yield
