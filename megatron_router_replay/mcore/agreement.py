"""What the ranks of a replay must have in common for their balancing to mean one thing, compared when the session is left.

An auxiliary loss adds the loads of several ranks up, and divides by tokens: by all rows where a rank knows of no padding, by
those that are left where it does. Ranks that differ in that compute parts of two different losses, without a word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron_router_replay.mcore.balance import Balance, aux_loss_group

_PRIME = (1 << 61) - 1
"""The digest of all micro-batches stays below, and so fits an int64."""


class Agreement:
    """Three numbers of this rank that others can compare with theirs.

    Args:
        balance: the choice of its session.
        routers: its TopKRouters.
    """

    def __init__(self, balance: Balance, routers: Sequence[Any]) -> None:
        self._choice = balance.number
        self._digest = 0
        self._group = -1  # the lowest rank of the group that shares an auxiliary loss; none does
        group = None if balance.aux_loss == "off" else aux_loss_group(routers)
        if group is not None and dist.is_initialized():
            self._group = min(dist.get_process_group_ranks(group))

    def add(self, with_padding: bool) -> None:
        """Take note of the next micro-batch that was forwarded: whether its padding is known."""
        # Never a step of 0, so that the number of micro-batches counts too.
        self._digest = (self._digest * 1_000_003 + 1 + with_padding) % _PRIME

    def numbers(self) -> list[int]:
        """Return choice, group and a digest of all micro-batches."""
        return [self._choice, self._group, self._digest]

    @staticmethod
    def problems(everyone: dict[int, list[int]]) -> list[str]:
        """Return what ranks do not agree upon, from `numbers` of each rank; the same on all of them."""
        choices = {choice for choice, _, _ in everyone.values()}
        if len(choices) > 1:
            return ["ranks replay with different expert_bias= or aux_loss=: give all of them the same."]
        digests: dict[int, set[int]] = defaultdict(set)
        for _, group, digest in everyone.values():
            digests[group].add(digest)
        return [
            f"ranks that share an auxiliary loss (those of rank {group}) were not told of padding in the same micro-batches: "
            "its parts were divided by different numbers of tokens: give padding= on all ranks, or on none."
            for group, of_group in sorted(digests.items())
            if group >= 0 and len(of_group) > 1
        ]
