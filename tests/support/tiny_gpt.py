"""A tiny Megatron-Core GPT with MoE layers, for any parallel layout, with the same weights under each of them."""

import math
import zlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.testing.global_parameters import load_global_parameters
from megatron_router_replay.testing.gpt import build_gpt, gpt_config
from megatron_router_replay.testing.packed_attention import PackedAttention

SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "ffn_hidden_size": 128,
    "moe_ffn_hidden_size": 32,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
}


def tiny_gpt_config(layout: ParallelSizes, **overrides: Any) -> Any:
    """Return a TransformerConfig of `SIZES` for this layout; overrides are any of its fields."""
    return gpt_config(layout, **{**SIZES, **overrides})


def build_tiny_gpt(
    config: Any, layout: ParallelSizes, *, vocab_size: int = 320, seed: int = 1234, small_attention: bool = False
) -> list[Any]:
    """Return this rank's GPTModel chunks, one per virtual stage, in training mode.

    The weights depend on `seed` and each parameter's global name only: under every layout the ranks have parts of the
    same model, so losses and gradients can be compared.

    Args:
        config: from `tiny_gpt_config` for the same layout, which is initialised.
        small_attention: `PackedAttention`, which packed sequences need; context parallelism has it always.
    """
    attention = PackedAttention if small_attention or layout.cp_size > 1 else None
    chunks = build_gpt(config, layout, vocab_size=vocab_size, core_attention=attention)
    load_global_parameters(chunks, partial(random_parameter, seed=seed))
    return chunks


def random_parameter(name: str, shape: torch.Size, *, seed: int) -> Tensor:
    """Return a parameter drawn from its global name and the seed alone.

    Norm weights lie near one and biases near zero; of matrices, rows have length one on average, so that activations
    keep their size.
    """
    # By name, not in the order of construction: another layout builds its chunks in another order.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1.0 + 0.1 * noise
    if len(shape) == 1:
        return 0.02 * noise
    fan_in: int = 1 if "word_embeddings" in name else shape[-1]
    return noise * (1.0 / math.sqrt(fan_in))
