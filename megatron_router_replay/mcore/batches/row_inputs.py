"""The rows of a forward, with its masks and tokens: checked, and copied to the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.checks import as_integers, as_mask
from megatron_router_replay.errors import LayoutError
from megatron_router_replay.mcore.batches.forward_counts import ForwardCounts
from megatron_router_replay.mcore.core.streams import to_host


@dataclass(kw_only=True, slots=True)
class RowInputs:
    """The rows of a forward, given by hand or found by its tokens.

    Args:
        rows: [b, s] int64.
        token_ids: [b, s] int64; None: not given.
        padding: [b, s] bool; None: not given.
        counts: those that finding or checking the rows made.
        lengths: [S] int64, tokens of each sample that a recording numbers itself; None: rows by hand, or of a trace.

    Attributes:
        lowest, highest: of the rows; 0 and -1 if there are none.
    """

    rows: Tensor
    token_ids: Tensor | None
    padding: Tensor | None
    counts: ForwardCounts = ForwardCounts()
    lengths: Tensor | None = None
    lowest: int = field(init=False)
    highest: int = field(init=False)

    def __post_init__(self) -> None:
        values = self.rows.numpy()  # faster than torch with as few as a batch has
        self.lowest, self.highest = (int(values.min()), int(values.max())) if values.size else (0, -1)

    @classmethod
    def checked(cls, rows: Any, *, token_ids: Any, padding: Any) -> RowInputs:
        """Check shapes and copy to the host.

        Raises:
            LayoutError: rows are not [b, s] (or [n], one packed row), or a mask or tokens have another shape or kind.
        """
        rows = as_integers(rows, "rows")
        if rows.dim() not in (1, 2):
            raise LayoutError(f"MRR201: rows must have the shape of input_ids, [b, s], got {list(rows.shape)}.")
        # An unsigned -1 of eight bytes is -1 again as int64.
        if not rows.dtype.is_signed and rows.dtype.itemsize < 8:
            highest = torch.iinfo(rows.dtype).max
            if bool((rows.to(torch.int64) == highest).any()):
                raise LayoutError(
                    f"MRR201: rows are {rows.dtype} and have {highest}, which a -1 becomes there: it may be "
                    "padding or that row. Give a signed dtype."
                )
        tokens = None if token_ids is None else as_integers(token_ids, "token_ids")
        mask = None if padding is None else as_mask(padding, "padding")
        for name, values in (("token_ids", tokens), ("padding", mask)):
            if values is not None and values.shape != rows.shape:
                raise LayoutError(f"MRR201: rows {list(rows.shape)} and {name} {list(values.shape)} differ in shape.")
        as_2d = (1, -1) if rows.dim() == 1 else rows.shape
        # A copy also of those on the host, because trainers reuse their buffers.
        copied: list[Any] = [
            None if array is None else torch.from_numpy(array.copy().reshape(as_2d))
            for array in to_host((rows, tokens, mask))
        ]
        return cls(rows=copied[0], token_ids=copied[1], padding=copied[2])


def check_padding(inputs: RowInputs) -> None:
    """Check that padding has no rows: no mask overrules a row of the trace."""
    if inputs.padding is not None and bool((inputs.padding & (inputs.rows >= 0)).any()):
        raise LayoutError(
            "MRR203: a position with padding=True has a routing row: mask and rows moved apart, or the mask is "
            "inverted (True is padding) or a loss mask."
        )


def check_range(inputs: RowInputs, num_tokens: int) -> None:
    """Check the range of rows.

    Raises:
        LayoutError: a row is below -1, or num_tokens or more.
    """
    if inputs.lowest < -1 or inputs.highest >= num_tokens:
        raise LayoutError(f"MRR202: rows reach outside the trace's rows 0..{num_tokens - 1}; padding is -1.")
