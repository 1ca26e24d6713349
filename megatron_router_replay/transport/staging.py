"""The memory in which a sender gathers buckets: a fixed amount, whatever the payload and however many receivers."""

from __future__ import annotations

from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from megatron_router_replay.header import TraceFormat
from megatron_router_replay.transport.rows import Memory, as_bytes, views_of_bytes


class Staging:
    """A fixed number of bucket buffers that all parts of a transport share.

    Args:
        buffers: how many.
        bucket_bytes: of each; a bucket is never larger unless it is a single row.
        device: where messages lie; on a GPU each buffer has a page-locked twin on the host, where rows are gathered.
    """

    def __init__(self, *, buffers: int, bucket_bytes: int, device: torch.device) -> None:
        self.bucket_bytes = bucket_bytes
        self._device = device
        self._free: SimpleQueue[Buffer] = SimpleQueue()
        for _ in range(buffers):
            self._free.put(Buffer(device))

    def take(self, *, block: bool) -> Buffer | None:
        """Return a buffer, or None if there is none and the caller shall not wait.

        A waiting caller holds no buffer, and who holds one gives it back within its timeout: this ends.
        """
        try:
            return self._free.get(block=block)
        except Empty:
            return None

    def give_back(self, buffer: Buffer) -> None:
        """Let others have the buffer."""
        self._free.put(buffer)


class Buffer:
    """Memory for one bucket, allocated when first used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.empty(0, dtype=torch.uint8)
        self._on_device = self._host

    @property
    def nbytes(self) -> int:
        return self._host.numel()

    def views(self, format: TraceFormat, rows: int, size: int) -> Memory:
        """Return the format's tensors for some rows, in this buffer's host memory; `size` is the least to allocate."""
        size = max(size, rows * format.row_bytes())
        if self._host.numel() < size:
            cuda = self._device.type == "cuda"
            self._host = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
            self._on_device = torch.empty_like(self._host, device=self._device) if cuda else self._host
        return views_of_bytes(self._host, format, rows, format.num_layers)

    def messages(self, memory: Memory) -> list[Tensor]:
        """Return what to send of its views, in the format's order, on the device."""
        parts = [as_bytes(memory[name]) for name in sorted(memory)]
        if self._device.type != "cuda":
            return parts
        sent = [self._on_device[at : at + part.numel()] for part in parts for at in (part.storage_offset(),)]
        for target, part in zip(sent, parts):
            target.copy_(part, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()  # a sender thread of the rollout side, not training
        return sent
