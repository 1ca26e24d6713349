"""Token ids that travel with routes as more layers, so that a trainer's code lays both out alike.

    values = add(routes, ids, sample=i)       in the driver, where tokens and routes belong together
    routes = remove(values, ids, sample=i)    where samples come in: a row at a different token raises

A layer has room for topk bytes. The lowest three bytes of an id take one layer from topk 3 on, two at 2, three at 1. Any
dtype that carries routes carries bytes; a signed byte wraps, and `remove` unwraps it. Each byte is exclusive-or a mask,
and the last row of a sample has a different mask, so that rows that were cut off are missed. Trainers write zeros, -1 or
0, 1, ..., topk - 1 where there is no route: none of these is an id below 4 million under either mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_router_replay.errors import PayloadError

_BYTES, _ROW, _END = 3, 0x5A, 0xA5


def add(routes: Tensor, ids: Tensor, *, sample: int, at_least: int = 1) -> Tensor:
    """Return routes, followed by the layers of their tokens' ids.

    Args:
        routes: [rows, layers, topk], any integer dtype, rows <= T. The last row is marked as the sample's last.
        ids: [T] integers.
        sample: its number, for the message.
        at_least: how many rows the trained tokens depend on.

    Raises:
        PayloadError: routes of another shape, too few rows, or more rows than tokens.
    """
    if routes.dim() != 3 or not max(1, at_least) <= len(routes) <= len(ids):
        raise PayloadError(
            f"MRR802: sample {sample} has {len(ids)} tokens, and its routes are {list(routes.shape)}: [rows, layers, topk] "
            f"is known, with {max(1, at_least)} rows at least, which its trained tokens depend on, and a row a token at most."
        )
    layers = _layers(ids[: len(routes)], routes.shape[2])
    layers[-1] ^= _ROW ^ _END
    return torch.cat([routes, layers.to(routes.device, routes.dtype)], dim=1)


def remove(values: Tensor, ids: Tensor, *, sample: int, at_least: int = 1) -> Tensor:
    """Return routes without the layers of ids, [T, layers, topk] int16, -1 in rows that a trainer filled.

    Args:
        values: [T, layers and ids, topk] of a sample.
        ids: [T] integers, the tokens of the positions.
        sample: its number, for the message.
        at_least: how many rows must have an id.

    Raises:
        PayloadError: a row has the id of another token, or rows are missing.
    """
    values, topk = values.cpu(), values.shape[2]
    count = _num_layers(topk)
    carried, routes = values[:, -count:].to(torch.int64) & 255, values[:, :-count].to(torch.int16).clone()
    differs = (carried ^ _layers(ids, topk)).flatten(1)
    is_end = (differs == _ROW ^ _END).all(1)
    is_own = (differs == 0).all(1) | is_end
    fillers = torch.stack([torch.zeros(topk), torch.full((topk,), 255), torch.arange(topk)]).to(torch.int64)
    is_filler = (carried.unsqueeze(1) == fillers.unsqueeze(1)).flatten(2).all(2).any(1)
    wrong = (~is_own & ~is_filler).nonzero()
    if wrong.numel():
        at = int(wrong[0])
        low = (carried[at].flatten()[:_BYTES] ^ _ROW).tolist()
        raise PayloadError(
            f"MRR802: sample {sample}: the routes at position {at}, token {int(ids[at])}, carry the id "
            f"{sum(value << 8 * i for i, value in enumerate(low))} ({len(wrong)} of {len(ids)} rows are so). Rows were moved "
            "on their way, or the driver's process did not import this module, which adds the ids."
        )
    # A sample's rows come first, and the last of them is marked; then a trainer fills.
    num_rows, ends = int(is_own.sum()), is_end.nonzero().flatten().tolist()
    is_complete = bool(is_own[:num_rows].all()) and ends == [num_rows - 1] * bool(num_rows)
    if not is_complete or num_rows < at_least:
        raise PayloadError(
            f"MRR802: sample {sample}: rows of routes were lost on their way: {num_rows} of {len(ids)} positions have one, "
            f"{at_least} are needed, and the last row of the sample is {f'at position {ends[0]}' if ends else 'missing'}."
        )
    routes[num_rows:] = -1
    return routes


def without(values: Tensor) -> Tensor:
    """Return routes [..., layers, topk] without the layers of ids, unchecked."""
    return values[..., : -_num_layers(values.shape[-1]), :]


def are_in(values: Tensor) -> bool:
    """Return whether routes [..., layers, topk] have layers of ids, for metrics alone."""
    rows = values.flatten(0, -3)
    rows = rows[(rows != 0).flatten(1).any(1)]
    # By the highest byte: an id below 1,048,576 has one of at most 15.
    highest = rows[:, -_num_layers(values.shape[-1]) :].flatten(1)[:, _BYTES - 1 : _BYTES].to(torch.int64) & 255
    return highest.numel() > 0 and bool((((highest ^ _ROW) < 16) | ((highest ^ _END) < 16)).all())


def _num_layers(topk: int) -> int:
    """Return how many layers an id takes."""
    return -(-_BYTES // topk)


def _layers(ids: Tensor, topk: int) -> Tensor:
    """Return [T, layers, topk] int64: the bytes of ids."""
    places = torch.zeros(len(ids), _num_layers(topk) * topk, dtype=torch.int64)
    for i in range(_BYTES):
        places[:, i] = (ids.cpu().to(torch.int64) >> 8 * i) & 255
    return (places ^ _ROW).view(len(ids), _num_layers(topk), topk)
