"""Which settings of a TransformerConfig keep a router from being replayed exactly, each by the name of its field."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_router_replay.mcore.compat import TESTED

KNOWN_MOE_FIELDS = frozenset(
    f"moe_{name}"
    for name in """
    apply_probs_on_input aux_loss_coeff combine_bwd_dtype deepep_num_sms dispatch_fwd_dtype enable_deepep
    enable_routing_replay expert_capacity_factor expert_rank_capacity_factor extended_tp ffn_hidden_size
    flex_dispatcher_backend flex_dispatcher_num_sms grad_scale_func grouped_gemm hybridep_num_blocks_permute
    hybridep_num_blocks_unpermute hybridep_num_sms hybridep_num_sms_preprocessing
    hybridep_pad_uneven_dispatch_inputs input_jitter_eps latent_size layer_freq layer_recompute
    mlp_glu_interleave_size n_hash_layers ncclep_static_shape ncclep_zero_copy pad_expert_input_to_capacity
    pad_experts_for_cuda_graph_inference paged_stash paged_stash_buffer_size_factor_cpu
    paged_stash_buffer_size_factor_cuda paged_stash_page_size per_layer_logging permute_fusion
    permute_fusion_into_hybridep router_bias_update_rate router_dtype router_enable_expert_bias router_force_biased
    router_force_load_balancing router_fusion router_group_topk router_load_balancing_type router_num_groups
    router_padding_for_fp8 router_padding_for_quantization router_pre_softmax router_quantile_balancing_ema
    router_score_function router_topk router_topk_limited_devices router_topk_scaling_factor shared_expert_gate
    shared_expert_glu_interleave_size shared_expert_intermediate_size shared_expert_overlap single_grouped_bias
    single_grouped_weight token_dispatcher_type token_drop_policy token_dropping use_grouped_tensor
    use_legacy_grouped_gemm z_loss_coeff
    """.split()
)
"""The `moe_*` fields whose effect on routing was read, in Megatron-Core 0.16.1 to 0.19.2 and in main of August 2026."""

_KNOWN_BALANCING = {"none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing"}


def config_refusals(config: Any, router: TopKRouter) -> Iterator[str]:
    """Yield why a router of this config cannot be replayed exactly, in any version of Megatron-Core."""
    for name in _balancing_types(config):
        if name in ("sinkhorn", "quantile_balancing"):
            yield f"moe_router_load_balancing_type={name!r} selects experts without the top-k that is replayed"
    if config.moe_router_force_load_balancing:
        yield "moe_router_force_load_balancing=True replaces the logits by random ones"
    # Fields of later versions are absent in earlier ones.
    if getattr(config, "moe_router_force_biased", None) is not None:
        yield f"moe_router_force_biased={config.moe_router_force_biased} replaces the logits by random ones"
    yield from _token_drop_refusals(config, router)
    yield from _cuda_graph_refusals(config)


def mtp_refusals(config: Any) -> Iterator[str]:
    """Yield why a router of a multi-token-prediction layer cannot even be left live under a session."""
    depths = config.mtp_num_layers or 0
    if getattr(config, "mtp_use_repeated_layer", False) and depths > 1:
        yield (
            f"mtp_use_repeated_layer=True with mtp_num_layers={depths}: this router routes {depths} times a forward, of "
            "which a trace holds one; set mtp_use_repeated_layer=False"
        )


def untested_version_refusals(config: Any, version: str) -> Iterator[str]:
    """Yield what a Megatron-Core newer than all tested ones is asked to do that nobody here has read."""
    newest = f"Megatron-Core {version} is newer than {TESTED[-1]}, the newest that was tested"
    for name, value in unknown_moe_settings(config).items():
        yield f"{name}={value!r} is unknown here: {newest}. Leave it at its default, or use a tested version"
    for name in _balancing_types(config):
        if name not in _KNOWN_BALANCING:
            yield f"moe_router_load_balancing_type={name!r} is unknown here: {newest}"
    if config.moe_expert_capacity_factor is not None:
        yield (
            f"moe_expert_capacity_factor={config.moe_expert_capacity_factor} drops tokens behind the selection, so routing "
            f"maps cannot be verified, and {newest}: there sessions verify every map"
        )


def unknown_moe_settings(config: Any) -> dict[str, Any]:
    """Return the `moe_*` fields of a config that are not in KNOWN_MOE_FIELDS and not at their default, with their values."""
    unknown = {}
    # `router-replay doctor` has a file's values, without the class that would check them.
    for field in dataclasses.fields(config if dataclasses.is_dataclass(config) else TransformerConfig):
        if not field.name.startswith("moe_") or field.name in KNOWN_MOE_FIELDS:
            continue
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        value = getattr(config, field.name)
        if default is dataclasses.MISSING or value != default:
            unknown[field.name] = value
    return unknown


def _balancing_types(config: Any) -> list[str]:
    balancing = config.moe_router_load_balancing_type
    return list(balancing) if isinstance(balancing, list) else [balancing]


def _token_drop_refusals(config: Any, router: TopKRouter) -> Iterator[str]:
    if getattr(config, "moe_expert_rank_capacity_factor", None) is not None:
        yield (
            f"moe_expert_rank_capacity_factor={config.moe_expert_rank_capacity_factor}: the dispatcher drops what a rank "
            "has no room for, behind the selection and without a trace; leave it unset"
        )
    if getattr(config, "moe_paged_stash", False):
        yield "moe_paged_stash=True runs a step again when its buffer is full, and then other micro-batches come next"
    factor = config.moe_expert_capacity_factor
    if factor is None or config.moe_token_drop_policy != "probs":
        return
    # An expert's capacity is ceil(num_tokens * topk / num_experts * factor); it takes at most num_tokens.
    needed = router.num_experts / router.topk
    if factor < needed and not math.isclose(factor, needed):
        yield (
            f"moe_token_drop_policy='probs' with moe_expert_capacity_factor={factor}: live probabilities decide which "
            f"tokens are dropped; use 'position', or a factor of at least num_experts / topk = {needed:g}"
        )


def _cuda_graph_refusals(config: Any) -> Iterator[str]:
    implementation = getattr(config, "cuda_graph_impl", "none")
    if implementation == "none":
        return
    # 0.18 renamed cuda_graph_scope to cuda_graph_modules, and keeps the old name at None.
    field = "cuda_graph_modules" if hasattr(config, "cuda_graph_modules") else "cuda_graph_scope"
    chosen = getattr(config, field)
    # Members of an enum in a model's config, strings in a file that `router-replay doctor` reads.
    names = [str(getattr(each, "name", each)) for each in (chosen if isinstance(chosen, list) else [chosen]) if each]
    if implementation == "full_iteration":
        names = ["full_iteration"]
    elif not chosen and _captures_whole_inference_only(config):
        return
    # Empty is the whole layer; each name that is not listed here leaves the router out of the graph.
    captured = sorted(set(names or ["full"]) & {"full", "full_iteration", "moe", "moe_router", "moe_preprocess"})
    if captured:
        yield (
            f"cuda_graph_impl={implementation!r} with {field} {captured}: a captured router would repeat the routes of "
            "the capture. Leave the router out of the graph"
        )


def _captures_whole_inference_only(config: Any) -> bool:
    """Return whether inference runs as one graph of the whole model, which leaves training without any.

    Source: Megatron-Core 0.18.2, TransformerLayer.create_mcore_cudagraph_manager: with no cuda_graph_modules, layers get a
    graph of their own unless inference_cuda_graph_scope is block.
    """
    scope = getattr(config, "inference_cuda_graph_scope", None)
    return config.cuda_graph_impl == "local" and getattr(scope, "name", scope) == "block"
