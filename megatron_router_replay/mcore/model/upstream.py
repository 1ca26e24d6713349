"""Names and version of the imported Megatron-Core; all that depends on them is in this file.

Every version since 0.16 passes `router.router_replay` to `topk_routing_with_score_function`, which requests the top-k from
it. A checkout needs this feature, whatever its number. A version above all tested ones may route in a way that was never
read, so its sessions verify every routing map, and warn. Sessions verify as well where a trainer has replaced Megatron-Core's
routing function.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import megatron.core
import torch
from megatron.core.inference import utils as inference_utils
from megatron.core.tensor_parallel import random as megatron_checkpoints
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.distributed import distributed_c10d
from torch.utils import _python_dispatch
from torch.utils import checkpoint as torch_checkpoints

from megatron_router_replay.errors import ReplayStateError, UnsupportedRouterError

TESTED = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
"""Megatron-Core versions that our tests ran with, oldest first."""

INFERENCE_ROUTERS: tuple[Any, ...] = tuple(filter(None, [getattr(router_module, "InferenceTopKRouter", None)]))
"""Router classes that route in another way in Megatron's inference, since 0.17; before, no router is an instance."""

TOPK_FUNCTION = "topk_routing_with_score_function"
"""The function of the router's module that chooses experts; it requests them from `REPLAY_ARGUMENT`."""

REPLAY_ARGUMENT = "router_replay"
"""Its argument, and the attribute of a TopKRouter that it gets there."""

REPLAY_METHOD = "get_replay_topk"
"""The method of that object which returns them."""

DISPATCH_METHOD = "dispatch_preprocess"
"""The method of a token dispatcher that takes the router's output: (hidden, map, probabilities)."""

_INFERENCE_DISPATCHERS = "megatron.core.transformer.moe.token_dispatcher_inference"

REQUIRED_SYMBOLS: tuple[tuple[Any, str, str], ...] = (
    (torch_checkpoints, "CheckpointFunction", "recomputes of torch's reentrant checkpoints look like forwards"),
    (torch_checkpoints, "_checkpoint_hook", "forwards of torch's non-reentrant checkpoints write no tape"),
    (torch_checkpoints, "_recomputation_hook", "recomputes of torch's non-reentrant checkpoints read no tape"),
    (
        megatron_checkpoints,
        "CheckpointFunction",
        "recomputes of Megatron-Core's checkpoints look like forwards",
    ),
    (torch._C, "_current_graph_task_id", "a backward without a tape is not noticed"),
    (torch._C, "_len_torch_dispatch_stack", "selective checkpoints and traced graphs are not noticed"),
    (_python_dispatch, "_disable_current_modes", "selective checkpoints pair the wrong operations"),
    (TopKRouter, "routing", "no router requests its experts"),
    (router_module, TOPK_FUNCTION, "no experts can be given to a router"),
    (
        MoEAlltoAllTokenDispatcher,
        DISPATCH_METHOD,
        "maps in token dispatchers are not compared with the routers' experts",
    ),
    (torch._C, "_is_tracing", "routers that torch.jit.trace captures are not refused"),
    (torch._C, "_dispatch_tls_is_dispatch_key_included", "routers that torch.export captures are not refused"),
    (distributed_c10d, "_get_default_store", "ranks cannot exchange their numbers at the end of a session"),
)
"""(owner, name, the loss without it): private names of torch and Megatron-Core that `hooks.install` checks."""

# Read off the code, because a checkout between two releases has the number of either.
TOPK_ORDER_FOLLOWS_GRAD = "sorted=torch.is_grad_enabled()" in inspect.getsource(
    moe_utils.topk_routing_with_score_function
)
"""The live top-k is sorted only where gradients are on, since 0.18."""


def megatron_version() -> str:
    """Return the version of the Megatron-Core that is imported; pip's metadata may be another installation's."""
    return str(megatron.core.__version__)


@cache
def version_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, "0.20.0rc1" -> (0, 20, 0); what follows them does not count."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, leading.group().split("."))) if leading else ()


def is_newer_than_tested(version: str) -> bool:
    """Return whether a version of Megatron-Core is newer than all that our tests ran with; True if it has no number."""
    numbers = version_numbers(version)
    return not numbers or numbers > version_numbers(TESTED[-1])


def must_verify() -> bool:
    """Return whether sessions must verify every routing map, because the code that routes was never read."""
    topk = router_module.topk_routing_with_score_function
    # Our hook alone is unwrapped, because functools.wraps makes any wrapper look like its function.
    function = inspect.unwrap(topk, stop=lambda each: getattr(each, "is_hook", None) is not each)
    return is_newer_than_tested(megatron_version()) or function is not moe_utils.topk_routing_with_score_function


def check_version() -> None:
    """Raise unless the imported Megatron-Core requests experts from a router's `REPLAY_ARGUMENT`.

    Raises:
        UnsupportedRouterError: its routing function has no such argument (0.15 and before).
    """
    function = inspect.unwrap(router_module.topk_routing_with_score_function)
    parameters = inspect.signature(function).parameters.values()
    if not any(each.name == REPLAY_ARGUMENT or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        raise UnsupportedRouterError(
            f"MRR402: Megatron-Core {megatron_version()} cannot replay routes: its topk_routing_with_score_function has no "
            f"{REPLAY_ARGUMENT} argument, which came with 0.16. Sessions were run with {', '.join(TESTED)}: use one of these."
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


def dispatchers_of(layer: Any) -> list[Any]:
    """Return the token dispatchers of a layer that get what `TopKRouter.routing` returned.

    Source: Megatron-Core 0.17.1 to 0.19.2, MoELayer: in inference, a dispatcher of token_dispatcher_inference takes the place
    of the layer's own, and gets what InferenceTopKRouter made without a call of `routing`.
    """
    candidates = [each for each in vars(layer).values() if hasattr(type(each), DISPATCH_METHOD)]
    return [each for each in candidates if type(each).__module__ != _INFERENCE_DISPATCHERS]


def captured_by_cuda_graphs(config: Any, parts: set[str]) -> list[str]:
    """Return which parts of a layer, in Megatron-Core's words, CUDA graphs capture; "full" is all of it."""
    implementation = getattr(config, "cuda_graph_impl", "none")
    if implementation == "none":
        return []
    chosen = getattr(config, graph_field(config))
    # Members of an enum, or strings: Megatron-Core takes both.
    names = [str(getattr(each, "name", each)) for each in (chosen if isinstance(chosen, list) else [chosen]) if each]
    if implementation == "full_iteration":
        names = ["full_iteration"]
    elif not chosen and _captures_whole_inference_only(config):
        return []
    # Empty is the whole layer; a name that is not among the parts leaves the router out of the graph.
    return sorted(set(names or ["full"]) & parts)


def graph_field(config: Any) -> str:
    """Return the name of the config field that lists the parts CUDA graphs capture."""
    # 0.18 renamed cuda_graph_scope to cuda_graph_modules, and keeps the old name at None.
    return "cuda_graph_modules" if hasattr(config, "cuda_graph_modules") else "cuda_graph_scope"


def _captures_whole_inference_only(config: Any) -> bool:
    """Return whether inference runs as one graph of the whole model, which leaves training without any.

    Source: Megatron-Core 0.18.2, TransformerLayer.create_mcore_cudagraph_manager: with no cuda_graph_modules, layers get a
    graph of their own unless inference_cuda_graph_scope is block.
    """
    scope = getattr(config, "inference_cuda_graph_scope", None)
    return config.cuda_graph_impl == "local" and getattr(scope, "name", scope) == "block"


def check_names(names: Iterable[tuple[Any, str, str]]) -> None:
    """Raise if a name is gone, as listed in REQUIRED_SYMBOLS.

    Raises:
        ReplayStateError: names it, and what fails without it.
    """
    for owner, name, loss in names:
        # A name that only a base class declares is gone, too.
        if getattr(getattr(owner, name, None), "__isabstractmethod__", not hasattr(owner, name)):
            raise ReplayStateError(
                f"MRR402: {owner.__name__} has no {name}, so {loss}: use a tested version (docs/support.md)."
            )
