"""Join the parts that ranks recorded of a batch: all layers and all rows, piece by piece.

Rows are global names of tokens. Pipeline stages bring other layers, data-, context- and sequence-parallel ranks other rows; a
row that two parts have is compared. `merge_traces` gives whole parts, `recording.gather` the messages of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.errors import TraceError
from megatron_router_replay.trace.ids import empty_routes, fill_unrouted
from megatron_router_replay.trace.routing_trace import RoutingTrace
from megatron_router_replay.trace.rows import Rows, joined_rows, put_rows, take_rows
from megatron_router_replay.trace.runs import neighbour_runs

UNKNOWN = -1
"""token_ids and weight_version of a row where no part has one."""

_BLOCK_BYTES = 16 << 20
"""Bytes of routes to add at a time."""


class PartJoiner:
    """The whole of a batch, while parts are added.

    Args:
        num_tokens, layer_numbers, num_experts, topk, device: of the whole.
        earlier: returns the name of a part that has a row in a layer, for messages.

    Attributes:
        has_route: [layers, num_tokens] uint8, 1: a part has it. torch reduces bytes, layer by layer, 20 times faster than
            bools.
        block_rows: how many rows to add at a time, so that temporary memory stays small.
    """

    def __init__(
        self,
        num_tokens: int,
        layer_numbers: Sequence[int],
        *,
        num_experts: int,
        topk: int,
        device: torch.device | None = None,
        earlier: Callable[[int, int], str],
    ) -> None:
        self.layer_numbers, self._num_experts, self._topk = tuple(layer_numbers), num_experts, topk
        self._earlier, self._num_tokens, self._device = earlier, num_tokens, device
        num_layers = len(self.layer_numbers)
        self._topk_indices = empty_routes(num_tokens, num_layers, topk, num_experts=num_experts, device=device)
        self.has_route = torch.zeros(num_layers, num_tokens, dtype=torch.uint8, device=device)
        self._per_token: dict[str, Tensor] = {}
        self.block_rows = max(1, _BLOCK_BYTES // max(1, num_layers * topk * self._topk_indices.element_size()))

    def add(self, name: str, layer_numbers: Sequence[int], rows: Rows, values: Mapping[str, Tensor | None]) -> None:
        """Place some rows of a part, and compare them with what parts before it have of them.

        Args:
            name: of the part, for messages.
            layer_numbers: of the part, some of the whole's.
            rows: of the whole, n different ones, [n] int64 if they are no slice.
            values: topk_indices [n, layers of the part, topk], replay_mask [n], and token_ids and weight_version, [n], where
                the part has them.

        Raises:
            TraceError: they differ.
        """
        routes, recorded = (_known(values[each]).to(self._device) for each in ("topk_indices", "replay_mask"))
        routed, chosen = rows, None
        if not bool(recorded.all()):
            chosen = recorded.nonzero()[:, 0]
            routes = take_rows(routes, joined_rows(chosen))
            routed = rows[chosen] if isinstance(rows, Tensor) else chosen + rows.start
        if isinstance(routed, Tensor):
            routed = joined_rows(routed)
        columns = [self.layer_numbers.index(number) for number in layer_numbers]
        for place, first, count in neighbour_runs(columns).tolist():
            part, here = slice(place, place + count), slice(first, first + count)
            before, has_now = self.has_route[here, rows], recorded.to(torch.uint8)
            known = None
            if before.numel() and bool((before & has_now).amax()):
                known = (before if chosen is None else before[:, chosen]).t().bool()
            self._add_routes(name, layer_numbers[part], routed, here, routes[:, part], known)
            # A mask is added, which is many times faster than bytes here and there.
            self.has_route[here, rows] = before | has_now
        for each in ("token_ids", "weight_version"):
            if (of_part := values.get(each)) is not None:
                self._add_per_token(name, each, rows, of_part.to(self._device))

    def _add_routes(
        self,
        name: str,
        layer_numbers: Sequence[int],
        rows: Rows,
        columns: slice,
        routes: Tensor,
        known: Tensor | None,
    ) -> None:
        """Place routes [n, layers, topk] of neighbouring layers; `known` [n, layers] bool: parts before have them."""
        memory = self._topk_indices[:, columns]
        if known is not None:
            before = take_rows(memory, rows)
            if not torch.equal(before, routes):
                different = (known & (before != routes).any(dim=2)).nonzero()
                if len(different):
                    self._check_same_sets(name, layer_numbers, rows, different, before, routes)
                routes = torch.where(known.unsqueeze(2), before, routes)
        put_rows(memory, rows, routes)

    def _check_same_sets(
        self,
        name: str,
        layer_numbers: Sequence[int],
        rows: Rows,
        different: Tensor,
        before: Tensor,
        routes: Tensor,
    ) -> None:
        """Raise unless `routes` and those `before` only differ in the order of their experts.

        Args:
            different: [n, 2], row and layer where they are not the same.
            before, routes: [rows, the part's layers, topk].
        """
        row, layer = different[:, 0], different[:, 1]
        differ = (before[row, layer].sort(dim=1).values != routes[row, layer].sort(dim=1).values).any(dim=1)
        if not bool(differ.any()):
            return
        at, k = (int(i) for i in different[differ][0])
        number, first = layer_numbers[k], _row_at(rows, at)
        layers = sorted({layer_numbers[i] for i in layer[differ].tolist()})
        raise TraceError(
            f"MRR109: {self._earlier(first, number)} and {name} disagree on row {first}, layer {number}: "
            f"{before[at, k].tolist()} and {routes[at, k].tolist()} ({int(differ.sum())} such rows in layers {layers}). "
            "Were they recorded in the same step, with the same rows? Different samples are joined by concat_traces."
        )

    def _add_per_token(self, name: str, field: str, rows: Rows, values: Tensor) -> None:
        if field not in self._per_token:
            unknown = torch.full((self._num_tokens,), UNKNOWN, dtype=torch.int32, device=self._device)
            self._per_token[field] = unknown
        before = self._per_token[field][rows]
        wrong = ((before != UNKNOWN) & (values != UNKNOWN) & (before != values)).nonzero()[:, 0]
        if wrong.numel():
            at = int(wrong[0])
            raise TraceError(
                f"MRR109: {name} has {field}={int(values[at])} in row {_row_at(rows, at)}, an earlier part "
                f"{int(before[at])} ({wrong.numel()} such rows): they number their rows differently, or are of different "
                "steps."
            )
        self._per_token[field][rows] = torch.where(values != UNKNOWN, values, before)

    @property
    def replay_mask(self) -> Tensor:
        """Return [num_tokens] bool, True: a part has a route in each layer."""
        if not len(self.has_route):  # stages without MoE layers alone
            return torch.zeros(self._num_tokens, dtype=torch.bool, device=self._device)
        return self.has_route.amin(dim=0).bool()

    def trace(self, **metadata: Any) -> RoutingTrace:
        """Return the whole; the joiner is used up.

        Args:
            metadata: sequence_lengths and sample_ids.
        """
        mask = self.replay_mask
        fill_unrouted(self._topk_indices, mask, num_experts=self._num_experts)
        return RoutingTrace.from_checked(
            topk_indices=self._topk_indices,
            layer_numbers=self.layer_numbers,
            num_experts=self._num_experts,
            replay_mask=mask,
            token_ids=self._per_token.get("token_ids"),
            weight_version=self._per_token.get("weight_version"),
            **metadata,
        )


def known_rows(trace: RoutingTrace) -> Tensor:
    """Return the rows with a route, a token or a weight version in a rank's part, [n] int64."""
    known = trace.replay_mask
    for values in (trace.token_ids, trace.weight_version):
        if values is not None:
            known = known | (values != UNKNOWN)
    return known.nonzero()[:, 0]


def _known(values: Tensor | None) -> Tensor:
    assert values is not None, "every part has it"
    return values


def _row_at(rows: Rows, at: int) -> int:
    return int(rows[at]) if isinstance(rows, Tensor) else rows.start + at
