"""The inputs of one forward, checked and copied: routing rows, masks, tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.checks import Check, as_integers, as_mask
from megatron_router_replay.errors import LayoutError


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRoutes:
    """The routes of one micro-batch, as this rank's routers see their tokens.

    Args:
        topk_indices: [num_tokens, num_layers, topk] in the dtype that ids of the model need, layers as the chunk's routers.
        live_mask: [num_tokens] bool, True: the row has no route; None: all rows have one.
        rows: [b, s] int64, rows of the trace that know the token_ids; None: the caller named these.
        padding: [b, s] bool, known to be padding; None: nothing is known.
        batch_shape: (b, s).
        token_ids: [b, s] int64; None: not known.
    """

    topk_indices: Tensor
    live_mask: Tensor | None
    padding: Tensor | None
    batch_shape: tuple[int, int]
    token_ids: Tensor | None
    rows: Tensor | None = None


def count_rows(num_rows: int, live_mask: Tensor | None, padding: Tensor | None) -> dict[str, Tensor | int]:
    """Return how many rows there are, and how many of them are live and padding."""
    return {"rows": num_rows} | {
        name: 0 if mask is None else mask.sum() for name, mask in (("live", live_mask), ("padding", padding))
    }


def check_padding(has_row: Tensor, padding: Tensor | None, check: Check) -> None:
    """Check that padding has no rows: no mask overrules a row of the trace."""
    if padding is not None:
        check(
            (padding & has_row).any(),
            "MRR203: a position that padding= says is padding has a routing row: mask and rows moved apart, or the mask is "
            "inverted (True is padding) or a loss mask.",
        )


def check_trained(without: Tensor, check: Check, *, order: str) -> None:
    """Check that no trained position is without a route; `without` is bool, its order is for the message."""
    which = ""
    if is_known(without):
        first = int(without.flatten().nonzero()[0])
        which = f" ({int(without.sum())} of them, the first is token {first} {order})"
    check(
        without.any(),
        f"MRR410: a trained position has no route{which}: its row is -1, or there is no route for it. Leave `trained` out to "
        "let the live router decide such positions.",
    )


def is_known(values: Tensor) -> bool:
    """Return whether the host can read these values without waiting, and some are True."""
    return values.device.type == "cpu" and bool(values.any())


@dataclass(frozen=True, kw_only=True, slots=True)
class RowInputs:
    """Inputs that a caller queues for a forward; copies, because trainers reuse their buffers.

    Args:
        rows: [b, s] int64.
        token_ids: [b, s] int64; None: not given.
        padding, trained: [b, s] bool; None: not given.
    """

    rows: Tensor
    token_ids: Tensor | None
    padding: Tensor | None
    trained: Tensor | None

    @classmethod
    def checked(cls, rows: Any, *, token_ids: Any, padding: Any, trained: Any) -> RowInputs:
        """Check shapes and copy.

        Raises:
            LayoutError: rows are not [b, s] (or [n], one packed row), or something beside them has another shape or kind.
        """
        rows = as_integers(rows, "routing_rows")
        if rows.dim() not in (1, 2):
            raise LayoutError(f"MRR201: routing_rows must have the shape of input_ids, [b, s], got {list(rows.shape)}.")
        # An unsigned -1 of eight bytes is -1 again as int64.
        if not rows.dtype.is_signed and rows.dtype.itemsize < 8:
            highest = torch.iinfo(rows.dtype).max
            if bool((rows.to(torch.int64) == highest).any()):
                raise LayoutError(
                    f"MRR201: routing_rows are {rows.dtype} and hold {highest}, which a -1 becomes there: padding "
                    "cannot be told from that row. Give a signed dtype."
                )
        as_2d = (1, -1) if rows.dim() == 1 else rows.shape
        inputs: dict[str, Tensor | None] = {}
        for name, values in (("token_ids", token_ids), ("padding", padding), ("trained", trained)):
            if values is None:
                inputs[name] = None
                continue
            values = as_integers(values, name) if name == "token_ids" else as_mask(values, name)
            if values.shape != rows.shape:
                raise LayoutError(
                    f"MRR201: routing_rows {list(rows.shape)} and {name} {list(values.shape)} differ in shape."
                )
            dtype = torch.int64 if name == "token_ids" else torch.bool
            inputs[name] = values.reshape(as_2d).to(rows.device, dtype, copy=True)
        return cls(rows=rows.reshape(as_2d).to(torch.int64, copy=True), **inputs)
