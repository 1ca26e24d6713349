"""A tiny HybridModel (MambaModel before 0.18) of Mamba, attention and MoE layers, as its pattern orders them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.testing.global_parameters import load_global_parameters
from megatron_router_replay.testing.packed_attention import PackedAttention
from tests.support.tiny_gpt import random_parameter


class CausalMean(nn.Module):
    """Stands for the mixer of a MambaLayer: each position becomes the mean of those up to it.

    Megatron-Core's own MambaMixer raises without the package mamba_ssm, whose kernels are written for GPUs.
    """

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__()

    def forward(self, hidden_states: Tensor, **options: Any) -> tuple[Tensor, None]:
        """Return [s, b, h] of [s, b, h], and no bias."""
        count = torch.arange(1, len(hidden_states) + 1, device=hidden_states.device, dtype=hidden_states.dtype)
        return hidden_states.cumsum(dim=0) / count.view(-1, 1, 1), None


def build_tiny_hybrid(
    config: Any,
    layout: ParallelSizes,
    pattern: str,
    *,
    vocab_size: int = 320,
    seed: int = 1234,
    small_attention: bool = False,
) -> list[Any]:
    """Return this rank's HybridModel as a list of one chunk, in training mode; weights as of `build_tiny_gpt`.

    Args:
        config: from `tiny_gpt_config` for the same layout, which is initialised, with num_layers of the pattern.
        layout: parallel sizes; no virtual stages.
        pattern: `*` is attention, `E` an MoE layer, `M` Megatron's MambaLayer around a `CausalMean`; `|` ends a pipeline
            stage, `/` begins an MTP layer: `*E|ME/*E`. A GPT model of two layers is `*E*E`.
        vocab_size: a multiple of tp_size.
        seed: of the weights.
        small_attention: `PackedAttention`, which packed sequences need.
    """
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    # A hybrid model's layers are halves of a GPT layer: the attention and the experts are layers of their own.
    whole = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    ).submodules
    if small_attention:
        whole.self_attention.submodules.core_attention = PackedAttention
    attention = TransformerLayerSubmodules(
        input_layernorm=whole.input_layernorm,
        self_attention=whole.self_attention,
        self_attn_bda=whole.self_attn_bda,
    )
    experts = TransformerLayerSubmodules(
        pre_mlp_layernorm=whole.pre_mlp_layernorm, mlp=whole.mlp, mlp_bda=whole.mlp_bda
    )
    mamba = MambaLayerSubmodules(
        norm=WrappedTorchNorm, mixer=ModuleSpec(module=CausalMean), mamba_bda=get_bias_dropout_add
    )
    mtp = {}
    if "/" in pattern:
        submodules = MultiTokenPredictionLayerSubmodules(
            enorm=WrappedTorchNorm,
            hnorm=WrappedTorchNorm,
            eh_proj=ColumnParallelLinear,
            mtp_model_layer=None,
            layer_norm=WrappedTorchNorm,
        )
        layer = ModuleSpec(module=MultiTokenPredictionLayer, submodules=submodules)
        mtp["mtp_block_spec"] = ModuleSpec(
            module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
        )
    stack, stack_submodules, model_class, names = _hybrid_classes()
    spec = ModuleSpec(
        module=stack,
        submodules=stack_submodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            moe_layer=ModuleSpec(module=TransformerLayer, submodules=experts),
            **mtp,
        ),
    )
    model = model_class(
        config=config,
        vocab_size=vocab_size,
        max_sequence_length=512,
        **dict(zip(names, (spec, pattern))),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    )
    load_global_parameters([model], partial(random_parameter, seed=seed))
    return [model]


def _hybrid_classes() -> tuple[Any, Any, Any, tuple[str, str]]:
    """Return the classes of the stack, its submodules and the model, and what the model calls stack and pattern."""
    try:
        from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ModuleNotFoundError:  # before 0.18, where the last norm of a stack is always Transformer Engine's
        from megatron.core.models.mamba import MambaModel
        from megatron.core.ssm import mamba_block
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        mamba_block.TENorm = WrappedTorchNorm
        names = ("mamba_stack_spec", "hybrid_override_pattern")
        return mamba_block.MambaStack, mamba_block.MambaStackSubmodules, MambaModel, names
    return HybridStack, HybridStackSubmodules, HybridModel, ("hybrid_stack_spec", "hybrid_layer_pattern")
