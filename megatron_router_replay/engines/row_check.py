"""The one check of rows, for engines and trainers: which rows hold a route, and what is none for certain.

| fault | what it is | what becomes of it |
| --- | --- | --- |
| narrow | the dtype cannot hold the model's experts: a cast has wrapped ids | raises |
| outside | an id is no expert's; a row is -1 in some places only | raises |
| absent | a row of -1 in every layer | raises, or is left live |
| lost | a route names an expert twice, as zeros do | raises, or is left live |

Nothing here rests on chance: any routes of experts that a router can have chosen pass, however they repeat. Whether they are
the model's own, a session asks the live router.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_router_replay.engines.payload import Array, Source
from megatron_router_replay.errors import listed
from megatron_router_replay.trace.ids import find_invalid_routes, find_outside, has_repeats
from megatron_router_replay.trace.runs import neighbour_runs

_BLOCK_BYTES = 1 << 20
"""What one step reads, in bytes: it stays in a processor's cache while it is checked and copied."""


class RowCheck:
    """Checks and copies the rows of samples of one model.

    Args:
        layer_numbers: of the MoE layers that are checked, in order.
        num_experts, topk: of the model.
        missing: "raise", or "live": rows that are absent or lost have no route, and are counted.

    Attributes:
        num_absent, num_lost: rows so far that were left without a route.
    """

    def __init__(
        self,
        *,
        layer_numbers: Sequence[int],
        num_experts: int,
        topk: int,
        missing: str = "raise",
    ) -> None:
        self.num_absent = self.num_lost = 0
        self._numbers, self._num_experts, self._topk = tuple(layer_numbers), num_experts, topk
        self._may_miss = missing == "live"

    def check_dtype(self, dtype: np.dtype[Any], source: Source) -> None:
        """Raise if ids were cast to a dtype that cannot hold the model's experts."""
        if np.iinfo(dtype).max < self._num_experts - 1:
            raise source.error(
                f"MRR307: ids are {dtype}, which cannot hold the ids of {self._num_experts} experts: a cast has "
                "wrapped them. Keep them in int16, uint16 or wider."
            )

    def copy(
        self,
        part: Array,
        out: Array,
        *,
        columns: tuple[int, ...],
        kept: slice | list[int],
        source: Source,
        first_row: int = 0,
        border: int | None = None,
        has_route: Array | None = None,
    ) -> Array:
        """Copy the layers of `kept` of each row to `out`, and return which rows hold a route, [rows] bool.

        Args:
            part: [rows, columns of any layers, topk], any integer dtype.
            out: [rows, kept layers, topk] in the narrow dtype; rows without a route hold anything afterwards.
            columns: of the MoE layers, in order; all of them are checked, also those that are not kept.
            first_row: the token of row 0, for messages; `border`: the first token of the generation.
            has_route: [rows] bool, False: this row is not looked at.

        Raises:
            PayloadError: see the module's table.
        """
        if len(part):
            self.check_dtype(part.dtype, source)
        routed = np.ones(len(part), np.bool_) if has_route is None else has_route.copy()
        runs, whole = column_runs(columns), kept == slice(0, len(columns))
        step = max(1, _BLOCK_BYTES // max(1, part.shape[1] * part.shape[2] * part.itemsize))
        for begin in range(0, len(part), step):
            block, rows = part[begin : begin + step], slice(begin, begin + step)
            narrow = out[rows] if whole else np.empty((len(block), len(columns), self._topk), out.dtype)
            if not self._is_clean(block, narrow, runs):
                # Of the whole part, not of this block: whether all rows are wrong, or a run of them, tells the cause.
                routed = self._sort_out(part[:, list(columns)], routed, source, first_row, border)
                self._copy_all(part, out, columns, kept)
                return routed
            if not whole:
                out[rows] = narrow[:, kept]
        return routed

    def is_filler(self, rows: Array) -> Array:
        """Return which rows [rows] bool nobody would take for a route, however few bits they have.

        For positions that should have none, where a mistake raises: -1, an expert twice, or one route in every layer.
        """
        ordered = np.sort(rows, axis=2)
        filler = (rows < 0).any(axis=(1, 2)) | (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=(1, 2))
        same = np.arange(rows.shape[2]) if rows.shape[1] == 1 else rows[:, :1]
        return np.asarray(filler | (rows == same).all(axis=(1, 2)))

    def _is_clean(self, block: Array, narrow: Array, runs: list[list[int]]) -> bool:
        """Copy the MoE layers of a block; return whether every row is a route. What is not may be wrapped in `narrow`."""
        same = block.dtype == narrow.dtype
        for layer, column, length in runs:
            values = block[:, column : column + length]
            # Before the cast, which would wrap 300 to 44. One check of all layers is faster, but needs the ids as they came.
            if not same and find_outside(values, num_experts=self._num_experts) is not None:
                return False
            narrow[:, layer : layer + length] = values
        if same and find_outside(narrow, num_experts=self._num_experts) is not None:
            return False
        return not has_repeats(narrow)

    def _copy_all(self, part: Array, out: Array, columns: tuple[int, ...], kept: slice | list[int]) -> None:
        places = list(columns[kept]) if isinstance(kept, slice) else [columns[i] for i in kept]
        step = max(1, _BLOCK_BYTES // max(1, part.shape[1] * part.shape[2] * part.itemsize))
        for begin in range(0, len(part), step):
            out[begin : begin + step] = part[begin : begin + step, places]

    def _sort_out(self, rows: Array, routed: Array, source: Source, first_row: int, border: int | None) -> Array:
        """Return which of the rows that should have a route have one; at least one row has a fault.

        Args:
            rows: [rows, MoE layers, topk], all of one part: whether all are wrong, or a run of them, tells the cause.
        """

        def where(at: Array) -> tuple[int, int, str]:
            first, last = first_row + int(at[0]), first_row + int(at[-1])
            if border is None:
                return first, last, ""
            if first < border <= last:
                return first, last, " (prompt and generation)"
            return first, last, " (prompt)" if last < border else " (generation)"

        absent = (rows == -1).all(axis=(1, 2)) if rows.dtype.kind == "i" else np.zeros(len(rows), np.bool_)
        at = np.flatnonzero(routed & absent)
        if len(at) and not self._may_miss:
            first, last, part = where(at)
            raise source.error(
                f"MRR302: {len(at)} rows {first}..{last}{part} are -1 in every layer: they have no route. Did the engine or "
                "the way here drop them? missing='live' lets the live router decide such tokens, and counts them."
            )
        self.num_absent += len(at)
        routed = routed & ~absent
        invalid = find_invalid_routes(rows[routed], num_experts=self._num_experts)
        if invalid is None:
            return routed
        at = np.flatnonzero(routed)[invalid.invalid.any(axis=1)]
        row, layer = (int(i) for i in np.argwhere(invalid.invalid)[0])
        if invalid.cause == "outside":
            cause = (
                "Likely physical ids, sent by an engine under expert load balancing (vLLM 0.14, 0.15 and 0.21, SGLang 0.5.7 "
                "to 0.5.9, sglang-jax): turn it off or upgrade. Or they are of another model than the config."
                if int(invalid.rows.max()) >= self._num_experts
                else "Negative ids mark layers without data: the engine lost these, or the served model is dense there."
            )
            described = invalid.describe(self._numbers, first_row=first_row + int(at[0]) - row)
            raise source.error(f"MRR307: {described} {cause}")
        if not self._may_miss:
            zeros = int((invalid.invalid & (invalid.rows == 0).all(axis=2)).sum())
            what = f"{zeros} routes are all zero"
            cause = (
                "The engine lost them: a fused kernel that bypasses the capture (vLLM 0.22 to 0.26 with FlashInfer, "
                "SGLang), a prefix-cache hit (vLLM 0.21) or vLLM 0.15. Use another MoE backend or a fixed version; "
                "missing='live' lets the live router decide such tokens, and counts them. Zeros in a whole layer also mean "
                "that it is dense in the served model: give that model's config. In a trainer's padded batch without a mask "
                "they may be padding: give attention_mask."
            )
            if not zeros:
                what = f"{int(invalid.invalid.sum())} routes name an expert twice"
                cause = "No router chooses one twice: the payload is damaged, or the model's topk or layers are others."
            layers = [self._numbers[i] for i in np.flatnonzero(invalid.invalid.any(axis=0)).tolist()]
            first, last, part = where(at)
            span = f"row {first}" if first == last else f"rows {first}..{last}"
            raise source.error(
                f"MRR307: {what}, in layers [{listed(layers)}], {span}{part}; first: row {first}, layer_number "
                f"{self._numbers[layer]} = {invalid.rows[row, layer].tolist()}. {cause}"
            )
        self.num_lost += len(at)
        routed[at] = False
        return routed


@lru_cache(maxsize=64)
def column_runs(columns: tuple[int, ...]) -> list[list[int]]:
    """Return (layer index, first column, number of columns) of each run of neighbouring columns, copied as one slice.

    Cached, for it is the same for every reply of a model and costs more than copying a short one.
    """
    runs: list[list[int]] = neighbour_runs(columns).tolist()
    return runs
