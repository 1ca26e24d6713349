"""The one check of rows, for engines and trainers: which rows hold a route, and what no router can have chosen.

| fault | what it is | what becomes of it |
| --- | --- | --- |
| narrow | the dtype cannot hold the model's experts: a cast has wrapped ids | raises |
| outside | an id is no expert's; a row is -1 in some places only | raises |
| absent | a row of -1 in every layer | raises, or is left live |
| filler | a row of experts 0..topk-1, or of one route, in every layer | raises, or is left live |
| lost | a route names an expert twice, as zeros do | raises, or is left live |
| constant | a layer repeats one route | raises, or is believed |
| copied | a layer holds the routes of the layer before it | raises, or is believed |
| stuck, doubled | rows stand still, or come twice, while tokens change | raises, or is believed |

The first three are certain. The rest is chance, and is refused where it comes up once in 2 ** 40 times (`BITS`):

- A balanced router has `route_bits` = log2(E * (E - 1) * ...) bits for a route, which decides what is filler.
- Real routers are not balanced. So a copy counts `COPY_BITS` at most for each different token, and equal neighbours 1 bit a
  layer: as if each layer sent half of all tokens the same way. Equal tokens may well have equal routes and count nothing.
- A constant layer needs `MIN_TOKENS` different tokens, and so does what stands still where token ids are unknown.

In about 60 captured arrays of real engines the longest standstill was 5 different tokens in three layers, 12 bits. No layer
was a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_router_replay.engines.payload import Array, Source
from megatron_router_replay.errors import listed
from megatron_router_replay.trace.ids import find_invalid_routes, find_outside, has_repeats
from megatron_router_replay.trace.runs import neighbour_runs

BITS = 40
COPY_BITS = 8.0
MIN_TOKENS = 32

_BLOCK_BYTES = 1 << 20
"""What one step reads, in bytes: it stays in a processor's cache while it is checked and copied."""


class RowCheck:
    """Checks and copies the rows of samples of one model.

    Args:
        layer_numbers: of the MoE layers that are checked, in order.
        num_experts, topk: of the model.
        missing: "raise", or "live": rows that are absent, filler or lost have no route, and are counted.
        believe: believe what is refused by chance alone: constant and copied layers, rows that stand still.

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
        believe: bool = False,
    ) -> None:
        self.num_absent = self.num_lost = 0
        self._numbers, self._num_experts, self._topk = tuple(layer_numbers), num_experts, topk
        self._may_miss, self._believe = missing == "live", believe
        # A model that uses all its experts has one route, which says nothing.
        self._route_bits = math.log2(math.perm(num_experts, topk)) if topk < num_experts else 0.0
        self._first_is_filler = len(self._numbers) * self._route_bits >= BITS
        self._one_route_is_filler = (len(self._numbers) - 1) * self._route_bits >= BITS

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

    def check_span(self, rows: Array, *, name: str, first_row: int, token_ids: Array | None, source: Source) -> None:
        """Raise if layers are constant or copied, or rows stand still, beyond chance.

        Args:
            rows: [n, MoE layers, topk], routes of neighbouring tokens: a prompt, a generation, or a sample.
            token_ids: [n] or None.
        """
        if self._believe or not self._route_bits or len(rows) < 2 or not self._numbers:
            return
        fault = (
            self._constant_layers(rows, token_ids)
            or self._copied_layers(rows, token_ids)
            or _standing_rows(rows, token_ids, first_row)
        )
        if fault is not None:
            raise source.error(
                f"MRR307: {fault.format(rows=f'{len(rows)} rows {first_row}..{first_row + len(rows) - 1} ({name})')} "
                "If the model really routes like that, pass allow_constant_layers=True."
            )

    def is_filler(self, rows: Array) -> Array:
        """Return which rows [rows] bool nobody would take for a route, however few bits they have.

        For positions that should have none, where a mistake raises: -1, an expert twice, or one route in every layer.
        """
        ordered = np.sort(rows, axis=2)
        filler = (rows < 0).any(axis=(1, 2)) | (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=(1, 2))
        same = np.arange(rows.shape[2]) if rows.shape[1] == 1 else rows[:, :1]
        return np.asarray(filler | (rows == same).all(axis=(1, 2)))

    def find_filler(self, rows: Array) -> Array:
        """Return which rows [rows] bool hold experts 0..topk-1, or one route, in every layer, beyond chance."""
        filler = np.zeros(len(rows), np.bool_)
        if not rows.size:
            return filler
        # One id of two layers alone first: it tells most genuine rows, and reads a few bytes of each.
        if self._first_is_filler or self._one_route_is_filler:
            alike = np.flatnonzero(rows[:, 0, 0] == rows[:, -1, 0])
            values = rows[alike]
            if self._first_is_filler:
                filler[alike] |= (values == np.arange(self._topk)).all(axis=(1, 2))
            if self._one_route_is_filler and len(alike):
                ids = np.sort(values[:, 0], axis=1)
                distinct = (ids[:, 1:] != ids[:, :-1]).all(axis=1)  # an expert twice is lost data, no filler
                filler[alike] |= distinct & (values == values[:, :1]).all(axis=(1, 2))
        return filler

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
        return not has_repeats(narrow) and not self.find_filler(narrow).any()

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
        words = ("-1 in every layer: they have no route", "filler, the same route in every layer")
        for fault, rule in zip((absent, self.find_filler(rows)), words):
            at = np.flatnonzero(routed & fault)
            if len(at) and not self._may_miss:
                first, last, part = where(at)
                raise source.error(
                    f"MRR302: {len(at)} rows {first}..{last}{part} are {rule}; first: {rows[at[0], 0].tolist()} in "
                    f"layer_number {self._numbers[0]}. Did the engine or the way here drop them? missing='live' lets "
                    "the live router decide such tokens, and counts them."
                )
            self.num_absent += len(at)
            routed = routed & ~fault
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

    def _constant_layers(self, rows: Array, ids: Array | None) -> str | None:
        if len(rows) < MIN_TOKENS:
            return None
        suspects = np.flatnonzero((rows[:MIN_TOKENS] == rows[:1]).all(axis=(0, 2)))
        layers = [int(i) for i in suspects if (rows[:, i] == rows[0, i]).all()]
        # Degenerate output, of few different tokens, may well be that constant.
        if not layers or (ids is not None and len(np.unique(ids)) < MIN_TOKENS):
            return None
        return (
            f"layers [{listed([self._numbers[i] for i in layers])}] hold the same route {rows[0, layers[0]].tolist()} in "
            "all {rows}: a broken capture kernel repeats one row."
        )

    def _copied_layers(self, rows: Array, ids: Array | None) -> str | None:
        suspects = np.flatnonzero((rows[:MIN_TOKENS, 1:] == rows[:MIN_TOKENS, :-1]).all(axis=(0, 2)))
        copies = [int(i) for i in suspects if (rows[:, i + 1] == rows[:, i]).all()]
        if not copies:
            return None
        # Where ids are unknown, tokens of different rows are different.
        different = len(np.unique(rows.reshape(len(rows), -1), axis=0) if ids is None else np.unique(ids))
        if min(self._route_bits, COPY_BITS) * different < BITS:
            return None
        pairs = listed([f"{self._numbers[i + 1]} of {self._numbers[i]}" for i in copies])
        return (
            f"layers are copies of their neighbour ({pairs}) in all {{rows}}: the capture wrote one layer's ids twice."
        )


def _standing_rows(rows: Array, ids: Array | None, first_row: int) -> str | None:
    num_layers = rows.shape[1]
    # Two ids alone first, as they tell nearly all rows.
    first, last = rows[:, 0, 0], rows[:, -1, -1]
    at = np.flatnonzero((first[1:] == first[:-1]) & (last[1:] == last[:-1]))
    equal = np.zeros(len(rows) - 1, np.bool_)
    equal[at] = (rows[at] == rows[at + 1]).all(axis=(1, 2))
    for start, length in _true_runs(equal):
        # Without ids, tokens of rows that stand still are the same where the rows are few.
        different = length if length + 1 >= MIN_TOKENS else 0
        if ids is not None:
            different = len(np.unique(ids[start : start + length + 1])) - 1
        if length > 1 and num_layers * different >= BITS:
            span = f"rows {first_row + start}..{first_row + start + length}"
            return f"{span} of {{rows}} are equal in every layer while their tokens differ: the capture stood still."
    for parity in (0, 1):
        for start, length in _true_runs(equal[parity::2]):
            begin = parity + 2 * start
            end = begin + 2 * length
            different = length if 2 * length >= MIN_TOKENS else 0
            if ids is not None:
                pairs = int((ids[begin:end:2] != ids[begin + 1 : end : 2]).sum())
                different = min(pairs, len(np.unique(ids[begin:end])) - 1)
            if different > 1 and num_layers * different >= BITS:
                span = f"rows {first_row + begin}..{first_row + end - 1}"
                return f"{span} of {{rows}} hold every row twice, in every layer: is the capture read twice a step?"
    return None


def _true_runs(values: Array) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of each run of True."""
    for _, start, length in neighbour_runs(np.flatnonzero(values)).tolist():
        yield start, length


@lru_cache(maxsize=64)
def column_runs(columns: tuple[int, ...]) -> list[list[int]]:
    """Return (layer index, first column, number of columns) of each run of neighbouring columns, copied as one slice.

    Cached, for it is the same for every reply of a model and costs more than copying a short one.
    """
    runs: list[list[int]] = neighbour_runs(columns).tolist()
    return runs
