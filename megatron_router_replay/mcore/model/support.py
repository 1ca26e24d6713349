"""Checks that routers can be replayed exactly, and reasons for those that cannot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from megatron_router_replay.checks import warn
from megatron_router_replay.errors import UnsupportedRouterError, listed
from megatron_router_replay.mcore.model.find import FoundRouter, WalkedChunk
from megatron_router_replay.mcore.model.upstream import (
    INFERENCE_ROUTERS,
    TESTED,
    captured_by_cuda_graphs,
    graph_field,
    inference_refusals,
    is_newer_than_tested,
    megatron_version,
    must_verify,
)

_KNOWN_ROUTERS = (TopKRouter, *INFERENCE_ROUTERS)


def is_hashed(router: Any) -> bool:
    """Return whether a table of token ids routes this layer, as DeepSeek-V4's first ones.

    Source: Megatron-LM dev d48bd6b, router.TopKRouter._hash_routing: `tid2eid`, [vocab, topk], without any replay object;
    radixark/Megatron-LM 2e64d788, TopKRouter._init_routing_mode: `tid2eid` is None in all layers but these.
    """
    return bool(getattr(router, "is_hash_layer", False)) or getattr(router, "tid2eid", None) is not None


def check_supported(routers: Sequence[FoundRouter]) -> bool:
    """Raise unless every router can be replayed exactly; return whether a session must verify every routing map.

    It must where the code that routes was never read: a Megatron-Core newer than all tested ones, a trainer's own function.

    Args:
        routers: of all the model's chunks on this rank.

    Raises:
        UnsupportedRouterError: names the layers at fault and the config field.
    """
    refused: dict[str, list[FoundRouter]] = {}
    for found, reasons in zip(routers, refusals_of(routers)):
        for reason in reasons:
            refused.setdefault(reason, []).append(found)
    if refused:
        # Most settings are the same in all layers: one line for all of them.
        lines = (
            f"{found[0] if len(found) == 1 else f'layers {listed([each.layer_number for each in found])}'}: {reason}"
            for reason, found in refused.items()
        )
        raise UnsupportedRouterError("MRR401: no session is exact with this model:\n  " + "\n  ".join(lines))
    if is_newer_than_tested(megatron_version()):
        warn(
            "untested version",
            f"Megatron-Core {megatron_version()} is newer than {TESTED[-1]}, the newest that was tested: sessions verify "
            "every routing map, as with verify=True",
            once=True,
        )
    return must_verify()


def refusals_of(routers: Sequence[FoundRouter]) -> list[list[str]]:
    """Return, for each router, why it cannot be replayed exactly in this model; empty if it can."""
    reasons = [refusals(found.router, found.dispatchers) for found in routers]
    for found, of_router in zip(routers, reasons):
        # In this order, because more reasons for a router that is refused anyway would hide the cause.
        if not of_router and found.is_graphed:
            of_router.append(
                _captured(found.router.config, "the whole layer ('transformer_engine' captures attention alone)")
            )
        if not of_router and found.is_mtp:
            of_router += mtp_refusals(found.router.config)
        if not of_router:
            of_router += _uneven_refusals(found, routers[0])
    return reasons


def _uneven_refusals(found: FoundRouter, first: FoundRouter) -> Iterator[str]:
    """Yield how a router differs from the first one: a trace has one topk and one num_experts for all layers."""
    for name in ("topk", "num_experts"):
        one, other = getattr(first.router, name, None), getattr(found.router, name, None)
        if one is not None and one != other:
            yield f"{name}={other}, but {first} has {one}: a trace has one {name} for all layers"


def refusals(router: nn.Module, dispatchers: Sequence[Any] = ()) -> list[str]:
    """Return why this router cannot be replayed exactly; empty if it can.

    Args:
        dispatchers: that get its output, and compare its map in each call.
    """
    if not isinstance(router, TopKRouter):
        return [f"router class {type(router).__name__} is not a TopKRouter; nothing is known of how it selects experts"]
    if reason := _override_refusal(router, dispatchers):
        return [reason]
    # `forward` and `routing` may be wrapped on the module: each call proves that the wrapper leaves the map alone.
    reasons = list(inference_refusals(router)) + list(_foreign_dispatch_refusals(router))
    reasons += config_refusals(router.config, router)
    return reasons


def _override_refusal(router: TopKRouter, dispatchers: Sequence[Any]) -> str:
    """Return why a subclass that overrides one of the methods that choose experts cannot be replayed; "": it can.

    A `routing` may call `super().routing` and change the probabilities: the dispatcher proves in each call that the map is
    the one of TopKRouter. One that takes its experts from the probabilities proves nothing.

    Source: Megatron-Bridge 067f987d, Gemma4TopKRouter.routing scales probabilities; miles 31f1ca96, InklingRouter.forward
    selects experts too and returns every second result from a cache.
    """
    definers = {
        name: next(each for each in type(router).__mro__ if name in vars(each)) for name in ("forward", "routing")
    }
    changed = [name for name, definer in definers.items() if definer not in _KNOWN_ROUTERS]
    if not changed:
        return ""
    text = f"router class {type(router).__name__} overrides TopKRouter.{' and '.join(changed)}"
    if "forward" in changed:
        return text
    if not dispatchers:
        return f"{text}, and its layer has no token dispatcher, which would compare the map that it returns"
    if takes_topk_again(router.config):
        return (
            f"{text}, and the dispatcher takes a top-k of the probabilities that it returns; use "
            "moe_token_dispatcher_type='alltoall' or the flex backend 'hybridep'"
        )
    return ""


def _foreign_dispatch_refusals(router: Any) -> Iterator[str]:
    """Yield why the dispatcher sends tokens to different experts than the router chose.

    Source: slime 624b824a, routing_replay.register_ordered_topk_capture and alignment.deepgemm_moe_forward: the bridge keeps
    the indices of its own top-k and gives them to DeepEP in place of the routing map.
    """
    if getattr(router, "_slime_ordered_topk_capture_registered", False):
        yield (
            "slime's DeepEP alignment bridge dispatches by a top-k of its own, not by the routing map of the router; build "
            "the model without the bridge"
        )


def takes_topk_again(config: Any) -> bool:
    """Return whether the token dispatcher drops the routing map and takes a top-k of the probabilities.

    Source: Megatron-Core 0.16.1 to main, token_dispatcher._DeepepManager.setup_metadata, and _NCCLEPManager's on main;
    _HybridEPManager keeps the map.
    """
    is_flex = getattr(config, "moe_token_dispatcher_type", None) == "flex"
    return is_flex and config.moe_flex_dispatcher_backend in ("deepep", "ncclep")


# ---- sparse attention
def find_indexers(walks: Sequence[WalkedChunk]) -> list[str]:
    """Return the names of layers that attend to positions which an indexer chooses, in order.

    Args:
        walks: the chunks on this rank.

    Source: Megatron-Core 0.16.1 to 0.19.2, experimental_attention_variant.dsa: DSAttention has a DSAIndexer, or shares the
    positions of an earlier layer's.
    """
    names = []
    for walked in walks:
        paths = set()
        for path, module, mtp_layer, _ in walked.modules:
            # By name, because importing `dsa` takes seconds. An indexer inside such an attention is not named again.
            is_sparse = any(kind.__name__.endswith(("DSAttention", "Indexer")) for kind in type(module).__mro__)
            if is_sparse and path.rpartition(".")[0] not in paths:
                paths.add(path)
                names.append(f"{'MTP ' if mtp_layer else ''}layer {getattr(module, 'layer_number', '?')} ({path})")
    return names


# ---- the settings of a TransformerConfig
def config_refusals(config: Any, router: TopKRouter) -> Iterator[str]:
    """Yield why a router of this config cannot be replayed exactly, in any version of Megatron-Core."""
    balancing = config.moe_router_load_balancing_type
    for name in balancing if isinstance(balancing, list) else [balancing]:
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
            f"mtp_use_repeated_layer=True with mtp_num_layers={depths}: this router routes {depths} times a "
            "forward, and a trace has one route for it; set mtp_use_repeated_layer=False"
        )


def _token_drop_refusals(config: Any, router: TopKRouter) -> Iterator[str]:
    if getattr(config, "moe_expert_rank_capacity_factor", None) is not None:
        yield (
            f"moe_expert_rank_capacity_factor={config.moe_expert_rank_capacity_factor}: the dispatcher drops tokens "
            "above a rank's capacity, after the selection and without a trace; leave it unset"
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
    captured = captured_by_cuda_graphs(config, {"full", "full_iteration", "moe", "moe_router", "moe_preprocess"})
    if captured:
        yield _captured(config, str(captured))


def _captured(config: Any, parts: str) -> str:
    return (
        f"cuda_graph_impl={config.cuda_graph_impl!r} with {graph_field(config)} captures {parts}: a captured router would "
        "repeat the routes of the capture. Leave the router out of the graph"
    )
