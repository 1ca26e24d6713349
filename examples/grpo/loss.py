"""GRPO in tensors: group-normalised advantages, the clipped loss, the k3 estimate of KL."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, groups: Sequence[int]) -> Tensor:
    """Return (reward - mean of its group) / (std of its group + 1e-4), [num_samples].

    Source: GRPO, arXiv 2402.03300, section 4.1.2.
    """
    groups_of = torch.tensor(groups)
    advantages = torch.zeros_like(rewards)
    for group in groups_of.unique():
        members = groups_of == group
        own = rewards[members]
        advantages[members] = (own - own.mean()) / (own.std(correction=0) + 1e-4)
    return advantages


def k3_kl(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return the k3 estimate of KL(p || q) for each token sampled from p: r - 1 - log r, with r = q / p.

    Args:
        logprobs: of the tokens under p, which sampled them.
        other: under q.

    Source: J. Schulman, "Approximating KL divergence", 2020.
    """
    log_ratio = other - logprobs
    return log_ratio.exp() - 1 - log_ratio


def clipped_loss(
    logprobs: Tensor,
    *,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    clip: float,
    kl_coef: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return per token: the loss, whether the clip took effect, and the k3 KL to the reference.

    Args:
        logprobs: of the policy in training; all tensors have the same shape.
        clip: the ratio to the old policy counts within 1 - clip .. 1 + clip.
    """
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    kl = k3_kl(logprobs, ref_logprobs)
    return kl_coef * kl - surrogate, clipped * advantages < ratio * advantages, kl
