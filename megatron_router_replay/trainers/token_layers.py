"""Token ids that travel with routes as more layers, so that a trainer's code lays both out alike.

    values = add(routes, ids)              in the driver, where tokens and routes are known to belong together
    routes = remove(values, ids)           where samples come in: a row at another token raises

A layer has room for topk bytes of an id. Its lowest three bytes, exclusive-or 0x5A, take one layer from topk 3 on, two at 2,
three at 1. Any dtype that carries routes carries bytes. Trainers write zeros or 0, 1, ..., topk - 1 where there is no route:
neither is an id below 4 million.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_router_replay.errors import PayloadError

_BYTES, _MASK = 3, 0x5A


def num_layers(topk: int) -> int:
    """Return how many layers an id takes."""
    return -(-_BYTES // topk)


def add(routes: Tensor, ids: Tensor, *, sample: int) -> Tensor:
    """Return routes, followed by the layers of their tokens' ids.

    Args:
        routes: [rows, layers, topk], any integer dtype, rows <= T.
        ids: [T] integers.
        sample: its number, for the message.

    Raises:
        PayloadError: routes of another shape, or more rows than tokens.
    """
    if routes.dim() != 3 or len(routes) > len(ids):
        raise PayloadError(
            f"MRR802: sample {sample} has {len(ids)} tokens, and its routes are {list(routes.shape)}: [rows, layers, topk] "
            "is known, a row a token at most."
        )
    return torch.cat([routes, _layers(ids[: len(routes)], routes.shape[2]).to(routes.dtype)], dim=1)


def remove(values: Tensor, ids: Tensor, *, sample: int) -> Tensor:
    """Return routes without the layers of ids, [T, layers, topk] int16, -1 in rows that a trainer filled.

    Args:
        values: [T, layers and ids, topk] of a sample.
        ids: [T] integers, the tokens of the positions.
        sample: its number, for the message.

    Raises:
        PayloadError: a row has the id of another token.
    """
    topk = values.shape[2]
    count = num_layers(topk)
    carried, routes = values[:, -count:].to(torch.int64), values[:, :-count].to(torch.int16).clone()
    is_own = (carried == _layers(ids, topk)).flatten(1).all(1)
    filler = torch.arange(topk).expand(count, topk)
    is_filler = (carried == 0).flatten(1).all(1) | (carried == filler).flatten(1).all(1)
    wrong = (~is_own & ~is_filler).nonzero()
    if wrong.numel():
        at = int(wrong[0])
        low = (carried[at].flatten()[:_BYTES] ^ _MASK).tolist()
        raise PayloadError(
            f"MRR802: sample {sample}: the routes at position {at}, token {int(ids[at])}, carry the id "
            f"{sum(value << 8 * i for i, value in enumerate(low))} ({len(wrong)} of {len(ids)} rows are so). Rows were moved "
            "on their way, or the driver's process did not import this module, which adds the ids."
        )
    routes[~is_own] = -1
    return routes


def _layers(ids: Tensor, topk: int) -> Tensor:
    """Return [T, num_layers(topk), topk] int64: the bytes of ids."""
    places = torch.zeros(len(ids), num_layers(topk) * topk, dtype=torch.int64)
    for i in range(_BYTES):
        places[:, i] = (ids.cpu().to(torch.int64) >> 8 * i) & 255
    return (places ^ _MASK).view(len(ids), -1, topk)
