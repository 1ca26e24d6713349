"""Read rows and layers of a trace file; nothing is returned that a checksum has not proven."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_router_replay.errors import StoreError, TraceError
from megatron_router_replay.header import TraceHeader
from megatron_router_replay.ids import check_topk_indices
from megatron_router_replay.store.format import FORMAT, MAX_HEADER_BYTES, FileHeader, decode_header
from megatron_router_replay.trace import RoutingTrace

_MAX_ATTEMPTS = 100
"""How often a file is opened anew because it was replaced meanwhile."""
_DTYPES = {"U8": torch.uint8, "BOOL": torch.bool, "I16": torch.int16, "I32": torch.int32, "U32": torch.uint32}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """A trace file whose header is proven; it is mapped as long as this lives.

    Args:
        file: safetensors' handle.
        checksums: of each tensor, [num_blocks] uint32.
    """

    file: Any
    header: FileHeader
    checksums: dict[str, npt.NDArray[np.uint32]]

    @classmethod
    def open(cls, path: str | os.PathLike[str] | BinaryIO) -> Reader:
        """Map the file and prove its header.

        Args:
            path: a path, or an open file that has one.

        Raises:
            StoreError: not a trace file, truncated, or its header was altered.
        """
        file = _map(path if isinstance(path, str | os.PathLike) else path.name)
        metadata = file.metadata() or {}
        if list(metadata) != [FORMAT]:
            raise StoreError(f"its metadata has {sorted(metadata)[:9]}, not {FORMAT!r}: it is no trace file.")
        header = decode_header(metadata[FORMAT])
        tensors = header.tensors()
        expected = tensors | {"crc32": (torch.uint32, (1 + len(tensors) * header.num_blocks,))}
        if set(file.keys()) != set(expected) or any(_kind(file, name) != kind for name, kind in expected.items()):
            raise StoreError("its tensors are not those that its metadata asks for.")
        crc = file.get_tensor("crc32").numpy()
        if zlib.crc32(crc[1:].data, zlib.crc32(metadata[FORMAT].encode("ascii"))) != int(crc[0]):
            raise StoreError("the checksum of its header is wrong: it was altered.")
        table = crc[1:].reshape(len(tensors), header.num_blocks)
        return cls(file=file, header=header, checksums=dict(zip(tensors, table)))

    def read(self, layer_numbers: tuple[int, ...], start: int, stop: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return rows start..stop-1: topk_indices [rows, layers, topk] and the other tensors by name, [rows] each."""
        header, rows = self.header, stop - start
        per_token = header.empty(rows, len(layer_numbers))
        indices = per_token.pop("topk_indices")
        for block in range(start // header.block_rows, -(-stop // header.block_rows) if rows else 0):
            at = block * header.block_rows
            taken = slice(max(start - at, 0), min(stop - at, header.block_rows))
            place = slice(at + taken.start - start, at + taken.stop - start)
            for name, values in per_token.items():
                values[place] = self._block(name, block)[taken]
            if layer_numbers:
                # Whole blocks become token-major while they are in the cache.
                by_layer = [self._block(f"topk_indices.{number}", block)[taken] for number in layer_numbers]
                indices[place] = torch.stack(by_layer).transpose(0, 1)
        return indices, per_token

    def _block(self, name: str, block: int) -> Tensor:
        first = block * self.header.block_rows
        stop = min(first + self.header.block_rows, self.header.num_tokens)
        values: Tensor = self.file.get_slice(name)[first:stop]
        # A copy, so that what is returned is what the checksum is of; of bytes, since one of bools may turn 3 into 1.
        data = values.view(torch.uint8).clone()
        if zlib.crc32(data.numpy().data) != int(self.checksums[name][block]):
            raise StoreError(f"the checksum of {name}, rows {first}..{stop - 1}, is wrong: it was altered.")
        values = data.view(values.dtype)
        check_bool(name, values)
        return values


def _map(path: str | os.PathLike[str]) -> Any:
    """Return safetensors' handle of the file that has this name, whoever replaces it meanwhile."""
    for _ in range(_MAX_ATTEMPTS):
        with open(path, "rb") as held:
            header_bytes = int.from_bytes(held.read(8), "little")
            # safetensors itself would parse up to 100 MB, at many times that memory.
            if header_bytes > MAX_HEADER_BYTES:
                raise StoreError(
                    f"its header takes {header_bytes} bytes, more than {MAX_HEADER_BYTES}: it is no trace file."
                )
            failure: Exception | None = None
            try:
                # Checks that all offsets lie in the file; so what follows from a shape is never more than the file holds.
                file: Any = safe_open(path, "pt")
            except (SafetensorError, RuntimeError, OSError) as error:
                failure = error
            # safetensors opens the name twice, for the header and for the tensors. As long as `held` is open no other file
            # can have its number: where the name still leads to it, both were of this file.
            if not os.path.samestat(os.fstat(held.fileno()), os.stat(path)):
                continue
        if failure is not None:
            raise StoreError(f"it is no safetensors file, or truncated or altered ({failure}).") from None
        return file
    raise StoreError("it is being replaced all the time.")


def _kind(file: Any, name: str) -> tuple[torch.dtype | None, tuple[int, ...]]:
    values = file.get_slice(name)
    return _DTYPES.get(values.get_dtype()), tuple(values.get_shape())


def check_bool(name: str, values: Tensor) -> None:
    """Raise StoreError unless each bool of a tensor is 0 or 1."""
    # A byte that is neither would make a bool with two kinds of True.
    if values.dtype is torch.bool and values.numel() and (most := int(values.view(torch.uint8).max())) > 1:
        raise StoreError(f"{name} holds {most}, not 0 or 1.")


def checked_trace(
    header: TraceHeader,
    layer_numbers: tuple[int, ...],
    topk_indices: Tensor,
    per_token: dict[str, Tensor],
    *,
    whole: bool,
) -> RoutingTrace:
    """Return the trace of values whose shapes and dtypes follow from a checked header, after checking the ids.

    Raises:
        StoreError: an id is no expert's, or a row names an expert twice.
    """
    try:
        check_topk_indices(topk_indices, num_experts=header.num_experts, layer_numbers=layer_numbers)
    except TraceError as error:
        raise StoreError(str(error)) from None
    return RoutingTrace.from_checked(
        topk_indices=topk_indices,
        layer_numbers=layer_numbers,
        num_experts=header.num_experts,
        sequence_lengths=header.sequence_lengths if whole else None,
        sample_ids=header.sample_ids if whole else None,
        **per_token,
    )
