"""Format of a trace file, version 1 or 3: a safetensors file whose metadata has one entry.

Tensors, for N = num_tokens, K = topk, B = ceil(N / block_rows):

    topk_indices.<number>    U8 if num_experts <= 256, else I16, [N, K]; one for each of layer_numbers
    replay_mask              BOOL [N]           one byte a row, 0 or 1; 1: the row has a route
    token_ids                I32  [N]           if has_token_ids
    weight_version           I32  [N]           if has_weight_version
    crc32                    U32  [1 + T * B]   checksums of the T tensors above, in the order above

One tensor a layer: a pipeline rank reads its own layers and no other. The tensors lie in order, as the safetensors
library orders them: by dtype (U32 and I32, I16, U8, BOOL), then by name.

The metadata maps "megatron_router_replay.trace" to a JSON object in ASCII, keys sorted, no spaces:

    version                  1, or 3 with saved_by
    num_tokens, topk, num_experts, block_rows
    layer_numbers            list, increasing, from 1 or more
    has_token_ids, has_weight_version
    sequence_lengths         list or null; adds up to num_tokens
    sample_ids               list of strings or null; one for each of sequence_lengths
    saved_by                 version 3, a part of a `TraceStore`: object of step, rank and run

Checksums are CRC-32 (zlib's). crc32[1 + t * B + b] is of rows b * block_rows .. (b + 1) * block_rows - 1 of the t-th
tensor. crc32[0] is of the JSON's bytes followed by those of crc32[1:]. All bytes before the tensors, and how many follow,
must be those that follow from the JSON. So a slice is proven by reading the blocks that it touches, and
nothing that is read is unproven. CRC-32 finds accidents; against a forged file every value is checked on reading.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from math import prod
from mmap import mmap
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_router_replay.checks import as_integer, shown
from megatron_router_replay.errors import StoreError
from megatron_router_replay.trace.header import TraceHeader

FORMAT = "megatron_router_replay.trace"
BLOCK_ROWS = 16384
_MAX_METADATA_BYTES = 8_000_000
"""Of our JSON, quoted."""
_MAX_HEADER_BYTES = 16_000_000
"""Of the header that is read: our JSON and safetensors' entry for each of up to _MAX_LAYERS tensors."""
_MAX_LAYERS = 1 << 16
_MAX_JSON_VALUES = 1 << 22
_MAX_BLOCK_ROWS = 1 << 20
_MAX_NUMBER = (1 << 63) - 1
_MAX_RUN_CHARACTERS = 200

_DTYPES = {torch.uint8: "U8", torch.bool: "BOOL", torch.int16: "I16", torch.int32: "I32", torch.uint32: "U32"}
_START = f'{{"__metadata__":{{"{FORMAT}":'


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class SavedBy:
    """Who saved a part of a store: step, rank and the name of the run; a copy under another name is refused.

    Raises:
        StoreError: a number is no integer of 63 bits, or the run has no name of 1 to 200 characters.
    """

    step: int
    rank: int
    run: str

    def __post_init__(self) -> None:
        for name in ("step", "rank"):
            object.__setattr__(self, name, as_number(name, getattr(self, name)))
        if not isinstance(self.run, str) or not 0 < len(self.run) <= _MAX_RUN_CHARACTERS:
            raise StoreError(
                f"MRR505: a run's name must be a text of 1 to {_MAX_RUN_CHARACTERS} characters, got {shown(self.run)}: "
                "open the store as TraceStore(root, run='job-17'), one name for all processes of a run, another after "
                "a restart."
            )


class Kind(NamedTuple):
    """What a tensor of a file is."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def to_json(self) -> tuple[str, str]:
        """Return dtype and shape as safetensors writes them."""
        return _DTYPES[self.dtype], ",".join(map(str, self.shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class FileHeader(TraceHeader):
    """What a trace file says of itself; its tensors' names, dtypes and shapes follow from these values.

    Args:
        block_rows: rows that one checksum covers.
        saved_by: of a part of a store.
    """

    block_rows: int = BLOCK_ROWS
    saved_by: SavedBy | None = None

    def __post_init__(self) -> None:
        TraceHeader.__post_init__(self)
        as_integer("block_rows", self.block_rows, least=1, most=_MAX_BLOCK_ROWS)
        if self.num_layers > _MAX_LAYERS:
            raise StoreError(f"MRR506: {self.num_layers} layers are more than {_MAX_LAYERS}.")

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.block_rows)

    def tensors(self) -> dict[str, Kind]:
        """Return what each tensor but crc32 is, in the order of the checksums."""
        routes = Kind(self.index_dtype, (self.num_tokens, self.topk))
        tensors = {f"topk_indices.{number}": routes for number in self.layer_numbers}
        return tensors | {name: Kind(dtype, (self.num_tokens,)) for name, dtype in self.per_token.items()}

    def all_tensors(self) -> dict[str, Kind]:
        """Return what each tensor is, in the order in which they lie in a file that this package writes."""
        tensors = self.tensors()
        tensors["crc32"] = Kind(torch.uint32, (1 + len(tensors) * self.num_blocks,))
        order = sorted(
            tensors, key=lambda name: (-tensors[name].dtype.itemsize, tensors[name].dtype is torch.bool, name)
        )
        return {name: tensors[name] for name in order}

    def encode(self) -> str:
        """Return the JSON text.

        Raises:
            StoreError: it is longer than a header may be, or has too many samples for one file.
        """
        values = self.to_json() | {"version": 1}
        if self.saved_by is None:
            del values["saved_by"]
        else:
            values |= {"version": 3, "saved_by": asdict(self.saved_by)}
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        _check_json_size(text)
        size = len(json.dumps(text))
        if size > _MAX_METADATA_BYTES:
            raise StoreError(
                f"MRR506: the header takes {size} bytes, more than {_MAX_METADATA_BYTES}: save fewer samples."
            )
        return text

    @classmethod
    def decode(cls, text: str) -> FileHeader:
        """Return the header that this text encodes.

        Raises:
            StoreError: not JSON, another version, values out of range.
        """
        _check_json_size(text)
        try:
            values = json.loads(text)
            if values["version"] not in (1, 3):
                raise StoreError(
                    f"MRR502: it has version {shown(values['version'])}; this package reads versions 1 and 3."
                )
            saved_by = SavedBy(**values["saved_by"]) if values["version"] == 3 else None
            header = cls.from_json({**values, "saved_by": saved_by})
            # Only what this package writes: a key that is there twice, or a number as 1.0, has been through other hands.
            same = header.encode() == text
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(
                f"MRR502: it has no header of a trace file ({type(error).__name__}: {str(error)[:200]})."
            ) from None
        if not same:
            raise StoreError("MRR503: its header is not as this package writes it: it was altered.")
        return header


def as_words(routes: Tensor) -> npt.NDArray[np.void]:
    """Return routes [rows, layers, topk] on the host as [rows, layers], one word of topk ids each, a view where possible.

    A block of words is transposed many times faster than one of ids, by numpy and layer by layer.
    """
    ids = routes.contiguous().numpy()
    return ids.view(np.dtype((np.void, ids.shape[2] * ids.itemsize)))[..., 0]


def run_blocks(function: Callable[[int], None], blocks: range) -> None:
    """Call a function for each block, in as many threads as torch may use; raise the error of the first block that fails."""
    # While the interpreter ends no thread can be started; a trace that is saved then is saved by one.
    threads = min(len(blocks), torch.get_num_threads(), 8) if threading.main_thread().is_alive() else 1
    if threads < 2:
        for block in blocks:
            function(block)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="routes-blocks") as pool:
        for _ in pool.map(function, blocks):
            pass


def encode_container(metadata: str, tensors: Mapping[str, Kind]) -> tuple[bytes, dict[str, slice]]:
    """Return what stands in a safetensors file before its tensors, and the bytes of the file that each tensor takes.

    The tensors follow in this order without gaps.
    """
    ends = list(accumulate(kind.num_bytes for kind in tensors.values()))
    entries = []
    for (name, kind), stop in zip(tensors.items(), ends):
        dtype, shape = kind.to_json()
        offsets = f"{stop - kind.num_bytes},{stop}"
        entries.append(f',"{name}":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{offsets}]}}')
    header = f"{_START}{json.dumps(metadata)}}}{''.join(entries)}}}".encode("ascii")
    header += b" " * (-len(header) % 8)
    start = len(header).to_bytes(8, "little") + header
    stops = [len(start), *(len(start) + end for end in ends)]
    return start, {name: slice(*bounds) for name, bounds in zip(tensors, pairwise(stops))}


def decode_container(data: mmap) -> tuple[FileHeader, dict[str, slice]]:
    """Return the header of a trace file, and the bytes of the file that each tensor takes.

    Raises:
        StoreError: not a trace file, truncated, or its tensors are not those that follow from the header.
    """
    length = int.from_bytes(data[:8], "little")
    if not 8 <= length <= min(_MAX_HEADER_BYTES, len(data) - 8):
        raise StoreError(
            f"MRR502: it is no trace file, or truncated: of its {len(data)} bytes the first 8 ask for a header of {length}."
        )
    text = data[8 : 8 + length].decode("latin-1").rstrip(" ")
    if not text.startswith(f'{_START}"'):
        raise StoreError(f"MRR502: it is no trace file: its metadata is not {FORMAT!r} alone.")
    try:
        metadata, end = json.JSONDecoder().raw_decode(text, len(_START))
    except ValueError as error:
        raise StoreError(f"MRR502: it has no header of a trace file ({error}).") from None
    header = FileHeader.decode(metadata)
    start, places = encode_container(metadata, header.all_tensors())
    if data[: len(start)] != start:
        raise StoreError("MRR503: its tensors are not those that its metadata asks for: it is truncated or altered.")
    size = max(place.stop for place in places.values())  # of crc32, if there are no other tensors
    if size != len(data):
        raise StoreError(f"MRR503: it has {len(data)} bytes, its header asks for {size}: it is truncated or altered.")
    return header, places


def as_number(name: str, value: Any) -> int:
    """Return a step, rank or part: an integer of 63 bits, or raise StoreError."""
    return as_integer(name, value, least=0, most=_MAX_NUMBER, error=StoreError)


def _check_json_size(text: str) -> None:
    # A text of brackets alone would take thirty times its own size when it is parsed. What is written passes this too.
    if sum(text.count(mark) for mark in ",[{:") > _MAX_JSON_VALUES:
        raise StoreError(f"MRR506: its JSON holds more than {_MAX_JSON_VALUES} values: save fewer samples.")
