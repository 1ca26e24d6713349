"""The loads of experts -> how uneven they are."""

from __future__ import annotations

from torch import Tensor


def imbalance(load: Tensor) -> Tensor:
    """Return each layer's load of its busiest expert over the mean, [num_layers] float64; 1.0 is even, NaN is no load.

    Args:
        load: [num_layers, num_experts], as `expert_load` returns it.
    """
    return load.max(dim=1).values.double() / load.double().mean(dim=1)
