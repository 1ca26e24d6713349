"""Routes as a trainer's micro-batch carries them -> the routes of this rank's routers, each checked and of its token.

A trainer lays routes out as it lays out tokens. A layout for another order has the right shape and is wrong in every row, so
the layout must be proved: `stamp` adds a layer that says which token a row is of, where the rollout enters; it rides through
the trainer's code like any layer, and is compared with the micro-batch's tokens and taken off here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_router_replay.checks import Check, as_integers, as_mask
from megatron_router_replay.errors import LayoutError
from megatron_router_replay.mcore.batches.chunk import Chunk
from megatron_router_replay.mcore.batches.rows import LaidOut, check_trained
from megatron_router_replay.mcore.batches.upload import take_layers
from megatron_router_replay.mcore.heart.streams import to_device
from megatron_router_replay.mcore.model.find import FoundRouter
from megatron_router_replay.mcore.model.layers import check_hashed_routes, route_columns
from megatron_router_replay.trace.ids import index_dtype, narrow_ids

_DIGIT_BITS = 7
"""Digits below 128 are legal ids in every integer dtype, and stay what they are when a trainer casts the routes."""

_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


def stamp(routes: Tensor, tokens: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Add a layer to routes that names the token of each row. Call it where the rollout's routes enter the trainer.

    Args:
        routes: [..., layers, topk] integers, a row for each of the first tokens.
        tokens: [...] or longer in its last dimension: the ids of the tokens.
        dtype: signed, of the result; None: the routes' own. slime and miles carry int32, of which torch.int16 is half.

    Returns:
        [..., layers + 1, topk]. The last layer holds the token's id in digits of 7 bits. Three digits
        tell all tokens of a vocabulary below 2 million apart; with topk=2 two tokens look alike once in 16,384 pairs, with
        topk=1 once in 128.

    Raises:
        LayoutError: there are fewer tokens than rows, these are no integers, or an id does not fit `dtype`. On a GPU an
            assertion of the device fails for that instead.
    """
    routes, tokens = as_integers(routes, "routes"), as_integers(tokens, "tokens")
    tokens = tokens[..., : routes.shape[-3]] if routes.dim() >= 3 else tokens
    if routes.dim() < 3 or tokens.shape != routes.shape[:-2]:
        raise LayoutError(
            f"MRR411: cannot stamp routes {list(routes.shape)} with tokens {list(tokens.shape)}: give [..., layers, "
            "topk] routes and one token a row."
        )
    if dtype is not None:
        routes = _narrowed(routes, dtype, waits=not routes.is_cuda)
    return torch.cat([routes, _stamps(tokens, routes).unsqueeze(-2)], dim=-2)


def _narrowed(routes: Tensor, dtype: torch.dtype, *, waits: bool) -> Tensor:
    """Return routes in a dtype that holds every id of theirs; a cast alone would make an expert of any number.

    Without waiting for a device, it asserts that.
    """
    if dtype not in _DTYPES[1:]:
        raise LayoutError(f"MRR411: cannot stamp routes as {dtype}: give torch.int16, int32 or int64.")
    limits = torch.iinfo(dtype)
    if routes.numel() and torch.iinfo(routes.dtype).max > limits.max:
        routes = routes if routes.dtype in _DTYPES else routes.to(torch.int64)  # torch computes too little with uint16
        lowest, highest = torch.aminmax(routes)
        outside = (lowest < limits.min) | (highest > limits.max)
        if not waits:
            torch._assert_async(~outside, f"MRR103: routes hold ids that {dtype} does not.")
        elif bool(outside):
            raise LayoutError(
                f"MRR103: routes hold ids from {int(lowest)} to {int(highest)}, which {dtype} does not: of a model they "
                "lie in 0..num_experts - 1, -1 where there is none."
            )
    return routes.to(dtype)


def _digits(tokens: Any, topk: int) -> list[Any]:
    """Return up to three digits of token ids, int64 of torch or numpy; all bits of an id count, also where there are few."""
    bits = topk * _DIGIT_BITS
    if bits < 21:  # too few for every vocabulary: the high bits of a multiplicative hash, which depend on all of an id
        tokens = ((tokens * 0x9E3779B1) & 0xFFFFFFFF) >> (32 - bits)
    return [(tokens >> place * _DIGIT_BITS) & 127 for place in range(min(topk, 3))]


def _stamps(tokens: Tensor, routes: Tensor) -> Tensor:
    """Return [..., topk] digits of token ids, of the dtype and topk of routes."""
    topk = routes.shape[-1]
    digits = _digits(tokens.to(routes.device, torch.int64), topk)
    return torch.stack([digits[place % 3] for place in range(topk)], dim=-1).to(routes.dtype)


def lay_out(
    chunk: Chunk,
    check: Check,
    hashed: Sequence[FoundRouter],
    *,
    routes: Any,
    token_ids: Any = None,
    padding: Any = None,
    trained: Any = None,
    stamped: bool = False,
    trust_layout: bool = False,
    filler: Sequence[int] | Tensor | None = None,
    layer_numbers: Sequence[int] | None = None,
    split: bool = False,
) -> LaidOut:
    """Check routes as a trainer laid them out, and return those of the chunk's routers.

    Args:
        hashed: the routers of hash layers, whose columns are compared with their tables.
        routes: [b, s, layers, topk], or [t, layers, topk] for one packed row; any integer dtype.
        token_ids: [b, s], what the model gets.
        padding: [b, s] bool, True: padding, whatever its routes are.
        trained: [b, s], non-zero: trained on; without a route it raises.
        stamped: the last layer is the stamp; needs token_ids.
        trust_layout: take the routes without a stamp; the report says so.
        filler: [topk], what the trainer writes in every layer where there is no route: such rows are live.
        layer_numbers: Megatron's number of each layer of `routes`; None: all layers of the model, or its MoE layers.
        split: routes and masks are this sequence-parallel rank's part of s already.

    Raises:
        LayoutError: a shape, a layer, an id or a token does not fit.
    """
    _check_proof(stamped=stamped, trust_layout=trust_layout, token_ids=token_ids)
    given = _as_batch(routes)
    values, tokens, at_padding, at_trained = _on_one_device(given, token_ids, padding, trained)
    stamps, values = (values[:, :, -1], values[:, :, :-1]) if stamped else (None, values)
    columns = _columns(chunk, values, layer_numbers)
    # Read where the routes came from: if the host knows which rows are live, no router takes the live top-k of all.
    live = _has_no_route(take_layers(given[:, :, : values.shape[2]], columns.judged, dim=2), filler)
    known = ~to_device(live, values.device)
    if at_padding is not None:
        live, known = ~known, known & ~at_padding
    judged = take_layers(values, columns.judged, dim=2)
    checked = _checked(judged, known, int(chunk.taking_part[0].router.num_experts), check)
    _check_dense(values, columns.dense, known, check)
    if stamps is not None and tokens is not None:
        _check_stamps(stamps, tokens, known, check)
    if at_trained is not None:
        check_trained(at_trained & ~known, check, order="of the batch")
    tokens = None if split else tokens
    if tokens is not None:
        for found in (each for each in hashed if each.layer_number in columns.of_layer):
            check_hashed_routes(found, values[:, :, columns.of_layer[found.layer_number]], tokens, check)
    return _routers_view(chunk, checked, columns.replayed, live=live, padding=at_padding, token_ids=tokens, split=split)


def _on_one_device(values: Tensor, *beside: Any) -> list[Any]:
    """Return routes, token_ids, padding and trained on a GPU if one of them is there: on the way down the host would wait."""
    there = [each.device for each in (values, *beside) if isinstance(each, Tensor) and each.device.type != "cpu"]
    device, shape = there[0] if there else values.device, (int(values.shape[0]), int(values.shape[1]))
    named = zip(beside, ("token_ids", "padding", "trained"), strict=True)
    return [to_device(values, device), *(_beside(each, name, shape, device) for each, name in named)]


def _routers_view(
    chunk: Chunk,
    checked: Tensor,
    layers: Sequence[int],
    *,
    live: Tensor,
    padding: Tensor | None,
    token_ids: Tensor | None,
    split: bool,
) -> LaidOut:
    """Return the routes of a chunk's layers, which stand at `layers` of checked ones, as its routers see them."""
    on_host = checked.device.type == "cpu"
    live = chunk.router_view(live, split=split)
    has_live = live.device.type != "cpu" or bool(live.any())
    values = take_layers(checked, layers, dim=2)
    if has_live and values.dtype.is_signed and not on_host:
        values = values.clamp(min=0)
    view = chunk.router_view(values, split=split)
    # A copy, for a trainer reuses its buffers. What was checked on the host is one; a part of it would keep all of it.
    is_copy = on_host and view.numel() == checked.numel()
    return LaidOut(
        compact=view.to(index_dtype(chunk.taking_part[0].router.num_experts), copy=not is_copy),
        live=live if has_live else None,
        padding=padding,
        batch_shape=(int(checked.shape[0]), int(checked.shape[1])),
        token_ids=token_ids,
        split=split,
    )


def _as_batch(routes: Any) -> Tensor:
    """Return [b, s, layers, topk]."""
    values = as_integers(routes, "routes").detach()
    values = values.unsqueeze(0) if values.dim() == 3 else values
    # Narrow ones stay narrow: widening costs more than every check. torch computes too little with uint16.
    values = values if values.dtype in _DTYPES else values.to(torch.int64)
    if values.dim() != 4:
        raise LayoutError(
            f"MRR411: routes must be [b, s, layers, topk], or [t, layers, topk] for one packed row, got {list(values.shape)}."
        )
    return values


def _check_proof(*, stamped: bool, trust_layout: bool, token_ids: Any) -> None:
    """Raise unless the caller says how the layout of routes is proved."""
    if stamped == trust_layout:
        raise LayoutError(
            "MRR411: routes can be right in shape and wrong in every row: stamp them where the rollout enters (routes = "
            "mrr.stamp(routes, tokens)) and say stamped=True with token_ids=, or say trust_layout=True in its place."
        )
    if stamped and token_ids is None:
        raise LayoutError(
            "MRR411: stamped=True compares the stamp with the tokens: give token_ids=, what the model gets."
        )


def _has_no_route(routes: Tensor, filler: Any) -> Tensor:
    """Return [b, s] bool, True: every layer of the row is below 0, or the trainer's filler."""
    if filler is not None:
        filler = to_device(torch.as_tensor(filler, dtype=torch.int64), routes.device)
    if routes.device.type != "cpu":
        return _is_unrouted(routes, filler)
    # Few rows begin like one without a route; the rest of a row is read of these alone.
    rows = routes.numpy()
    without = rows[:, :, 0, 0] < 0
    if filler is not None:
        without |= rows[:, :, 0, 0] == int(filler.expand(routes.shape[3])[0])
    places = without.nonzero()
    without[places] = _is_unrouted(torch.from_numpy(rows[places]), filler).numpy()
    return torch.from_numpy(without)


def _is_unrouted(routes: Tensor, filler: Tensor | None) -> Tensor:
    """Return [...] bool of [..., layers, topk] routes, each of which is read whole."""
    without = routes.flatten(-2).amax(-1) < 0
    if filler is not None:
        without |= (routes == filler).flatten(-2).all(-1)
    return without


@dataclass(frozen=True, kw_only=True, slots=True)
class _Columns:
    """The layer axis of routes, the stamp taken off.

    Args:
        of_layer: Megatron's number of each MoE layer -> its column.
        judged: columns that say of a row whether it has a route, and which are checked.
        replayed: positions in `judged` of the chunk's layers.
        dense: columns of dense layers.
    """

    of_layer: dict[int, int]
    judged: list[int]
    replayed: list[int]
    dense: list[int]


def _columns(chunk: Chunk, routes: Tensor, layer_numbers: Sequence[int] | None) -> _Columns:
    """Return what stands in the columns of routes; worked out for the chunk's first micro-batch."""
    topk, count = int(chunk.taking_part[0].router.topk), int(routes.shape[2])
    if routes.shape[3] != topk:
        raise LayoutError(f"MRR411: routes name {routes.shape[3]} experts a token, the model's topk is {topk}.")
    numbers = None if layer_numbers is None else tuple(int(number) for number in layer_numbers)
    if (count, numbers) in chunk.columns:
        known: _Columns = chunk.columns[count, numbers]
        return known
    column = route_columns(chunk.module, chunk.config, count, numbers)
    missing = [found for found in chunk.taking_part if found.layer_number not in column]
    if missing:
        raise LayoutError(
            f"MRR411: {missing[0]} has no routes: they are of layers {sorted(column)}; say layer_numbers=."
        )
    # Judged by all layers of the model, so that every pipeline stage says the same of a row: one layer may rightly choose
    # what is filler elsewhere. Hash layers hold zeros.
    num_hashed = getattr(chunk.config, "moe_n_hash_layers", None) or 0
    replayed = [found.layer_number for found in chunk.taking_part]
    judged = [place for number, place in column.items() if number > num_hashed or number in replayed]
    columns = chunk.columns[count, numbers] = _Columns(
        of_layer=column,
        judged=judged,
        replayed=[judged.index(column[number]) for number in replayed],
        dense=[place for place in range(count) if place not in column.values()],
    )
    return columns


def _check_dense(routes: Tensor, dense: list[int], known: Tensor, check: Check) -> None:
    """Check that columns of dense layers hold filler; a trainer's own, in rows without a route, spreads over all layers."""
    if dense:
        filler = take_layers(routes, dense, dim=2).to(torch.int64)  # torch takes 255 for -1 in uint8
        check(
            ((filler != 0) & (filler != -1) & known[..., None, None]).any(),
            f"MRR411: routes of the dense layers {[place + 1 for place in dense]} are not filler (0 or -1): the layers are "
            "shifted, or of another model.",
        )


def _check_stamps(stamps: Tensor, tokens: Tensor, known: Tensor, check: Check) -> None:
    """Check that rows with a route bear the stamp of their token."""
    if stamps.device.type == "cpu":  # numpy reads these thin columns in less than half of torch's time
        columns = stamps.numpy()
        digits = [digit.astype(columns.dtype) for digit in _digits(tokens.numpy(), columns.shape[-1])]
        unlike = [columns[..., place] != digits[place % 3] for place in range(columns.shape[-1])]
        differ = torch.from_numpy(np.logical_or.reduce(unlike))
    else:
        differ = (stamps != _stamps(tokens, stamps)).any(-1)
    check(
        (differ & known).any(),
        "MRR203: routes are of other tokens than the model gets at their positions: the trainer lays routes out in another "
        "order than tokens (context parallelism, padding side, [s, b]), or cut one of the two.",
    )


def _beside(values: Any, name: str, shape: tuple[int, int], device: torch.device) -> Tensor | None:
    if values is None:
        return None
    checked = as_integers(values, name) if name == "token_ids" else as_mask(values, name)
    if checked.numel() != shape[0] * shape[1] or (checked.dim() == 2 and tuple(checked.shape) != shape):
        raise LayoutError(f"MRR411: routes are of {list(shape)} tokens, {name} has the shape {list(checked.shape)}.")
    # As it came to the device, and widened there: a copy, for a trainer reuses its buffers.
    return to_device(checked.reshape(shape), device).to(torch.int64 if name == "token_ids" else torch.bool, copy=True)


def _checked(routes: Tensor, known: Tensor, num_experts: int, check: Check) -> Tensor:
    """Return routes whose known rows name different experts of the model in every layer.

    On the host they are a copy in the stored dtype, with legal ids in the rows that are not known.
    """
    if routes.device.type == "cpu":  # where torch sorts short rows slowly
        narrow, cause = narrow_ids(routes.flatten(0, 1).numpy(), known.flatten().numpy(), num_experts=num_experts)
        outside, repeated = (torch.tensor(cause == each) for each in ("outside", "repeated"))
        checked = torch.from_numpy(narrow).view(routes.shape)
    else:
        lowest, highest = (each.to(torch.int64) for each in torch.aminmax(routes.flatten(2), dim=2))
        outside = (((lowest < 0) | (highest >= num_experts)) & known).any()
        ordered = routes.sort(dim=3).values
        repeated = ((ordered[..., 1:] == ordered[..., :-1]).flatten(2).any(2) & known).any()
        checked = routes
    check(
        outside,
        f"MRR103: routes name experts outside 0..{num_experts - 1}, or miss some layers of a row (-1).",
    )
    check(
        repeated, "MRR103: routes name an expert twice in one row: was padding written without -1, padding= or filler=?"
    )
    return checked
