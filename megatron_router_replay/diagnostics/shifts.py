"""What a trace looks like when it does not match: rows shifted, layers moved or swapped, a layer that lost its data.

Windows of rows are compared under every shift and every pairing of layers, by the share of experts in common; so the
search costs the same for a small trace and a large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_router_replay.diagnostics.compare import count_shared
from megatron_router_replay.diagnostics.source import TraceSource

Array = npt.NDArray[Any]

MAX_SHIFT = 64
_WINDOWS, _WINDOW_ROWS, _SHIFT_ROWS, _SHIFT_LAYERS = 16, 256, 64, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A fault that a comparison recognised.

    Args:
        kind: "rows_shifted", "layers_moved", "layer_constant", "layer_outlier" or "other_tokens".
        text: the plain sentence.
        layer_numbers: layers of b it concerns; empty: all.
        shift: rows_shifted: row r of a is row r + shift of b.
    """

    kind: str
    text: str
    layer_numbers: tuple[int, ...] = ()
    shift: int | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True, slots=True)
class _Window:
    """Rows start..stop-1 of a with the rows of b around them; rows of b begin at `start - before`."""

    start: int
    a: Tensor
    b: Tensor
    mask_a: Array
    mask_b: Array
    before: int


def search_shifts(a: TraceSource, b: TraceSource, *, max_shift: int = MAX_SHIFT) -> list[Finding]:
    """Return what explains that b differs from a: shifted rows, moved or swapped layers, constant layers.

    Args:
        a, b: of the same num_experts and topk.
        max_shift: rows to look in either direction.
    """
    windows = list(_windows(a, b, max_shift))
    layers = [number for number in a.layer_numbers if number in b.layer_numbers]
    findings: list[Finding] = []
    best: list[tuple[_Window, int]] = []
    if windows and layers:
        chosen = _spread(layers, _SHIFT_LAYERS)
        columns_a = [a.layer_numbers.index(number) for number in chosen]
        columns_b = [b.layer_numbers.index(number) for number in chosen]
        best = [(window, _best_shift(window, columns_a, columns_b, max_shift)) for window in windows]
        findings += _row_findings(best, a.name, b.name)
    if not best:
        best = [(window, 0) for window in windows]
    constant_a = _constant_layers(a, [(window.a, window.mask_a) for window in windows])
    constant_b = _constant_layers(b, [(window.b, window.mask_b) for window in windows])
    lost = [number for number in constant_b if number not in constant_a]
    for number, experts in constant_b.items():
        if number in lost:
            findings.append(_constant(b.name, a.name, number, experts))
    for number, experts in constant_a.items():
        if number not in constant_b:
            findings.append(_constant(a.name, b.name, number, experts))
    pairing = _best_layers(a, b, best)
    findings += _layer_findings(pairing, a, b, skip={*lost, *(n for n in constant_a if n not in constant_b)})
    return findings


def _windows(a: TraceSource, b: TraceSource, max_shift: int) -> list[_Window]:
    rows = min(a.num_tokens, b.num_tokens)
    count = min(_WINDOWS, -(-rows // _WINDOW_ROWS))
    starts = sorted({int(start) for start in np.linspace(0, max(0, rows - _WINDOW_ROWS), count)}) if rows else []
    windows = []
    for start in starts:
        before = min(start, max_shift)
        of_a = a.read(start, min(start + _WINDOW_ROWS, rows))
        of_b = b.read(start - before, start + of_a.num_tokens + max_shift)
        windows.append(
            _Window(
                start=start,
                a=of_a.topk_indices,
                b=of_b.topk_indices,
                mask_a=of_a.replay_mask.numpy(),
                mask_b=of_b.replay_mask.numpy(),
                before=before,
            )
        )
    return windows


def _spread(values: Sequence[int], count: int) -> list[int]:
    picks = np.linspace(0, len(values) - 1, min(count, len(values)))
    return [values[int(i)] for i in picks]


def _aligned(window: _Window, shift: int) -> tuple[Array, Array]:
    """Return the positions in the window's a and b that hold a route of the same row under this shift."""
    positions = np.arange(len(window.mask_a))
    other = positions + window.before + shift
    inside = (other >= 0) & (other < len(window.mask_b))
    positions, other = positions[inside], other[inside]
    both = window.mask_a[positions] & window.mask_b[other]
    return positions[both], other[both]


def _best_shift(window: _Window, columns_a: list[int], columns_b: list[int], max_shift: int) -> int:
    a = window.a[:, columns_a].numpy()
    b = window.b[:, columns_b].numpy()
    shares: dict[int, float] = {}
    for shift in sorted(range(-max_shift, max_shift + 1), key=abs):
        at_a, at_b = _aligned(window, shift)
        # A few rows agree by chance.
        if len(at_a) < max(8, len(window.mask_a) // 4):
            continue
        step = -(-len(at_a) // _SHIFT_ROWS)
        one, other = (part[rows[::step]].reshape(-1, a.shape[2]) for part, rows in ((a, at_a), (b, at_b)))
        shares[shift] = float(count_shared(one, other).mean()) / a.shape[2]
        if shift == 0 and not _much_better(1.0, shares[0]):
            return 0
    best = max(shares, key=lambda shift: (shares[shift], -abs(shift)), default=0)
    return best if _much_better(shares.get(best, 0.0), shares.get(0, 0.0)) else 0


def _much_better(best: float, unmoved: float) -> bool:
    """Whether a share of common experts explains a difference: high by itself, and most of the gap is gone."""
    return best >= 0.6 and best - unmoved >= 0.15 and (1 - best) <= 0.5 * (1 - unmoved)


def _row_findings(best: list[tuple[_Window, int]], name_a: str, name_b: str) -> list[Finding]:
    findings = []
    spans = [(shift, [window for window, _ in group]) for shift, group in groupby(best, key=lambda pair: pair[1])]
    for shift, windows in spans:
        if shift == 0:
            continue
        rows = "one row" if abs(shift) == 1 else f"{abs(shift)} rows"
        where = ""
        if len(spans) > 1:
            last = windows[-1].start + len(windows[-1].mask_a) - 1
            where = f", seen in rows {windows[0].start}..{last}"
        findings.append(
            Finding(
                kind="rows_shifted",
                shift=shift,
                text=f"{name_b} looks like {name_a} shifted {'down' if shift > 0 else 'up'} by {rows}: row r of {name_a} "
                f"is row r {'+' if shift > 0 else '-'} {abs(shift)} of {name_b}{where}.",
            )
        )
    return findings


def _constant_layers(source: TraceSource, parts: list[tuple[Tensor, Array]]) -> dict[int, list[int]]:
    """Return the layers that send every sampled row to the same experts, and these experts."""
    first: Tensor | None = None
    constant: Tensor | None = None
    rows = 0
    for routes, mask in parts:
        routed = routes[torch.from_numpy(mask)]
        if not len(routed):
            continue
        first = routed[0] if first is None else first
        equal = (routed == first).all(dim=2).all(dim=0)
        constant = equal if constant is None else constant & equal
        rows += len(routed)
    if constant is None or first is None or rows < 8:
        return {}
    return {
        number: first[i].tolist()
        for i, number in enumerate(source.layer_numbers)
        if bool(constant[i]) and source.topk < source.num_experts
    }


def _constant(name: str, other: str, number: int, experts: list[int]) -> Finding:
    return Finding(
        kind="layer_constant",
        layer_numbers=(number,),
        text=f"layer {number} of {name} sends every token to the same experts {experts}, in {other} it does not: the "
        "layer's data was lost or zeroed.",
    )


def _best_layers(a: TraceSource, b: TraceSource, best: list[tuple[_Window, int]]) -> Array:
    """Return the share of common experts of every layer of a with every layer of b, [layers of a, layers of b]."""
    together = np.zeros((len(a.layer_numbers), len(b.layer_numbers)))
    rows = 0
    for window, shift in best[:: max(1, len(best) // 4)]:
        at_a, at_b = _aligned(window, shift)
        one, other = _one_hot(window.a[at_a], a.num_experts), _one_hot(window.b[at_b], b.num_experts)
        together += (one @ other.T).numpy()
        rows += len(at_a)
    return together / max(1, rows * a.topk)


def _one_hot(indices: Tensor, num_experts: int) -> Tensor:
    """[n, layers, topk] -> [layers, n * num_experts] float."""
    n, layers, _ = indices.shape
    hot = torch.zeros(n, layers, num_experts).scatter_(2, indices.to(torch.int64), 1.0)
    return hot.transpose(0, 1).reshape(layers, n * num_experts)


def _layer_findings(shares: Array, a: TraceSource, b: TraceSource, *, skip: set[int]) -> list[Finding]:
    """Group layers of b that look like another layer of a: swaps first, then runs with one offset."""
    looks_like: dict[int, int] = {}
    for j, number in enumerate(b.layer_numbers):
        if number in skip or not len(shares):
            continue
        i = int(shares[:, j].argmax())
        own = shares[a.layer_numbers.index(number), j] if number in a.layer_numbers else 0.0
        if a.layer_numbers[i] != number and _much_better(float(shares[i, j]), float(own)):
            looks_like[number] = a.layer_numbers[i]
    findings = []
    for number, other in sorted(looks_like.items()):
        if number < other and looks_like.get(other) == number:
            findings.append(
                Finding(
                    kind="layers_moved",
                    layer_numbers=(number, other),
                    text=f"layers {number} and {other} of {b.name} are swapped: each looks like the other in {a.name}.",
                )
            )
            del looks_like[number], looks_like[other]
    for offset, group in groupby(sorted(looks_like.items()), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for number, _ in group]
        findings.append(
            Finding(
                kind="layers_moved",
                layer_numbers=tuple(numbers),
                text=f"{_span(numbers)} of {b.name} look{'s' if len(numbers) == 1 else ''} like "
                f"{_span([number + offset for number in numbers])} of {a.name}.",
            )
        )
    return findings


def _span(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"layers {numbers[0]}..{numbers[-1]}"
    return f"layers {', '.join(map(str, numbers))}"
