"""probe: Megatron-Core's unfused routing, run beside `route` on this device -> whether they are equal, and where it rounds.

Sessions do not need the fused path. They may take it where this proved it equal, on the device and dtype that they run on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.fused.routing import route
from megatron_router_replay.fused.score import Rounding
from megatron_router_replay.ids import spread_experts

RouteChosen = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits [num_tokens, num_experts], topk_indices [num_tokens, topk] int64) -> dense (routing_probs, routing_map)."""

_ROUNDINGS_OF_ONE = 4
"""Within so many units in the last place of the largest value, `route` rounds in another order and computes the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What a comparison found.

    Args:
        rounding: the one under which `route` came closest; pass it on.
        is_equal: probabilities, map and gradients were the same bits.
        is_within_rounding: the map was the same, and nothing differed by more than 4 units in the last place of the largest
            value. A wrong formula is further away; which of two roundings a version has cannot be told by this.
        largest_error: of probabilities and gradients, absolute; infinite where the maps differ.
    """

    rounding: Rounding
    is_equal: bool
    is_within_rounding: bool
    largest_error: float


def probe(
    reference: RouteChosen,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    num_experts: int,
    topk: int,
    num_tokens: int = 257,
    score_function: str = "softmax",
    use_pre_softmax: bool = False,
    scaling_factor: float | None = None,
    exact: bool = True,
) -> Probe:
    """Compare `route`, as it would run on this device, with a reference, forward and backward.

    The caller's random numbers, gradients and grad mode stay as they are.

    Args:
        reference: Megatron-Core's routing function with its options, replaying the indices that it is given.
        device, dtype: of the router's logits.
        num_experts, topk, score_function, use_pre_softmax, scaling_factor: of the router.
        num_tokens: a number that no vector width divides finds more.
        exact: as for `route`.

    Raises:
        ReplayStateError: the reference returned other shapes.
        UnsupportedRouterError: `route` knows no such score function.
    """
    generator = torch.Generator().manual_seed(num_tokens)
    # Ordinary, large and equal logits: saturated sigmoids and exact ties are where roundings part.
    logits = 3 * torch.randn(num_tokens, num_experts, generator=generator)
    logits[::5] *= 8
    logits[::7] = logits[::7].round()
    logits = logits.to(device, dtype)
    # Every expert is chosen equally often, in an order that is not that of the scores.
    indices = spread_experts(0, num_tokens, topk=topk, num_experts=num_experts).to(device, torch.int64)
    weights = torch.randn(num_tokens, num_experts, generator=generator).to(device, dtype)
    expected = _outcome(reference, logits, indices, weights)
    fused = partial(
        route,
        score_function=score_function,
        use_pre_softmax=use_pre_softmax,
        scaling_factor=scaling_factor,
        exact=exact,
    )
    probes = [
        _compare(_outcome(partial(fused, rounding=rounding), logits, indices, weights), expected, rounding)
        for rounding in Rounding
    ]
    # The first of equals: float32 is rounded early and late alike.
    return min(probes, key=lambda found: (not found.is_equal, found.largest_error))


def _outcome(function: RouteChosen, logits: Tensor, indices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities, map and the gradient of (probabilities * weights).sum()."""
    with torch.enable_grad():
        leaf = logits.clone().requires_grad_()
        probs, routing_map = function(leaf, indices)
        if probs.shape != logits.shape or routing_map.shape != logits.shape:
            raise ReplayStateError(
                f"cannot compare the fused path with a routing function that returns {list(probs.shape)} and "
                f"{list(routing_map.shape)} for logits {list(logits.shape)}: it must return dense probabilities and map."
            )
        (gradient,) = torch.autograd.grad((probs * weights).sum(), leaf)
    return probs.detach(), routing_map.bool(), gradient


def _compare(ours: tuple[Tensor, Tensor, Tensor], theirs: tuple[Tensor, Tensor, Tensor], rounding: Rounding) -> Probe:
    is_equal = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs))
    largest_error, is_within = 0.0, torch.equal(ours[1], theirs[1])
    for i in (0, 2):
        error = float((ours[i].double() - theirs[i].double()).abs().max())
        unit = torch.finfo(theirs[i].dtype).eps * float(theirs[i].abs().max())
        # Not a number compares false: it is never within.
        is_within = is_within and error <= _ROUNDINGS_OF_ONE * unit
        largest_error = max(largest_error, error) if error == error else float("inf")
    if not torch.equal(ours[1], theirs[1]):
        largest_error = float("inf")
    return Probe(
        rounding=rounding, is_equal=is_equal, is_within_rounding=is_within or is_equal, largest_error=largest_error
    )
