"""Damaged files and envelopes: each is read correctly or raises RouterReplayError, in little time and memory."""

import base64
import json
import random
import re
import resource
import struct
import time
import zlib
from importlib.util import find_spec
from tempfile import NamedTemporaryFile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_router_replay import RouterReplayError
from megatron_router_replay.store import TraceStore, decode_envelope, encode_envelope, load_trace, save_trace
from megatron_router_replay.store.format import FORMAT
from tests.unit.store.store_traces import FIELDS, assert_same, assert_valid, full_trace, make_trace

CODECS = [None, "zlib"] + (["zstd"] if find_spec("zstandard") else [])
NUM_MUTATIONS = 26_000
MAX_SECONDS = 20.0
MAX_GROWTH_MB = 400

TRACES = [
    make_trace(3),
    full_trace(6),
    full_trace(4, num_experts=300, layer_numbers=(1,)),
    make_trace(0),
    make_trace(2, layer_numbers=()),
]
TOKENS = [
    *("0", "-1", "1", "2", "3", "255", "256", "257", "32768", "32769", "65536", "4294967295", "4294967296"),
    *("9223372036854775807", "99999999999999999999999999", "1e400", "1.0", "-0", "null", "true", "NaN", "[]", "{}"),
    *('""', '"x"', "[[]]", "[0]", '"[1,1]"', '"U8"', '"I16"', '"BOOL"', '"F64"', '"9"', '"-1"', '"1_0"', '"\\ud800"'),
]
"""What a number or a string of a header is replaced by."""


def flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.choice([1, 8, 50])) + data[at:]


def delete(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.choice([1, 4, 8, 30]) :]


def overwrite(rng: random.Random, data: bytes) -> bytes:
    at, size = rng.randrange(len(data)), rng.choice([1, 2, 4, 8])
    return data[:at] + rng.choice([b"\0", b"\xff", b"\x7f"]) * size + data[at + size :]


BYTES = [flip, flip, truncate, insert, delete, overwrite]


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


def max_memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(cases, decode) -> dict[str, int]:
    """Decode every (mutated, original trace or None if checksums were made to fit); count what happened."""
    before, counts = max_memory_mb(), {"refused": 0, "as it was": 0, "another valid trace": 0}
    for mutated, original in cases:
        started = time.monotonic()
        try:
            trace = decode(mutated)
        except RouterReplayError:
            counts["refused"] += 1
        else:
            if original is not None:
                assert_same(trace, original)
                counts["as it was"] += 1
            else:
                assert_valid(trace)
                counts["another valid trace"] += 1
        assert time.monotonic() - started < MAX_SECONDS, mutated
    assert max_memory_mb() - before < MAX_GROWTH_MB
    return counts


@pytest.mark.slow
def test_damaged_files(tmp_path):
    written = [save_trace(trace, tmp_path / "x").read_bytes() for trace in TRACES]

    def cases():
        for seed in range(NUM_MUTATIONS):
            rng = random.Random(seed)
            trace, good = rng.choice(list(zip(TRACES, written)))
            mutated = rng.choice([*BYTES, edit_header, edit_header, flip_tensor, flip_tensor, edit_length])(rng, good)
            if rng.random() < 0.6:
                yield sign(mutated), None
            else:
                yield mutated, trace

    def decode(data):
        (tmp_path / "x").write_bytes(data)
        return load_trace(tmp_path / "x")

    counts = run(cases(), decode)
    print(counts)
    assert sum(counts.values()) == NUM_MUTATIONS
    # Or the mutations would not reach behind the checksums.
    assert counts["another valid trace"] > 100


def resign(envelope: dict) -> dict:
    """Return the envelope with a checksum that fits, as far as it can be computed."""
    try:
        raw = base64.b64decode(envelope["data"], validate=True)
        raw = zlib.decompress(raw) if envelope["compression"] == "zlib" else raw
        header = {name: value for name, value in envelope.items() if name not in ("crc32", "data")}
        canonical = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, KeyError, TypeError, zlib.error):
        return envelope
    return envelope | {"crc32": zlib.crc32(raw, zlib.crc32(canonical))}


def mutate_envelope(rng: random.Random, envelope: dict) -> bytes:
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(BYTES)(rng, json.dumps(envelope).encode())
    if kind < 0.6:
        data = envelope["data"]
        mutated = rng.choice(BYTES)(rng, base64.b64decode(data)) if data else rng.randbytes(3)
        changed = envelope | {"data": base64.b64encode(mutated).decode()}
    else:
        try:
            changed = json.loads(edit_json(rng, json.dumps(envelope)))
        except ValueError:
            return edit_json(rng, json.dumps(envelope)).encode()
    return json.dumps(resign(changed) if isinstance(changed, dict) else changed).encode()


@pytest.mark.slow
def test_damaged_envelopes():
    def cases():
        for seed in range(NUM_MUTATIONS):
            rng = random.Random(seed)
            trace = rng.choice(TRACES)
            envelope = encode_envelope(trace, compression=rng.choice([None, "zlib"]), metadata={"a": "b"})
            yield mutate_envelope(rng, envelope), None

    def decode(text):
        return decode_envelope(text, max_bytes=1 << 20)

    counts = run(cases(), decode)
    print(counts)
    assert sum(counts.values()) == NUM_MUTATIONS
    assert counts["another valid trace"] > 100


@pytest.mark.slow
def test_damaged_envelopes_that_were_not_signed_again_are_never_another_trace():
    def cases():
        for seed in range(NUM_MUTATIONS):
            rng = random.Random(-1 - seed)
            trace = rng.choice(TRACES)
            envelope = encode_envelope(trace, compression=rng.choice(CODECS))
            yield rng.choice(BYTES)(rng, json.dumps(envelope).encode()), trace

    counts = run(cases(), lambda text: decode_envelope(text, max_bytes=1 << 20))
    print(counts)
    assert sum(counts.values()) == NUM_MUTATIONS


@pytest.mark.slow
def test_damaged_parts_of_a_store(tmp_path):
    store = TraceStore(tmp_path)
    store.save(make_trace(3), step=1)
    path = tmp_path / "step_000000001" / "rank_00000_part_00000.safetensors"
    good, expected = path.read_bytes(), store.parts(1)
    for seed in range(3000):
        rng = random.Random(seed)
        path.write_bytes(rng.choice(BYTES)(rng, good))
        try:
            assert store.parts(1) == expected
        except RouterReplayError:
            continue


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data):
    with NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with pytest.raises(RouterReplayError):
            load_trace(file.name)
    with pytest.raises(RouterReplayError):
        decode_envelope(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.sampled_from(sorted(encode_envelope(TRACES[1]))), json_values)
def test_any_json_value_in_any_entry_is_refused_or_harmless(name, value):
    envelope = encode_envelope(TRACES[1])
    try:
        trace = decode_envelope(resign(envelope | {name: value}))
    except RouterReplayError:
        return
    assert_valid(trace)
    assert all(hasattr(trace, field) for field in FIELDS)
