"""Samples that begin with the same tokens: a causal model routes these alike, so routes of another sample are told.

The samples of a GRPO group share their prompt. Real engines agree on at least 80 % of a shared prompt's decisions, whatever
noise they compute with; the routes of another prompt agree on next to nothing. So two samples are refused where they agree
on half of the decisions at the end of their common tokens, or fewer, and where agreement of `AGREEMENT` a decision would come
out as low as that once in 2 ** 40 times. Only the end is looked at, for a template in front may be common to all prompts.

An image is one placeholder many times, and its ids do not say which image, so nothing behind `PLACEHOLDERS` equal ids is
compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_router_replay.errors import PayloadError

Array = npt.NDArray[Any]

_LOG = logging.getLogger(__name__)

AGREEMENT = 0.8
"""What share of the decisions on equal tokens two samples have in common at least."""

BITS = 40
PLACEHOLDERS = 16

_MAX_DECISIONS = 8192
_MAX_TOKENS = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Sibling:
    """One sample of a batch.

    Args:
        name: for messages.
        token_ids: [T].
        routed: [T] bool, which tokens have a route.
        weight_version: [T] or None; routes of different weights are not compared.
        routes: rows [n] -> their routes [n, layers, topk].
    """

    name: str
    token_ids: Array
    routed: Array
    weight_version: Array | None
    routes: Callable[[Array], Array]


@lru_cache(maxsize=1)
def warn_without_ids() -> None:
    """Warn, once in a process, that a trace has no token ids: nothing then proves whose its rows are."""
    _LOG.warning(
        "a trace without token ids: nothing proves that its rows are those of the tokens that a model runs, nor that samples "
        "have their own routes. Have the engine return ids, or pass token_ids= (take_routes: tokens=)."
    )


def check_siblings(samples: Sequence[Sibling], *, source: str) -> None:
    """Raise PayloadError if two samples of `source` that begin with the same tokens have routes of different ones there."""
    # In the order of their ids, those that have most in common are neighbours.
    keys = [np.asarray(sample.token_ids[:_MAX_TOKENS]).astype(">i4").tobytes() for sample in samples]
    order = sorted(range(len(samples)), key=keys.__getitem__)
    for i, j in pairwise(order):
        _check_pair(samples[min(i, j)], samples[max(i, j)], source)


def _check_pair(a: Sibling, b: Sibling, source: str) -> None:
    length = min(_common_length(a.token_ids[:_MAX_TOKENS], b.token_ids[:_MAX_TOKENS]), len(a.routed), len(b.routed))
    both = a.routed[:length] & b.routed[:length]
    if a.weight_version is not None and b.weight_version is not None:
        both &= a.weight_version[:length] == b.weight_version[:length]
    rows = np.flatnonzero(both)
    if not len(rows):
        return
    num_layers = a.routes(rows[:1]).shape[1]
    if not num_layers:
        return
    rows = rows[-max(1, _MAX_DECISIONS // num_layers) :]
    agreeing = _agreeing_layers(a.routes(rows), b.routes(rows))
    # Of every end of the common tokens: how much of it agrees, and what that is worth.
    behind = np.cumsum(agreeing[::-1])
    decisions = num_layers * np.arange(1, len(rows) + 1)
    share = behind / decisions
    bits = np.where(share <= 0.5, decisions * _bits(share), 0.0)
    if bits.max() >= BITS + np.log2(len(rows)):
        at = int(bits.argmax())
        raise PayloadError(
            f"MRR314: {source}: {a.name} and {b.name} begin with the same {length} tokens, but of the "
            f"{int(decisions[at])} decisions on tokens {int(rows[-1 - at])}..{int(rows[-1])} only {share[at]:.0%} "
            f"agree; with one prompt {AGREEMENT:.0%} or more do. One of them has the routes of another sample: did "
            "samples change places, or are n choices tiled where the tokens are interleaved? Where equal ids stand for "
            "different inputs (images, adapters), pass allow_unlike_prompts=True."
        )


def _common_length(a: Array, b: Array) -> int:
    """Return how many first ids are equal, up to the first placeholders."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    length = int(different[0]) if len(different) else length
    changes = np.flatnonzero(np.diff(a[:length], prepend=-1, append=-1))
    long = np.flatnonzero(np.diff(changes) >= PLACEHOLDERS)
    return int(changes[long[0]]) if len(long) else length


def _agreeing_layers(a: Array, b: Array) -> Array:
    """Return in how many layers of each row the same experts were chosen, in any order."""
    same = (a == b).all(axis=2)
    others = ~same
    same[others] = (np.sort(a[others], axis=1) == np.sort(b[others], axis=1)).all(axis=1)
    return np.asarray(same.sum(axis=1))


def _bits(share: Array) -> Array:
    """Return how many bits each decision is worth: the divergence of a binomial share from AGREEMENT."""
    with np.errstate(divide="ignore", invalid="ignore"):
        hits = np.where(share > 0, share * np.log2(share / AGREEMENT), 0.0)
        misses = np.where(share < 1, (1 - share) * np.log2((1 - share) / (1 - AGREEMENT)), 0.0)
    return np.asarray(hits + misses)
