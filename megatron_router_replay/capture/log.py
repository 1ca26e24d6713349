"""The steps whose routes are on their way to the host: kept side by side and sorted into requests many at a time.

On a GPU each step is one asynchronous copy into pinned memory on a stream of its own; on a CPU the routers' ids are collected
there directly. Sorting a step by itself would cost some Python for each request of each step, so a decode step waits here
until the log is full, the batch changes its size, or a request ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_router_replay.capture.buffer import RoutingBuffer, host_memory
from megatron_router_replay.capture.recorder import StepRecorder

_MAX_STEPS = 64
"""Enough that sorting costs little a step, and no request's routes stay here for long."""

_MIN_TOKENS = 2048
"""Room for so many tokens at least: 32 decode steps of 64 requests."""


class StepLog:
    """Host memory for consecutive steps of the same number of tokens.

    Args:
        buffer: the device memory that is copied from.
    """

    def __init__(self, buffer: RoutingBuffer) -> None:
        self._buffer = buffer
        self._num_layers, max_num_tokens, self._topk = buffer.tensor.shape
        device = buffer.tensor.device
        on_gpu = device.type == "cuda"
        self._max_tokens = max(max_num_tokens, _MIN_TOKENS)
        self._routes_memory = _allocate(self._max_tokens * self._num_layers * self._topk, pinned=on_gpu)
        self._heads_memory = _allocate(_MAX_STEPS * self._num_layers + self._max_tokens, pinned=on_gpu)
        # On a GPU all layers are collected there first: one kernel, then one copy.
        self._collected = torch.empty(buffer.tensor.numel(), dtype=torch.int64, device=device) if on_gpu else None
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._room = 0
        self._num_tokens = 0
        self.num_steps = 0
        self._reshape(1)

    def has_room(self, num_tokens: int) -> bool:
        """Return whether a step of `num_tokens` tokens can follow those that are kept."""
        return self.num_steps == 0 or (num_tokens == self._num_tokens and self.num_steps < self._room)

    def append(self, recorder: StepRecorder, num_tokens: int) -> None:
        """Copy a step's routes, stamps and token ids behind the forward, without waiting for either.

        Raises:
            CaptureError: the recorder's; nothing is appended.
        """
        if num_tokens != self._num_tokens:
            assert self.num_steps == 0, "take() comes before steps of another size"
            self._reshape(num_tokens)
        routes, head = self._places[self.num_steps]
        if self._stream is None or self._copied is None:
            recorder.collect(routes, self._buffer.tensor)
            if self._host_head is not None:
                head[:] = self._host_head
            else:
                head.copy_(self._head)
        else:
            recorder.collect(self._device_routes, self._buffer.tensor)
            self._stream.wait_stream(torch.cuda.current_stream(self._device_routes.device))
            with torch.cuda.stream(self._stream):
                routes.copy_(self._device_routes, non_blocking=True)
                head.copy_(self._head, non_blocking=True)
                self._copied.record()
        self.num_steps += 1

    def hold_device(self) -> None:
        """Keep the kernels that the current stream gets from now on from overwriting what is still being copied."""
        if self._copied is not None and self.num_steps:
            torch.cuda.current_stream(self._buffer.tensor.device).wait_event(self._copied)

    def take(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Wait for the copies and return the steps; the log is empty then, and the arrays hold until the next append.

        Returns:
            (routes [steps, num_layers, num_tokens, topk], stamps [steps, num_layers], token_ids [steps, num_tokens]).
        """
        if self._copied is not None and self.num_steps:
            self._copied.synchronize()
        num_steps, self.num_steps = self.num_steps, 0
        heads: NDArray[Any] = self._heads[:num_steps].numpy()
        return self._routes[:num_steps].numpy(), heads[:, : self._num_layers], heads[:, self._num_layers :]

    def _reshape(self, num_tokens: int) -> None:
        """Divide the memory into steps of `num_tokens` tokens; the views are made once for many steps."""
        self._num_tokens = num_tokens
        self._room = min(self._max_tokens // max(num_tokens, 1), _MAX_STEPS)
        shape = (self._num_layers, num_tokens, self._topk)
        size, head = self._num_layers * num_tokens * self._topk, self._num_layers + num_tokens
        self._routes = self._routes_memory[: self._room * size].view(self._room, *shape)
        self._heads = self._heads_memory[: self._room * head].view(self._room, head)
        self._head = self._buffer.head[:head]
        heads: list[Any] = list(self._heads.unbind())
        self._host_head = None
        if self._buffer.host_head is not None:
            heads = [host_memory(place) for place in heads]
            self._host_head = self._buffer.host_head[:head]
        self._places = list(zip(self._routes.unbind(), heads))
        if self._collected is not None:
            self._device_routes = self._collected[:size].view(shape)


def _allocate(size: int, *, pinned: bool) -> Tensor:
    return torch.empty(size, dtype=torch.int64, pin_memory=pinned)
