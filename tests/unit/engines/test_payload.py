"""The bytes and arrays that engines send, written out by hand."""

import base64
import struct
import warnings

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
    parse_routes,
)
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import npy_base64

# Three tokens, two layers of which the first is dense, top-2 of 4.
MODEL = engines.ModelRoutingInfo(num_layers=2, moe_layer_numbers=(2,), num_experts=4, topk=2)
IDS = [11, 12, 13]
SOURCE = Source(engine="test", field="routes")


HEADER = b"{'descr': '|u1', 'fortran_order': False, 'shape': (2, 2, 2), }".ljust(117) + b"\n"
NPY = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(HEADER)) + HEADER + bytes([0, 0, 3, 1, 0, 0, 2, 0])


def npy_file(header, data=b""):
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def npy_of(dtype, shape, data=b"", *, order=b"False", pad=0):
    header = b"{'descr': '%s', 'fortran_order': %s, 'shape': %s, }" % (dtype, order, shape)
    return npy_file(header.ljust(pad - 1) + b"\n", data)


BIG_ENDIAN = np.arange(12, dtype=">i2").reshape(2, 3, 2)
DENSE_ZERO = np.array([[[0, 0], [3, 1]], [[0, 0], [2, 0]]], np.uint8)
TWELVE = [[[256, 770, 1284], [1798, 2312, 2826]]]  # the bytes 0, 1, ... 11 as <i2


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        *((base64.b64decode(npy_base64(array)), array) for array in (np.asfortranarray(BIG_ENDIAN), DENSE_ZERO)),
        (npy_of(b"<i2", b"(1, 2, 3)", bytes(range(12))), TWELVE),
        (npy_of(b"|u1", b"(0, 2, 3)"), np.zeros((0, 2, 3))),
        *((npy_of(b"|u1", b"(1, 1, 1)", b"\7", pad=pad), [[[7]]]) for pad in (1023, 1024)),
        *((npy_of(b"<i2", b"(1, 2, 3)", bytes(n)), f"12 bytes, {n} follow") for n in (0, 11, 13)),
        (npy_of(b"<i4", b"(9, 9, 9)"), r"promises \[9, 9, 9\] int32 = 2916 bytes, 0 follow"),
        (npy_of(b"<i4", b"(0, 9, 999999999999)"), "promises"),
        (b"\x93NUMPY\x02\x00\x76\x00", "magic"),
        *(
            (raw, "header")
            for raw in (
                npy_of(b"|u1", b"(1, 1, 1)", b"\7", pad=1025),
                npy_of(b"<i2", b"(1, 2, 3)", bytes(12))[:40],
                npy_of(b"|O", b"(1, 1, 1)", bytes(8)),
                npy_of(b"|u1", b"(-1, -1, 1)", b"\7"),
                npy_of(b"|u1", b"(" * 900 + b")" * 900),
                npy_of(b"|u1", b"(1, 1, 1) + exit()"),
                npy_of(b"<f4", b"(1, 1, 1)", bytes(4)),
                npy_of(b"<i4", b"(1, 1)", bytes(4)),
            )
        ),
    ],
)
def test_an_npy_file_is_three_axes_of_integers_as_numpy_saves_them(raw, expected):
    check(lambda: parse_npy(raw, source=SOURCE), expected)


def test_every_damaged_byte_of_an_npy_header_is_refused_or_harmless():
    """30,090 damages: each byte after the magic, with each other value."""
    array = np.arange(66, dtype=np.uint8).reshape(11, 3, 2)
    raw = bytearray(base64.b64decode(npy_base64(array)))
    codes = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns of headers that Python 2 may have written
        for place in range(10, 128):
            right = raw[place]
            for raw[place] in {*range(256)} - {right}:
                codes.add(code_of(bytes(raw), array))
            raw[place] = right
    assert codes == {"MRR310", None}


def code_of(raw, array):
    """Return the code of the error of `parse_npy`, or None if it reads the array: other blanks, or signed bytes."""
    try:
        assert np.array_equal(parse_npy(raw, source=SOURCE), array)
    except PayloadError as error:
        return error.code
    return None


def check(read, expected):
    """`expected`: the array, or the message."""
    if isinstance(expected, str):
        with pytest.raises(PayloadError, match=expected):
            read()
        return
    assert np.array_equal(read(), np.asarray(expected))  # which compares shapes as well


@pytest.mark.parametrize("text", ["AAA", "AAA\u00e9", "A===", "AAAAAAA\n"])
def test_base64_with_foreign_characters_is_refused(text):
    with pytest.raises(PayloadError, match=r"not base64.* Was the string cut"):
        decode_base64(text, source=SOURCE)


def test_int32_is_a_whole_number_of_rows():
    raw = struct.pack("<12i", *range(12))
    array = parse_routes(raw, source=SOURCE, num_columns=3, topk=2)
    assert array.tolist() == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]
    for size in (4, 23, 25, 36):
        with pytest.raises(PayloadError, match=rf"{size} bytes are {size / 24:.3f} rows of 3 layers x top-2 int32"):
            parse_routes(bytes(size), source=SOURCE, num_columns=3, topk=2)


@pytest.mark.parametrize("form", [NPY, base64.b64encode(NPY).decode()])
@pytest.mark.parametrize("engine", [engines.sglang, engines.sglang_jax])
def test_vllms_bytes_given_to_sglang_are_named_and_the_reverse(engine, form):
    with pytest.raises(PayloadError, match=r"is a \.npy file, as vLLM sends it: engines\.vllm reads it"):
        engine.decode(form, model=MODEL, token_ids=IDS)
    raw = struct.pack("<8i", 0, 0, 3, 1, 0, 0, 2, 0)
    with pytest.raises(PayloadError, match=r"Raw ids without a header are of SGLang: engines\.sglang"):
        engines.vllm.decode(base64.b64encode(raw).decode(), model=MODEL, token_ids=IDS)


class LikeAnArray:
    def __array__(self, dtype=None, copy=None):
        return np.array([[[3, 1]]])


ROUTES = [[[3, 1]], [[2, 0]]]
FROZEN = np.array(ROUTES, np.uint16)
FROZEN.flags.writeable = False


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (FROZEN, ROUTES),
        (torch.tensor(ROUTES), ROUTES),
        (torch.tensor(ROUTES, dtype=torch.int16), ROUTES),
        (ROUTES, ROUTES),
        ((((3, 1),), ((2, 0),)), ROUTES),
        ([np.array([[3, 1]]), np.array([[2, 0]])], ROUTES),
        (LikeAnArray(), [[[3, 1]]]),
        ([torch.tensor([[3, 1]]), torch.tensor([[2, 0]])], ROUTES),
        ([], np.zeros((0, 0, 0))),
        ([[], []], np.zeros((2, 0, 0))),
        ([(1, 2), [3, 4]], [[1, 2], [3, 4]]),
        *(([[[value]]], "must hold integers, got object") for value in (2**64, 10**9000, None)),
        ([[[1.5, 0]]], "must hold integers, got float"),
        ([[[True]]], "must hold integers, got bool"),
        ([[[True, 3]]], "must hold integers, got bool"),
        ([[[2, 3]], [[2, np.False_]]], "must hold integers, got bool"),
        ([[["3", 0]]], "must hold integers, got <U"),
        ([[3], 4], "inhomogeneous"),
        (np.zeros((1, 1, 1)), "must hold integers, got float64"),
        (np.array(3), "is a single number"),
        (np.array([True]), "must hold integers, got bool"),
        (torch.zeros(1, 1, 1), "must hold integers, got torch.float32"),
        (torch.zeros(1, dtype=torch.bool), "must hold integers, got torch.bool"),
        ({"a": 1}, "cannot read routes from dict"),
    ],
)
def test_every_kind_of_array_of_integers_is_read_and_nothing_else(value, expected):
    check(lambda: as_array(value, source=SOURCE), expected)


MOST = [-(2**31), -1, 0, 2**31 - 1]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1, 2], [1, 2]),
        ((1, 2), [1, 2]),
        (range(1, 3), [1, 2]),
        ([np.int64(1), 2], [1, 2]),
        *((form, MOST) for form in (MOST, [np.int64(id) for id in MOST], np.array(MOST, np.int64), torch.tensor(MOST))),
        *((nothing, np.zeros(0)) for nothing in ([], (), range(0), np.zeros(0, np.int64), torch.zeros(0).long())),
        *((f([value]), "int32 cannot hold") for f in (list, np.array, torch.tensor) for value in (-(2**31) - 1, 2**31)),
        ([1.0], "must hold integers, got float"),
        ([True], "must hold integers, got bool"),
        ([[1]], r"one-dimensional, got shape \[1, 1\]"),
        ("12", "token ids must be integers, got str"),
        (5, "token ids must be integers, got int"),
    ],
)
def test_token_ids_of_every_kind_are_int32(value, expected):
    check(lambda: as_token_ids(value, source=SOURCE), expected)
    if not isinstance(expected, str):
        assert as_token_ids(value, source=SOURCE).dtype == np.int32
