"""Did anybody write into a batch? Cheaply, without a copy of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MAX_SAMPLES = 4096
"""Elements of a tensor that are looked at; all of a smaller one."""


class Snapshot:
    """What the tensors and arrays of a batch were when this was made.

    torch counts what it writes into a tensor, so its writes are found for certain, on every device. numpy's writes into
    memory on the host are not counted: of such memory up to 4096 elements, evenly spread, are compared.

    Args:
        batch: tensors and arrays in mappings, lists and tuples, nested at will; other values are not looked into.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self._states = [(name, value, _state(value)) for name, value in _leaves("", batch)]

    def changed(self) -> str | None:
        """Return the name of a value that was written to since, or None."""
        for name, value, state in self._states:
            if _state(value) != state:
                return name
        return None


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor | np.ndarray[Any, Any]]]:
    if isinstance(value, (Tensor, np.ndarray)):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{name}[{key!r}]" if name else repr(key), item)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _leaves(f"{name}[{i}]", item)


def _state(value: Tensor | np.ndarray[Any, Any]) -> tuple[int, bytes]:
    if isinstance(value, np.ndarray):
        return 0, _digest(value) if value.dtype != object else b""
    # Tensors made in inference mode have no counter.
    version = 0 if value.is_inference() else value._version
    if value.layout is not torch.strided or value.device.type != "cpu":
        return version, b""
    comparable = value.detach().view(torch.int16) if value.dtype is torch.bfloat16 else value.detach()
    return version, _digest(comparable.resolve_conj().resolve_neg().numpy())


def _digest(array: np.ndarray[Any, Any]) -> bytes:
    if not array.size:
        return b""
    step = -(-array.size // _MAX_SAMPLES)
    # `flat` goes through any strides without a copy of the whole.
    return hashlib.blake2b(array.flat[::step].tobytes(), digest_size=16).digest()
