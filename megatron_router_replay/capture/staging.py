"""The copy of one forward's routes to the host: asynchronous, into pinned memory, on a stream of its own.

On a CPU the same calls copy at once and wait for nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostStaging:
    """Room on the host for the used part of the device buffer.

    Args:
        buffer: [num_layers, max_num_tokens, topk], the device buffer.
    """

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        on_gpu = buffer.device.type == "cuda"
        self._memory = torch.empty(buffer.numel(), dtype=buffer.dtype, pin_memory=on_gpu)
        self._stream = torch.cuda.Stream(buffer.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._staged: Tensor | None = None

    def start_copy(self, num_tokens: int) -> None:
        """Copy the first `num_tokens` rows of every layer behind the forward, without waiting for either."""
        num_layers, _, topk = self._buffer.shape
        # Contiguous on the host: only then is the copy of a strided part of the buffer asynchronous.
        self._staged = self._memory[: num_layers * num_tokens * topk].view(num_layers, num_tokens, topk)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._buffer.device))
        with self._on_stream():
            self._staged.copy_(self._buffer[:, :num_tokens], non_blocking=True)
            if self._copied is not None:
                self._copied.record()

    def hold_device(self) -> None:
        """Keep the kernels that the current stream gets from now on from overwriting what is still being copied."""
        if self._copied is not None and self._staged is not None:
            torch.cuda.current_stream(self._buffer.device).wait_event(self._copied)

    def take(self) -> NDArray[Any]:
        """Wait for the copy and return its rows, [num_tokens, num_layers, topk], an array of its own."""
        assert self._staged is not None, "take follows start_copy"
        if self._copied is not None:
            self._copied.synchronize()
        return np.ascontiguousarray(self._staged.numpy().transpose(1, 0, 2))

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
