"""The rows of a sample -> checked rows of a trace: which have a route, and this rank's layers of them.

The same checks as for an engine's reply: ids in range, no expert twice, no layer that repeats one route. They read all layers
on every rank, so that all pipeline stages raise, or none.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from megatron_router_replay.engines.checks import check_constant_layers
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.payload import Array, Source
from megatron_router_replay.errors import LayoutError, PayloadError
from megatron_router_replay.ids import find_invalid_routes
from megatron_router_replay.runs import as_slice
from megatron_router_replay.trainers.columns import Columns
from megatron_router_replay.trainers.samples import SampleRoutes

_BLOCK_BYTES = 2 << 20
"""What one step of a check reads, in bytes."""

_FILLER_BITS = 40
"""A row that is the same in every layer is filler where balanced routers would choose one in 2 ** 40 tokens."""

LastRow = Literal["live", "copied", "replayed", "as_given"]
"""What to take a sample's last row for, where it has as many rows as tokens."""


class SampleReader:
    """Checks samples and copies this rank's layers of them.

    Args:
        info, columns: the model, and the layers of the payload.
        last_row, missing, allow_constant_layers: as for `take_routes`.
    """

    def __init__(
        self,
        info: ModelRoutingInfo,
        columns: Columns,
        *,
        last_row: str,
        missing: str,
        allow_constant_layers: bool,
    ) -> None:
        self.num_absent = self.num_lost = 0
        self._info, self._columns = info, columns
        self._moe, self._here = as_slice(columns.moe), as_slice(columns.here)
        # For the check of the whole body: a model that has these columns' layers alone, under their numbers.
        self._checked = ModelRoutingInfo(
            num_layers=max(info.num_layers, *columns.numbers, 1),
            moe_layer_numbers=columns.numbers,
            num_experts=info.num_experts,
            topk=info.topk,
        )
        self._last_row, self._may_miss = last_row, missing == "live"
        self._allow_constant = allow_constant_layers
        of_layer = sum(math.log2(info.num_experts - i) for i in range(info.topk))
        self._constant_is_filler = (len(columns.moe) - 1) * of_layer >= _FILLER_BITS
        self._first_is_filler = len(columns.moe) * of_layer >= _FILLER_BITS

    def read(
        self,
        i: int,
        sample: SampleRoutes,
        length: int,
        routed: Array | None,
        ids: Array | None,
        out: Array,
        mask: Array,
    ) -> None:
        """Copy a sample's routes to out [T, this rank's layers, topk] and say in mask [T] which rows have one.

        Raises:
            LayoutError, PayloadError: see `take_routes`.
        """
        rows, padding = sample.rows, sample.padding
        end = max(length - 1, 0)  # the last sampled token was never fed back to the engine, so nothing has routed it
        if self._last_row == "replayed" and len(rows) != length:
            raise LayoutError(
                f"sample {i} has {len(rows)} rows of routes for {length} tokens; with last_row='replayed' there is one a "
                "token."
            )
        if len(rows) > end and self._last_is_route(i, rows):
            end = length
        self._check_padding(i, padding[:, self._moe])
        body = rows[:end]
        wanted = np.ones(end, np.bool_) if routed is None else routed[:end]
        self.num_absent += end - int(wanted.sum())
        step = max(1, _BLOCK_BYTES // max(1, self._columns.num_columns * self._info.topk * body.itemsize))
        for start in range(0, end, step):
            part = slice(start, min(start + step, end))
            values = body[part][:, self._moe]
            mask[part] = self._genuine(i, values, wanted[part], start)
            out[part] = values[:, self._here]
        self._check_filler_columns(i, body, mask[:end])
        if not self._allow_constant and end:
            valid = mask[:end]
            all_valid = bool(valid.all())
            check_constant_layers(
                (body if all_valid else body[valid])[:, self._moe],
                name="all",
                first_row=0,
                token_ids=None if ids is None else ids[:end][valid],
                model=self._checked,
                source=Source(engine="routed_experts", field=f"sample {i}"),
            )

    def _genuine(self, i: int, values: Array, wanted: Array, first_row: int) -> Array:
        """Return which rows [rows] bool hold a route; values are [rows, MoE layers, topk]."""
        genuine = wanted & ~self._is_absent(values)  # first, for its -1 is no id to complain of
        self.num_absent += self._missing(i, wanted & ~genuine, first_row, "are filler: they have no route")
        fault = find_invalid_routes(values if genuine.all() else values[genuine], num_experts=self._info.num_experts)
        if fault is None:
            return genuine
        at, invalid = np.flatnonzero(genuine), fault.invalid.any(axis=1)
        first = int(np.flatnonzero(invalid)[0])
        described = fault.describe(self._columns.numbers, first_row=first_row + int(at[first]) - first)
        if fault.cause == "outside":
            raise PayloadError(
                f"sample {i}: {described} Are they of another model, or physical ids of an engine under expert load "
                "balancing?"
            )
        lost = np.zeros(len(values), np.bool_)
        lost[at[invalid]] = True
        self.num_lost += self._missing(i, lost, first_row, f"name an expert twice: they were lost ({described})")
        return genuine & ~lost

    def _is_absent(self, values: Array) -> Array:
        """Return which rows [rows] bool are marked as having no route."""
        absent = np.zeros(len(values), np.bool_)
        if not values.size:
            return absent
        if values.dtype.kind == "i" and int(values.min()) < 0:
            absent |= (values == -1).all(axis=(1, 2))
        if self._first_is_filler:
            absent |= (values == np.arange(values.shape[2])).all(axis=(1, 2))
        if self._constant_is_filler:
            # Two layers alone first: they tell nearly all genuine rows. Ids that come twice are no filler but lost data.
            alike = np.flatnonzero((values[:, 0] == values[:, -1]).all(axis=1))
            ids = np.sort(values[alike, 0], axis=1)
            distinct = (ids[:, 1:] != ids[:, :-1]).all(axis=1)
            absent[alike] |= distinct & (values[alike] == values[alike, :1]).all(axis=(1, 2))
        return absent

    def _missing(self, i: int, rows: Array, first_row: int, what: str) -> int:
        """Return how many rows these are; raise if there are any and none may be missing."""
        count = int(rows.sum())
        if count and not self._may_miss:
            raise PayloadError(
                f"sample {i}: {count} rows from row {first_row + int(rows.argmax())} on {what}. Did the engine or the "
                "way here drop them? missing='live' lets the live router decide such tokens, and counts them; routed= names "
                "tokens that rightly have no route."
            )
        return count

    def _last_is_route(self, i: int, rows: Array) -> bool:
        """Return whether the row of the last token is to be replayed.

        Raises:
            LayoutError: it should be filler, or a copy, and is a route: then every row may be shifted by one.
        """
        if self._last_row == "replayed":
            return True
        last = rows[-1:, self._moe]
        if self._is_filler(last).all():
            return False
        # Only where the caller says that his trainer makes such copies: of two equal tokens behind one another, routes may be
        # equal too, and rows that are one too late would pass for filled up.
        if self._last_row == "copied" and len(rows) > 1 and bool((rows[-2] == rows[-1]).all()):
            return False
        if self._last_row == "as_given":
            return True
        raise LayoutError(
            f"sample {i} has as many rows of routes as tokens, and the last one is a route, {last[0, 0].tolist()} in layer "
            f"{self._columns.numbers[0]}. An engine has none of the token that it sampled last: is there a row too much in "
            "front, or a token too few? A recording's rows take last_row='replayed'; samples that were cut after they were "
            "generated, 'as_given'; where the trainer fills up with a copy of the row before, 'copied'."
        )

    def _check_padding(self, i: int, values: Array) -> None:
        """Raise if a position without a token has a route: routes and tokens then stand in different places."""
        if len(values) and bool((values == values[:1]).all()):
            values = values[:1]  # as nearly always, and a batch may be padding for the most part
        routes = ~self._is_filler(values)
        if routes.any():
            raise LayoutError(
                f"sample {i} has routes on {int(routes.sum())} positions that hold no token: are the routes padded on "
                "another side than the tokens, or is the attention mask another one?"
            )

    def _is_filler(self, values: Array) -> Array:
        """Return which rows of [rows, MoE layers, topk] are no routes: -1, an expert twice, or the same in every layer."""
        # Wider than `_is_absent`, which reads trained tokens: here a mistake raises, there it would route a token live.
        filler = (values < 0).any(axis=(1, 2))
        ordered = np.sort(values, axis=2)
        filler |= (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=(1, 2))
        if values.shape[1] > 1:
            return np.asarray(filler | (values == values[:, :1]).all(axis=(1, 2)))
        first = np.arange(values.shape[2])
        return np.asarray(filler | (values == first).all(axis=(1, 2)))

    def _check_filler_columns(self, i: int, body: Array, genuine: Array) -> None:
        """Raise if a dense layer has routes in a row that has one, whose layers are then shifted."""
        # Rows without a route may hold anything there: a trainer's filler spreads over the whole axis.
        for column in self._columns.filler:
            values = body[:, column]
            wrong = ((values != 0) & (values != -1)).any(axis=1) & genuine
            if wrong.any():
                row = int(wrong.argmax())
                raise LayoutError(
                    f"sample {i}: column {column} of the layer axis is a dense layer of the model, but row {row} holds "
                    f"{values[row].tolist()} there, not filler (0 or -1). Has the axis MoE layers in front and filler "
                    "behind? layer_numbers= names the layer of each column, 0 for one that is left out."
                )
