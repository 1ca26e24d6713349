"""Routed experts in a trainer's container -> the rows of each sample -> checked rows of a trace, this rank's layers.

Rows are checked as an engine's are (`engines.row_check`), over all layers on every rank, so that all pipeline stages raise,
or none. What is a trainer's own is its last row, its padding and its dense columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.payload import Array, Source
from megatron_router_replay.engines.row_check import RowCheck
from megatron_router_replay.errors import LayoutError
from megatron_router_replay.trace.runs import as_slice
from megatron_router_replay.trainers.columns import Columns
from megatron_router_replay.trainers.containers import TokenLayout, as_samples, is_list

LastRow = Literal["live", "copied", "replayed", "unchecked"]
"""What to take a sample's last row for, where it has as many rows as tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRoutes:
    """One sample's routes: rows [T or T - 1, layers, topk], and what lies on its padding."""

    rows: Array
    padding: Array


def split_routes(routed_experts: Any, layout: TokenLayout) -> list[SampleRoutes]:
    """Return the routes of each sample of the batch.

    Args:
        routed_experts: as `take_routes` takes them.
        layout: of the tokens.

    Raises:
        LayoutError: they do not fit the tokens; names the sample.
    """
    if not is_list(routed_experts) and not getattr(routed_experts, "is_nested", False):
        return list(_padded_samples(_array(routed_experts, "routed_experts"), layout))
    parts = routed_experts if is_list(routed_experts) else as_samples(routed_experts, "routed_experts")
    samples = [_array(part, f"routed_experts of sample {i}") for i, part in enumerate(parts)]
    if len(samples) != len(layout.lengths):
        raise LayoutError(f"MRR802: routed_experts hold {len(samples)} samples, the tokens {len(layout.lengths)}.")
    for i, (rows, length) in enumerate(zip(samples, layout.lengths)):
        if rows.ndim != 3 or rows.shape[1:] != samples[0].shape[1:]:
            raise LayoutError(
                f"MRR802: routed_experts of sample {i} are {list(rows.shape)}, of sample 0 {list(samples[0].shape)}: "
                "each must be [rows, layers, topk]."
            )
        if len(rows) not in (length, length - 1):
            raise LayoutError(
                f"MRR802: sample {i} has {len(rows)} rows of routes for {length} tokens: expected {max(length - 1, 0)} "
                f"(the last token has no route) or {length}. Were tokens cut, joined or padded without their routes?"
            )
    return [SampleRoutes(rows=rows, padding=rows[:0]) for rows in samples]


def _padded_samples(routes: Array, layout: TokenLayout) -> Iterator[SampleRoutes]:
    if routes.ndim != 4 or routes.shape[0] != len(layout.lengths):
        raise LayoutError(
            f"MRR802: routed_experts are {list(routes.shape)}: a padded batch of {len(layout.lengths)} samples must be "
            "[B, S, layers, topk]."
        )
    in_front = [torch.arange(length) for length in layout.lengths]
    positions = in_front if layout.positions is None else layout.positions
    aligned = layout.positions is None or all(torch.equal(a, b) for a, b in zip(in_front, layout.positions))
    size = routes.shape[1]
    # An axis of another length was cut or widened on either side; only tokens that begin at 0 say on which.
    if not aligned and size not in (layout.seq_length, layout.seq_length - 1):
        raise LayoutError(
            f"MRR802: routed_experts have {size} positions, the tokens {layout.seq_length}, with padding in front: "
            "which row is whose cannot be told. Give routes of as many positions as tokens, or one less."
        )
    for i, at in enumerate(positions):
        kept = at[at < size]
        if len(kept) < len(at) - 1:  # the last token alone may be without a row
            raise LayoutError(
                f"MRR802: sample {i} has {len(at)} tokens, routed_experts end {len(at) - len(kept)} tokens before it."
            )
        padding = np.ones(size, np.bool_)
        padding[kept.numpy()] = False
        behind = as_slice(np.flatnonzero(padding).tolist())
        yield SampleRoutes(rows=routes[i, as_slice(kept.tolist())], padding=routes[i, behind])


def _array(values: Any, name: str) -> Array:
    """Return integers as numpy; without a copy where they are on the CPU."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        got = type(values).__name__ if array.dtype == object else array.dtype
        raise LayoutError(f"MRR802: {name} must be integers, got {got}.")
    return array


def split_has_route(has_route: Any, layout: TokenLayout) -> list[Array | None]:
    """Return, of each sample, [T] bool: the token has a route; None: nothing is said.

    Raises:
        LayoutError: it is neither a mask like the tokens nor a number of tokens for each sample.
    """
    if has_route is None:
        return [None] * len(layout.lengths)
    of_tokens = getattr(has_route, "is_nested", False) or (
        is_list(has_route) and any(np.ndim(part) for part in has_route)
    )
    if not of_tokens:
        counts = torch.as_tensor(has_route)
        if counts.dim() == 1 and counts.dtype is not torch.bool:
            known = [int(count) for count in counts.tolist()]
            if len(known) != len(layout.lengths) or any(not 0 <= n <= t for n, t in zip(known, layout.lengths)):
                raise LayoutError(
                    f"MRR802: has_route {known} must be a number of tokens, 0..T, for each sample of {layout.lengths}."
                )
            return [np.arange(length) < count for count, length in zip(known, layout.lengths)]
    return [(part != 0).numpy() for part in layout.split(has_route, "has_route")]


class SampleReader:
    """Checks samples and copies this rank's layers of them; arguments as for `take_routes`."""

    def __init__(self, info: ModelRoutingInfo, columns: Columns, *, last_row: str, missing: str) -> None:
        self.num_absent = 0
        self._columns, self._last_row = columns, last_row
        self._moe, self._here = as_slice(columns.moe), as_slice(columns.here)
        self._check = RowCheck(
            layer_numbers=columns.numbers,
            num_experts=info.num_experts,
            topk=info.topk,
            missing=missing,
        )

    @property
    def num_lost(self) -> int:
        return self._check.num_lost

    def read(
        self,
        i: int,
        sample: SampleRoutes,
        length: int,
        has_route: Array | None,
        out: Array,
        mask: Array,
    ) -> None:
        """Copy a sample's routes to out [T, this rank's layers, topk] and say in mask [T] which rows have one.

        Raises:
            LayoutError, PayloadError: see `take_routes`.
        """
        rows, source = sample.rows, Source(engine="routed_experts", field=f"sample {i}")
        end = max(length - 1, 0)  # the last sampled token was never fed back to the engine, so nothing has routed it
        if self._last_row == "replayed" and len(rows) != length:
            raise LayoutError(
                f"MRR802: sample {i} has {len(rows)} rows of routes for {length} tokens; with last_row='replayed' "
                "there is one a token."
            )
        has = np.ones(length, np.bool_) if has_route is None else has_route
        if len(rows) > end and self._last_is_route(i, rows, has):
            end = length
        self._check_padding(i, sample.padding[:, self._moe])
        body, before = rows[:end], self._check.num_absent
        mask[:end] = self._check.copy(
            body, out[:end], columns=self._columns.moe, kept=self._here, source=source, has_route=has[:end]
        )
        self.num_absent += end - int(has[:end].sum()) + self._check.num_absent - before
        self._check_dense_columns(i, body, mask[:end])

    def _last_is_route(self, i: int, rows: Array, has_route: Array) -> bool:
        """Return whether the row of the last token is to be replayed.

        Raises:
            LayoutError: it should be filler, or a copy, and is a route: then every row may be shifted by one.
        """
        if self._last_row == "replayed":
            return True
        last = rows[-1:, self._moe]
        if self._check.is_filler(last).all():
            return False
        # Only where the caller says that his trainer makes such copies: of two equal tokens in order, routes may be equal
        # too, and rows that are one too late would pass for filled up.
        if self._last_row == "copied" and len(rows) > 1 and bool((rows[-2] == rows[-1]).all()):
            return False
        if self._last_row == "unchecked":
            # An engine always routes a first token and never the last one: the other way round, rows are one too late.
            if len(rows) > 1 and has_route[0] and self._check.is_filler(rows[:1, self._moe]).all():
                raise LayoutError(
                    f"MRR802: sample {i} has filler in its first row, {rows[0, self._columns.moe[0]].tolist()}, and a "
                    "route in its last one: its rows are one too late, for an engine routes a first token and never "
                    "the last. Drop the row in front; has_route= names first tokens that rightly have no route."
                )
            return True
        raise LayoutError(
            f"MRR802: sample {i} has as many rows of routes as tokens, and the last one is a route, "
            f"{last[0, 0].tolist()} in layer {self._columns.numbers[0]}. An engine has none of the token that it "
            "sampled last: is there a row too much in front, or a token too few? A recording's rows take "
            "last_row='replayed'; samples that were cut after they were generated, 'unchecked'; where the trainer "
            "fills up with a copy of the row before, 'copied'."
        )

    def _check_padding(self, i: int, values: Array) -> None:
        """Raise if a position without a token has a route: routes and tokens then stand in different places."""
        if len(values) and bool((values == values[:1]).all()):
            values = values[:1]  # as nearly always, and a batch may be padding for the most part
        routes = ~self._check.is_filler(values)
        if routes.any():
            raise LayoutError(
                f"MRR802: sample {i} has routes on {int(routes.sum())} positions that hold no token: are the routes "
                "padded on another side than the tokens, or is the attention mask another one?"
            )

    def _check_dense_columns(self, i: int, body: Array, routed: Array) -> None:
        """Raise if a dense layer has routes in a row that has one, whose layers are then shifted."""
        # Rows without a route may hold anything there: a trainer's filler spreads over the whole axis.
        for column in self._columns.filler:
            values = body[:, column]
            wrong = ((values != 0) & (values != -1)).any(axis=1) & routed
            if wrong.any():
                row = int(wrong.argmax())
                raise LayoutError(
                    f"MRR802: sample {i}: column {column} of the layer axis is a dense layer of the model, but row "
                    f"{row} holds {values[row].tolist()} there, not filler (0 or -1). Has the axis MoE layers in front "
                    "and filler behind? layer_numbers= names the layer of each column, 0 for one that is left out."
                )
