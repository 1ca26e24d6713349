"""The bytes that engines send, written out by hand."""

import base64
import struct

import numpy as np
import pytest
import torch

from megatron_router_replay import engines
from megatron_router_replay.engines.payload import (
    Source,
    as_array,
    as_token_ids,
    decode_base64,
    parse_npy,
    parse_raw,
)
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import npy_base64

# Three tokens, two layers of which the first is dense, top-2 of 4.
MODEL = engines.ModelRoutingInfo(num_layers=2, moe_layer_numbers=(2,), num_experts=4, topk=2)
IDS = [11, 12, 13]
SOURCE = Source(engine="test", field="routes")


def test_vllm_sends_base64_of_an_npy_file():
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (2, 2, 2), }"
    header += b" " * (128 - 10 - len(header) - 1) + b"\n"
    raw = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes([0, 0, 3, 1, 0, 0, 2, 0])
    assert base64.b64encode(raw).decode() == npy_base64(np.array([[[0, 0], [3, 1]], [[0, 0], [2, 0]]], np.uint8))
    trace = engines.vllm.decode(base64.b64encode(raw).decode(), model=MODEL, token_ids=IDS)
    assert trace.topk_indices[:2].tolist() == [[[3, 1]], [[2, 0]]]
    assert trace.replay_mask.tolist() == [True, True, False]
    assert trace.layer_numbers == (2,)


def test_sglang_sends_base64_of_raw_int32():
    text = "AAAAAAAAAAADAAAAAQAAAAAAAAAAAAAAAgAAAAAAAAA="
    assert base64.b64decode(text) == struct.pack("<8i", 0, 0, 3, 1, 0, 0, 2, 0)
    trace = engines.sglang.decode(text, model=MODEL, token_ids=IDS)
    assert trace.topk_indices[:2].tolist() == [[[3, 1]], [[2, 0]]]
    assert trace.replay_mask.tolist() == [True, True, False]


def test_sglang_jax_marks_dense_layers_with_minus_one():
    raw = struct.pack("<8i", -1, -1, 3, 1, -1, -1, 2, 0)
    trace = engines.sglang_jax.decode(base64.b64encode(raw).decode(), model=MODEL, token_ids=IDS)
    assert trace.topk_indices[:2].tolist() == [[[3, 1]], [[2, 0]]]


def npy_file(header, data=b""):
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"", "magic"),
        (b"\x93NUMPY\x02\x00\x76\x00", "magic"),
        (npy_file(b"{'a'}\n"), "header"),
        (npy_file(b"{'descr': '|O', 'fortran_order': False, 'shape': (1, 1, 1), }\n", bytes(8)), "header"),
        (npy_file(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 1), }\n", bytes(4)), "header"),
        (npy_file(b"{'descr': '<i4', 'fortran_order': False, 'shape': (1, 1), }\n", bytes(4)), "header"),
        (npy_file(b"{'descr': '<i4', 'fortran_order': False, 'shape': (9, 9, 9), }\n"), "2916 bytes, 0 follow"),
        (npy_file(b"{'descr': '<i4', 'fortran_order': False, 'shape': (0, 9, 999999999999), }\n"), "impossible"),
        (npy_file(b" " * 65535), "header"),
    ],
)
def test_other_npy_files_are_refused(raw, named):
    with pytest.raises(PayloadError, match=named):
        parse_npy(raw, source=SOURCE)


def test_fortran_order_and_big_endian_npy_are_read_as_what_they_say():
    import io

    array = np.arange(12, dtype=">i2").reshape(2, 3, 2)
    buffer = io.BytesIO()
    np.save(buffer, np.asfortranarray(array))
    assert np.array_equal(parse_npy(buffer.getvalue(), source=SOURCE), array)


def test_a_payload_too_large_is_refused_before_it_is_decoded():
    with pytest.raises(PayloadError, match="4000000 base64 characters, at most"):
        engines.vllm.decode("A" * 4_000_000, model=MODEL, token_ids=IDS)
    with pytest.raises(PayloadError, match="400 base64 characters, at most 136"):
        decode_base64("A" * 400, source=SOURCE, max_bytes=100)


@pytest.mark.parametrize("text", ["AAA", "AA=A", "AAA\u00e9", "A===", "AAAAAAA\n"])
def test_base64_with_foreign_characters_is_refused(text):
    with pytest.raises(PayloadError, match=r"not base64.* Was the string cut"):
        decode_base64(text, source=SOURCE, max_bytes=100)


def test_every_kind_of_array_is_accepted_and_nothing_else():
    want = [[[3, 1]], [[2, 0]]]
    frozen = np.array(want, np.uint16)
    frozen.flags.writeable = False
    for value in (frozen, torch.tensor(want), torch.tensor(want, dtype=torch.int16), want, (((3, 1),), ((2, 0),))):
        assert as_array(value, source=SOURCE).tolist() == want
    assert as_array([np.array([[3, 1]]), np.array([[2, 0]])], source=SOURCE).tolist() == want
    for value in (
        [[[1.5, 0]]],
        [[[True, 0]]],
        [[["3", 0]]],
        [[[3], [1, 2]]],
        [[3], 4],
        [[[[1]]]],
        [[[2**40, 0]]],
        7,
        "x",
        None,
        np.zeros((1, 1, 1)),
        torch.zeros(1, 1, 1),
        np.array([["a"]]),
        {"a": 1},
        torch.zeros(1, dtype=torch.bool),
    ):
        with pytest.raises(PayloadError):
            as_array(value, source=SOURCE)


def test_token_ids_of_every_kind():
    for value in ([1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2]), range(1, 3), [np.int64(1), 2]):
        assert as_token_ids(value, source=SOURCE).tolist() == [1, 2]
    assert as_token_ids([], source=SOURCE).tolist() == []
    for value in ("12", b"12", [1.0], [True], [None], [2**31], {"a": 1}, 5, [[1]], np.array([2**31])):
        with pytest.raises(PayloadError):
            as_token_ids(value, source=SOURCE)


def test_an_npy_file_is_as_long_as_its_shape_says():
    header = b"{'descr': '<i2', 'fortran_order': False, 'shape': (1, 2, 3), }\n"
    assert parse_npy(npy_file(header, bytes(range(12))), source=SOURCE).tolist() == [
        [[256, 770, 1284], [1798, 2312, 2826]]
    ]
    for size in (0, 11, 13, 24):
        with pytest.raises(PayloadError, match=rf"promises \[1, 2, 3\] int16 = 12 bytes, {size} follow"):
            parse_npy(npy_file(header, bytes(size)), source=SOURCE)
    with pytest.raises(PayloadError, match="header"):
        parse_npy(npy_file(header, bytes(12))[:40], source=SOURCE)
    for size in (8, 9):
        with pytest.raises(PayloadError, match="magic"):
            parse_npy(npy_file(header)[:size], source=SOURCE)
    empty = npy_file(b"{'descr': '|u1', 'fortran_order': False, 'shape': (0, 2, 3), }\n")
    assert parse_npy(empty, source=SOURCE).shape == (0, 2, 3)


@pytest.mark.parametrize(("header_bytes", "accepted"), [(1023, True), (1024, True), (1025, False)])
def test_an_npy_header_is_as_long_as_those_of_numpy_at_most(header_bytes, accepted):
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1, 1, 1), }"
    raw = npy_file(header.ljust(header_bytes - 1) + b"\n", b"\7")
    if accepted:
        assert parse_npy(raw, source=SOURCE).tolist() == [[[7]]]
        return
    with pytest.raises(PayloadError, match="header"):
        parse_npy(raw, source=SOURCE)


def test_base64_of_more_than_the_most_is_refused():
    for most, characters in ((99, 136), (98, 132), (0, 4)):
        decode_base64("A" * characters, source=SOURCE, max_bytes=most)
        with pytest.raises(PayloadError, match=f"{characters + 4} base64 characters, at most {characters} "):
            decode_base64("A" * (characters + 4), source=SOURCE, max_bytes=most)


def test_int32_is_a_whole_number_of_rows():
    raw = struct.pack("<12i", *range(12))
    array = parse_raw(raw, dtype="int32", source=SOURCE, num_columns=3, topk=2)
    assert array.tolist() == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]
    for size in (4, 23, 25, 36):
        with pytest.raises(PayloadError, match=rf"{size} bytes are {size / 24:.3f} rows of 3 layers x top-2 int32"):
            parse_raw(bytes(size), dtype="int32", source=SOURCE, num_columns=3, topk=2)


class LikeAnArray:
    def __array__(self, dtype=None, copy=None):
        return np.array([[[3, 1]]])


def test_what_makes_an_array_of_itself_is_one():
    assert as_array(LikeAnArray(), source=SOURCE).tolist() == [[[3, 1]]]
    with pytest.raises(PayloadError, match=r"one-dimensional, got shape \[1, 1, 2\]"):
        as_token_ids(LikeAnArray(), source=SOURCE)
    with pytest.raises(PayloadError, match="token ids must be integers, got int"):
        as_token_ids(5, source=SOURCE)


@pytest.mark.parametrize("value", [-(2**31), -1, 0, 2**31 - 1])
def test_ids_of_32_bits_are_kept(value):
    for form in ([value], [np.int64(value)], np.array([value], np.int64), torch.tensor([value], dtype=torch.int64)):
        assert as_token_ids(form, source=SOURCE).tolist() == [value]
        assert as_token_ids(form, source=SOURCE).dtype == np.int32
    assert as_array([[[value]]], source=SOURCE).tolist() == [[[value]]]


@pytest.mark.parametrize("value", [-(2**31) - 1, 2**31])
def test_ids_of_more_than_32_bits_are_refused(value):
    for form in ([value], np.array([value], np.int64), torch.tensor([value], dtype=torch.int64)):
        with pytest.raises(PayloadError, match="int32"):
            as_token_ids(form, source=SOURCE)
    with pytest.raises(PayloadError, match="does not fit int32"):
        as_array([[[value]]], source=SOURCE)


def test_no_token_ids_are_an_empty_list_of_int32():
    for nothing in ([], (), np.zeros(0, np.int64), torch.zeros(0, dtype=torch.int64), range(0)):
        ids = as_token_ids(nothing, source=SOURCE)
        assert (ids.shape, ids.dtype) == ((0,), np.int32)
    with pytest.raises(PayloadError, match=r"one-dimensional, got shape \[0, 0, 0\]"):
        as_token_ids(np.zeros((0, 0, 0), np.int64), source=SOURCE)


@pytest.mark.parametrize(
    ("value", "shape"),
    [([], (0, 0, 0)), ([[], []], (2, 0)), ([[[]]], (1, 1, 0)), ([(1, 2), [3, 4]], (2, 2)), ([[[1], [2]]], (1, 2, 1))],
)
def test_lists_have_the_shape_that_they_are_nested_in(value, shape):
    array = as_array(value, source=SOURCE)
    assert (array.shape, array.dtype) == (shape, np.int32)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[[1]], [[1], [2]]], r"lengths \[1, 2\] at level 1"),
        ([[[1]], [[1, 2]]], r"lengths \[1, 2\] at level 2"),
        ([[[[1]]]], r"deeper than .* lengths \[1\] at level 3"),
        ([[1], [[2]]], "must hold integers, got list"),
        ([np.zeros((1, 2), int), np.zeros((2, 1), int)], "rows differ in shape"),
        (torch.zeros(2, dtype=torch.complex64), "must hold integers"),
        (np.array([True]), "must hold integers, got bool"),
        (object(), "cannot read routes from object"),
    ],
)
def test_what_is_no_array_of_integers_is_named(value, message):
    with pytest.raises(PayloadError, match=message):
        as_array(value, source=SOURCE)


def test_a_message_begins_with_the_source():
    assert str(Source(engine="E", field="f")) == "E: f"
    assert str(Source(engine="E", field="f", sample="s").error("wrong")) == "E: f of s: wrong"


# Three rows of four layers are as many ids as four rows of the three MoE layers.
FOUR_LAYERS = engines.ModelRoutingInfo(num_layers=4, moe_layer_numbers=(1, 2, 4), num_experts=4, topk=2)
FLAT = [3, 1, 0, 2, 0, 0, 2, 3, 1, 2, 3, 0, 0, 0, 0, 1, 2, 0, 1, 3, 0, 0, 3, 2]


@pytest.mark.parametrize("engine", [engines.sglang, engines.sglang_jax])
def test_routes_that_a_caller_decoded_himself_have_no_shape_or_the_right_one(engine):
    ids = [11, 12, 13, 14]
    want = [[[3, 1], [0, 2], [2, 3]], [[1, 2], [3, 0], [0, 1]], [[2, 0], [1, 3], [3, 2]]]
    # The bytes fit the tokens, so nothing is explained that they would be if they did not.
    for value in (np.array(FLAT, np.int32), struct.pack("<24i", *FLAT), np.array(FLAT).reshape(3, 4, 2)):
        assert engine.decode(value, model=FOUR_LAYERS, token_ids=ids).topk_indices[:3].tolist() == want
        later = engine.decode(value, model=FOUR_LAYERS, token_ids=[10, *ids], start=1)
        assert later.topk_indices[1:4].tolist() == want
        assert later.replay_mask.tolist() == [False, True, True, True, False]
    for other in (
        np.array(FLAT).reshape(4, 3, 2),
        np.array(FLAT).reshape(3, 8),
        np.array(FLAT).reshape(6, 2, 2),
        np.array(FLAT[:22]),
        np.array(FLAT[:17]),
    ):
        with pytest.raises(PayloadError):
            engine.decode(other, model=FOUR_LAYERS, token_ids=ids)


@pytest.mark.parametrize("rows", [3, 4])
def test_bytes_of_a_known_mistake_are_explained(rows):
    # With another number of tokens, four rows of MoE layers are no longer three of all.
    model = engines.ModelRoutingInfo(
        num_layers=5, moe_layer_numbers=(1, 2, 4), num_experts=4, topk=2, num_shared_experts=1
    )
    for layers, width, named in ((3, 2, "3 layers: the MoE layers only"), (5, 3, "of 3 experts a token")):
        with pytest.raises(PayloadError, match=f"are {rows} rows of {named}|are {rows} rows {named}"):
            engines.sglang.decode(bytes(4 * rows * layers * width), model=model, token_ids=[11, 12, 13, 14])
