"""Measure the mismatch of two log-probs of the same tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_router_replay.errors import TraceError

_ROUNDING = 0.5
"""Nats above 0 that a log-prob may come to in bf16, as the difference of a large logit and a log-sum-exp."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobMismatch:
    """The distance of a trainer's log-probs from those of the engine that sampled the tokens, in nats.

    Without tokens every number is 0.0.

    Args:
        tokens: tokens counted.
        k1: mean of -log r with r = p_trainer / p_engine: estimates KL(engine || trainer), may be negative.
        k3: mean of r - 1 - log r: the same KL, never negative, less noisy.
        abs_difference: mean of |log r|.
        ratio_above_2: share of tokens with r > 2 or r < 1/2.

    Source: J. Schulman, "Approximating KL Divergence" (k1, k3).
    """

    tokens: int
    k1: float
    k3: float
    abs_difference: float
    ratio_above_2: float


def logprob_mismatch(trainer: Tensor, engine: Tensor, *, mask: Tensor | None = None) -> LogprobMismatch:
    """Compare the log-probs that two forwards gave to the same tokens.

    Args:
        trainer, engine: [...] of the same shape, log-probs in nats, any float dtype.
        mask: [...] any dtype, not 0: count this token. Positions where either log-prob is NaN are never counted.

    Raises:
        TraceError: the shapes differ, or a value is above 0, which no log-prob is.
    """
    if not isinstance(trainer, Tensor) or not isinstance(engine, Tensor):
        raise TraceError(
            f"MRR101: log-probs must be tensors, got {type(trainer).__name__} and {type(engine).__name__}."
        )
    if mask is not None and not isinstance(mask, Tensor):
        raise TraceError(f"MRR101: mask must be a tensor, got {type(mask).__name__}.")
    if trainer.shape != engine.shape or (mask is not None and mask.shape != trainer.shape):
        shapes = [list(trainer.shape), list(engine.shape), None if mask is None else list(mask.shape)]
        raise TraceError(f"MRR102: trainer, engine and mask must have one shape, got {shapes}.")
    trainer, engine = trainer.detach().double(), engine.detach().to(trainer.device).double()
    counted = ~(trainer.isnan() | engine.isnan())
    # Integers would index, where bools select: a loss mask of 0 and 1 would count tokens 0 and 1 again and again.
    counted = counted if mask is None else counted & (mask.to(counted.device) != 0)
    trainer, engine = trainer[counted], engine[counted]
    tokens = trainer.numel()
    if not tokens:
        return LogprobMismatch(tokens=0, k1=0.0, k3=0.0, abs_difference=0.0, ratio_above_2=0.0)
    highest = float(torch.maximum(trainer, engine).max())
    if highest > _ROUNDING:
        raise TraceError(
            f"MRR101: log-probs reach {highest:.4g}, and none is above 0: give log(p) of each token, not p or a loss."
        )
    log_ratio = trainer - engine
    distance = log_ratio.abs()
    return LogprobMismatch(
        tokens=tokens,
        k1=float(-log_ratio.mean()),
        # expm1 keeps the digits that matter where the two nearly agree.
        k3=float((torch.expm1(log_ratio) - log_ratio).mean()),
        abs_difference=float(distance.mean()),
        ratio_above_2=float((distance > math.log(2)).double().mean()),
    )
