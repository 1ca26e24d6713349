"""Which routers can be replayed exactly, and why the others cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from megatron_router_replay.errors import UnsupportedRouterError, listed
from megatron_router_replay.mcore.balance import METHODS
from megatron_router_replay.mcore.compat import (
    INFERENCE_ROUTERS,
    check_version,
    inference_refusals,
    is_newer_than_tested,
    megatron_version,
    must_verify,
)
from megatron_router_replay.mcore.find import FoundRouter, as_chunks, find_routers
from megatron_router_replay.mcore.settings import config_refusals, mtp_refusals, untested_version_refusals

_KNOWN_ROUTERS = (TopKRouter, *INFERENCE_ROUTERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSupport:
    """What a session would do with one router.

    Args:
        chunk: index of its model chunk.
        name, layer_number, is_mtp: as in `FoundRouter`.
        router_class: name of its class.
        num_experts, topk: None where the router does not say.
        reason: why it cannot be replayed exactly, naming the config field; empty: it can.
        unfused: sessions run Megatron-Core's unfused routing function for it, in place of the fused one that it runs live.
        hashed: a table of token ids routes it: it is never replayed, and its recompute cannot differ.
    """

    chunk: int
    name: str
    layer_number: int
    is_mtp: bool
    router_class: str
    num_experts: int | None
    topk: int | None
    reason: str
    unfused: bool = False
    hashed: bool = False

    @property
    def replayable(self) -> bool:
        return not self.reason

    def _verdict(self) -> str:
        """Return in words what becomes of the router."""
        verdict = "replayed" if self.replayable else f"refused: {self.reason}"
        if self.replayable and self.is_mtp:
            verdict = "live and frozen for recomputes, unless mtp=True replays it"
        if self.hashed:
            verdict = "left alone: a table of token ids routes it, so its recompute cannot differ"
        elif self.replayable and self.unfused:
            verdict += ", by Megatron-Core's unfused routing function (moe_router_fusion=True)"
        return verdict

    def _experts(self) -> str:
        """Return how many experts the router chooses of how many."""
        return f"top-{self.topk} of {self.num_experts}"

    def __str__(self) -> str:
        return (
            f"chunk {self.chunk}  layer {self.layer_number:>3}  {self._experts():<14}  {self.name}: {self._verdict()}"
        )


class Explanation(tuple[RouterSupport, ...]):
    """Every router of a model, in order of chunk and layer; prints as a table, many alike in one line."""

    __slots__ = ()

    @property
    def replayable(self) -> bool:
        """Whether the model has routers and all of them can be replayed."""
        return bool(self) and all(router.replayable for router in self)

    def __str__(self) -> str:
        if not self:
            return "no MoE routers on this rank"
        lines: list[str] = []
        for (chunk, experts, verdict), alike in groupby(
            self, lambda each: (each.chunk, each._experts(), each._verdict())
        ):
            routers = list(alike)
            if len(routers) <= 8:
                lines += map(str, routers)
                continue
            layers = listed([router.layer_number for router in routers])
            names = f"{routers[0].name} ... {routers[-1].name}"
            lines.append(f"chunk {chunk}  layers {layers}  {experts}  {names}: {verdict}")
        return "\n".join(lines)


def explain(model_chunks: nn.Module | Sequence[nn.Module]) -> Explanation:
    """Return, for every router of the model on this rank, whether a session would replay it, and if not, why.

    Args:
        model_chunks: the model or its chunks on this rank, wrapped or not.

    Raises:
        UnsupportedRouterError: this Megatron-Core has no way to replay at all.
    """
    check_version()
    found = [(index, found) for index, chunk in enumerate(as_chunks(model_chunks)) for found in find_routers(chunk)]
    reasons = refusals_of([router for _, router in found])
    return Explanation(
        RouterSupport(
            chunk=index,
            name=router.name,
            layer_number=router.layer_number,
            is_mtp=router.is_mtp,
            router_class=type(router.router).__name__,
            num_experts=getattr(router.router, "num_experts", None),
            topk=getattr(router.router, "topk", None),
            reason="; ".join(of_router),
            # Only of a TopKRouter is it known that its config says so.
            unfused=isinstance(router.router, TopKRouter) and bool(router.router.config.moe_router_fusion),
            hashed=is_hashed(router.router),
        )
        for (index, router), of_router in zip(found, reasons)
    )


def is_hashed(router: Any) -> bool:
    """Return whether a table of token ids routes this layer, as DeepSeek-V4's first ones.

    Source: Megatron-LM dev d48bd6b, router.TopKRouter._hash_routing: `tid2eid`, [vocab, topk], asks no replay object.
    """
    return bool(getattr(router, "is_hash_layer", False))


def check_supported(routers: Sequence[FoundRouter]) -> bool:
    """Raise unless every router can be replayed exactly; return whether a session must verify every routing map.

    It must where nobody here has read what routes: a Megatron-Core newer than all tested ones, or a trainer's own function.

    Args:
        routers: of all the model's chunks on this rank.

    Raises:
        UnsupportedRouterError: names the layers at fault and the config field behind it.
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
        raise UnsupportedRouterError("cannot replay exactly:\n  " + "\n  ".join(lines))
    return must_verify()


def refusals_of(routers: Sequence[FoundRouter]) -> list[list[str]]:
    """Return, for each router, why it cannot be replayed exactly in this model; empty if it can."""
    reasons = [refusals(found.router) for found in routers]
    for found, of_router in zip(routers, reasons):
        # In this order: what is said of a router that is refused anyway would only hide the cause.
        if not of_router and found.is_mtp:
            of_router += mtp_refusals(found.router.config)
        if not of_router:
            of_router += _uneven_refusals(found, routers[0])
    return reasons


def _uneven_refusals(found: FoundRouter, first: FoundRouter) -> Iterator[str]:
    """Yield what a router has otherwise than the first one: a trace has one topk and one num_experts for all layers."""
    for name in ("topk", "num_experts"):
        one, other = getattr(first.router, name, None), getattr(found.router, name, None)
        if one is not None and one != other:
            yield f"{name}={other}, but {first} has {one}: a trace has one {name} for all layers"


def refusals(router: nn.Module) -> list[str]:
    """Return why this router cannot be replayed exactly; empty if it can."""
    if not isinstance(router, TopKRouter):
        return [f"router class {type(router).__name__} is not a TopKRouter; nothing is known of how it selects experts"]
    # A subclass may change anything but these two, which choose the experts: only the classes named above were read.
    definers = {
        name: next(each for each in type(router).__mro__ if name in vars(each)) for name in ("forward", "routing")
    }
    changed = [name for name, definer in definers.items() if definer not in _KNOWN_ROUTERS]
    if changed:
        return [f"router class {type(router).__name__} overrides TopKRouter.{' and '.join(changed)}"]
    # `forward` and `routing` may be wrapped on the module: each call proves that the wrapper leaves the map alone.
    replaced = [name for name in METHODS if name in vars(router)]
    if replaced:
        return [f"TopKRouter.{' and '.join(replaced)} was replaced on this module by {vars(router)[replaced[0]]!r}"]
    reasons = list(inference_refusals(router)) + list(_foreign_dispatch_refusals(router))
    reasons += config_refusals(router.config, router)
    if is_newer_than_tested(megatron_version()):
        reasons += untested_version_refusals(router.config, megatron_version())
    return reasons


def _foreign_dispatch_refusals(router: Any) -> Iterator[str]:
    """Yield why what the dispatcher sends is not what the router chose.

    Source: slime 624b824a, routing_replay.register_ordered_topk_capture and alignment.deepgemm_moe_forward: the bridge keeps
    the indices of its own top-k and gives them to DeepEP in place of the routing map.
    """
    if getattr(router, "_slime_ordered_topk_capture_registered", False):
        yield (
            "slime's DeepEP alignment bridge dispatches by a top-k of its own, not by the routing map of the router; build "
            "the model without the bridge"
        )
