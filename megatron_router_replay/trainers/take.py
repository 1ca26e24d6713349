"""Routes in a trainer's container -> a trace of this rank's layers, and the rows of the trainer's tokens.

Row by row the same checks as for an engine's reply: as many rows as tokens (or one less), ids in range, no expert twice, no
layer that repeats one route. They read all layers on every rank, so that all pipeline stages raise, or none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from megatron_router_replay.engines.checks import check_constant_layers
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.payload import Array, Source
from megatron_router_replay.errors import LayoutError, PayloadError
from megatron_router_replay.ids import find_invalid_routes, index_dtype, spread_experts
from megatron_router_replay.layout import number_rows as rows_of_lengths
from megatron_router_replay.runs import as_slice
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trainers.columns import Columns, columns_of
from megatron_router_replay.trainers.containers import Container, TokenLayout, as_samples, is_list

_BLOCK_BYTES = 2 << 20
"""What one step of a check reads, in bytes."""

_FILLER_BITS = 40
"""A row that is the same in every layer is filler where balanced routers would choose one in 2 ** 40 tokens."""


LastRow = Literal["live", "replayed", "as_given"]
"""What to take a sample's last row for, where it has as many rows as tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """A batch's routes, and which row is whose.

    Args:
        trace: one row a token, samples behind one another, with this rank's MoE layers; on the CPU.
        rows: the row of each token, int64, in the container and shape of the tokens; -1 on padding and nowhere else.
        num_absent: tokens without a route: filler (-1, or the same ids in every layer), or not in `routed`; last tokens
            do not count.
        num_lost: tokens whose routes name an expert twice: the engine lost them. 0 unless missing="live".
    """

    trace: RoutingTrace
    rows: Container
    num_absent: int
    num_lost: int


def take_routes(
    routed_experts: Any,
    model: Any,
    *,
    tokens: Any = None,
    attention_mask: Any = None,
    lengths: Any = None,
    routed: Any = None,
    last_row: LastRow = "live",
    missing: Literal["raise", "live"] = "raise",
    layer_numbers: Sequence[int] | None = None,
    weight_version: Any = None,
    allow_constant_layers: bool = False,
) -> Routes:
    """Return the trace of a batch's routes, for `mrr.replay`, and the rows of its tokens.

    Args:
        routed_experts: jagged nested [B, T_i or T_i - 1, layers, topk], padded [B, S, layers, topk], or a list of
            [T_i or T_i - 1, layers, topk]; tensors or numpy, any integer dtype that holds the model's experts. A padded
            one has its rows where a padded batch has its tokens (S or S - 1 positions), and filler on padding: -1, an
            expert twice, or the same ids in every layer. Of samples without padding in front it may have any S.
        model: this rank's model chunks, or a ModelRoutingInfo, which keeps every MoE layer.
        tokens: jagged nested [B, T_i], padded [B, S], or a list of [T_i]. The trace then proves that rows and tokens match
            wherever they meet again. Without it, one of the next two says where they are.
        attention_mask: [B, S], non-zero where a padded batch has tokens.
        lengths: [B], tokens of each sample.
        routed: which tokens have a route, where the container cannot say so: bool like the tokens, or [B], how many first
            ones of each sample. Others are routed live, whatever the container holds there. No loss mask: prompts are
            routed too.
        last_row: what a sample's last row is where it has as many rows as tokens. "live": filler, for an engine has no
            route of the token that it sampled last; a route there raises, for then all rows may be one too late.
            "replayed": a route, as of a recording; every sample must have one. "as_given": either, for samples that were
            cut after they were generated; nothing then tells rows that are shifted.
        missing: a token (but the last) without a route: a row of -1, one that has the same ids in every layer, such as
            0, 1, 2, ..., which trainers use as filler (where no router would choose it in 2 ** 40 tokens), or one that
            names an expert twice, which is lost data. "raise", or "live": the live router decides it, on every rank and in
            every layer, and it is counted.
        layer_numbers: Megatron's layer_number of each entry of the layer axis, 0 for one that is left out unread; None:
            all layers of the model or its MoE layers alone, by their number.
        weight_version: of the weights that chose the routes: an int, or one a sample.
        allow_constant_layers: believe a layer that repeats one route in every row of a sample.

    Returns:
        Routes; the same rows and the same `replay_mask` on every rank.

    Raises:
        LayoutError: containers, shapes or layers do not fit; names the sample.
        PayloadError: rows that no router can have chosen, or that are missing; names the sample and its row.
    """
    if last_row not in get_args(LastRow) or missing not in ("raise", "live"):
        raise LayoutError(f"last_row={last_row!r}, missing={missing!r}: see the docstring for what they may be.")
    layout = TokenLayout.of(tokens, attention_mask=attention_mask, lengths=lengths)
    samples = _samples(routed_experts, layout)
    shape = samples[0].rows.shape if samples else (0, 0, 0)
    if not samples:
        raise LayoutError("routed_experts hold no sample: there is nothing to replay in an empty batch.")
    info, columns = columns_of(shape[1], model, layer_numbers)
    _check_width(samples, info)
    wanted = _routed(routed, layout)
    reader = _Reader(info, columns, last_row=last_row, missing=missing, allow_constant_layers=allow_constant_layers)
    dtype = np.dtype(np.uint8 if index_dtype(info.num_experts) is torch.uint8 else np.int16)
    indices = np.empty((layout.num_tokens, len(columns.here), info.topk), dtype)
    mask = np.zeros(layout.num_tokens, np.bool_)
    ids = None if tokens is None else [part.numpy() for part in layout.split(tokens, "tokens")]
    start = 0
    for i, (sample, length) in enumerate(zip(samples, layout.lengths)):
        own = slice(start, start + length)
        reader.read(i, sample, length, wanted[i], None if ids is None else ids[i], indices[own], mask[own])
        start += length
    unrouted = np.flatnonzero(~mask)
    if unrouted.size:
        filler = spread_experts(0, layout.num_tokens, topk=info.topk, num_experts=info.num_experts).numpy()
        indices[unrouted] = filler[unrouted][:, None, :]
    trace = RoutingTrace.from_checked(
        topk_indices=torch.from_numpy(indices),
        layer_numbers=columns.numbers_here,
        num_experts=info.num_experts,
        replay_mask=torch.from_numpy(mask),
        token_ids=None if ids is None else torch.from_numpy(np.concatenate(ids)).to(torch.int32),
        sequence_lengths=layout.lengths,
        weight_version=_weight_versions(weight_version, layout.lengths),
    )
    rows = layout.join(rows_of_lengths(layout.lengths), fill=-1)
    return Routes(trace=trace, rows=rows, num_absent=reader.num_absent, num_lost=reader.num_lost)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    """One sample's routes: rows [T or T - 1, layers, topk], and what lies on its padding."""

    rows: Array
    padding: Array


def _samples(routed_experts: Any, layout: TokenLayout) -> list[_Sample]:
    if not is_list(routed_experts) and not getattr(routed_experts, "is_nested", False):
        return list(_padded_samples(_array(routed_experts, "routed_experts"), layout))
    samples = [_array(part, f"routed_experts of sample {i}") for i, part in enumerate(_parts(routed_experts))]
    if len(samples) != len(layout.lengths):
        raise LayoutError(f"routed_experts hold {len(samples)} samples, the tokens {len(layout.lengths)}.")
    for i, (rows, length) in enumerate(zip(samples, layout.lengths)):
        if rows.ndim != 3 or rows.shape[1:] != samples[0].shape[1:]:
            raise LayoutError(
                f"routed_experts of sample {i} are {list(rows.shape)}, of sample 0 {list(samples[0].shape)}: each must be "
                "[rows, layers, topk]."
            )
        if len(rows) not in (length, length - 1):
            raise LayoutError(
                f"sample {i} has {len(rows)} rows of routes for {length} tokens: expected {max(length - 1, 0)} (the last "
                f"token has no route) or {length}. Were tokens cut, joined or padded without their routes?"
            )
    return [_Sample(rows=rows, padding=rows[:0]) for rows in samples]


def _parts(routed_experts: Any) -> Sequence[Any]:
    return list(routed_experts) if is_list(routed_experts) else as_samples(routed_experts, "routed_experts")


def _padded_samples(routes: Array, layout: TokenLayout) -> Iterator[_Sample]:
    if routes.ndim != 4 or routes.shape[0] != len(layout.lengths):
        raise LayoutError(
            f"routed_experts are {list(routes.shape)}: a padded batch of {len(layout.lengths)} samples must be [B, S, "
            "layers, topk]."
        )
    in_front = [torch.arange(length) for length in layout.lengths]
    positions = in_front if layout.positions is None else layout.positions
    aligned = layout.positions is None or all(torch.equal(a, b) for a, b in zip(in_front, layout.positions))
    size = routes.shape[1]
    if not aligned and size not in (layout.seq_length, layout.seq_length - 1):
        raise LayoutError(
            f"routed_experts have {size} positions, the tokens {layout.seq_length}, with padding in front: which row is "
            "whose cannot be told. Give routes of as many positions as tokens, or one less."
        )
    for i, at in enumerate(positions):
        kept = at[at < size]
        if len(kept) < len(at) - 1:
            raise LayoutError(
                f"sample {i} has {len(at)} tokens, routed_experts end {len(at) - len(kept)} tokens before it."
            )
        padding = np.ones(size, np.bool_)
        padding[kept.numpy()] = False
        index = as_slice(kept.tolist())
        yield _Sample(rows=routes[i, index], padding=routes[i, padding])


def _array(values: Any, name: str) -> Array:
    """Return integers as numpy; without a copy where they are on the CPU."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise LayoutError(f"{name} must be integers, got {array.dtype}.")
    return array


def _check_width(samples: Sequence[_Sample], info: ModelRoutingInfo) -> None:
    rows = samples[0].rows
    if rows.shape[2] != info.topk:
        raise LayoutError(
            f"routed_experts have {rows.shape[2]} experts a token, the model's topk is {info.topk}: of another model, or "
            "with shared experts appended?"
        )
    for i, sample in enumerate(samples):
        if np.iinfo(sample.rows.dtype).max < info.num_experts - 1:
            raise LayoutError(
                f"routed_experts of sample {i} are {sample.rows.dtype}, which cannot hold the ids of {info.num_experts} "
                "experts: a cast has wrapped them. Keep them in int16 or wider."
            )


def _routed(routed: Any, layout: TokenLayout) -> list[Array | None]:
    """Return, of each sample, [T] bool: the token has a route; None: nothing is said."""
    if routed is None:
        return [None] * len(layout.lengths)
    flat = None if is_list(routed) and any(np.ndim(part) for part in routed) else routed
    if flat is not None and not getattr(flat, "is_nested", False):
        counts = torch.as_tensor(np.asarray(flat)) if not isinstance(flat, Tensor) else flat
        if counts.dim() == 1 and counts.dtype is not torch.bool:
            known = [int(count) for count in counts.tolist()]
            if len(known) != len(layout.lengths) or any(not 0 <= n <= t for n, t in zip(known, layout.lengths)):
                raise LayoutError(
                    f"routed {known} must be a number of tokens, 0..T, for each sample of {layout.lengths}."
                )
            return [np.arange(length) < count for count, length in zip(known, layout.lengths)]
    return [(part != 0).numpy() for part in layout.split(routed, "routed")]


class _Reader:
    """Checks samples and copies this rank's layers of them."""

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
        self, i: int, sample: _Sample, length: int, routed: Array | None, ids: Array | None, out: Array, mask: Array
    ) -> None:
        """Copy a sample's routes to out [T, this rank's layers, topk] and say in mask [T] which rows have one.

        Raises:
            LayoutError, PayloadError: see `take_routes`.
        """
        rows, padding = sample.rows, sample.padding
        end = max(length - 1, 0)
        if self._last_row == "replayed" and len(rows) != length:
            raise LayoutError(
                f"sample {i} has {len(rows)} rows of routes for {length} tokens; with last_row='replayed' there is one a "
                "token."
            )
        if len(rows) > end and self._last_is_route(i, rows):
            end = length
        if len(padding) and not self._is_filler(padding[:, self._moe]).all():
            raise LayoutError(
                f"sample {i} has routes on {int((~self._is_filler(padding[:, self._moe])).sum())} positions that hold no "
                "token: are the routes padded on another side than the tokens, or is the attention mask another one?"
            )
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
        genuine = wanted & ~self._is_absent(values)
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
            # Two layers alone first: they tell nearly all genuine rows.
            alike = np.flatnonzero((values[:, 0] == values[:, -1]).all(axis=1))
            absent[alike] |= (values[alike] == values[alike, :1]).all(axis=(1, 2))
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
            LayoutError: it should be filler and is a route: then every row may be shifted by one.
        """
        if self._last_row == "replayed":
            return True
        last = rows[-1:, self._moe]
        repeats = len(rows) > 1 and bool((rows[-2] == rows[-1]).all())
        if repeats or self._is_filler(last).all():
            return False
        if self._last_row == "as_given":
            return True
        raise LayoutError(
            f"sample {i} has as many rows of routes as tokens, and the last one is a route, {last[0, 0].tolist()} in layer "
            f"{self._columns.numbers[0]}. An engine has none of the token that it sampled last: is there a row too much in "
            "front, or a token too few? A recording's rows take last_row='replayed'; samples that were cut after they were "
            "generated, 'as_given'."
        )

    def _is_filler(self, values: Array) -> Array:
        """Return which rows of [rows, MoE layers, topk] are no routes: -1, an expert twice, or the same in every layer."""
        filler = (values < 0).any(axis=(1, 2))
        ordered = np.sort(values, axis=2)
        filler |= (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=(1, 2))
        if values.shape[1] > 1:
            return np.asarray(filler | (values == values[:, :1]).all(axis=(1, 2)))
        first = np.arange(values.shape[2])
        return np.asarray(filler | (values == first).all(axis=(1, 2)))

    def _check_filler_columns(self, i: int, body: Array, genuine: Array) -> None:
        """Raise if a dense layer has routes in a row that has one, whose layers are then shifted."""
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


def _weight_versions(value: Any, lengths: Sequence[int]) -> Tensor | None:
    if value is None:
        return None
    versions = torch.as_tensor(value).to(torch.int32)
    if versions.dim() and list(versions.shape) != [len(lengths)]:
        raise LayoutError(f"weight_version must be an int or one for each of {len(lengths)} samples, got {value!r}.")
    return versions.expand(len(lengths)).repeat_interleave(torch.tensor(lengths))
