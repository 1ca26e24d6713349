import base64
import json
import sys
import tracemalloc
import zlib
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_router_replay.errors import StoreError
from megatron_router_replay.store import decode_envelope, encode_envelope
from megatron_router_replay.store.codecs import compress, decode_base64, decompress, encode_base64
from megatron_router_replay.trace import RoutingTrace
from tests.unit.store.store_traces import assert_same, full_trace, make_trace

# The format, written out: two tokens, layers 1 and 3, top-2 of 4 experts; the second token has no route.
DATA = b"\x03\x01\x00\x02\x02\x03\x02\x03" + b"\x01\x00" + b"\x0b\x00\x00\x00\x0c\x00\x00\x00"
PINNED = {
    "format": "megatron_router_replay.envelope",
    "version": 1,
    "dtype": "uint8",
    "shape": [2, 2, 2],
    "layer_numbers": [1, 3],
    "num_experts": 4,
    "sequence_lengths": [2],
    "sample_ids": ["a"],
    "tensors": ["topk_indices", "replay_mask", "token_ids"],
    "metadata": {"engine": "vllm"},
    "compression": None,
    "nbytes": 18,
    "crc32": 0,
    "data": "AwEAAgIDAgMBAAsAAAAMAAAA",
}
HEADER = (
    b'{"compression":null,"dtype":"uint8","format":"megatron_router_replay.envelope","layer_numbers":[1,3],'
    b'"metadata":{"engine":"vllm"},"nbytes":18,"num_experts":4,"sample_ids":["a"],"sequence_lengths":[2],'
    b'"shape":[2,2,2],"tensors":["topk_indices","replay_mask","token_ids"],"version":1}'
)
PINNED["crc32"] = zlib.crc32(HEADER + DATA)


def pinned_trace() -> RoutingTrace:
    return RoutingTrace(
        topk_indices=[[[3, 1], [0, 2]], [[-1, -1], [-1, -1]]],
        layer_numbers=(1, 3),
        num_experts=4,
        token_ids=[11, 12],
        sequence_lengths=(2,),
        sample_ids=("a",),
    )


def signed(**changes) -> dict:
    """The pinned envelope with entries changed and a correct checksum; `data` as bytes."""
    data = changes.pop("data", DATA)
    content = PINNED | changes | {"data": base64.b64encode(data).decode()}
    header = {name: value for name, value in content.items() if name not in ("crc32", "data")}
    raw = zlib.decompress(data) if content["compression"] == "zlib" else data
    crc = zlib.crc32(raw, zlib.crc32(json.dumps(header, sort_keys=True, separators=(",", ":")).encode()))
    return content | {"crc32": crc}


def test_the_format_is_this_object():
    assert encode_envelope(pinned_trace(), metadata={"engine": "vllm"}) == PINNED


def test_this_object_is_the_trace():
    assert_same(decode_envelope(PINNED), pinned_trace())
    assert_same(decode_envelope(json.dumps(PINNED)), pinned_trace())
    assert_same(decode_envelope(json.dumps(PINNED, indent=2).encode()), pinned_trace())
    assert_same(decode_envelope(signed()), pinned_trace())


@pytest.mark.parametrize("compression", [None, "zlib", "zstd"])
@pytest.mark.parametrize("num_experts", [8, 300])
def test_a_trace_comes_back_as_it_was(compression, num_experts):
    if compression == "zstd":
        pytest.importorskip("zstandard", reason="compression='zstd' needs the optional package zstandard")
    trace = full_trace(900, num_experts=num_experts)
    envelope = encode_envelope(trace, compression=compression)
    assert_same(decode_envelope(json.dumps(envelope)), trace)
    assert decode_envelope(envelope).topk_indices.is_contiguous()


@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.integers(0, 9),
    num_layers=st.integers(0, 3),
    num_experts=st.sampled_from([3, 256, 300, 32768]),
    topk=st.integers(1, 3),
    compression=st.sampled_from([None, "zlib"]),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
def test_any_trace_comes_back_as_it_was(num_tokens, num_layers, num_experts, topk, compression, metadata):
    trace = make_trace(num_tokens, layer_numbers=tuple(range(1, 1 + num_layers)), num_experts=num_experts, topk=topk)
    text = json.dumps(encode_envelope(trace, compression=compression, metadata=metadata))
    assert_same(decode_envelope(text), trace)
    assert json.loads(text)["metadata"] == metadata


def test_the_decoded_trace_shares_no_memory_with_the_envelope():
    trace = decode_envelope(PINNED)
    trace.topk_indices[0, 0, 0] = 2
    assert decode_envelope(PINNED).topk_indices[0, 0, 0] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "x"}, "not of format"),
        ({"version": 2}, "it has version 2"),
        ({"version": True}, "it has version True"),
        ({"extra": 1}, "its entries are"),
        ({"dtype": "int16"}, "dtype 'int16', .* disagree"),
        ({"num_experts": 300}, "dtype 'uint8', .* disagree"),
        ({"num_experts": 3}, r"outside 0\.\.2"),
        ({"shape": [2, 1, 2]}, "disagree"),
        ({"shape": [2, 2]}, "damaged"),
        ({"shape": [2, 2, 2.0]}, "shape is .2.0., not an integer"),
        ({"shape": [-2, 2, 2], "sequence_lengths": None, "sample_ids": None}, "num_tokens=-2"),
        ({"shape": [2, 2, 2], "layer_numbers": [3, 1]}, "must increase"),
        ({"sequence_lengths": [3]}, "add up to 3"),
        ({"sample_ids": ["a", "b"]}, "one sample for each"),
        ({"tensors": ["topk_indices"]}, "take 10 bytes, not 18"),
        ({"tensors": ["topk_indices", "token_ids", "replay_mask"]}, "tensors"),
        ({"nbytes": 17}, "take 18 bytes, not 17"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"compression": "lz4"}, "'lz4' is unknown"),
        ({"compression": ["zlib"]}, "is unknown"),
        ({"data": DATA[:-1]}, "its data does not hold 18 bytes|truncated"),
        ({"data": b"\x04" + DATA[1:]}, r"row 0, layer 1 .*outside 0\.\.3"),
        ({"data": b"\x01" + DATA[1:]}, "named twice"),
        ({"data": DATA[:8] + b"\x02\x00" + DATA[10:]}, "replay_mask holds 2"),
    ],
)
def test_a_forged_envelope_with_a_correct_checksum_is_refused(changes, message):
    with pytest.raises(StoreError, match=message):
        decode_envelope(signed(**changes) | ({"version": True} if changes.get("version") is True else {}))


@pytest.mark.parametrize("name", sorted(set(PINNED) - {"data"}))
def test_every_entry_is_covered_by_the_checksum(name):
    other = {"metadata": {}, "sample_ids": ["b"], "layer_numbers": [1, 2], "num_experts": 5, "compression": "zlib"}
    with pytest.raises(StoreError):
        decode_envelope(PINNED | {name: other.get(name)})
    with pytest.raises(StoreError, match=r"its entries are|not of format|it has version"):
        decode_envelope({key: value for key, value in PINNED.items() if key != name})


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "{}", '"x"', "{", b"\xff\xfe", "[" * 100_000, '{"version":' + "9" * 10_000 + "}", "NaN"],
    ids=lambda text: repr(text[:12]),
)
def test_another_text_is_refused(text):
    with pytest.raises(StoreError, match="cannot decode the envelope"):
        decode_envelope(text)


def test_data_that_is_not_base64_is_refused():
    for data in ("AwEAAgIDAgMBAAsAAAAMAA*A", "é" * 24, 5, None, ["A"], "AwEA AgIDAgMBAAsAAAAMAAA"):
        with pytest.raises(StoreError, match="its data"):
            decode_envelope(PINNED | {"data": data})


def test_a_decompression_bomb_stops_at_the_size_that_the_shape_asks_for():
    bomb = zlib.compress(b"\0" * (64 << 20), 9)
    with pytest.raises(StoreError, match="characters, not what 18 bytes take"):
        decode_envelope(signed(compression="zlib", data=bomb))
    with pytest.raises(StoreError, match="does not hold 18 bytes"):
        decode_envelope(signed(compression="zlib", data=zlib.compress(b"\0" * 4000)))
    tracemalloc.start()
    with pytest.raises(StoreError, match="does not hold 1000 bytes"):
        decompress(bomb, "zlib", 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(bomb) + (1 << 20)
    with pytest.raises(StoreError, match="does not hold 5 bytes"):
        decompress(zlib.compress(b"12345") + b"x", "zlib", 5)
    with pytest.raises(StoreError, match="does not hold 5 bytes"):
        decompress(zlib.compress(b"12345" * 99)[:-3], "zlib", 5)


def test_a_zstd_bomb_stops_at_the_size_that_the_shape_asks_for():
    zstandard = pytest.importorskip("zstandard", reason="compression='zstd' needs the optional package zstandard")
    bomb = zstandard.ZstdCompressor().compress(b"\0" * (64 << 20))
    with pytest.raises(StoreError, match="does not hold 1000 bytes"):
        decompress(bomb, "zstd", 1000)
    with pytest.raises(StoreError, match="does not hold 5 bytes"):
        decompress(zstandard.ZstdCompressor().compress(b"1234"), "zstd", 5)
    with pytest.raises(StoreError, match="does not decompress"):
        decompress(b"no zstd", "zstd", 5)


def test_compressed_data_cannot_stand_for_more_than_its_codec_can_make_of_it():
    # A gigabyte of mask, in an envelope of 700 characters.
    header = {"shape": [1 << 30, 0, 1], "layer_numbers": [], "num_experts": 1, "nbytes": 1 << 30}
    header |= {
        "sequence_lengths": None,
        "sample_ids": None,
        "tensors": ["topk_indices", "replay_mask"],
        "dtype": "uint8",
    }
    for compression in ("zlib", "zstd"):
        tracemalloc.start()
        with pytest.raises(StoreError, match="compressed bytes cannot hold 1073741824"):
            decode_envelope(signed(**header, compression=compression, data=zlib.compress(b"\1" * 20_000)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()
    # The most that each codec makes of a byte is let through.
    for compression in ("zlib", "zstd") if find_spec("zstandard") else ("zlib",):
        same = b"\1" * (32 << 20)
        assert decompress(compress(same, compression), compression, len(same)) == same


def test_a_text_that_max_bytes_cannot_need_is_refused_before_it_is_parsed():
    text, most = json.dumps(PINNED), 18 // 3 * 4 + (16 << 20)
    assert_same(decode_envelope(text.ljust(most), max_bytes=18), pinned_trace())
    with pytest.raises(StoreError, match=f"its {most + 1} characters cannot hold max_bytes=18 or less"):
        decode_envelope(text.ljust(most + 1), max_bytes=18)


def test_more_than_max_bytes_is_refused_before_it_is_allocated():
    envelope = encode_envelope(make_trace(1000))
    assert decode_envelope(envelope, max_bytes=envelope["nbytes"]).num_tokens == 1000
    with pytest.raises(StoreError, match=f"more than max_bytes={envelope['nbytes'] - 1}"):
        decode_envelope(envelope, max_bytes=envelope["nbytes"] - 1)
    huge = signed(shape=[1 << 45, 2, 2], nbytes=(1 << 45) * 9, sequence_lengths=None, sample_ids=None)
    with pytest.raises(StoreError, match="more than max_bytes"):
        decode_envelope(huge)
    with pytest.raises(StoreError, match="characters cannot hold"):
        decode_envelope(" " * (17 << 20), max_bytes=1000)
    with pytest.raises(StoreError, match="holds more than 4194304 values"):
        decode_envelope("[" + "[]," * (3 << 20))


def test_a_codec_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)  # as if it were not installed
    for call in (
        lambda: encode_envelope(make_trace(), compression="zstd"),
        lambda: decode_envelope(signed(compression="zstd")),
    ):
        with pytest.raises(StoreError, match="needs the package zstandard, which is not installed"):
            call()
    with pytest.raises(StoreError, match="'brotli' is unknown"):
        compress(b"", "brotli")


def test_metadata_holds_strings_only():
    with pytest.raises(StoreError, match="strings only"):
        encode_envelope(make_trace(), metadata={"step": 3})


def test_a_trace_on_another_device_or_a_view_is_encoded_as_what_it_shows():
    view = make_trace(20).select_layers([2, 7]).slice_rows(3, 11)
    assert_same(decode_envelope(encode_envelope(view)), view)
    assert torch.equal(decode_envelope(encode_envelope(view)).topk_indices, view.topk_indices)


@pytest.mark.parametrize(("compression", "characters"), [(None, 26668), ("zlib", 28300), ("zstd", 28300)])
def test_a_text_is_as_long_as_its_bytes_ask_for(compression, characters):
    """20,000 bytes take 26,668 characters; compressed, at most 20,000 + 200 + 1024 = 21,224 bytes: 28,300."""
    nbytes = 20_000
    decode_base64("A" * (characters - 1) + "=", compression, nbytes)
    for other in (characters + 4, 40 * characters, *([characters - 4] if compression is None else [])):
        with pytest.raises(StoreError, match=f"has {other} characters, not what 20000 bytes take"):
            decode_base64("A" * other, compression, nbytes)


def test_bytes_that_no_codec_makes_smaller_come_back():
    data = (
        torch.randint(256, (300_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy().tobytes()
    )
    text = encode_base64(compress(data, "zlib"))
    assert len(text) > 400_000
    assert decompress(decode_base64(text, "zlib", len(data)), "zlib", len(data)) == data


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_characters_that_are_no_base64_are_not_skipped(compression):
    """They would leave what is decoded as it was: an altered text that no checksum finds."""
    text = encode_base64(compress(bytes(300), compression))
    altered = text[:8] + "!!!!" + text[8:]
    nbytes = 300 if compression else 303
    with pytest.raises(StoreError, match="not base64"):
        decode_base64(altered, compression, nbytes)
