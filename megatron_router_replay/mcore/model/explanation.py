"""`mrr.explain`: the verdict of a session on each router of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from megatron_router_replay.errors import listed
from megatron_router_replay.mcore.model.find import as_chunks, walk
from megatron_router_replay.mcore.model.support import find_indexers, is_hashed, refusals_of
from megatron_router_replay.mcore.model.upstream import check_version


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSupport:
    """The verdict of a session on one router.

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
            verdict = "live, and frozen for recomputes"
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
    """Every router of a model, in order of chunk and layer. It prints as a table, with one line for many alike.

    Attributes:
        indexers: the layers with sparse attention. No session freezes their positions, so `freeze_recompute` refuses them.
    """

    indexers: tuple[str, ...] = ()

    @property
    def replayable(self) -> bool:
        """Return whether the model has routers and all of them can be replayed."""
        return bool(self) and all(router.replayable for router in self)

    def __str__(self) -> str:
        lines: list[str] = [] if self else ["no MoE routers on this rank"]
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
        if self.indexers:
            refused = "freeze_recompute refuses it, or leaves it live with indexers=False"
            lines.append(f"sparse attention in {listed(self.indexers)}: {refused}")
        return "\n".join(lines)


def explain(model_chunks: nn.Module | Sequence[nn.Module]) -> Explanation:
    """Return which routers a session would replay, and what freeze_recompute refuses.

    Args:
        model_chunks: the model or its chunks on this rank, wrapped or not.

    Raises:
        UnsupportedRouterError: this Megatron-Core has no way to replay at all.
    """
    check_version()
    walks = [walk(chunk) for chunk in as_chunks(model_chunks)]
    found = [(index, each) for index, walked in enumerate(walks) for each in walked.routers]
    reasons = refusals_of([router for _, router in found])
    explanation = Explanation(
        RouterSupport(
            chunk=index,
            name=router.name,
            layer_number=router.layer_number,
            is_mtp=router.is_mtp,
            router_class=type(router.router).__name__,
            num_experts=getattr(router.router, "num_experts", None),
            topk=getattr(router.router, "topk", None),
            reason="; ".join(of_router),
            # Only the config of a TopKRouter is known to say so.
            unfused=isinstance(router.router, TopKRouter) and bool(router.router.config.moe_router_fusion),
            hashed=is_hashed(router.router),
        )
        for (index, router), of_router in zip(found, reasons)
    )
    explanation.indexers = tuple(find_indexers(walks))
    return explanation
