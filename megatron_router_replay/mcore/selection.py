"""What the live router chooses, for all rows or for some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.moe.moe_utils import group_limited_topk
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LiveTopk:
    """The live top-k of one forward, worked out only when asked for.

    It runs in the gradient mode of the forward: since Megatron-Core 0.18 the order of the columns depends on it.

    Args:
        scores: [num_tokens, num_experts], what the router ranks.
        topk, num_groups, group_topk: as the router asks for them.
        compute: Megatron-Core's own top-k of these scores.
    """

    scores: Tensor
    topk: int
    num_groups: int | None
    group_topk: int | None
    compute: Any

    def indices(self) -> Tensor:
        """Return the experts of all rows, [num_tokens, topk] int64."""
        scores = self.scores.detach()
        indices: Tensor = self.compute(scores, self.topk, num_groups=self.num_groups, group_topk=self.group_topk)[1]
        return indices

    def indices_of(self, rows: Tensor) -> Tensor:
        """Return the experts of the rows at these positions ([n] int64), [n, topk] int64."""
        scores = self.scores.detach().index_select(0, rows)
        if self.group_topk:  # the router's own knows how many rows all scores have
            chosen = group_limited_topk(scores, self.topk, *scores.shape, self.num_groups, self.group_topk)
        else:
            chosen = self.compute(scores, self.topk)
        indices: Tensor = chosen[1]
        return indices


def in_order_of_scores(topk_indices: Tensor, scores: Tensor) -> Tensor:
    """Return the same experts with the columns in falling order of their scores, as a sorted top-k has them.

    Args:
        topk_indices: [num_tokens, topk] int64; equal scores keep their order.
        scores: [num_tokens, num_experts].
    """
    order = scores.detach().gather(1, topk_indices).argsort(dim=1, descending=True, stable=True)
    return topk_indices.gather(1, order)
