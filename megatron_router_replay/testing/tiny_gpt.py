"""A tiny Megatron-Core GPT with MoE layers, for any parallel layout, with the same weights under each of them."""

from functools import partial
from typing import Any

import torch

from megatron_router_replay.errors import RouterReplayError
from megatron_router_replay.testing.attention import SmallAttention
from megatron_router_replay.testing.global_parameters import load_global_parameters, random_parameter
from megatron_router_replay.testing.layout import ParallelSizes


def tiny_gpt_config(layout: ParallelSizes, **overrides: Any) -> Any:
    """Return a TransformerConfig of a small MoE model for this layout.

    4 layers, hidden 64, 4 heads in 2 query groups, 8 SwiGLU experts, top-2, fp32, RMSNorm, qk-norm, no bias, no
    dropout, no aux loss, all-to-all dispatcher, deterministic; and what gloo needs (see `megatron_on_cpu`).

    Args:
        layout: parallel sizes; sets the config's parallel fields.
        overrides: any field of TransformerConfig.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 128,
        "moe_ffn_hidden_size": 32,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_dtype": "fp32",
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "deterministic_mode": True,
        # Also marks the parameters that tensor parallelism splits, which Megatron's gradient norm needs. The values are
        # those of load_global_parameters in the end: Megatron's own would depend on the layout.
        "perform_initialization": True,
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "deallocate_pipeline_outputs": False,
        "tensor_model_parallel_size": layout.tp_size,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pp_size,
        "virtual_pipeline_model_parallel_size": layout.vp_size,
        "context_parallel_size": layout.cp_size,
        "expert_model_parallel_size": layout.ep_size,
        "expert_tensor_parallel_size": layout.expert_tp_size,
        "batch_p2p_comm": layout.vp_size is None,
        "overlap_p2p_comm": layout.vp_size is not None,
    }
    return TransformerConfig(**{**fields, **overrides})


def build_tiny_gpt(
    config: Any,
    layout: ParallelSizes,
    *,
    vocab_size: int = 320,
    rotary_base: int = 10000,
    seed: int = 1234,
    core_attention: str | None = None,
) -> list[Any]:
    """Return this rank's GPTModel chunks, one per virtual stage, in training mode.

    The weights depend on `seed` and each parameter's global name only: under every layout the ranks have parts of the
    same model, so losses and gradients can be compared.

    Args:
        config: from `tiny_gpt_config` for the same layout, which is initialised.
        layout: parallel sizes.
        vocab_size: a multiple of tp_size.
        rotary_base: base of the rotary embedding.
        seed: of the weights.
        core_attention: "local" (Megatron's DotProductAttention), "small" (`SmallAttention`: context parallelism and packed
            sequences) or None: "small" if cp_size > 1, else "local".
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    core_attention = core_attention or ("small" if layout.cp_size > 1 else "local")
    if core_attention not in ("local", "small"):
        raise RouterReplayError(f"MRR904: core_attention is 'local' or 'small', got {core_attention!r}.")
    chunks = []
    vp_stages: list[int | None] = [None] if layout.vp_size is None else list(range(layout.vp_size))
    for vp_stage in vp_stages:
        block_spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
        )
        if core_attention == "small":
            _use_small_attention(block_spec.layer_specs)
        mtp_spec = None
        if config.mtp_num_layers:
            # A stage with an MTP layer but no decoder layer still needs one to copy.
            layer_source = block_spec if block_spec.layer_specs else _last_layer_spec(config, core_attention)
            mtp_spec = get_gpt_mtp_block_spec(config, layer_source, use_transformer_engine=False, vp_stage=vp_stage)
        first, last = _is_first_and_last(vp_stage, layout)
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=block_spec,
            vocab_size=vocab_size,
            max_sequence_length=512,  # of learned positions, which rotary ones have no use for
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            rotary_base=rotary_base,
            mtp_block_spec=mtp_spec,
            vp_stage=vp_stage,
        )
        chunks.append(chunk)
    load_global_parameters(chunks, partial(random_parameter, seed=seed))
    return chunks


def _is_first_and_last(vp_stage: int | None, layout: ParallelSizes) -> tuple[bool, bool]:
    from megatron.core import parallel_state

    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    first = pp_rank == 0 and vp_stage in (None, 0)
    last = pp_rank == layout.pp_size - 1 and vp_stage in (None, layout.num_chunks - 1)
    return first, last


def _last_layer_spec(config: Any, core_attention: str) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs

    spec = get_gpt_decoder_layer_specs(config, use_transformer_engine=False, normalization=config.normalization)[-1]
    if core_attention == "small":
        _use_small_attention([spec])
    return spec


def _use_small_attention(layer_specs: list[Any]) -> None:
    for spec in layer_specs:
        spec.submodules.self_attention.submodules.core_attention = SmallAttention
