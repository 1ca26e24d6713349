"""Leave the calls of a session out of expert bias and auxiliary losses, for `balance="off"`.

Otherwise Megatron-Core balances as without a session: by the map that leaves the router, padding included, in each run with
gradients. The z-loss always stays.

    TopKRouter._apply_expert_bias     adds a call's tokens to local_tokens_per_expert; off: does nothing
    TopKRouter.is_aux_loss_enabled    whether the call gets auxiliary losses; off: False

Source: TopKRouter.routing of Megatron-Core 0.16.1 to 0.19.2, which calls both.
"""

from __future__ import annotations

from typing import Any, Literal

from megatron.core.transformer.moe.router import TopKRouter

from megatron_router_replay.errors import TraceError, UnsupportedRouterError
from megatron_router_replay.mcore.core.call import current

Balance = Literal["megatron", "off"]
_METHODS = ("_apply_expert_bias", "is_aux_loss_enabled")


def check_balance(balance: Any) -> None:
    """Raise TraceError for an unknown value of `balance=`."""
    if balance not in ("megatron", "off"):
        raise TraceError(f"MRR101: balance={balance!r} must be 'megatron' or 'off'.")


def check_can_be_off(router: Any) -> None:
    """Raise UnsupportedRouterError for a router with a balancing method of its own, which `balance="off"` cannot reach."""
    for name in _METHODS:
        if name in vars(router) or not hasattr(getattr(type(router), name), "is_hook"):
            raise UnsupportedRouterError(
                f"MRR401: balance='off' cannot leave layer {getattr(router, 'layer_number', '?')} out: its {name} is not "
                "Megatron-Core's. Take the replacement away, or replay with Megatron-Core's own counts."
            )


def install() -> None:
    """Wrap both methods where they are not wrapped.

    Sessions with `balance="off"` call it when they start, because each call of a router pays for it.
    """
    for name in _METHODS:
        original = getattr(TopKRouter, name)
        if not hasattr(original, "is_hook"):
            setattr(TopKRouter, name, _unless_off(original))


def replaced() -> list[str]:
    """Return the names of wrapped methods that were replaced."""
    return [f"TopKRouter.{name}" for name in _METHODS if not hasattr(getattr(TopKRouter, name), "is_hook")]


def _unless_off(original: Any) -> Any:
    def balance(router: Any, *args: Any, **kwargs: Any) -> Any:
        if current.call is not None and current.call.counter.balance_off:
            return False  # no auxiliary loss is enabled; the expert bias returns nothing that is used
        return original(router, *args, **kwargs)

    balance.is_hook = balance  # type: ignore[attr-defined]
    return balance
