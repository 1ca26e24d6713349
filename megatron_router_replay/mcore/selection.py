"""What a live router would choose, worked out only when a session asks for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.transformer.moe.moe_utils import group_limited_topk
from torch import Tensor


def select_topk(scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None) -> Tensor:
    """Return Megatron-Core's unfused top-k of any rows, [rows, topk] int64."""
    if not group_topk:
        return torch.topk(scores, k=topk, dim=1)[1]
    indices: Tensor = group_limited_topk(scores, topk, *scores.shape, num_groups, group_topk)[1]
    return indices


class LiveSelection:
    """What the live router would choose for one micro-batch, worked out only when asked for.

    Args:
        inputs: [num_tokens, num_experts], what `score` makes scores of.
        score: inputs of any rows -> the scores that the selection ranks, of the same shape.
        select: scores of any rows -> the experts it takes, [rows, topk] int64.
    """

    def __init__(
        self,
        inputs: Tensor,
        *,
        select: Callable[[Tensor], Tensor],
        score: Callable[[Tensor], Tensor] = lambda scores: scores,
    ) -> None:
        self.inputs = inputs
        self._score = score
        self._select = select

    @torch.no_grad()
    def scores(self) -> Tensor:
        """Return what the selection ranks, [num_tokens, num_experts]."""
        return self._score(self.inputs)

    @torch.no_grad()
    def topk(self, rows: Tensor | None = None) -> Tensor:
        """Return the experts of the rows at these positions ([n] int64; None: of all), [n, topk] int64."""
        return self._select(self.scores() if rows is None else self._score(self.inputs.index_select(0, rows)))
