"""A GPTModel of Megatron-Core with MoE layers, with the settings that a CPU and gloo need, for any parallel layout."""

from typing import Any

import torch

from megatron_router_replay.testing.layout import ParallelSizes


def gpt_config(layout: ParallelSizes, **fields: Any) -> Any:
    """Return a TransformerConfig for this layout, with what gloo needs (see `megatron_on_cpu`).

    fp32, SwiGLU, RMSNorm, qk-norm, no bias, no dropout, no aux loss, all-to-all dispatcher, deterministic.

    Args:
        layout: parallel sizes; sets the config's parallel fields.
        fields: the model's sizes, and any other field of TransformerConfig.
    """
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    own: dict[str, Any] = {
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
    kind = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    return kind(**{**own, **fields})


def build_gpt(
    config: Any, layout: ParallelSizes, *, vocab_size: int, rotary_base: int = 10000, core_attention: type | None = None
) -> list[Any]:
    """Return this rank's GPTModel chunks, one per virtual stage, in training mode; `load_global_parameters` fills them.

    Args:
        config: from `gpt_config` for the same layout, which is initialised.
        layout: parallel sizes.
        vocab_size: a multiple of tp_size.
        rotary_base: base of the rotary embedding.
        core_attention: a class in the place of Megatron-Core's DotProductAttention, which refuses context parallelism
            and packed sequences.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_decoder_layer_specs,
        get_gpt_mtp_block_spec,
    )

    options: dict[str, Any] = {"use_transformer_engine": False, "normalization": config.normalization}
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks = []
    for stage in range(layout.num_chunks):
        vp_stage = None if layout.vp_size is None else stage
        block_spec = get_gpt_decoder_block_spec(config, vp_stage=vp_stage, **options)
        # A stage with an MTP layer but no decoder layer still needs one to copy.
        layer_specs = block_spec.layer_specs or get_gpt_decoder_layer_specs(config, **options)[-1:]
        for spec in layer_specs if core_attention else ():
            spec.submodules.self_attention.submodules.core_attention = core_attention
        mtp_spec = None
        if config.mtp_num_layers:
            source = block_spec if block_spec.layer_specs else layer_specs[0]
            mtp_spec = get_gpt_mtp_block_spec(config, source, use_transformer_engine=False, vp_stage=vp_stage)
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=block_spec,
                vocab_size=vocab_size,
                max_sequence_length=512,  # of learned positions, which rotary ones have no use for
                pre_process=pp_rank == 0 and stage == 0,
                post_process=pp_rank == layout.pp_size - 1 and stage == layout.num_chunks - 1,
                share_embeddings_and_output_weights=False,
                position_embedding_type="rope",
                rotary_base=rotary_base,
                mtp_block_spec=mtp_spec,
                vp_stage=vp_stage,
            )
        )
    return chunks
