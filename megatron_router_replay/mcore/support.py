"""Which routers can be replayed exactly, and why the others cannot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from megatron_router_replay.errors import UnsupportedRouterError
from megatron_router_replay.mcore.compat import check_version
from megatron_router_replay.mcore.find import FoundRouter, as_chunks, find_routers
from megatron_router_replay.mcore.routing_function import is_needed


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSupport:
    """What a session would do with one router.

    Args:
        chunk: index of its model chunk.
        name, layer_number, is_mtp: as in `FoundRouter`.
        router_class: name of its class.
        num_experts, topk: None where the router does not say.
        reason: why it cannot be replayed exactly, naming the config field; empty: it can.
    """

    chunk: int
    name: str
    layer_number: int
    is_mtp: bool
    router_class: str
    num_experts: int | None
    topk: int | None
    reason: str

    @property
    def replayable(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        verdict = "replayed" if self.replayable else f"refused: {self.reason}"
        if self.replayable and self.is_mtp:
            verdict = "live and frozen for recomputes, unless mtp=True replays it"
        experts = f"top-{self.topk} of {self.num_experts}"
        return f"chunk {self.chunk}  layer {self.layer_number:>3}  {experts:<14}  {self.name}: {verdict}"


class Explanation(tuple[RouterSupport, ...]):
    """Every router of a model, in order of chunk and layer; prints as a table."""

    __slots__ = ()

    @property
    def replayable(self) -> bool:
        """Whether the model has routers and all of them can be replayed."""
        return bool(self) and all(router.replayable for router in self)

    def __str__(self) -> str:
        if not self:
            return "no MoE routers on this rank"
        return "\n".join(str(router) for router in self)


def explain(model_chunks: nn.Module | Sequence[nn.Module]) -> Explanation:
    """Return, for every router of the model on this rank, whether a session would replay it, and if not, why.

    Args:
        model_chunks: the model or its chunks on this rank, wrapped or not.

    Raises:
        UnsupportedRouterError: this Megatron-Core has no way to replay at all.
    """
    check_version()
    return Explanation(
        RouterSupport(
            chunk=index,
            name=found.name,
            layer_number=found.layer_number,
            is_mtp=found.is_mtp,
            router_class=type(found.router).__name__,
            num_experts=getattr(found.router, "num_experts", None),
            topk=getattr(found.router, "topk", None),
            reason="; ".join(refusals(found.router)),
        )
        for index, chunk in enumerate(as_chunks(model_chunks))
        for found in find_routers(chunk)
    )


def check_supported(routers: Sequence[FoundRouter]) -> None:
    """Raise unless every router can be replayed exactly.

    Raises:
        UnsupportedRouterError: names every router at fault and the config field behind it.
    """
    refused = [f"{found}: {reason}" for found in routers for reason in refusals(found.router)]
    if refused:
        raise UnsupportedRouterError("cannot replay exactly:\n  " + "\n  ".join(refused))


def refusals(router: nn.Module) -> list[str]:
    """Return why this router cannot be replayed exactly; empty if it can."""
    if not isinstance(router, TopKRouter):
        return [f"router class {type(router).__name__} is not a TopKRouter; nothing is known of how it selects experts"]
    changed = [name for name in ("forward", "routing") if getattr(type(router), name) is not getattr(TopKRouter, name)]
    if changed:
        return [f"router class {type(router).__name__} overrides TopKRouter.{' and '.join(changed)}"]
    return list(_config_refusals(router.config, router))


def _config_refusals(config: Any, router: TopKRouter) -> Iterator[str]:
    if config.moe_router_score_function not in ("softmax", "sigmoid") and is_needed(router):
        yield (
            f"moe_router_score_function={config.moe_router_score_function!r}: fused replay knows 'softmax' and 'sigmoid'; "
            "set moe_router_fusion=False"
        )
    balancing = config.moe_router_load_balancing_type
    for name in balancing if isinstance(balancing, list) else [balancing]:
        if name in ("sinkhorn", "quantile_balancing"):
            yield f"moe_router_load_balancing_type={name!r} selects experts without the top-k that is replayed"
    if config.moe_router_force_load_balancing:
        yield "moe_router_force_load_balancing=True replaces the logits by random ones"
    if getattr(router, "is_hash_layer", False):
        yield f"moe_n_hash_layers={getattr(config, 'moe_n_hash_layers', '?')}: a hash of the token selects the experts"
    yield from _token_drop_refusals(config, router)
    yield from _cuda_graph_refusals(config)


def _token_drop_refusals(config: Any, router: TopKRouter) -> Iterator[str]:
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
    # An empty scope is the whole layer; each other name leaves the router out of the graph.
    scopes = {getattr(scope, "name", scope) for scope in config.cuda_graph_scope or ["full"]}
    captured = sorted(scopes & {"full", "full_iteration", "moe", "moe_router"})
    if captured:
        yield (
            f"cuda_graph_impl={implementation!r} with cuda_graph_scope {captured}: a captured router would repeat the "
            "routes of the capture. Leave the router out of the graph, or capture it yourself with mcore.static.StaticTargets"
        )
