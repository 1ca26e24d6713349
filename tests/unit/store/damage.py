"""What happens to trace files on their way: tensors are damaged, headers are edited and signed again."""

import json
import random
import re
import struct
import zlib

from megatron_router_replay.store.format import FORMAT
from tests.support.damaged_bytes import flip

TOKENS = [
    *("0", "-1", "1", "2", "3", "255", "256", "257", "32768", "32769", "65536", "4294967295", "4294967296"),
    *("9223372036854775807", "99999999999999999999999999", "1e400", "1.0", "-0", "null", "true", "NaN", "[]", "{}"),
    *('""', '"x"', "[[]]", "[0]", '"[1,1]"', '"U8"', '"I16"', '"BOOL"', '"F64"', '"9"', '"-1"', '"1_0"', '"\\ud800"'),
]
"""What a number or a string of a header is replaced by."""


def edit_json(rng: random.Random, text: str) -> str:
    values = list(re.finditer(r'-?\d+|"[^"\\]*"|null|\[[^\[\]]*\]', text))
    chosen = rng.choice(values)
    return text[: chosen.start()] + rng.choice(TOKENS) + text[chosen.end() :]


def edit_header(rng: random.Random, data: bytes) -> bytes:
    """Replace one value of the safetensors header, or of our JSON in it, of a length that fits again."""
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].decode()
    if rng.random() < 0.5:
        header = edit_json(rng, header)
    else:
        fields = json.loads(header)
        fields["__metadata__"][FORMAT] = edit_json(rng, fields["__metadata__"][FORMAT])
        header = json.dumps(fields, separators=(",", ":"))
    encoded = header.rstrip().encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded + data[8 + length :]


def flip_tensor(rng: random.Random, data: bytes) -> bytes:
    at = 8 + int.from_bytes(data[:8], "little")
    return data[:at] + flip(rng, data[at:])


def edit_length(rng: random.Random, data: bytes) -> bytes:
    return struct.pack("<Q", rng.choice([0, 1, 2**63, 2**64 - 1, len(data), len(data) - 8, 10**8])) + data[8:]


def sign(data: bytes) -> bytes:
    """Return the file with checksums that fit its content, as far as it has any structure left."""
    length = int.from_bytes(data[:8], "little")
    body = bytearray(data[8 + length :])
    try:
        fields = json.loads(data[8 : 8 + length])
        metadata = fields.pop("__metadata__")[FORMAT]
        start, stop = fields.pop("crc32")["data_offsets"]
        layers = [f"topk_indices.{number}" for number in json.loads(metadata)["layer_numbers"]]
        names = layers + [name for name in ("replay_mask", "token_ids", "weight_version") if name in fields]
        places = [fields[name]["data_offsets"] for name in names]
        table = b"".join(struct.pack("<I", zlib.crc32(body[low:high])) for low, high in places if high > low)
        if len(table) + 4 == stop - start:
            body[start:stop] = struct.pack("<I", zlib.crc32(table, zlib.crc32(metadata.encode()))) + table
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return data
    return data[: 8 + length] + bytes(body)
