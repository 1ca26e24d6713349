"""What the model really runs: its input_ids and attention_mask, seen by a hook and compared with what was announced."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_router_replay.capture.buffer import MASKED
from megatron_router_replay.capture.errors import CaptureError

See = Callable[[Tensor, Any], None]
"""(input_ids, attention_mask or None) of a forward."""


def watch_inputs(model: nn.Module, see: See) -> RemovableHandle | None:
    """Call `see` before every eager forward of the outermost module that takes `input_ids`; None if there is none."""
    for module in model.modules():
        parameters = list(inspect.signature(type(module).forward).parameters)[1:]
        if "input_ids" in parameters:
            return module.register_forward_pre_hook(_hook(parameters, see), with_kwargs=True)
    return None


def _hook(parameters: list[str], see: See) -> Any:
    ids_index = parameters.index("input_ids")
    mask_index = parameters.index("attention_mask") if "attention_mask" in parameters else len(parameters)

    def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        input_ids = kwargs.get("input_ids", args[ids_index] if ids_index < len(args) else None)
        if isinstance(input_ids, Tensor):
            see(input_ids, kwargs.get("attention_mask", args[mask_index] if mask_index < len(args) else None))

    return before_forward


class TokenSlots:
    """The token of each slot of the announced forward.

    Args:
        token_ids: [max_num_tokens] int64, where they are written; `head` of the RoutingBuffer.
    """

    def __init__(self, token_ids: Tensor) -> None:
        self._token_ids = token_ids
        self._announced = (0, 0, False, False)  # tokens, batch, s-major, packed
        self._batch = self._length = 0
        self._slots = token_ids[:0]
        self._was_run = False
        self.is_announced = False
        self.are_known = False

    def begin(self, num_tokens: int, batch: int, *, sequence_first: bool, is_packed: bool) -> None:
        """Expect the input_ids of a forward of `batch` requests, `num_tokens` in all."""
        self._was_run = self.are_known = False
        if (num_tokens, batch, sequence_first, is_packed) == self._announced:
            return
        self._announced = num_tokens, batch, sequence_first, is_packed
        self._batch, self._length = batch, num_tokens // max(batch, 1)
        self._slots = self._token_ids[:num_tokens]
        if sequence_first and not is_packed:
            self._slots = self._slots.view(self._length, batch).t()
        elif not is_packed:
            self._slots = self._slots.view(batch, self._length)

    def see_run(self, input_ids: Tensor, attention_mask: Any) -> None:
        """Take what the model is about to run; nothing where no forward is announced.

        Raises:
            CaptureError: another shape than announced, or a second forward.
        """
        if not self.is_announced:
            return
        if self._was_run:
            raise CaptureError(
                "a second forward of the model in one announced one: whose routes hold cannot be known. Announce each by "
                "itself."
            )
        self.put(input_ids, attention_mask)
        self._was_run = True

    def put(self, input_ids: Tensor, attention_mask: Any = None) -> None:
        """Write the ids into their slots.

        Args:
            input_ids: [batch, length] also for a model that routes s-major; [tokens] or [1, tokens] if packed.
            attention_mask: counts where it has the shape of input_ids: 0 hides a token.

        Raises:
            CaptureError: another shape than announced.
        """
        shape = input_ids.shape
        num_tokens, _, _, is_packed = self._announced
        flat = is_packed or self._length == 1 or self._batch == 1
        if shape != (self._batch, self._length) and not (flat and input_ids.numel() == num_tokens):
            announced = f"{num_tokens} packed tokens" if is_packed else f"{[self._batch, self._length]}"
            raise CaptureError(
                f"the model runs input_ids {list(shape)} where {announced} were announced: name every row of the batch, None "
                "for one that is nobody's."
            )
        slots = self._slots if self._slots.shape == shape else self._slots.view(shape)
        slots.copy_(input_ids)
        if isinstance(attention_mask, Tensor) and attention_mask.shape == input_ids.shape:
            slots.masked_fill_(attention_mask.to(slots.device) == 0, MASKED)
        self.are_known = True
