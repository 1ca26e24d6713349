"""The inputs of a forward, checked and copied: rows, masks, tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.checks import Check, as_integers, as_mask
from megatron_router_replay.errors import LayoutError
from megatron_router_replay.mcore.core.counts import Counts


class DeferredChecks:
    """Checks of tensors in one session. On the CPU they raise at once, on a GPU at the end, to spare the host a wait.

    Attributes:
        failed: message -> how often the check failed, on a device until `Counts.read`.
    """

    def __init__(self) -> None:
        self.failed = Counts()
        self._details: dict[str, Callable[[], str]] = {}  # message -> makes the one that is raised instead

    def check(self, failed: Tensor, message: str, detail: Callable[[], str] | None = None) -> None:
        """Raise LayoutError if `failed` (a scalar) is not 0: now, or from `texts` on.

        Args:
            detail: makes the whole message, from values that the host must wait for.
        """
        if failed.device.type != "cpu":
            self.failed.add(**{message: failed})
            if detail is not None:
                self._details[message] = detail
        elif bool(failed):
            raise LayoutError(message if detail is None else detail())

    def texts(self) -> list[str]:
        """Return the messages of the checks that failed, once they are read."""
        failed = self.failed.positive
        return [self._details[message]() if message in self._details else message for message in failed]

    def check_range(self, rows: Tensor, num_tokens: int) -> bool:
        """Check the range of rows; return whether some may be -1, True also on a GPU, without a wait.

        Raises:
            LayoutError: a row is below -1, or num_tokens or more.
        """
        message = f"MRR202: rows reach outside the trace's rows 0..{num_tokens - 1}; padding is -1."
        if not rows.numel():
            return False
        if rows.device.type != "cpu":
            self.check(((rows < -1) | (rows >= num_tokens)).any(), message)
            return True
        lowest, highest = map(int, rows.aminmax())
        if lowest < -1 or highest >= num_tokens:
            raise LayoutError(message)
        return lowest < 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RowInputs:
    """The rows of a forward, queued by hand or found by its tokens.

    Args:
        rows: [b, s] int64.
        token_ids: [b, s] int64; None: not given.
        padding: [b, s] bool; None: not given.
        num_ambiguous: segments that several samples fit, an int or a scalar on a device; 0 of rows by hand.
    """

    rows: Tensor
    token_ids: Tensor | None
    padding: Tensor | None
    num_ambiguous: Tensor | int = 0

    @classmethod
    def checked(cls, rows: Any, *, token_ids: Any, padding: Any) -> RowInputs:
        """Check shapes and copy, because trainers reuse their buffers.

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
                    f"MRR201: rows are {rows.dtype} and hold {highest}, which a -1 becomes there: padding "
                    "cannot be told from that row. Give a signed dtype."
                )
        as_2d = (1, -1) if rows.dim() == 1 else rows.shape
        inputs: dict[str, Any] = {}
        for name, values in (("token_ids", token_ids), ("padding", padding)):
            if values is None:
                inputs[name] = None
                continue
            values = as_integers(values, name) if name == "token_ids" else as_mask(values, name)
            if values.shape != rows.shape:
                raise LayoutError(f"MRR201: rows {list(rows.shape)} and {name} {list(values.shape)} differ in shape.")
            dtype = torch.int64 if name == "token_ids" else torch.bool
            inputs[name] = values.reshape(as_2d).to(rows.device, dtype, copy=True)
        return cls(rows=rows.reshape(as_2d).to(torch.int64, copy=True), **inputs)


def check_padding(inputs: RowInputs, check: Check) -> None:
    """Check that padding has no rows: no mask overrules a row of the trace."""
    if inputs.padding is not None:
        check(
            (inputs.padding & (inputs.rows >= 0)).any(),
            "MRR203: a position with padding=True has a routing row: mask and rows moved apart, or the mask is "
            "inverted (True is padding) or a loss mask.",
        )
