"""`TopKRouter.routing` takes its experts from the first of these that applies.

    1  a tape is being read              -> its next entry, which must be this router's; sessions do not matter
    2  any other backward                -> raises, if the router ever had a source, until `forget`
    3  it has a source                   -> the experts of the source, written on every tape that is being written
    4  else                              -> Megatron-Core's own code, untouched

A source is a session's, or the router's own RouterReplay while that has an action; see `router_replay`.
A `RoutingCall` is passed as `router_replay=` for one call of `topk_routing_with_score_function`; a call that does not use it
exactly once raises. The hooks are process-wide: `install` puts them in once, and nothing is put on a model.
A forward's way through a session, in the order of calls:

    routing -> routing_call -> tape.checkpoint_state                                       whether this is a recompute
            -> Microbatches._routing_state -> Chunk.microbatch_of                          the micro-batch of this call
    topk_routing_with_score_function -> RoutingCall.get_replay_topk -> source._experts     its experts
    routing -> tape.write                                                                  for its recomputes
            -> Microbatches._on_routed -> Chunk.routed                                     one router of the micro-batch ran
    dispatch_preprocess                                                                    gets both outputs; see `dispatch`

In miles' fork the manager that this function gets its top-k from hands out the call; see `upstream.MANAGER`.

Source: Megatron-Core 0.16.1 to 0.19.2, router.TopKRouter.routing and moe_utils.topk_routing_with_score_function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor
from torch._compile import _disable_dynamo

from megatron_router_replay.errors import ReplayStateError, UnsupportedRouterError
from megatron_router_replay.mcore.core import checkpoints, dispatch, tape
from megatron_router_replay.mcore.core.call import ExpertSource, RoutingCall, RoutingSource, count_wrong, current
from megatron_router_replay.mcore.core.tape import Entry
from megatron_router_replay.mcore.model.support import is_hashed
from megatron_router_replay.mcore.model.upstream import (
    INFERENCE_ROUTERS,
    MANAGER_METHOD,
    REPLAY_ARGUMENT,
    REQUIRED_SYMBOLS,
    TOPK_FUNCTION,
    asks_manager,
    check_names,
    inference_refusals,
    takes_replay,
    topk_manager,
)

_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch

_sources: WeakKeyDictionary[Any, list[RoutingSource]] = WeakKeyDictionary()
"""Every router that ever had a source, until `forget` -> those of its sessions, the innermost last.

It outlives the sources, because a graph of an ended session may still recompute.
"""

unregistered_forwards = 0
"""Forwards in training mode of routers without a session."""

on_unregistered: Callable[[Any], None] | None = None
"""Called with a router without a session that trains: in training mode, with gradients, and with a weight that needs one."""


def register(router: Any, source: RoutingSource, dispatchers: Iterable[Any] = ()) -> None:
    """Register a source for a router, inside those that it has already.

    Args:
        dispatchers: token dispatchers that get what leaves the router.
    """
    _sources.setdefault(router, []).append(source)
    dispatch.held_routers.add(router)
    dispatch.check_dispatchers(router, dispatchers)


def unregister(router: Any, source: RoutingSource) -> None:
    """Remove a source. The router stays known, so that no backward repeats its calls live."""
    sources = _sources.get(router, [])
    sources[:] = [each for each in sources if each is not source]
    if not sources:
        dispatch.held_routers.discard(router)
        dispatch.thread.outputs.pop(id(router), None)  # of a forward that failed


def forget() -> None:
    """Forget the routers without a session, so a backward without a tape runs them live again, and unhook miles' manager."""
    _unhook_manager(topk_manager())
    for router in [router for router, sources in _sources.items() if not sources]:
        del _sources[router]


def sources_of(router: Any) -> list[RoutingSource]:
    """Return the sources that are registered for a router, the innermost last."""
    return list(_sources.get(router, ()))


def routing_call(router: Any, source: ExpertSource | None, shape: torch.Size) -> tuple[RoutingCall | None, bool]:
    """Return the state of a router's call, from the first line of this module's docstring that applies.

    Args:
        source: of the router: its innermost session's, or the RouterReplay that drives it; None: it has none.
        shape: of its tokens, [s, b].

    Returns:
        (the call, or None: run Megatron-Core's own top-k; whether a tape is being written).

    Raises:
        ReplayStateError: it repeats a forward without a tape, or a forward without a session.
    """
    run, repeats, is_written = tape.checkpoint_state()
    if run is not None or source is not None:
        # A graph would keep the entry of this recompute, or the experts that go on a tape.
        check_runs_python(router, source if run is None and not is_written else None)
    if run is not None:
        entry = run.next(router)
        driver = getattr(router, REPLAY_ARGUMENT, router)
        if getattr(driver, "_announces_recomputes", False):
            del driver.replay_backward_list[:1]  # its target: the tape has the experts
        if entry.topk_indices is not None:
            entry.counter.recomputes += 1
            if entry.counter.counts_flips:
                num_rows = entry.topk_indices.shape[0]
                entry.counter.recomputed += num_rows
            return RoutingCall(router, entry.counter, recompute_of=entry, in_order=entry.in_order), is_written
        if source is not None:
            raise ReplayStateError(
                f"MRR412: {tape.layer_of(router)} is recomputed in a session, but its forward ran before the session, "
                "live or with an action: run that backward before the session begins."
            )
    elif repeats and not (source is not None and source._announces_recomputes):
        if source is not None:
            check_installed()  # a checkpoint that was replaced since the session began leaves no tape
        # With or without a session: no number of autograd shows reliably whether this forward ran under an earlier one.
        raise ReplayStateError(
            f"MRR412: {tape.layer_of(router)} is recomputed, but no tape of its forward is known: the forward ran before the "
            "session, or in an unknown kind of checkpoint (those of torch, Megatron-Core and Transformer Engine are "
            "known). If your own autograd function runs the model again, name its runs with mcore.Tape, or announce them "
            "with REPLAY_BACKWARD; if no session is needed any more, uninstall() lets the model train without one."
        )
    elif source is not None:
        if tape.open_runs and not (is_written or repeats):
            check_thread(router)
        driver = getattr(router, REPLAY_ARGUMENT, None)
        if driver is not None and driver is not source:
            check_not_driven(router)
        counter, microbatch = source._routing_state(router, shape)
        if microbatch is not None or is_written or counter.verify:
            return RoutingCall(router, counter, source=source, microbatch=microbatch, is_written=is_written), is_written
        counter.forwards += 1  # live, and no recompute follows
    else:
        _count_unregistered(router)
    return None, is_written


def driver_of(router: Any) -> Any:
    """Return the RouterReplay that drives a router: its own, if that is ours and has an action; None: there is none.

    Args:
        router: a TopKRouter, or a RouterReplay itself.
    """
    replay = getattr(router, REPLAY_ARGUMENT, router)
    # Only ours has this attribute.
    return None if getattr(replay, "_action", None) is None or is_hashed(router) else replay


def check_thread(router: Any) -> None:
    """Raise for a forward with gradients in this thread, while only different threads run checkpointed functions.

    Args:
        router: the TopKRouter or RouterReplay.

    Raises:
        ReplayStateError: a checkpointed function may have started this thread, and its recompute would read no tape.
    """
    if torch.is_grad_enabled():
        raise ReplayStateError(
            f"MRR413: {tape.layer_of(router)} is called in a thread that runs no checkpointed function, while a different "
            "thread runs one: if that one started this thread, its recompute would look like a new forward. Call the model "
            "in the thread that runs the checkpointed function, and train one model at a time under sessions."
        )


def check_not_driven(router: Any) -> None:
    """Raise if a router's own RouterReplay, Megatron-Core's or ours, is being driven.

    Raises:
        ReplayStateError: names the action.
    """
    replay = getattr(router, REPLAY_ARGUMENT, None)
    action = None if replay is None else getattr(replay, "router_replay_action", "unknown")
    if action is not None:
        raise ReplayStateError(
            f"MRR417: {tape.layer_of(router)}: its own {type(replay).__name__} is being driven (action "
            f"{getattr(action, 'name', action)}), and one router follows one driver. Clear its action "
            "(RouterReplay.clear_global_router_replay_action()), or use no session."
        )


def check_runs_python(caller: Any, source: ExpertSource | None = None) -> None:
    """Raise if this call becomes part of a graph that runs again without Python, with the routes of this run.

    Args:
        caller: a router, or words that name it.
        source: of the experts of a forward that no tape keeps; a graph may have the calls of some. None: it may not.

    Raises:
        ReplayStateError: a CUDA graph is captured; make_fx, torch.export or torch.jit.trace traces; compiled autograd is on.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")  # slow to import; loaded wherever it traces
    reason = ""
    if compiled is not None and compiled.in_compiled_autograd_region:
        reason = (
            ": recomputes look like forwards under compiled autograd: turn it off "
            "(torch._dynamo.config.compiled_autograd = False)"
        )
    elif (
        torch._C._is_tracing()
        or _is_in_proxy_mode()
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]
    ):
        reason = " is captured into a graph, which would repeat the routes of the capture. Leave routers out of graphs"
    if reason and not (source is not None and source._may_be_captured):
        name = caller if isinstance(caller, str) else tape.layer_of(caller)
        raise ReplayStateError(f"MRR416: {name}{reason}.")


def _is_in_proxy_mode() -> bool:
    """Return whether make_fx or torch.export traces: in a mode of the dispatcher, or of the operators above autograd."""
    if not (torch._C._len_torch_dispatch_stack() or torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)):
        return False
    proxy_tensor = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxy_tensor is not None and proxy_tensor.get_proxy_mode() is not None


# ---- the hooks themselves
def install() -> None:
    """Put the hooks in, once for the process.

    Raises:
        ReplayStateError: a private name of torch or Megatron-Core is gone.
    """
    check_names(REQUIRED_SYMBOLS)
    checkpoints.install()
    routing, topk = TopKRouter.routing, getattr(router_module, TOPK_FUNCTION)
    if not hasattr(routing, "is_hook"):
        TopKRouter.routing = _routing_hook(routing)
    for inference_router in INFERENCE_ROUTERS:
        if not hasattr(inference_router.forward, "is_hook"):
            inference_router.forward = _inference_hook(inference_router.forward)
    if not is_hook(topk):
        setattr(router_module, TOPK_FUNCTION, _topk_hook(topk))
    tape.before_run = check_routing


def _replaced() -> list[str]:
    """Return the functions of the router's module that are hooked no more."""
    # `functools.wraps` copies the mark to a wrapper: one around the method is legal, the top-k must be the hook itself.
    routing = [] if hasattr(TopKRouter.routing, "is_hook") else ["TopKRouter.routing"]
    return routing if is_hook(getattr(router_module, TOPK_FUNCTION)) else [*routing, f"router.{TOPK_FUNCTION}"]


def check_routing() -> None:
    """Raise if routers no longer pass the hooks; runs of checkpoints and rows by hand check no more, for they are many."""
    if _replaced() and (dispatch.held_routers or _any_driven()):
        check_installed()


def _any_driven() -> bool:
    """Return whether a RouterReplay of ours has an action; a fused router without the hook would not call it."""
    return any(driver_of(each) is not None for each in RouterReplay.global_router_replay_instances)


def is_installed() -> bool:
    """Return whether `install` would change nothing."""
    return not (_replaced() or checkpoints.replaced() or checkpoints.misses_transformer_engine())


def check_installed() -> None:
    """Raise if a hook was replaced.

    Raises:
        ReplayStateError: names the replaced functions.
    """
    replaced = _replaced() + checkpoints.replaced()
    if replaced:
        raise ReplayStateError(
            f"MRR415: {' and '.join(replaced)} was replaced during a session, which no longer gives routers "
            "their experts. Patch it before the session begins (it is then wrapped), and do not patch it inside."
        )


def _routing_hook(original: Any) -> Any:
    @_disable_dynamo
    def routing(self: Any, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        sources = _sources.get(self)
        source: ExpertSource | None = sources[-1] if sources else driver_of(self)
        if sources is None:
            if source is not None:
                _sources[self] = []
            elif not tape.has_entry(self):  # of a forward before `forget`
                _count_unregistered(self)
                return cast("tuple[Tensor, Tensor]", original(self, logits, *args, **kwargs))
        # The call before entered no dispatcher, if it was a recompute of the router alone, or failed after the routing.
        dispatch.thread.outputs.pop(id(self), None)
        call, is_written = routing_call(self, source, logits.shape[:-1])
        outer, current.call = current.call, call
        try:
            probs, routing_map = original(self, logits, *args, **kwargs)
        finally:
            current.call = outer
        if call is not None:
            if call.used is None:
                raise ReplayStateError(
                    f"MRR414: {tape.layer_of(self)} chose experts without a request to the session, or to its RouterReplay: "
                    "not by Megatron-Core's topk_routing_with_score_function. Was moe_router_load_balancing_type, or the "
                    "function, replaced?"
                )
            if call.counter.verify:
                count_wrong(call.counter, call.used, routing_map)
            if call.counter.topk_again:
                call.check_probabilities(probs)
        # After the routing, so that a forward that raises has written nothing.
        if is_written:
            tape.write(Entry(self, None) if call is None else call.entry())
        if call is not None and call.source is not None:
            call.counter.forwards += 1
            call.source._on_routed(call)
        if (source is not None or call is not None) and self in dispatch.compared_routers:
            try:
                # A subclass that called this may change the probabilities; its map must enter the dispatcher as it is.
                is_last = type(self).routing is TopKRouter.routing
                dispatch.thread.outputs[id(self)] = dispatch.RoutedOutputs(
                    dispatch.identity_of(routing_map), dispatch.identity_of(probs) if is_last else None
                )
            except NotImplementedError as error:  # tensors of torch.func have no storage
                raise ReplayStateError(
                    f"MRR416: {tape.layer_of(self)} runs inside a transform of torch.func (grad, vjp, jvp, vmap), whose "
                    "tensors cannot be compared at a token dispatcher: use torch.autograd.grad or backward()."
                ) from error
        return probs, routing_map

    routing.is_hook = routing  # type: ignore[attr-defined]
    return routing


def _count_unregistered(router: Any) -> None:
    global unregistered_forwards
    unregistered_forwards += router.training
    if on_unregistered is not None and router.training and torch.is_grad_enabled() and router.weight.requires_grad:
        on_unregistered(router)


def _topk_hook(original: Any) -> Any:
    takes_argument, asks = takes_replay(original), asks_manager(original)

    def topk_routing_with_score_function(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        call = current.call
        if call is not None:
            kwargs["fused"] = False  # the fused function requests nothing
            if takes_argument:
                kwargs[REPLAY_ARGUMENT] = call
            elif "is_mtp" in kwargs:
                kwargs["is_mtp"] = False  # else MTP routers bypass the manager, and their recomputes must freeze
            if asks:
                _hook_manager(topk_manager())
        routed: tuple[Tensor, Tensor] = original(*args, **kwargs)
        return routed

    topk_routing_with_score_function.is_hook = topk_routing_with_score_function  # type: ignore[attr-defined]
    topk_routing_with_score_function.__wrapped__ = original  # type: ignore[attr-defined]
    return topk_routing_with_score_function


def _hook_manager(manager: Any) -> None:
    """Let miles' manager hand out the call of the router that runs now; without one, it answers itself.

    Source: miles 31f1ca96, replay_base.BaseReplayManager.get_topk_fn.
    """
    original = getattr(manager, MANAGER_METHOD, None)
    if original is None or is_hook(original):
        return

    def get_topk_fn(compute_topk: Any, *args: Any, **kwargs: Any) -> Any:
        call = current.call
        if call is None:
            return original(compute_topk, *args, **kwargs)

        def replay_topk(scores: Tensor, topk: int, num_groups: Any = None, group_topk: Any = None) -> Any:
            return call.get_replay_topk(scores, topk, num_groups, group_topk, compute_topk)

        return replay_topk

    get_topk_fn.is_hook, get_topk_fn.__wrapped__ = get_topk_fn, original  # type: ignore[attr-defined]
    setattr(manager, MANAGER_METHOD, get_topk_fn)


def _unhook_manager(manager: Any) -> None:
    """Put back the method of miles' manager; the next call in a session hooks it again."""
    hook: Any = getattr(manager, MANAGER_METHOD, None)
    if not is_hook(hook):
        return
    if getattr(hook.__wrapped__, "__self__", None) is manager:
        delattr(manager, MANAGER_METHOD)  # its class has it
    else:
        setattr(manager, MANAGER_METHOD, hook.__wrapped__)


def _inference_hook(original: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A frozen model may generate between its steps: a freeze takes no micro-batches.
        if any(source._takes_microbatches for source in sources_of(self)):
            for reason in inference_refusals(self):
                raise UnsupportedRouterError(f"MRR401: {tape.layer_of(self)}: {reason}.")
        return original(self, *args, **kwargs)

    forward.is_hook = forward  # type: ignore[attr-defined]
    return forward


def is_hook(function: Any) -> bool:
    """Return whether a function is a hook itself; `functools.wraps` copies the mark to a wrapper around one."""
    return function is not None and getattr(function, "is_hook", None) is function
