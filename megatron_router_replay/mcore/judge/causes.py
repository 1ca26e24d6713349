"""Find the cause of wrong rows, in the trace or in the experts that the live router ranks first; pure functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_router_replay.mcore.judge.blocks import Block
from megatron_router_replay.mcore.judge.places import names_of
from megatron_router_replay.trace import RoutingTrace

MOST_MOVED = 128
"""The most tokens by which a moved stream is searched for."""
MOST_EQUAL = 1024
"""The most rows with equal routes among which the source of a row is searched for."""
ONE_ROW = 0.8
"""Share of a block's rows that are one row in a stale capture."""
CLEAR, CLEARLY_MORE = 0.6, 0.25
"""Share of a block's rows that a cause must explain, and how much more than the next cause of its kind."""


def cause_of(trace: RoutingTrace, rows: Any) -> str:
    """Return the cause of wrong rows, if the trace shows one; "" if not.

    Args:
        rows: [n] of the trace.
    """
    routes = trace.topk_indices
    block = routes[rows].reshape(len(rows), -1).cpu().numpy()
    different, number = np.unique(block, axis=0, return_counts=True)
    most = different[number.argmax()]
    if number.max() >= ONE_ROW * len(rows) and len(rows) > 2:
        by_layer = np.sort(most.reshape(trace.num_layers, trace.topk), axis=1)
        what = f"{number.max()} of these {len(rows)} rows are one and the same row"
        if (by_layer == np.arange(trace.topk)).all():
            return f"{what}, experts 0 to {trace.topk - 1} of every layer: a filler of lost rows"
        before = rows.min() - 1
        if before >= 0 and (routes[before].reshape(-1).cpu().numpy() == most).all():
            return f"{what}, that of the token before them: a stale capture (SGLang before #36467), or lost rows were filled"
        return f"{what}: a stale capture in the engine (SGLang before #36467)"
    return _copied_from(trace, rows, block)


def _copied_from(trace: RoutingTrace, rows: Any, block: Any) -> str:
    """Return which other rows of the trace a block repeats."""
    factors = np.random.default_rng(0).integers(1, 1 << 62, block.shape[1], dtype=np.uint64) | np.uint64(1)
    names = np.zeros(trace.num_tokens, np.uint64)
    columns = trace.topk_indices.reshape(trace.num_tokens, -1)
    for column, factor in enumerate(factors):  # no copy of the trace in eight bytes an expert
        names += columns[:, column].cpu().numpy().astype(np.uint64) * factor
    is_block = np.zeros(trace.num_tokens, bool)
    is_block[rows] = True
    order = names.argsort(kind="stable")
    order = order[~is_block[order]]
    offsets = []
    for row in rows[:: max(1, len(rows) // 32)]:
        first, stop = (np.searchsorted(names[order], names[row], side=side) for side in ("left", "right"))
        offsets.append(order[first:stop][:MOST_EQUAL] - row)
    moved, number = np.unique(np.concatenate(offsets), return_counts=True)
    if not len(moved) or len(np.unique(names[rows])) < 4:
        return ""
    source = rows + int(moved[number.argmax()])
    is_inside = (source >= 0) & (source < trace.num_tokens)
    if (names[source[is_inside]] == names[rows[is_inside]]).sum() < CLEAR * len(rows):
        return ""
    return f"they are the routes of {names_of(trace, source[is_inside])}"


def moved_by(experts: Any, first: Any, block: Block, begin: int, end: int) -> str:
    """Return by how many tokens the routes of a block are late or early; "" if they fit no neighbours.

    Args:
        experts: [n, topk], replayed.
        first: [n], the expert that the live router ranks first; -1: not compared.
        begin, end: of the sequence that the block begins in.
    """
    at = np.arange(block.first, min(block.stop, end))
    shares: dict[int, float] = {}
    for moved in (*range(-MOST_MOVED, 0), *range(1, MOST_MOVED + 1)):
        source = at - moved
        inside = (source >= begin) & (source < end)
        if inside.sum() >= max(8, len(at) // 2):
            hits = (experts[at[inside]] == first[source[inside], None]).any(1)
            shares[moved] = float(hits.mean())
    if len(shares) < 2:  # a few tokens fit by chance
        return ""
    (second, _), (share, moved) = sorted((share, moved) for moved, share in shares.items())[-2:]
    if share < CLEAR or share < second + CLEARLY_MORE:
        return ""
    places = f"{abs(moved)} place{'s' * (abs(moved) > 1)}"
    return f"they fit the tokens {places} {'before' if moved > 0 else 'after'} them"
