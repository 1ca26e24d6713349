"""Which routers can be replayed exactly, and why the others cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.inference import utils as inference_utils
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from megatron_router_replay.errors import UnsupportedRouterError
from megatron_router_replay.mcore.balance import replaced_methods
from megatron_router_replay.mcore.compat import check_version, is_newer_than_tested, megatron_version
from megatron_router_replay.mcore.find import FoundRouter, as_chunks, find_routers
from megatron_router_replay.mcore.routing_function import is_needed
from megatron_router_replay.mcore.settings import config_refusals, mtp_refusals, untested_version_refusals

INFERENCE_ROUTERS: tuple[Any, ...] = tuple(filter(None, [getattr(router_module, "InferenceTopKRouter", None)]))
"""Router classes that route in another way in Megatron's inference, since 0.17; before, no router is an instance."""

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

    @property
    def replayable(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        verdict = "replayed" if self.replayable else f"refused: {self.reason}"
        if self.replayable and self.is_mtp:
            verdict = "live and frozen for recomputes, unless mtp=True replays it"
        if self.replayable and self.unfused:
            verdict += ", by Megatron-Core's unfused routing function (moe_router_fusion=True)"
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
            unfused=isinstance(router.router, TopKRouter) and is_needed(router.router),
        )
        for (index, router), of_router in zip(found, reasons)
    )


def check_supported(routers: Sequence[FoundRouter]) -> bool:
    """Raise unless every router can be replayed exactly; return whether a session must verify every routing map.

    It must under a Megatron-Core newer than all tested ones.

    Args:
        routers: of all the model's chunks on this rank.

    Raises:
        UnsupportedRouterError: names every router at fault and the config field behind it.
    """
    refused = [f"{found}: {reason}" for found, reasons in zip(routers, refusals_of(routers)) for reason in reasons]
    if refused:
        raise UnsupportedRouterError("cannot replay exactly:\n  " + "\n  ".join(refused))
    return is_newer_than_tested(megatron_version())


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
    # A method put on the module itself hides the class's; slime's DeepEP bridge replaces `routing` so.
    replaced = [name for name in ("forward", "routing") if name in vars(router)] + replaced_methods(router)
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


def inference_refusals(router: Any) -> Iterator[str]:
    """Yield why a router that Megatron's inference uses routes in another way than `TopKRouter` right now.

    Source: InferenceTopKRouter.forward of Megatron-Core 0.17.1 (a flag of each router, ignored in training) and of 0.18.2 to
    0.19.2 (`InferenceMode`); with it off, both call TopKRouter.forward.
    """
    if not isinstance(router, INFERENCE_ROUTERS):
        return
    flag = getattr(router, "is_inference_cuda_graphed_iteration", None)
    mode = getattr(inference_utils, "InferenceMode", None)  # since 0.18, where the flag went
    if (flag and not router.training) or (flag is None and mode is not None and mode.is_active()):
        yield (
            f"router class {type(router).__name__} routes without the session while Megatron's inference mode is on; "
            "leave it before the session, and do not generate inside"
        )
