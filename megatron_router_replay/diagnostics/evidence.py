"""The rows in which two traces are far apart, read again: what every search for a fault looks at.

A set of experts is compared as one number: each expert has a random 64-bit number, a set's is their sum. Equal sets have
equal numbers whatever the order and the layer; unequal sets do not, but for a chance of 2**-64.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from megatron_router_replay.diagnostics.compare import Array, count_shared
from megatron_router_replay.diagnostics.counting import Counter
from megatron_router_replay.diagnostics.source import TraceSource

MAX_ROWS = 32768
"""Rows that are read again at most; of more, pieces are taken that are spread over all."""

MIN_RUN = 6
"""Rows that a fault must hold for: fewer look moved by chance."""

_SUSPECT = 0.1
"""Share of far decisions, measured by that of unrelated routes, from which a piece of a layer is looked at."""


def expert_numbers(num_experts: int) -> Array:
    """Return the number of each expert, [num_experts] uint64, the same in every process."""
    return np.random.default_rng(20250807).integers(1 << 63, size=num_experts, dtype=np.uint64)


def set_numbers(topk_indices: Array, numbers: Array) -> Array:
    """Return the number of each decision's set, [..., topk] -> [...] uint64."""
    total = numbers[topk_indices[..., 0]].copy()
    for column in range(1, topk_indices.shape[-1]):
        total += numbers[topk_indices[..., column]]
    return total


@dataclass(kw_only=True)
class Evidence:
    """Suspect rows of two traces, piece by piece; n rows, in order.

    Args:
        layers: numbers of the compared layers. layers_a: of all of a. index_in_a: [num_layers], their indices in layers_a.
        name_a, name_b: how texts call the two.
        rows: [n] row numbers. piece: [n] index of each row's piece in `starts`.
        starts: [pieces] where each piece begins in `rows`.
        complete: whether every suspect row was read.
        sets_a: [m, layers of a] set numbers, with `max_shift` rows before and behind every run. at: [n] each row's in it.
        sets_b: [n, num_layers]. ids_a, ids_b: [n, num_layers, topk], the experts themselves.
        far: [n, num_layers] bool, far decisions that nothing explains yet; searches take out what they explain.
        far_if_unrelated: [num_layers] share of far decisions between rows that have nothing to do with each other.
        max_shift: rows around that `sets_a` holds.
    """

    layers: tuple[int, ...]
    layers_a: tuple[int, ...]
    index_in_a: Array
    name_a: str
    name_b: str
    rows: Array
    piece: Array
    starts: Array
    complete: bool
    sets_a: Array
    at: Array
    sets_b: Array
    ids_a: Array
    ids_b: Array
    far: Array
    far_if_unrelated: Array
    max_shift: int

    def by_piece(self, flags: Array) -> Array:
        """Return how many of each piece's rows have a flag, [n, ...] bool -> [pieces, ...] int64."""
        counts: Array = np.add.reduceat(flags.astype(np.int32), self.starts, axis=0)
        return counts.astype(np.int64)

    def rows_by_piece(self) -> Array:
        """Return how many rows of each piece were read, [pieces]."""
        return np.diff(np.append(self.starts, len(self.rows)))

    def shifted(self, shift: Array | int) -> Array:
        """Return the set numbers of the row of a that is each row of b under a shift (one, or [n]), [n, layers of a]."""
        rows: Array = self.sets_a[self.at - shift]
        return rows

    def same_sets(self, shift: Array | int = 0) -> Array:
        """Return where a row of b holds the set of the row of a that it is under a shift, [n, num_layers] bool."""
        same: Array = self.shifted(shift)[:, self.index_in_a] == self.sets_b
        return same

    def unexplained(self) -> Array:
        """Return the share of far decisions left, measured by that of unrelated routes, [pieces, num_layers]."""
        share: Array = self.by_piece(self.far) / self.rows_by_piece()[:, None] / self.far_if_unrelated
        return share


def gather_evidence(counts: Counter, *, far_if_unrelated: Array, max_shift: int) -> Evidence | None:
    """Read the rows that are suspect again; None if none is.

    Args:
        counts: of a whole pass. far_if_unrelated: [num_layers].
        max_shift: rows to read around each run.
    """
    rows_by_piece = counts.rows_by_piece.numpy()
    # By that of unrelated rows, because it depends on the model: of 8 experts, top-2, half a set is the same by chance.
    share = counts.far_by_piece.numpy() / np.maximum(1, rows_by_piece)[:, None] / far_if_unrelated
    suspect = np.flatnonzero((share >= _SUSPECT).any(axis=1) & (rows_by_piece > 0))
    if not len(suspect):
        return None
    bounds = np.append(counts.piece_starts.numpy(), counts.samples.num_rows)
    begins, ends = bounds[suspect], np.minimum(bounds[suspect + 1], min(counts.a.num_tokens, counts.b.num_tokens))
    complete = int((ends - begins).sum()) <= MAX_ROWS
    # Pieces spread over all rows, not the first ones: a fault may begin anywhere.
    if not complete:
        longest = int((ends - begins).max())
        chosen = np.unique(np.linspace(0, len(suspect) - 1, max(1, MAX_ROWS // longest)).astype(np.int64))
        begins, ends = begins[chosen], ends[chosen]
    return _read(counts, begins, ends, far_if_unrelated, max_shift, complete=complete)


def _read(
    counts: Counter, begins: Array, ends: Array, far_if_unrelated: Array, max_shift: int, *, complete: bool
) -> Evidence:
    numbers = expert_numbers(counts.a.num_experts)
    parts = defaultdict[str, list[Array]](list)
    index_in_a = np.array([counts.a.layer_numbers.index(number) for number in counts.layers], dtype=np.int64)
    held = pieces = 0
    for first, last in _runs(begins, ends):
        begin, end = int(begins[first]), int(ends[last])
        # A shifted row of b is found beside its own place in a, so a is read further in both directions.
        before, behind = min(begin, max_shift), min(counts.a.num_tokens, end + max_shift)
        # All layers of a, also those that b lacks: a layer of b may hold the routes of one of them.
        ids_a, routed_a = _rows(counts.a, begin - before, behind, counts.a.layer_numbers)
        ids_b, routed_b = _rows(counts.b, begin, end, counts.layers)
        sets_a, sets_b = set_numbers(ids_a, numbers), set_numbers(ids_b, numbers)
        # Numbers that no set has, and not the same: rows without a route equal nothing.
        sets_a[~routed_a], sets_b[~routed_b] = 0, 1
        # Before the first and behind the last row of a stand zeros, so that a shift needs no bounds.
        padded = np.zeros((end - begin + 2 * max_shift, sets_a.shape[1]), dtype=np.uint64)
        padded[max_shift - before : max_shift - before + len(sets_a)] = sets_a
        aligned = ids_a[before : before + end - begin][:, index_in_a]
        both = routed_a[before : before + end - begin] & routed_b
        overlap = count_shared(aligned.reshape(-1, aligned.shape[2]), ids_b.reshape(-1, ids_b.shape[2]))
        far = (2 * overlap < ids_b.shape[2]).reshape(len(ids_b), -1) & both[:, None]
        sizes = ends[first : last + 1] - begins[first : last + 1]
        values = {
            "rows": np.arange(begin, end),
            "piece": np.repeat(np.arange(pieces, pieces + len(sizes)), sizes),
            "sets_a": padded,
            "at": np.arange(end - begin) + held + max_shift,
            "sets_b": sets_b,
            "ids_a": aligned,
            "ids_b": ids_b,
            "far": far,
        }
        for name, value in values.items():
            parts[name].append(value)
        held += len(padded)
        pieces += len(sizes)
    arrays = {name: np.concatenate(values) for name, values in parts.items()}
    return Evidence(
        layers=counts.layers,
        layers_a=counts.a.layer_numbers,
        index_in_a=index_in_a,
        name_a=counts.a.name,
        name_b=counts.b.name,
        starts=np.searchsorted(arrays["piece"], np.arange(pieces)),
        complete=complete,
        far_if_unrelated=far_if_unrelated,
        max_shift=max_shift,
        **arrays,
    )


def _runs(begins: Array, ends: Array) -> list[tuple[int, int]]:
    """Return (first, last) index of every run of pieces without a gap."""
    breaks = np.flatnonzero(begins[1:] != ends[:-1])
    return list(zip([0, *(breaks + 1).tolist()], [*breaks.tolist(), len(begins) - 1]))


def _rows(source: TraceSource, start: int, stop: int, layers: tuple[int, ...]) -> tuple[Array, Array]:
    block = source.read(start, stop, layers)
    return block.topk_indices.numpy(), block.replay_mask.numpy()
