"""How much of what a fact names is as it says, counted from the routes alone with sets of Python."""

import torch

from tests.unit.diagnostics.planted.noisy_pair import FIRST_LAYER, Pair


def share_of_truth(fact, pair: Pair) -> float:
    """Return the share of the named decisions, or of the named rows, that are as a fact says; 1.0 of what names none."""
    if fact.rows is None:
        return 1.0
    first_b = pair.layers_b.start if pair.layers_b else FIRST_LAYER
    rows = range(fact.rows[0], fact.rows[1] + 1)
    layers = [number - first_b for number in fact.layer_numbers]
    sources = [number - FIRST_LAYER for number in fact.source_layers] or layers
    if fact.kind == "constant":
        return sum(most_common(pair.b[fact.rows[0] : fact.rows[1] + 1, layer]) for layer in layers) / len(layers)
    if fact.kind == "row_order":
        # Some row of a has most of these layers' routes.
        a = one_hot(pair.a[:, layers], pair.shape.num_experts)
        b = one_hot(pair.b[rows.start : rows.stop, layers], pair.shape.num_experts)
        shared = torch.einsum("rle,sle->rsl", b, a)
        best = (2 * shared > pair.shape.topk).double().mean(dim=2).max(dim=1).values
        return float((best > 0.5).double().mean())
    if fact.kind == "names":
        return fact.held / fact.decisions  # counted by hand in test_where.py
    near = [
        2 * len(set(pair.b[row, layer].tolist()) & set(pair.a[row + (fact.offset or 0), source].tolist()))
        > pair.shape.topk
        for row in rows
        for layer, source in zip(layers, sources)
    ]
    held = sum(near)
    assert (held, len(near)) == (fact.held, fact.decisions), "what a fact counts is counted right"
    if fact.kind == "nothing":
        return 1 - held / len(near)
    # Of a fact with others in between the named decisions are those that hold.
    return 1.0 if "the others are in place" in fact.text else held / len(near)


def most_common(routes: torch.Tensor) -> float:
    """Return the share of rows that name the most common set of experts."""
    _, counts = routes.sort(dim=1).values.unique(dim=0, return_counts=True)
    return float(counts.max() / len(routes))


def one_hot(routes: torch.Tensor, num_experts: int) -> torch.Tensor:
    return torch.zeros(*routes.shape[:2], num_experts).scatter_(2, routes.long(), 1.0)
