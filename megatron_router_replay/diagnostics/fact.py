"""Facts, values for `json.dumps`, and the imbalance of experts."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """A fact about two traces.

    Args:
        kind: "row": rows of b match different rows of a; "sample_order": samples of a in a different order; "layer": layers
            of b match different layers of a; "constant": one route is repeated; "names": the experts of a under different
            ids; "nothing": b and a are as unlike as unrelated rows; "expert_order": the same experts in a different order;
            "samples", "layers", "tokens": the traces cover different samples, layers or tokens. Clues, about decisions that
            no such fact explains: "expert" was gained or lost; "token": its rows differ; "first_rows" of samples agree;
            "earlier_expert": rows used one in the layer below.
        text: one plain sentence.
        layer_numbers: its layers in b; empty: all, or none.
        rows: its first and last row in b; None: the fact is not about rows.
        decisions: in these rows and layers; of a clue, those that show it.
        expert: that was gained or lost, or that rows used before they differ; None: several, or the fact is not about one.
        verb: of the expert in b, "gained" or "lost"; empty: it has none.
        token: the id in the rows.
        later_layers: "agree" or "differ", after layers under different ids; empty: there are none, or the fact is not about
            ids.
    """

    kind: str
    text: str
    layer_numbers: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None
    decisions: int = 0
    expert: int | None = None
    verb: str = ""
    token: int | None = None
    later_layers: str = ""

    def __str__(self) -> str:
        return self.text


def imbalance(load: Tensor) -> Tensor:
    """Return the load of each layer's busiest expert over the mean load.

    Args:
        load: [num_layers, num_experts], tokens of each expert.

    Returns:
        [num_layers] float64; 1.0 is even, NaN is no load.
    """
    return load.max(dim=1).values.double() / load.double().mean(dim=1)


def plain(value: Any) -> Any:
    """Return a record, a tensor or a list as values for `json.dumps`; NaN (nothing was measured) becomes None."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return None if value != value else value
