"""A tiny GPTModel with sparse attention (DSA over absorbed MLA) and MoE layers, of Megatron-Core's own classes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.testing.tiny_gpt import tiny_gpt_config

INDEX_TOPK = 4


class DuplicatedLinear(nn.Module):
    """A linear layer that every tensor-parallel rank has as a whole, where the specs want Transformer Engine's."""

    def __init__(self, input_size: int, output_size: int, **unused: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(output_size, input_size) / input_size**0.5)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return nn.functional.linear(hidden, self.weight), None


def dsa_config(layout: ParallelSizes, **overrides: Any) -> Any:
    """Return the config of a model whose every token attends to INDEX_TOPK positions."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    of_gpt = tiny_gpt_config(layout)
    values = {
        each.name: getattr(of_gpt, each.name)
        for each in fields(type(of_gpt))
        if each.init and each.name not in ("init_method", "output_layer_init_method", "embedding_init_method")
    }
    values |= {
        "multi_latent_attention": True,
        "num_query_groups": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 8,
        "rope_type": "rope",
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": 2,
        "dsa_indexer_head_dim": 16,
        "dsa_indexer_topk": INDEX_TOPK,
        "dsa_indexer_loss_coeff": 0.0,
        "dsa_indexer_rotate_activation": False,  # needs a kernel
        "cp_comm_type": "allgather",
        "transformer_impl": "local",
    }
    return MLATransformerConfig(**{**values, **overrides})


def build_tiny_dsa(config: Any, *, vocab_size: int = 320, seed: int = 1234, vp_stage: int | None = None) -> Any:
    """Return the model, or this pipeline stage of it, with the same weights on every tensor- and context-parallel rank."""
    from megatron.core import parallel_state
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    class Backend(LocalSpecProvider):
        def linear(self) -> type:
            return DuplicatedLinear

    backend = Backend()
    layers = specs.get_transformer_layer_with_experimental_attention_variant_spec(config, backend=backend)
    for layer in layers:
        attention = layer.submodules.self_attention.submodules
        attention.linear_q_down_proj = attention.linear_kv_down_proj = backend.column_parallel_linear()
    offset = get_transformer_layer_offset(config, vp_stage)
    layers = layers[offset : offset + get_num_layers_to_build(config, vp_stage)]
    block = TransformerBlockSubmodules(layer_specs=layers, layer_norm=backend.layer_norm(rms_norm=True))
    torch.manual_seed(seed)
    return GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=vocab_size,
        max_sequence_length=512,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
