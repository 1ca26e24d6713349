"""Router modules of a model, their layers, and how to read the chosen ids off their output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from megatron_router_replay.errors import RouterReplayError


class CaptureError(RouterReplayError, ValueError):
    """Routes cannot be captured, or some of a request's tokens have none."""


Select = Callable[[nn.Module, Any, Any], Tensor]
"""(module, forward arguments, forward output) -> chosen ids [num_tokens, topk]; traced by torch.compile with the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSite:
    """One place where experts are chosen.

    Args:
        module: the router, or any module with the chosen ids in its inputs or output.
        layer_number: Megatron's, from 1: hidden layer i of a Hugging Face model is layer_number i + 1.
        num_experts, topk: routed experts of the layer, and how many of them a token takes.
        select: reads the chosen ids off a forward of `module`.
    """

    module: nn.Module
    layer_number: int
    num_experts: int
    topk: int
    select: Select


def select_transformers(module: nn.Module, args: Any, output: Any) -> Tensor:
    """Return the ids that a `transformers` router chose.

    Source: transformers 5.23, the TopKRouter of Qwen3-MoE, Mixtral and gpt-oss, the TopkRouter of DeepSeek-V3 and GLM4-MoE:
    forward returns (logits, scores, indices).
    """
    indices: Tensor = output[2]
    return indices


def find_router_sites(model: nn.Module) -> list[RouterSite]:
    """Return the routers of a transformers model by layer; multi-token-prediction layers are left out.

    Raises:
        CaptureError: no router is known here, a layer has experts and no known router, or a layer has two.
    """
    sites: dict[int, RouterSite] = {}
    for name, module in model.named_modules():
        if "mtp" in name.split("."):
            continue
        if _is_router(module):
            site = _site(name, module)
            if site.layer_number in sites:
                raise CaptureError(
                    f"MRR701: {name} is a second router of layer_number {site.layer_number}: list the sites by hand."
                )
            sites[site.layer_number] = site
        elif isinstance(getattr(module, "experts", None), nn.Module) and not any(map(_is_router, module.children())):
            raise CaptureError(
                f"MRR701: {name} ({type(module).__name__}) has experts, but no router that is known here: its tokens "
                "would have no route. Pass routers=[RouterSite(...)] with a `select` for every MoE layer."
            )
    if not sites:
        raise CaptureError(
            f"MRR701: {type(model).__name__} has no router that is known here (a class named ...TopKRouter): pass "
            "routers=[RouterSite(...)] with a `select` for every MoE layer."
        )
    return [sites[number] for number in sorted(sites)]


def _is_router(module: nn.Module) -> bool:
    return type(module).__name__.lower().endswith("topkrouter")


def _site(name: str, module: Any) -> RouterSite:
    parts = name.split(".")
    numbers = [int(after) for before, after in pairwise(parts) if before == "layers" and after.isdigit()]
    num_experts, topk = getattr(module, "num_experts", None), getattr(module, "top_k", None)
    if not numbers or not isinstance(num_experts, int) or not isinstance(topk, int):
        raise CaptureError(
            f"MRR701: {name} ({type(module).__name__}) has no layer, num_experts or top_k that can be read: pass "
            "routers=[RouterSite(...)]. Record a Megatron-Core model with megatron_router_replay.record."
        )
    return RouterSite(
        module=module,
        layer_number=numbers[-1] + 1,
        num_experts=num_experts,
        topk=topk,
        select=select_transformers,
    )


def check_sites(sites: Sequence[RouterSite]) -> tuple[int, int]:
    """Return (num_experts, topk) of all sites.

    Raises:
        CaptureError: there is none, they differ, or a layer has two.
    """
    if not sites:
        raise CaptureError("MRR701: there is no router to capture: routers=[] was passed.")
    kinds = {(site.num_experts, site.topk) for site in sites}
    numbers = [site.layer_number for site in sites]
    if len(kinds) != 1 or len(set(numbers)) != len(numbers) or min(numbers) < 1:
        raise CaptureError(
            "MRR701: all layers must have the same num_experts and topk and numbers of their own, from 1; got "
            f"(num_experts, topk) {sorted(kinds)} in layers {numbers}."
        )
    num_experts, topk = kinds.pop()
    if not 1 <= topk <= num_experts:
        raise CaptureError(f"MRR701: topk={topk} must lie in 1..num_experts={num_experts}.")
    return num_experts, topk
