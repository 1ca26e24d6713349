"""Memory that is used again once nobody looks into it: for decoded traces and received ones.

Touching new memory for the first time can take longer than decoding into it (the kernel clears every page), so whoever
decodes or receives a batch every step does well to take the memory of earlier ones. A trace is never overwritten: its memory
is free again when the last tensor that looks into it is gone.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 64
_BLOCK_BYTES = 64 << 20


class TraceMemory:
    """Blocks of memory, lent in pieces; several threads may take at once.

    Args:
        block_bytes: of a block. One is free again when all its pieces are; a larger piece gets a block of its own.
        pinned: page-locked memory, from which copies to a GPU run beside its work; only with CUDA.

    It holds as much as was in use at once, until it is gone itself: pieces outlive it.
    """

    def __init__(self, block_bytes: int = _BLOCK_BYTES, *, pinned: bool = False) -> None:
        self._block_bytes, self._pinned = block_bytes, pinned
        self._lock = threading.Lock()
        self._free: deque[npt.NDArray[np.uint8]] = deque()  # filled by finalizers, which may run anywhere: no lock
        self._block: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return uninitialised memory, [nbytes] uint8, aligned to 64 bytes, for as long as something refers to it."""
        with self._lock:
            if self._used + nbytes > self._block.nbytes:
                self._block, self._used = self._block[:0].copy(), 0  # lets go of it: it may be free
                self._block = self._lend(nbytes)
            start = self._used
            self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            return self._block[start : start + nbytes]

    def _lend(self, nbytes: int) -> npt.NDArray[np.uint8]:
        memory = self._of_old(nbytes)
        if memory is None:
            size = -(-max(nbytes, 1) // self._block_bytes) * self._block_bytes
            # numpy asks for huge pages, of which fewer have to be mapped.
            memory = (
                torch.empty(size + _ALIGNMENT, dtype=torch.uint8, pin_memory=True).numpy()
                if self._pinned
                else np.empty(size + _ALIGNMENT, np.uint8)
            )
            memory = memory[-memory.ctypes.data % _ALIGNMENT :][:size]
        loan = _Loan(memory)
        weakref.finalize(loan, self._free.append, memory).atexit = False
        return np.asarray(loan)

    def _of_old(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        for _ in range(len(self._free)):
            memory = self._free.popleft()
            if memory.nbytes >= nbytes:
                return memory
            self._free.append(memory)
        if self._free:
            self._free.popleft()  # too small: it makes room for a larger one
        return None


class _Loan:
    """What every piece of a block refers to, directly or not: when it is gone, so are they.

    A view of a view refers to the first array alone, so an array cannot take this part.
    """

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.__array_interface__: dict[str, Any] = memory.__array_interface__
