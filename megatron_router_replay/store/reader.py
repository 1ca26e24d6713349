"""Read rows and layers of a trace file; nothing is returned that a checksum has not proven."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap

import numpy as np
import numpy.typing as npt

from megatron_router_replay.errors import StoreError
from megatron_router_replay.store.atomic import check_no_special_file
from megatron_router_replay.store.format import FileHeader, as_words, decode_container, run_blocks
from megatron_router_replay.trace.ids import check_topk_indices
from megatron_router_replay.trace.routing_trace import RoutingTrace

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """A trace in a file, which is mapped as long as this lives; its header is proven.

    Args:
        header: what the file holds.
        tensors: the bytes of each tensor.
        checksums: of each tensor, [num_blocks] uint32.
        crc32: of the header and of all checksums: two files that have the same one hold the same.
    """

    header: FileHeader
    tensors: dict[str, Bytes]
    checksums: dict[str, npt.NDArray[np.uint32]]
    crc32: int

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Reader:
        """Map a file and prove its header; whoever replaces the file meanwhile does not change what is read.

        Raises:
            StoreError: not a trace file, truncated, or its header was altered.
            OSError: there is no such file.
        """
        check_no_special_file(path)
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:  # which cannot be mapped
                raise StoreError("MRR502: it is empty: it is no trace file, or truncated.")
            data = mmap(file.fileno(), 0, access=ACCESS_READ)
        header, places = decode_container(data)
        content = np.frombuffer(data, np.uint8)
        tensors = {name: content[place] for name, place in places.items()}
        crc = tensors.pop("crc32").copy().view("<u4")
        if zlib.crc32(crc[1:].data, zlib.crc32(header.encode().encode("ascii"))) != int(crc[0]):
            raise StoreError("MRR503: the checksum of its header is wrong: it was altered.")
        names = header.tensors()
        table = crc[1:].reshape(len(names), header.num_blocks)
        return cls(header=header, tensors=tensors, checksums=dict(zip(names, table)), crc32=int(crc[0]))

    def load(self, *, layer_numbers: Sequence[int] | None = None, rows: slice | None = None) -> RoutingTrace:
        """Return the trace, or a slice of it; see `load_trace`. It is proven and checked in one pass.

        Raises:
            StoreError: a checksum is wrong; there are no such layers or rows.
            TraceError: an id is no expert's, or a row names an expert twice.
        """
        header = self.header
        start, stop = _row_bounds(rows, header.num_tokens)
        numbers = header.layer_numbers
        if layer_numbers is not None:
            numbers = header.select_layers(sorted(set(layer_numbers))).layer_numbers
        values = header.empty(stop - start, len(numbers))
        indices = values["topk_indices"]
        words = as_words(indices)

        def read_block(block: int) -> None:
            at = block * header.block_rows
            taken = slice(max(start - at, 0), min(stop - at, header.block_rows))
            place = slice(at + taken.start - start, at + taken.stop - start)
            for name in header.per_token:
                target = values[name].numpy()
                target[place] = self._block(name, block).view(target.dtype)[taken]
            for i, number in enumerate(numbers):
                words[place, i] = self._block(f"topk_indices.{number}", block).view(words.dtype)[taken]
            # While the block is in the cache.
            check_topk_indices(
                indices[place], num_experts=header.num_experts, layer_numbers=numbers, first_row=at + taken.start
            )

        run_blocks(read_block, range(start // header.block_rows, -(-stop // header.block_rows) if stop > start else 0))
        return RoutingTrace.from_checked(
            **values,
            layer_numbers=numbers,
            num_experts=header.num_experts,
            sequence_lengths=header.sequence_lengths if rows is None else None,
            sample_ids=header.sample_ids if rows is None else None,
        )

    def _block(self, name: str, block: int) -> Bytes:
        rows, num_tokens = self.header.block_rows, self.header.num_tokens
        first, stop = block * rows, min((block + 1) * rows, num_tokens)
        width = len(self.tensors[name]) // num_tokens
        # A copy, so that what is returned is what the checksum is of, whatever is written into the file meanwhile.
        data = self.tensors[name][first * width : stop * width].copy()
        if zlib.crc32(data.data) != int(self.checksums[name][block]):
            raise StoreError(f"MRR503: the checksum of {name}, rows {first}..{stop - 1}, is wrong: it was altered.")
        # A byte that is neither 0 nor 1 would make a bool with two kinds of True.
        if name == "replay_mask" and (most := int(data.max())) > 1:
            raise StoreError(f"MRR503: {name} holds {most}, not 0 or 1.")
        return data


def _row_bounds(rows: slice | None, num_tokens: int) -> tuple[int, int]:
    if rows is None:
        return 0, num_tokens
    start = 0 if rows.start is None else rows.start
    stop = num_tokens if rows.stop is None else rows.stop
    if rows.step not in (None, 1) or not 0 <= start <= stop <= num_tokens:
        raise StoreError(f"MRR106: it has {num_tokens} tokens, not {rows}: give 0 <= start <= stop, step 1.")
    return start, stop
