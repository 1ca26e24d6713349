"""A trace as a JSON object: a trace file's own bytes as text."""

import base64
import json

import pytest

from megatron_router_replay.errors import StoreError
from megatron_router_replay.store import decode_envelope, encode_envelope, save_trace
from tests.unit.store.store_traces import assert_same, full_trace, make_trace


def envelope_of(data):
    text = base64.b64encode(data).decode()
    return {"format": "megatron_router_replay.envelope", "version": 2, "nbytes": len(data), "data": text}


@pytest.fixture
def file_bytes(tmp_path):
    return save_trace(full_trace(5), tmp_path / "x").read_bytes()


def test_an_envelope_is_the_bytes_of_a_trace_file(file_bytes):
    assert encode_envelope(full_trace(5)) == envelope_of(file_bytes)


@pytest.mark.parametrize("num_tokens", [0, 900])
def test_a_trace_comes_back_as_it_was(num_tokens):
    trace = full_trace(num_tokens, num_experts=300)
    envelope = encode_envelope(trace)
    text = json.dumps(envelope, indent=2)
    for same in (envelope, text, text.encode()):
        assert_same(decode_envelope(same), trace)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "x"}, "not of format"),
        ({"version": 1}, "it has version 1; this package reads version 2"),
        ({"extra": 1}, "its entries are"),
        ({"nbytes": 17}, "not a base64 text of 17 bytes"),
        ({"nbytes": "9"}, "nbytes='9' must be an integer"),
        ({"nbytes": -1}, "nbytes=-1 must be an integer of 0 or more"),
        ({"data": None}, "not a base64 text"),
        ({"nbytes": 18, "data": "é" * 24}, "not base64"),
        ({"data": "AAAA"}, "not a base64 text"),
        ({"nbytes": 2, "data": "AAAA"}, "does not hold 2 bytes"),
        ({"nbytes": 3, "data": "AA=A"}, "(not base64|does not hold)"),
    ],
)
def test_another_entry_is_refused(file_bytes, changes, message):
    with pytest.raises(StoreError, match=f"^MRR...: cannot decode the envelope: .*{message}"):
        decode_envelope(envelope_of(file_bytes) | changes)


def test_an_envelope_without_one_of_its_entries_is_refused(file_bytes):
    envelope = envelope_of(file_bytes)
    for name in envelope:
        with pytest.raises(StoreError, match="cannot decode the envelope"):
            decode_envelope({key: value for key, value in envelope.items() if key != name})


def test_altered_bytes_are_found_by_the_checksums_of_the_file(file_bytes):
    for at in (7, 100, len(file_bytes) - 1):
        altered = bytearray(file_bytes)
        altered[at] ^= 1
        with pytest.raises(StoreError, match="cannot decode the envelope"):
            decode_envelope(envelope_of(bytes(altered)))


TEXTS = ["", "null", "[]", "{}", '"x"', "{", b"\xff\xfe", "[" * 60, '{"version":' + "9" * 5_000 + "}", "NaN"]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:12]))
def test_another_text_is_refused(text):
    with pytest.raises(StoreError, match="cannot decode the envelope"):
        decode_envelope(text, max_bytes=9000)


def test_more_than_max_bytes_is_refused_before_it_is_parsed_or_decoded():
    envelope = encode_envelope(make_trace(5))
    size, text = envelope["nbytes"], json.dumps(envelope)
    assert decode_envelope(text, max_bytes=size).num_tokens == 5
    with pytest.raises(StoreError, match=f"it holds {size} bytes, more than max_bytes={size - 1}"):
        decode_envelope(text, max_bytes=size - 1)
    most = -(-size // 3) * 4 + 4096
    assert decode_envelope(text.ljust(most), max_bytes=size).num_tokens == 5
    with pytest.raises(StoreError, match=f"its {most + 1} characters cannot hold max_bytes={size}"):
        decode_envelope(text.ljust(most + 1), max_bytes=size)
    with pytest.raises(StoreError, match="holds more than 64 values"):
        decode_envelope("[" + "[]," * 99)


def test_rows_that_were_left_out_are_refused_by_name():
    with pytest.raises(StoreError, match=r"cannot encode an envelope: .* 1 rows were left out by choice"):
        encode_envelope(make_trace(2).keep([True, False]))
