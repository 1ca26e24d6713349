"""Routes as a trainer's micro-batch carries them -> the routes of this rank's routers, each proved to be its token's.

A trainer lays routes out as it lays out tokens. A layout for another order has the right shape and is wrong in every row, so
each row bears a seal (`trace.seal`), which is proved here. In this order a row is: what the trainer named as filler, or
nothing (-1); sealed for the token at its position; padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.checks import Check, as_integers, as_mask
from megatron_router_replay.errors import LayoutError
from megatron_router_replay.layout.rows import count_differing_tokens
from megatron_router_replay.mcore.batches.chunk import Chunk
from megatron_router_replay.mcore.batches.rows import RankRoutes, check_padding, check_trained, is_known
from megatron_router_replay.mcore.batches.upload import take_layers
from megatron_router_replay.mcore.core.streams import to_device
from megatron_router_replay.mcore.model.layers import route_columns
from megatron_router_replay.trace import seal


def lay_out(
    chunk: Chunk,
    check: Check,
    *,
    routes: Any,
    token_ids: Any = None,
    padding: Any = None,
    trained: Any = None,
    stamped: bool = False,
    trust_layout: bool = False,
    filler: Sequence[int] | Tensor | None = None,
    missing: str = "raise",
    layer_numbers: Sequence[int] | None = None,
    split: bool = False,
) -> RankRoutes:
    """Prove routes as a trainer laid them out, and return those of the chunk's routers.

    Args:
        routes: [b, s, layers, topk], or [t, layers, topk] for one packed row; any integer dtype.
        token_ids: [b, s], what the model gets.
        padding: [b, s] bool, True: padding. A row that is sealed for its token is none, and raises; without a seal, what
            stands on padding is not looked at.
        trained: [b, s], non-zero: trained on; without a route it raises.
        stamped: the last layers are the seal; needs token_ids.
        trust_layout: take the routes without a seal; the report says so.
        filler: [topk], what the trainer writes in every layer where there is no route: such rows are live.
        missing: "raise", or "live": a row whose layers are not all there, or, without a seal, that no router can have chosen,
            is live and counted. A row whose seal fails raises always.
        layer_numbers: Megatron's number of each layer of `routes`, 0 for one that is left out; None: all layers of the
            model, or its MoE layers.
        split: routes and masks are this sequence-parallel rank's part of s already.

    Raises:
        LayoutError: a shape, a layer, an id or a token does not fit.
    """
    _check_words(stamped=stamped, trust_layout=trust_layout, token_ids=token_ids, missing=missing)
    values = _as_batch(routes)
    shape, num_experts = (int(values.shape[0]), int(values.shape[1])), int(chunk.replayed_routers[0].router.num_experts)
    unchecked = {"token_ids": token_ids, "padding": padding, "trained": trained}
    inputs, device = _on_one_device(unchecked, shape, values.device)
    tokens, padded = inputs["token_ids"], inputs["padding"]
    columns = _columns(chunk, values, layer_numbers, stamped=stamped)
    flat = values.flatten(0, 1)
    rows, lost = _read(flat, columns, stamped=stamped, num_experts=num_experts, filler=filler)
    others = None
    if stamped and tokens is not None:
        others = rows.of_other_tokens(tokens.flatten()).view(shape)
        wrong, why = _unpadded(others, padded), seal.OTHER_TOKENS
        if is_known(wrong):
            why = seal.explain(flat, rows, wrong.flatten(), tokens.flatten(), num_experts=num_experts)
            check(wrong.any(), f"MRR203: {why}")
        elif wrong.device.type != "cpu":
            assert rows.words is not None, "sealed rows"
            sealed = to_device(rows.words.view(shape), device) >> 8
            count, tell = count_differing_tokens(tokens, sealed, why=why, wrong=wrong)
            check(count, f"MRR203: {why}", lambda: f"MRR203: {tell()}")
        if padded is not None:
            check_padding(~others & to_device(~rows.absent.view(shape), device), padded, check)
    if missing == "raise":
        check(
            _unpadded(to_device(lost.view(shape), device), padded).any(),
            f"MRR103: routes of a token are none that a router can have chosen: an expert outside 0..{num_experts - 1}, an "
            "expert twice, or some layers without a route. If padding was written without -1, name it: padding=, filler=. "
            "missing='live' leaves such tokens to the live router.",
        )
    rows = rows.without(lost)
    absent = to_device(rows.absent.view(shape), device)
    if columns.dense:
        known = ~absent if others is None else ~(absent | others)
        _check_dense(values, columns.dense, _unpadded(known, padded), check, num_experts)
    if inputs["trained"] is not None:
        without = absent if padded is None else absent | padded
        check_trained(inputs["trained"] & without, check, order="of the batch")
    tokens = None if split else tokens
    return _routers_view(
        chunk,
        take_layers(rows.ids, columns.replayed, dim=1).view(*shape, len(columns.replayed), rows.ids.shape[2]),
        absent=rows.absent.view(shape),
        padding=padded,
        token_ids=tokens,
        split=split,
    )


def _check_words(*, stamped: bool, trust_layout: bool, token_ids: Any, missing: str) -> None:
    """Raise unless the caller says how the layout of routes is proved."""
    if stamped == trust_layout:
        raise LayoutError(
            "MRR411: routes can be right in shape and wrong in every row: stamp them where the rollout enters (routes = "
            "mrr.stamp(routes, tokens, num_experts=...)) and say stamped=True with token_ids=, or say trust_layout=True in "
            "its place."
        )
    if stamped and token_ids is None:
        raise LayoutError(
            "MRR411: stamped=True compares the seal with the tokens: give token_ids=, what the model gets."
        )
    if missing not in ("raise", "live"):
        raise LayoutError(f"MRR411: missing={missing!r} is neither 'raise' nor 'live'.")


def _as_batch(routes: Any) -> Tensor:
    """Return [b, s, layers, topk]."""
    values = seal.as_stored(as_integers(routes, "routes").detach())
    values = values.unsqueeze(0) if values.dim() == 3 else values
    if values.dim() != 4:
        raise LayoutError(
            f"MRR411: routes must be [b, s, layers, topk], or [t, layers, topk] for one packed row, got {list(values.shape)}."
        )
    return values


def _on_one_device(
    unchecked: dict[str, Any], shape: tuple[int, int], device: torch.device
) -> tuple[dict[str, Tensor | None], torch.device]:
    """Return token ids and masks, [b, s], on a GPU if one of them or the routes are: on the way down the host would wait."""
    checked: dict[str, Tensor | None] = dict.fromkeys(unchecked)
    for name, values in unchecked.items():
        if values is None:
            continue
        tensor = as_integers(values, name) if name == "token_ids" else as_mask(values, name)
        if tensor.numel() != shape[0] * shape[1] or (tensor.dim() == 2 and tuple(tensor.shape) != shape):
            raise LayoutError(f"MRR411: routes are of {list(shape)} tokens, {name} has the shape {list(tensor.shape)}.")
        checked[name] = tensor.reshape(shape)
        device = tensor.device if device.type == "cpu" else device
    for name, values in checked.items():
        if values is not None:  # as it came to the device, and widened there; a copy, for a trainer reuses its buffers
            dtype = torch.int64 if name == "token_ids" else torch.bool
            checked[name] = to_device(values, device).to(dtype, copy=True)
    return checked, device


def _read(
    values: Tensor, columns: _Columns, *, stamped: bool, num_experts: int, filler: Any
) -> tuple[seal.Rows, Tensor]:
    """Return rows of the judged layers, and which of them lack a route in one of these, [n] bool."""
    if not stamped:
        judged = take_layers(values, columns.judged, dim=1)
        rows = seal.judge(judged, num_experts=num_experts, filler=filler, routed=range(len(columns.judged)))
        return rows, rows.broken
    rows = seal.prove(values, num_experts=num_experts, filler=filler)
    rows = replace(rows, ids=take_layers(rows.ids, columns.judged, dim=1))
    return rows, rows.lack_a_layer()


def _unpadded(mask: Tensor, padding: Tensor | None) -> Tensor:
    """Return a mask without the positions that are padding."""
    return mask if padding is None else mask & ~padding


def _routers_view(
    chunk: Chunk,
    ids: Tensor,
    *,
    absent: Tensor,
    padding: Tensor | None,
    token_ids: Tensor | None,
    split: bool,
) -> RankRoutes:
    """Return the routes of a chunk's layers, [b, s, layers, topk], as its routers see them."""
    live_mask = chunk.router_view(absent if padding is None else to_device(absent, padding.device), split=split)
    view = chunk.router_view(ids, split=split)
    # Of the rows that were read for it, a part would keep all.
    is_part = view.untyped_storage().nbytes() != view.numel() * view.element_size()
    return RankRoutes(
        topk_indices=view.clone() if is_part else view,
        live_mask=live_mask if live_mask.device.type != "cpu" or bool(live_mask.any()) else None,
        padding=padding,
        batch_shape=(int(ids.shape[0]), int(ids.shape[1])),
        token_ids=token_ids,
        split=split,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Columns:
    """The layer axis of routes, the seal taken off.

    Args:
        judged: columns that say of a row whether it has a route, and which are checked.
        replayed: positions in `judged` of the chunk's layers.
        dense: columns of dense layers.
    """

    judged: list[int]
    replayed: list[int]
    dense: list[int]


def _columns(chunk: Chunk, routes: Tensor, layer_numbers: Sequence[int] | None, *, stamped: bool) -> _Columns:
    """Return what stands in the columns of routes; worked out for the chunk's first micro-batch."""
    topk = int(chunk.replayed_routers[0].router.topk)
    count = int(routes.shape[2]) - (seal.seal_layers(topk) if stamped else 0)
    if routes.shape[3] != topk:
        raise LayoutError(f"MRR411: routes name {routes.shape[3]} experts a token, the model's topk is {topk}.")
    numbers = None if layer_numbers is None else tuple(int(number) for number in layer_numbers)
    if (count, numbers) in chunk.columns:
        known: _Columns = chunk.columns[count, numbers]
        return known
    column = route_columns(chunk.module, chunk.config, count, numbers)
    missing = [found for found in chunk.replayed_routers if found.layer_number not in column]
    if missing:
        raise LayoutError(
            f"MRR411: {missing[0]} has no routes: they are of layers {sorted(column)}; say layer_numbers=."
        )
    # Judged by all layers of the model, so that every pipeline stage says the same of a row: one layer may rightly choose
    # what is filler elsewhere. Hash layers hold zeros.
    num_hashed = getattr(chunk.config, "moe_n_hash_layers", None) or 0
    replayed = [found.layer_number for found in chunk.replayed_routers]
    judged = [place for number, place in column.items() if number > num_hashed or number in replayed]
    columns = chunk.columns[count, numbers] = _Columns(
        judged=judged,
        replayed=[judged.index(column[number]) for number in replayed],
        # Layers that the caller leaves out are not looked at.
        dense=[] if numbers else [place for place in range(count) if place not in column.values()],
    )
    return columns


def _check_dense(routes: Tensor, dense: list[int], known: Tensor, check: Check, num_experts: int) -> None:
    """Check that columns of dense layers hold filler; a trainer's own, in rows without a route, spreads over all layers."""
    ids = take_layers(routes, dense, dim=2).to(torch.int64)  # torch takes 255 for -1 in uint8
    is_filler = (ids == 0) | (ids == -1) | ((ids == 255) if num_experts <= 255 else False)
    check(
        (~is_filler & to_device(known, ids.device)[..., None, None]).any(),
        f"MRR411: routes of the dense layers {[place + 1 for place in dense]} are not filler (0 or -1): the layers are "
        "shifted, or of another model.",
    )
