"""Format of a trace file, version 1 or 2: a safetensors file whose metadata has one entry.

Tensors, for N = num_tokens, K = topk, B = ceil(N / block_rows):

    topk_indices.<number>    U8 if num_experts <= 256, else I16, [N, K]; one for each of layer_numbers
    replay_mask              BOOL [N]           one byte a row, 0 or 1; 1: the row has a route
    token_ids                I32  [N]           if has_token_ids
    weight_version           I32  [N]           if has_weight_version
    crc32                    U32  [1 + T * B]   checksums of the T tensors above, in the order above

One tensor a layer: a pipeline rank reads its own layers and no other. Where the tensors lie is the library's choice.

The metadata maps "megatron_router_replay.trace" to a JSON object in ASCII, keys sorted, no spaces. One entry, since the
library writes several in an order that changes from call to call.

    version                  1, or 2 with saved_by
    num_tokens, topk, num_experts, block_rows
    layer_numbers            list, increasing, from 1 or more
    has_token_ids, has_weight_version
    sequence_lengths         list or null; adds up to num_tokens
    sample_ids               list of strings or null; one for each of sequence_lengths
    saved_by                 version 2, which a `TraceStore` writes: object of step, rank, run (string or null),
                             process_start_ns, saved_ns (since 1970) and world_size (or null)

Checksums are CRC-32 (zlib's). crc32[1 + t * B + b] is of rows b * block_rows .. (b + 1) * block_rows - 1 of the t-th
tensor. crc32[0] is of the JSON's bytes followed by those of crc32[1:]. Names, dtypes and shapes must be those that
follow from the JSON, and safetensors accepts no byte outside of its header and tensors. So a slice is proven by reading
the blocks that it touches, and nothing that is read from the file is unproven. CRC-32 finds accidents; against a forged
file every value is checked on reading.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from megatron_router_replay.errors import StoreError
from megatron_router_replay.header import TraceHeader, as_integer
from megatron_router_replay.store.part import SavedBy

FORMAT = "megatron_router_replay.trace"
VERSIONS = (1, 2)
BLOCK_ROWS = 4096
MAX_METADATA_BYTES = 8_000_000
"""Of our JSON, quoted."""
MAX_HEADER_BYTES = 16_000_000
"""Of the header that is read: our JSON and safetensors' entry for each of up to MAX_LAYERS tensors."""
MAX_LAYERS = 1 << 16
MAX_JSON_VALUES = 1 << 22
MAX_BLOCK_ROWS = 1 << 20


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
        if not 1 <= self.block_rows <= MAX_BLOCK_ROWS:
            raise StoreError(f"block_rows={self.block_rows} must lie in 1..{MAX_BLOCK_ROWS}.")
        if self.num_layers > MAX_LAYERS:
            raise StoreError(f"{self.num_layers} layers are more than {MAX_LAYERS}.")

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.block_rows)

    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of each tensor but crc32, in the order of the checksums."""
        tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for number in self.layer_numbers:
            tensors[f"topk_indices.{number}"] = (self.index_dtype, (self.num_tokens, self.topk))
        for name, dtype in self.per_token.items():
            tensors[name] = (dtype, (self.num_tokens,))
        return tensors


def encode_header(header: FileHeader) -> str:
    """Return the JSON text.

    Raises:
        StoreError: it is longer than a header may be; too many samples for one file.
    """
    values = {"version": 1, **header.to_json(), "block_rows": header.block_rows}
    if header.saved_by is not None:
        values |= {"version": 2, "saved_by": header.saved_by.to_json()}
    text = canonical_json(values).decode("ascii")
    check_json_size(text)
    size = len(json.dumps(text))
    if size > MAX_METADATA_BYTES:
        raise StoreError(f"the header takes {size} bytes, more than {MAX_METADATA_BYTES}: save fewer samples.")
    return text


def decode_header(text: str) -> FileHeader:
    """Return the header that this text encodes.

    Raises:
        StoreError: not JSON, another version, values out of range.
    """
    try:
        values = load_json(text)
        if values["version"] not in VERSIONS:
            raise StoreError(f"it has version {str(values['version'])[:40]}; this package reads versions {VERSIONS}.")
        block_rows = as_integer("block_rows", values["block_rows"])
        saved_by = SavedBy.from_json(values["saved_by"]) if values["version"] == 2 else None
        header = FileHeader(**TraceHeader.from_json(values).to_json(), block_rows=block_rows, saved_by=saved_by)
        # Only what this package writes: a key that is there twice, or a number as 1.0, has been through other hands.
        same = encode_header(header) == text
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"it has no header of a trace file ({type(error).__name__}: {str(error)[:200]}).") from None
    if not same:
        raise StoreError("its header is not as this package writes it: it was altered.")
    return header


def canonical_json(content: Any) -> bytes:
    """Return the one JSON text of these values that checksums are of."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")


def load_json(text: str | bytes) -> Any:
    """Return what a JSON text holds, unless it is made of more values than any of ours.

    Raises:
        StoreError: more than MAX_JSON_VALUES; a text of brackets alone would take thirty times its own size.
        ValueError, RecursionError: as json.loads.
    """
    check_json_size(text)
    return json.loads(text)


def check_json_size(text: str | bytes) -> None:
    """Raise StoreError if a JSON text may hold more than MAX_JSON_VALUES; what is written passes this too."""
    marks: tuple[Any, ...] = (",", "[", "{", ":") if isinstance(text, str) else (b",", b"[", b"{", b":")
    if sum(text.count(mark) for mark in marks) > MAX_JSON_VALUES:
        raise StoreError(f"its JSON holds more than {MAX_JSON_VALUES} values: save fewer samples.")
