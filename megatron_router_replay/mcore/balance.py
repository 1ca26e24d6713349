"""What Megatron-Core's balancing sees of a router that a session holds: a token counts once, and padding never.

Megatron-Core feeds its expert-bias counters and its auxiliary losses with every row of a micro-batch, padding included. It
does so in each run of the router with gradients on, so twice under a non-reentrant checkpoint. `install` wraps these
methods on the class: in a call that a session decides they leave padding out, and count a forward and its recomputes once.
The load of an auxiliary loss stays that of the live scores. The z-loss is left as it is.

Source: TopKRouter.routing of Megatron-Core 0.16.1 to 0.19.2, which calls these methods in this order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_router_replay.errors import ReplayStateError, TraceError
from megatron_router_replay.mcore.core import hooks, tape
from megatron_router_replay.mcore.model.upstream import AUX_LOSSES

ExpertBias = Literal["replayed", "off"]
AuxLoss = Literal["live", "off"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """What balancing counts under a session.

    Args:
        expert_bias: "replayed": the experts that the forward used; "off": none, so the bias stays as it is.
        aux_loss: "live": auxiliary losses take their own top-k of the scores, as always; "off": there is none.
    """

    expert_bias: ExpertBias = "replayed"
    aux_loss: AuxLoss = "live"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("expert_bias", self.expert_bias, ("replayed", "off")),
            ("aux_loss", self.aux_loss, ("live", "off")),
        ):
            if value not in known:
                raise TraceError(f"MRR101: {name}={value!r} must be one of {', '.join(map(repr, known))}.")


@dataclass(slots=True, eq=False)
class BalanceState:
    """What balancing knows of the tokens of one call, shared by a forward and its recomputes.

    Args:
        balance: the session's choice.
        is_token: [num_tokens] bool on the router's device, False: known to be padding; None: nothing is known of padding.
        packed: the model got packed sequences.
        counted: a run with gradients has counted these tokens, so every later one repeats it.
        before: what global_aux_loss had added up before their first run: a repetition must see the same.
    """

    balance: Balance
    is_token: Tensor | None = None
    packed: bool = False
    counted: bool = False
    before: Sequence[Tensor] = ()


def balances(router: Any) -> bool:
    """Return whether a TopKRouter counts or balances anything."""
    return bool(router.enable_expert_bias or router.is_aux_loss_enabled())


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


def install(router_class: Any, router_module: Any, thread: Any) -> None:
    """Wrap the methods of TopKRouter, and the loss function that it calls.

    Args:
        thread: its `call` is what this thread routes with now; None: Megatron-Core's own code.
    """
    for name in AUX_LOSSES:
        _wrap(router_class, name, functools.partial(_aux_loss, method=name, thread=thread))
    _wrap(router_class, "_apply_expert_bias", functools.partial(_expert_bias, thread=thread))
    _wrap(router_class, "attach_and_log_load_balancing_loss", functools.partial(_logged, thread=thread))
    _wrap(router_module, "switch_load_balancing_loss_func", _unfused_with_padding)


def _wrap(owner: Any, name: str, wrapped: Callable[[Any], Any]) -> None:
    """Put what `wrapped` makes of a function in its place, unless that is done: a second wrapper would count again."""
    original = getattr(owner, name)
    if not hasattr(original, "is_hook"):
        wrapper = wrapped(original)
        wrapper.is_hook = wrapper
        setattr(owner, name, wrapper)


def _unfused_with_padding(original: Any) -> Any:
    def loss(*args: Any, **kwargs: Any) -> Tensor:
        # Transformer Engine's kernel divides by a number that the host knows; with padding it is a tensor of floats.
        if isinstance(kwargs.get("total_num_tokens"), Tensor) and kwargs["total_num_tokens"].is_floating_point():
            kwargs["fused"] = False
        computed: Tensor = original(*args, **kwargs)
        return computed

    return loss


def _aux_loss(original: Any, method: str, thread: Any) -> Any:
    def apply(
        router: Any, probs: Tensor, scores: Tensor, routing_map: Tensor, *args: Any, with_padding_mask: bool = False
    ) -> Tensor:
        tokens = _tokens(thread.call)
        around: AbstractContextManager[None] = nullcontext()
        if tokens is not None and router.get_aux_loss_coeff(AUX_LOSSES[method]) > 0:
            if tokens.balance.aux_loss == "off":
                return probs
            if method == "_apply_seq_aux_loss" and tokens.packed:
                raise ReplayStateError(
                    "MRR418: seq_aux_loss balances each sequence, but the model got packed sequences "
                    "(packed_seq_params), which Megatron-Core's router takes for a single one. Do not pack, "
                    "replay(..., aux_loss='off'), or moe_router_load_balancing_type='aux_loss'."
                )
            is_token = tokens.is_token
            if with_padding_mask:  # what Megatron-Core has masked itself has no expert any more
                routed = routing_map.any(dim=1)
                is_token = routed if is_token is None else is_token & routed
            with_padding_mask = is_token is not None
            if is_token is not None:
                padding = ~is_token.unsqueeze(1)
                # Filled, not multiplied: the loss of no token is 0 / 0, and 0 * nan would reach the weights.
                scores, routing_map = scores.masked_fill(padding, 0), routing_map.masked_fill(padding, 0)
            if method == "_apply_global_aux_loss":
                around = _restored_global_load(router, tokens)
        with around:
            applied: Tensor = original(router, probs, scores, routing_map, *args, with_padding_mask=with_padding_mask)
        return applied

    return apply


def _expert_bias(original: Any, thread: Any) -> Any:
    def apply(router: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        call = thread.call
        tokens: BalanceState | None = None if call is None else call.tokens
        if tokens is None:
            original(router, routing_map, padding_mask=padding_mask)
            return
        repeats, tokens.counted = tokens.counted, tokens.counted or torch.is_grad_enabled()  # the last method of a call
        counts = router.enable_expert_bias and torch.is_grad_enabled() and tokens.balance.expert_bias != "off"
        if repeats or not counts:
            return
        with tape.hidden_from_selective_checkpoint(), torch.no_grad():
            if router.config.moe_pad_expert_input_to_capacity:
                # That fills every expert up with tokens that were not routed to it.
                used = call.used.to(torch.int64)
                routing_map = routing_map & torch.zeros_like(routing_map).scatter_(1, used, True)
            # Megatron-Core's own mask is [num_tokens], and up to 0.19 it does not widen it for its [num_tokens, num_experts].
            is_token = tokens.is_token
            if padding_mask is not None:
                is_token = ~padding_mask if is_token is None else is_token & ~padding_mask
            if is_token is not None:
                routing_map = routing_map & is_token.unsqueeze(1)
            with torch.enable_grad():  # without gradients it does not count
                original(router, routing_map)
            call.counter.add(counted=routing_map.shape[0] if is_token is None else is_token.sum())

    return apply


def _logged(original: Any, thread: Any) -> Any:
    def attach_and_log(
        router: Any, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        tokens = _tokens(thread.call)
        if tokens is not None:
            num_tokens = kwargs.get("valid_token_count")
            if isinstance(num_tokens, Tensor):
                aux_loss = aux_loss.masked_fill(num_tokens == 0, 0)  # the loss of no token is 0 / 0
            if tokens.counted:
                aux_loss_coeff = math.inf  # it divides what is logged, which a repetition must not add up again
        attached: Tensor = original(router, activation, aux_loss_coeff, aux_loss, *args, **kwargs)
        return attached

    return attach_and_log


@contextmanager
def _restored_global_load(router: Any, tokens: BalanceState) -> Iterator[None]:
    """Let global_aux_loss, which adds up the load of micro-batches, find what it found when it first saw these tokens."""
    state = (router.global_tokens_per_expert, router.ga_steps)
    now = [tensor.clone() for tensor in state]
    if not tokens.counted:
        tokens.before = now
        yield
        return
    for tensor, earlier in zip(state, tokens.before):
        tensor.copy_(earlier)
    try:
        yield
    finally:
        for tensor, later in zip(state, now):
            tensor.copy_(later)


def _tokens(call: Any) -> BalanceState | None:
    tokens: BalanceState | None = None if call is None else call.tokens
    return tokens


hooks.on_install.append(install)
