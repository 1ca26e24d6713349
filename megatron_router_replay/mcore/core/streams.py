"""Copies between host and device, and uses under another stream; only copies to the host wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def collective_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return where a group takes tensors from: the host if it can, as gloo does, else this process's GPU."""
    if "cpu:" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def current_stream(device: torch.device) -> Any:
    """Return the stream on which work for this device is queued now; None: the device has none."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def wait_stream(stream: Any, *tensors: Tensor) -> None:
    """Make the current stream wait for a stream, and keep the memory of its tensors until both are done."""
    if stream is None or stream == (current := current_stream(tensors[0].device)):
        return
    current.wait_stream(stream)
    for tensor in tensors:
        tensor.record_stream(current)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return values on a device; an upload does not wait."""
    if device.type == "cpu" or values.device.type != "cpu":
        return values.to(device)
    # Page-locked, or the copy would wait for the device. Our own memory, because a trainer writes into its buffer again.
    staged = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)
    return staged.to(device, non_blocking=True)


def to_host(values: Sequence[Tensor | None]) -> list[Any]:
    """Return integers and masks as arrays on the host, int64 or bool; all that are on a GPU come in one copy, in one wait."""
    above = [each for each in values if each is not None and not each.is_cpu]
    flat = [each.flatten().to(torch.int64) for each in above]
    copied = (flat[0] if len(flat) == 1 else torch.cat(flat)).cpu() if flat else None
    found: list[Any] = []
    at = 0
    for each in values:
        if each is None:
            found.append(None)
            continue
        own = each
        if copied is not None and not each.is_cpu:
            own = copied[at : at + each.numel()].view(each.shape)
            at += each.numel()
        # Also a mask that was copied among integers, because ~1 is true.
        dtype = torch.bool if each.dtype is torch.bool else torch.int64
        found.append((own if own.dtype is dtype else own.to(dtype)).numpy())
    return found
