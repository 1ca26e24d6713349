"""Names and version of the imported Megatron-Core; all that depends on them is in this file.

Every version since 0.16 passes `router.router_replay` to `topk_routing_with_score_function`, which requests the top-k from
it. miles' fork gets the top-k from a manager of miles. A checkout needs one of the two, whatever its number. A version above
all tested ones may route in a way that was never read, so its sessions verify every routing map, and warn. Sessions verify
as well in miles' fork, and where a trainer has replaced Megatron-Core's routing function.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
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

MANAGER_MODULE, MANAGER, MANAGER_METHOD = "miles.utils.replay_base", "routing_replay_manager", "get_topk_fn"
"""The object from which the routing function of miles' Megatron-LM gets a top-k: (module, name there, method).

Source: radixark/Megatron-LM 2e64d788 (miles-main), where the function has no `REPLAY_ARGUMENT`, and 235952df
(miles-main-20260819), which tries this object first.
"""

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
    is_megatrons = function is moe_utils.topk_routing_with_score_function and not asks_manager(function)
    return is_newer_than_tested(megatron_version()) or not is_megatrons


def takes_replay(function: Callable[..., Any]) -> bool:
    """Return whether a routing function has the `REPLAY_ARGUMENT`."""
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    return any(each.name == REPLAY_ARGUMENT or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def asks_manager(function: Callable[..., Any]) -> bool:
    """Return whether a routing function imports miles' manager in each call, and gets the top-k from it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and {MANAGER_MODULE, MANAGER, MANAGER_METHOD} <= set(code.co_names)


def topk_manager() -> Any:
    """Return miles' manager; None: miles is not imported, so its Megatron-LM built no router yet."""
    return getattr(sys.modules.get(MANAGER_MODULE), MANAGER, None)


def check_version() -> None:
    """Raise unless the imported Megatron-Core requests a top-k from its `REPLAY_ARGUMENT`, or from miles' manager.

    Raises:
        UnsupportedRouterError: it is 0.15 or older, or an unknown fork.
    """
    function, version = router_module.topk_routing_with_score_function, megatron_version()
    if takes_replay(function) or asks_manager(function):
        return
    lacks = f"its {TOPK_FUNCTION} has no {REPLAY_ARGUMENT} argument, which came with 0.16"
    tested = f"Sessions were run with {', '.join(TESTED)}"
    if version_numbers(version) < (0, 16):
        raise UnsupportedRouterError(
            f"MRR402: Megatron-Core {version} cannot replay routes: {lacks}. {tested}: use one of these."
        )
    raise UnsupportedRouterError(
        f"MRR402: Megatron-Core {version} cannot replay routes: {lacks}, and it asks no manager that is known. Is "
        f"{Path(megatron.core.__file__).parent} a fork? Then give this function the argument {REPLAY_ARGUMENT}=None. Where "
        f"it is not None, call {REPLAY_ARGUMENT}.{REPLAY_METHOD}(scores, topk, num_groups, group_topk, compute_topk) for the "
        f"top-k, as moe_utils of {TESTED[-1]} does. {tested}."
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


def num_hash_layers(config: Any) -> int:
    """Return how many of the first layers a table of token ids routes, as DeepSeek-V4's.

    Source: Megatron-LM dev d48bd6b, TransformerConfig.moe_n_hash_layers; radixark/Megatron-LM 2e64d788, dsv4_n_hash_layers.
    """
    return getattr(config, "moe_n_hash_layers", None) or getattr(config, "dsv4_n_hash_layers", None) or 0


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
