"""What reports are made of: facts, values that `json.dumps` takes, the imbalance of experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from html import escape
from typing import Any

from torch import Tensor

_MOST_SHOWN = 12
"""Facts that a text or page shows: a screen; all are in the record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """A fact about two traces.

    Args:
        kind: what it says. "row": b holds different rows of a; "sample_order": samples of a in a different order; "layer":
            different layers; "constant": one route; "names": experts of a under different ids; "expert_order": the same
            experts in a different order; "nothing": no more of a than unrelated rows do; "unused": b never names an expert;
            "samples", "layers", "tokens": what the traces cover.
        text: one plain sentence.
        layer_numbers: layers of b that it is about; empty: all, or none.
        rows: first and last row of b that it is about; None: it is not about rows.
        samples: samples of b that these rows lie in; empty: unknown, or not about rows.
        offset: row r of b holds a's row r + offset; None: it is not one number.
        source_layers, source_samples: the layers and samples of a that `layer_numbers` and `samples` hold.
        held, decisions: how many of how many decisions in these rows and layers are as it says.
    """

    kind: str
    text: str
    layer_numbers: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None
    samples: tuple[int, ...] = ()
    offset: int | None = None
    source_layers: tuple[int, ...] = ()
    source_samples: tuple[int, ...] = ()
    held: int = 0
    decisions: int = 0

    def __str__(self) -> str:
        return self.text


def fact_lines(facts: Iterable[Fact]) -> list[str]:
    """Return facts as lines of a text; what is more than a screen is counted."""
    lines = [f"fact: {fact}" for fact in facts]
    left_out = len(lines) - _MOST_SHOWN
    counted = [f"fact: {left_out} more facts about fewer rows are left out here."] if left_out > 0 else []
    return lines[:_MOST_SHOWN] + counted


def facts_html(facts: Iterable[Fact]) -> str:
    """Return facts as a list in HTML, empty without any."""
    items = "".join(f"<li>{escape(line.removeprefix('fact: '))}</li>" for line in fact_lines(facts))
    return f'<ul class="facts" id="facts">{items}</ul>' if items else ""


def imbalance(load: Tensor) -> Tensor:
    """Return the load of each layer's busiest expert over the mean load.

    Args:
        load: [num_layers, num_experts], tokens of each expert.

    Returns:
        [num_layers] float64; 1.0 is even, NaN is no load.
    """
    return load.max(dim=1).values.double() / load.double().mean(dim=1)


def plain(value: Any) -> Any:
    """Return a record, a tensor or a list as values that `json.dumps` takes; None stands for NaN: nothing was measured."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return None if value != value else value
