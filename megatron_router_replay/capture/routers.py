"""Where a model chooses its experts: its router modules, their layers, and how to read the chosen ids off their output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from megatron_router_replay.capture.errors import CaptureError

Select = Callable[[nn.Module, Any, Any], Tensor]
"""(module, forward arguments, forward output) -> chosen ids [num_tokens, topk]; traced by torch.compile with the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSite:
    """One place where experts are chosen.

    Args:
        module: the router, or the MoE layer that calls `write_routes(self, topk_indices)` itself.
        layer_number: Megatron's, from 1: hidden layer i of a Hugging Face model is layer_number i + 1.
        num_experts, topk: routed experts of the layer, and how many of them a token takes.
        select: reads the chosen ids off a forward of `module`; None: the module calls `write_routes`.
    """

    module: nn.Module
    layer_number: int
    num_experts: int
    topk: int
    select: Select | None


def select_transformers(module: nn.Module, args: Any, output: Any) -> Tensor:
    """Return the ids that a `transformers` router chose.

    Source: transformers 5.23, the TopKRouter of Qwen3-MoE, Mixtral and gpt-oss, the TopkRouter of DeepSeek-V3 and GLM4-MoE:
    forward returns (logits, scores, indices).
    """
    indices: Tensor = output[2]
    return indices


def select_megatron(module: nn.Module, args: Any, output: Any) -> Tensor:
    """Return the ids that a Megatron-Core TopKRouter chose, by falling probability.

    Source: Megatron-Core 0.16.1, TopKRouter.forward returns (probs, routing_map), both [num_tokens, num_experts].
    """
    probs, routing_map = output
    # Where a chosen expert's probability is 0, topk of probs alone could name one that was not chosen.
    ranked = torch.where(routing_map, probs, torch.full_like(probs, -1.0))
    return ranked.topk(module.topk, dim=-1).indices  # type: ignore[arg-type]


def find_router_sites(model: nn.Module) -> list[RouterSite]:
    """Return the routers of a transformers or Megatron-Core model by layer; multi-token-prediction layers are left out.

    Raises:
        CaptureError: no router is known here, a layer has experts and none that is, two routers are of one layer, or a
            router drops tokens.
    """
    sites: dict[int, RouterSite] = {}
    for name, module in model.named_modules():
        if "mtp" in name.split("."):
            continue
        if _is_router(module):
            site = _site(name, module)
            if site.layer_number in sites:
                raise CaptureError(
                    f"{name} is a second router of layer_number {site.layer_number}: list the sites by hand."
                )
            sites[site.layer_number] = site
        elif isinstance(getattr(module, "experts", None), nn.Module) and not any(map(_is_router, module.children())):
            raise CaptureError(
                f"{name} ({type(module).__name__}) has experts, but no router that is known here: its tokens would have no "
                "route. Pass routers=[RouterSite(...)] with a `select` for every MoE layer."
            )
    if not sites:
        raise CaptureError(
            f"{type(model).__name__} has no router that is known here (a class named ...TopKRouter): pass "
            "routers=[RouterSite(...)] with a `select` for every MoE layer."
        )
    return [sites[number] for number in sorted(sites)]


def _is_router(module: nn.Module) -> bool:
    return type(module).__name__.lower().endswith("topkrouter")


def _site(name: str, module: Any) -> RouterSite:
    if type(module).__module__.startswith("megatron."):
        return _megatron_site(name, module)
    parts = name.split(".")
    numbers = [int(after) for before, after in pairwise(parts) if before == "layers" and after.isdigit()]
    num_experts, topk = getattr(module, "num_experts", None), getattr(module, "top_k", None)
    if not numbers or not isinstance(num_experts, int) or not isinstance(topk, int):
        raise CaptureError(
            f"{name} ({type(module).__name__}) does not tell its layer, num_experts or top_k: pass routers=[RouterSite(...)]."
        )
    return RouterSite(
        module=module,
        layer_number=numbers[-1] + 1,
        num_experts=num_experts,
        topk=topk,
        select=select_transformers,
    )


def _megatron_site(name: str, module: Any) -> RouterSite:
    config = module.config
    if config.moe_expert_capacity_factor is not None:
        raise CaptureError(
            f"{name}: with moe_expert_capacity_factor={config.moe_expert_capacity_factor} its output lacks the experts of "
            "dropped tokens. Generate without a capacity, or record with megatron_router_replay.record."
        )
    if module.layer_number is None:
        raise CaptureError(f"{name} has no layer_number: build the model with Megatron's layer specs.")
    return RouterSite(
        module=module,
        layer_number=int(module.layer_number),
        num_experts=int(config.num_moe_experts),
        topk=int(module.topk),
        select=select_megatron,
    )
