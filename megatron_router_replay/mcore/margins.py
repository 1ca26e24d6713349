"""Which decisions of a replay the live router takes after all, because it disagrees too little or too much.

A decision is a row in a layer. The router's forward takes it once, from its live scores; the recompute uses what the forward
used, as of every route. Each token is routed by one rank in a layer (Megatron-Core trains experts under tensor parallelism
with sequence parallelism alone), so no two ranks take the same decision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.errors import TraceError
from megatron_router_replay.mass import ScoreKind, mass_lost

NUM_COUNTS = 3
"""Numbers of a layer: decisions weighed, left live below min_margin, left live above max_margin."""


@dataclass(slots=True)
class Margins:
    """Replays a decision only where the live router would lose `lowest` to `highest` of its probability by it.

    Args:
        lowest, highest: 0 to 1, both included.
    """

    lowest: float
    highest: float
    _counts: dict[int, Tensor] = field(default_factory=dict)  # layer number -> [NUM_COUNTS] int64 on the device

    @classmethod
    def of(cls, min_margin: Any, max_margin: Any) -> Margins | None:
        """Return None where neither is given.

        Raises:
            TraceError: one is no share, or no margin lies between them.
        """
        if min_margin is None and max_margin is None:
            return None
        for name, value in (("min_margin", min_margin), ("max_margin", max_margin)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise TraceError(f"{name}={value!r} must be a share of the live router's probability, 0 to 1.")
        lowest = 0.0 if min_margin is None else float(min_margin)
        highest = math.inf if max_margin is None else float(max_margin)
        if lowest > highest:
            raise TraceError(
                f"no decision can be replayed: min_margin={min_margin} is above max_margin={max_margin}. Decisions between "
                "the two, both included, are replayed."
            )
        return cls(lowest, highest)

    def select(
        self, layer_number: int, routes: Tensor, *, scores: Tensor, kind: ScoreKind, live: Tensor, replayed: Tensor
    ) -> Tensor:
        """Return the routes to use; no host sync.

        Args:
            routes: [num_tokens, topk], the trace's, of any integer dtype, which the result has too.
            scores: [num_tokens, num_experts], what the live router ranks.
            live: [num_tokens, topk] int64, what it would choose.
            replayed: [num_tokens] bool, False: the row is live already, or padding.
        """
        with torch.no_grad():
            margin = mass_lost(scores, kind, live=live, replayed=routes)
            # The same experts are replayed whatever the bounds: there is nothing to decide, and the columns keep their order.
            differ = (live.sort(dim=1).values != routes.to(torch.int64).sort(dim=1).values).any(dim=1) & replayed
            below, above = differ & (margin < self.lowest), differ & (margin > self.highest)
            # Summed on the device: a number for the host in every layer would wait for it in every layer.
            counts = torch.stack([replayed.sum(), below.sum(), above.sum()])
            before = self._counts.get(layer_number)
            self._counts[layer_number] = counts if before is None else before + counts
            return torch.where((below | above).unsqueeze(1), live.to(routes.dtype), routes)

    def counts_of_layer(self) -> dict[int, list[int]]:
        """Return the counts of each layer, in the order of their numbers; waits for the device."""
        return {layer: self._counts[layer].tolist() for layer in sorted(self._counts)}
