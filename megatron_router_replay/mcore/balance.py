"""What Megatron-Core's balancing sees while a session holds a router: its expert-bias counters and its auxiliary losses.

Megatron-Core feeds both with every row of a micro-batch, padding included, once in each run of the router with gradients on,
so twice under a non-reentrant checkpoint. Under a session padding is left out, and a token counts once:

    a forward, or its recompute            begin(routing, live)        in get_replay_topk: who is routed, is it a repetition
    router._apply_*_aux_loss               rows and routing map        of the choice `Balance.aux_loss`, padding masked
    router.attach_and_log_...              its log                     once, and 0 where a micro-batch is all padding
    router._apply_expert_bias              the counters                of the choice `Balance.expert_bias`; the call is over

The methods are Megatron-Core's own, called with other arguments; they are hidden on the routers of a session alone
from their first forward on, not on the class. The z-loss is left as it is.

Source: TopKRouter.routing of Megatron-Core 0.16.1 to 0.19.2, which calls these methods in this order.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megatron_router_replay.errors import ReplayStateError, TraceError, UnsupportedRouterError
from megatron_router_replay.mcore.selection import LiveTopk
from megatron_router_replay.torch_private import not_compiled, outside_selective_checkpoints

ExpertBias = Literal["replayed", "live", "off"]
AuxLoss = Literal["live", "replayed", "off"]

_AUX_LOSSES = {f"_apply_{name}": name for name in ("aux_loss", "seq_aux_loss", "global_aux_loss")}
"""Method of TopKRouter -> its name in moe_router_load_balancing_type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """What balancing counts under a session; the default is what Megatron-Core counts while it replays.

    Args:
        expert_bias: whose experts the counters behind the expert bias get: "replayed", those that the forward used;
            "live", those that the router would have chosen; "off", none.
        aux_loss: whose experts the auxiliary losses take for the load: "live", their own top-k of the scores; "replayed",
            those that the forward used; "off": there is no auxiliary loss.
    """

    expert_bias: ExpertBias = "replayed"
    aux_loss: AuxLoss = "live"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("expert_bias", self.expert_bias, get_args(ExpertBias)),
            ("aux_loss", self.aux_loss, get_args(AuxLoss)),
        ):
            if value not in known:
                raise TraceError(f"{name}={value!r} must be one of {', '.join(map(repr, known))}.")

    @property
    def number(self) -> int:
        """A number of this choice that ranks compare; from 0."""
        return get_args(ExpertBias).index(self.expert_bias) * 3 + get_args(AuxLoss).index(self.aux_loss)

    def check_model(self, routers: Sequence[Any]) -> None:
        """Raise where a choice other than the default asks for something that the model does not have.

        Args:
            routers: the TopKRouters of this rank; without any, nothing is known of the model.

        Raises:
            UnsupportedRouterError: names the config field.
        """
        if not routers:
            return
        if self.expert_bias == "live" and not any(has_expert_bias(router) for router in routers):
            raise UnsupportedRouterError(
                "expert_bias='live' asks for counters that no router of this model has: moe_router_enable_expert_bias is "
                "off. Leave expert_bias out, or turn that on."
            )
        if self.aux_loss == "replayed" and not any(router.is_aux_loss_enabled() for router in routers):
            raise UnsupportedRouterError(
                "aux_loss='replayed' asks for a loss that no router of this model has: moe_router_load_balancing_type="
                f"{routers[0].routing_type!r} with moe_aux_loss_coeff={routers[0].config.moe_aux_loss_coeff!r}. Leave "
                "aux_loss out, or set these."
            )


AS_MEGATRON = Balance()
"""What Megatron-Core counts while it replays."""


@dataclass(slots=True, eq=False)
class Routing:
    """What one forward of a router leaves for its balancing, also for its recomputes; made by whoever chose the experts.

    Args:
        router: the TopKRouter.
        balance: the session's choice.
        topk_indices: [num_tokens, topk], the experts that it used.
        is_token: [num_tokens] bool on the router's device, False: known to be padding; None: nothing is known of padding.
        packed: the model got packed sequences.
        counted: called with the number of tokens that went into the expert-bias counters, an int or a scalar tensor.
        done: a run with gradients has been counted.
        before: what global_aux_loss had added up before these tokens' first run: a repetition must see the same.
    """

    router: Any
    balance: Balance
    topk_indices: Tensor
    is_token: Tensor | None
    packed: bool
    counted: Callable[[int | Tensor], None]
    done: bool = False
    before: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True)
class _Call:
    """One run of a router, forward or recompute, between its top-k and the end of `TopKRouter.routing`."""

    routing: Routing
    live: LiveTopk
    repeats: bool  # what must happen once a token has happened


class _Calls(threading.local):
    current: _Call | None = None


_calls = _Calls()  # of each thread: several may run backwards, and so recomputes, at once


def begin(routing: Routing, live: LiveTopk) -> None:
    """Take note that a router goes on to balance what it has just routed.

    Without gradients nothing counts: neither an evaluation, nor the forward of a reentrant checkpoint, whose recompute does.
    The first run with gradients counts, every later one of the same tokens repeats it.
    """
    router = routing.router
    if not (has_expert_bias(router) or router.is_aux_loss_enabled()):
        return
    if "_apply_expert_bias" not in vars(router):
        # Bound to the router, so that a copy of the model gets them bound to its own router: there nothing is under way.
        vars(router).update({name: MethodType(function, router) for name, function in _METHODS.items()})
    _calls.current = _Call(routing, live, repeats=routing.done)
    routing.done = routing.done or torch.is_grad_enabled()


def forget() -> None:
    """Take note that what this thread routes next, or has failed to finish, is not balanced by a session."""
    _calls.current = None


def is_under_way() -> bool:
    """Return whether this thread is balancing what a session has routed."""
    return _calls.current is not None


def take_off(router: Any) -> None:
    """Give a router its own balancing methods back, if it ever got ours."""
    for name, function in _METHODS.items():
        if getattr(vars(router).get(name), "__func__", None) is function:
            vars(router).pop(name, None)  # two threads may free the last recompute at once


def replaced_methods(router: Any) -> list[str]:
    """Return the balancing methods that somebody else has put on this router itself."""
    replaced = []
    for name, ours in _METHODS.items():
        method = vars(router).get(name)
        # A copy of a model under a session that was pickled has the class's own method there.
        if method is not None and getattr(method, "__func__", None) not in (ours, getattr(type(router), name)):
            replaced.append(name)
    return replaced


def has_expert_bias(router: Any) -> bool:
    """Return whether a TopKRouter counts tokens for its expert bias."""
    return bool(router.enable_expert_bias)


def aux_loss_group(routers: Sequence[Any]) -> Any:
    """Return the largest process group over which these routers add up a load for an auxiliary loss; None: they have none."""
    for name, group in (
        ("global_aux_loss", "tp_dp_cp_group"),
        ("seq_aux_loss", "tp_cp_group"),
        ("aux_loss", "tp_cp_group"),
    ):
        for router in routers:
            if router.get_aux_loss_coeff(name) > 0:
                return getattr(router, group)
    return None


@not_compiled
def _apply_expert_bias(router: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
    call = _call_of(router)
    count = type(router)._apply_expert_bias  # the router's own attribute of that name is this function
    if call is None:
        count(router, routing_map, padding_mask=padding_mask)
        return
    _calls.current = None  # routing ends here
    routing = call.routing
    if call.repeats or routing.balance.expert_bias == "off":
        return
    if not (has_expert_bias(router) and torch.is_grad_enabled()):
        return
    with outside_selective_checkpoints(), torch.no_grad():
        if routing.balance.expert_bias == "live":
            routing_map = _as_map(call.live.indices(), routing_map)
        elif router.config.moe_pad_expert_input_to_capacity:
            # That fills every expert up with tokens which were not routed to it.
            routing_map = routing_map & _as_map(routing.topk_indices, routing_map)
        # Megatron-Core's own mask is [num_tokens], and it does not widen it for its [num_tokens, num_experts].
        is_token = routing.is_token
        if padding_mask is not None:
            is_token = ~padding_mask if is_token is None else is_token & ~padding_mask
        if is_token is not None:
            routing_map = routing_map & is_token.unsqueeze(1)
        with torch.enable_grad():  # without gradients it does not count
            count(router, routing_map)
        routing.counted(routing_map.shape[0] if is_token is None else is_token.sum())


def _aux_loss_method(method: str) -> Any:
    @not_compiled
    def apply(
        router: Any, probs: Tensor, scores: Tensor, routing_map: Tensor, *args: Any, with_padding_mask: bool = False
    ) -> Tensor:
        call = _call_of(router)
        around: AbstractContextManager[None] = nullcontext()
        if call is not None and router.get_aux_loss_coeff(_AUX_LOSSES[method]) > 0:
            if call.routing.balance.aux_loss == "off":
                return probs
            if method == "_apply_seq_aux_loss" and call.routing.packed:
                raise ReplayStateError(
                    "seq_aux_loss balances each sequence, but the model got packed sequences (packed_seq_params), which "
                    "Megatron-Core's router takes for a single one. Do not pack, replay(..., aux_loss='off'), or "
                    "moe_router_load_balancing_type='aux_loss'."
                )
            scores, routing_map, with_padding_mask = _load(call.routing, scores, routing_map, with_padding_mask)
            if method == "_apply_global_aux_loss":
                around = _as_in_its_first_run(call)
        with around:
            applied: Tensor = getattr(type(router), method)(
                router, probs, scores, routing_map, *args, with_padding_mask=with_padding_mask
            )
        return applied

    apply.__name__ = method  # a bound method is copied and pickled by its name
    return apply


def _load(
    routing: Routing, scores: Tensor, routing_map: Tensor, with_padding_mask: bool
) -> tuple[Tensor, Tensor, bool]:
    """Return (scores, routing map, padding is masked) that an auxiliary loss takes, [num_tokens, num_experts] both."""
    is_token = routing.is_token
    if with_padding_mask:  # what Megatron-Core has masked itself has no expert any more
        its_own = routing_map.any(dim=1)
        is_token = its_own if is_token is None else is_token & its_own
    if routing.balance.aux_loss == "replayed":
        routing_map = _as_map(routing.topk_indices, routing_map)
    if is_token is None:
        return scores, routing_map, False
    padding = ~is_token.unsqueeze(1)
    # Filled, not multiplied: the loss of a micro-batch without a token is 0 / 0, and 0 * nan would reach the weights.
    return scores.masked_fill(padding, 0), routing_map.masked_fill(padding, 0), True


@contextmanager
def _as_in_its_first_run(call: _Call) -> Iterator[None]:
    """Let global_aux_loss, which adds up the load of micro-batches, find what it found when it first saw these tokens."""
    router: Any = call.routing.router
    state = (router.global_tokens_per_expert, router.ga_steps)
    now = [tensor.clone() for tensor in state]
    if not call.repeats:
        call.routing.before = now
        yield
        return
    assert call.routing.before, "a first run with gradients came before"
    for tensor, earlier in zip(state, call.routing.before):
        tensor.copy_(earlier)
    try:
        yield
    finally:
        for tensor, later in zip(state, now):
            tensor.copy_(later)


@not_compiled
def _attach_and_log_load_balancing_loss(
    router: Any, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    call = _call_of(router)
    if call is not None:
        num_tokens = kwargs.get("valid_token_count")
        if isinstance(num_tokens, Tensor):
            aux_loss = aux_loss.masked_fill(num_tokens == 0, 0)  # the loss of no tokens is 0 / 0
        if call.repeats:
            aux_loss_coeff = math.inf  # it divides what is logged, which a repetition must not add up again
    attached: Tensor = type(router).attach_and_log_load_balancing_loss(
        router, activation, aux_loss_coeff, aux_loss, *args, **kwargs
    )
    return attached


def _call_of(router: Any) -> _Call | None:
    """Return what this thread has under way in this router; None in a copy of it, and when no session routed."""
    call = _calls.current
    return call if call is not None and call.routing.router is router else None


def _as_map(topk_indices: Tensor, like: Tensor) -> Tensor:
    """Return [num_tokens, topk] indices as a map of the shape of another one, [num_tokens, num_experts] bool."""
    return torch.zeros_like(like, dtype=torch.bool).scatter(1, topk_indices.to(torch.int64), True)


_METHODS: dict[str, Any] = {name: _aux_loss_method(name) for name in _AUX_LOSSES} | {
    "_apply_expert_bias": _apply_expert_bias,
    "attach_and_log_load_balancing_loss": _attach_and_log_load_balancing_loss,
}
"""Name on TopKRouter -> ours."""
