"""One announced forward: request ids and positions -> request and position of every token slot."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from megatron_router_replay.capture.buffer import MASKED
from megatron_router_replay.capture.routers import CaptureError

IntArray = NDArray[np.int64]


@dataclass(slots=True)
class Forward:
    """Request and position of each token slot of a forward, in the order of memory.

    Args:
        request_numbers: [num_tokens], the request's number; -1 on padding and in rows that are not captured.
        positions: [num_tokens], in the request.
        shape: [batch, length] of the input_ids.
        has_token_ids: whether the tokens were seen.
        was_run: whether the model was seen to run.
        eager_stamps: [num_layers], calls and rows of eager routers.
    """

    request_numbers: IntArray
    positions: IntArray
    shape: tuple[int, ...]
    has_token_ids: bool = False
    was_run: bool = False
    eager_stamps: Sequence[int] = ()

    @classmethod
    def of_batch(cls, request_numbers: IntArray, positions: IntArray) -> Forward:
        """Return the forward of sequences with these request numbers, [batch]; positions are [batch, length] or [batch].

        Raises:
            CaptureError: the shapes do not fit, or a position is below -1.
        """
        if positions.size and positions.min() < -1:
            raise CaptureError(f"MRR702: a position is {positions.min()}: tokens count from 0, padding is -1.")
        if positions.ndim not in (1, 2) or len(positions) != len(request_numbers):
            raise CaptureError(
                f"MRR702: positions of shape {list(positions.shape)} do not fit {len(request_numbers)} request ids: expected "
                "[batch, length], or [batch] with one token each."
            )
        rows = positions[:, None] if positions.ndim == 1 else positions
        # A padded slot belongs to no request, whichever row of the batch it is in.
        slots = np.where(rows >= 0, request_numbers[:, None], -1)
        return cls(slots.reshape(-1), rows.reshape(-1), rows.shape)

    def put_token_ids(self, destination: Tensor, input_ids: Tensor, attention_mask: Any = None) -> None:
        """Write the token of each slot.

        Args:
            destination: [at least num_tokens].
            input_ids: [batch, length]; any shape for a single sequence, or a single token in each.
            attention_mask: counts where it has the shape of input_ids: 0 hides a token.

        Raises:
            CaptureError: another shape than announced.
        """
        num_tokens, shape = len(self.request_numbers), tuple(input_ids.shape)
        # A packed batch is announced as [total] or [1, total], and models take both shapes.
        if shape != self.shape and not (1 in self.shape and input_ids.numel() == num_tokens):
            raise CaptureError(
                f"MRR702: the model runs input_ids {list(shape)} where {list(self.shape)} were announced: name every "
                "row of the batch, None for one of no request."
            )
        if isinstance(attention_mask, Tensor) and attention_mask.shape == input_ids.shape:
            input_ids = input_ids.masked_fill(attention_mask.to(input_ids.device) == 0, MASKED)
        destination[:num_tokens].copy_(input_ids.reshape(-1))
        self.has_token_ids = True


def token_positions(attention_mask: Any) -> IntArray:
    """Return the position of each token in its sequence, -1 on padding.

    Args:
        attention_mask: [batch, length], nonzero on tokens.
    """
    is_token = as_integers(attention_mask) != 0
    positions: IntArray = np.where(is_token, np.cumsum(is_token, axis=-1) - 1, -1)
    return positions


def as_integers(values: Any) -> IntArray:
    """Return a tensor, array or list as int64 on the CPU.

    Raises:
        CaptureError: its values are no integers.
    """
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (ValueError, TypeError) as error:  # nested lists of several lengths
        raise CaptureError(
            f"MRR101: positions and token ids must be an array, got {type(values).__name__}: {error}"
        ) from None
    if array.dtype.kind not in "iub" and array.size:
        raise CaptureError(f"MRR101: positions and token ids must be integers, got {array.dtype}.")
    return array.astype(np.int64, copy=False)


def find_input_module(model: nn.Module) -> nn.Module | None:
    """Return the outermost module with `input_ids` in its forward, if any."""
    return next((module for module in model.modules() if "input_ids" in _input_names(type(module).forward)), None)


def named_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward by name."""
    return {**dict(zip(_input_names(type(module).forward), args)), **kwargs}


@cache  # reading a signature takes longer than all else of a decode step
def _input_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]
