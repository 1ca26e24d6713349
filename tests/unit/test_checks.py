"""Checks that the whole package shares: integers and base64."""

import numpy as np
import pytest
import torch

from megatron_router_replay import base64_text
from megatron_router_replay.base64_text import decode_base64
from megatron_router_replay.checks import as_integer, shown
from megatron_router_replay.errors import StoreError, TraceError


@pytest.mark.parametrize("value", [7, np.uint8(7), np.int64(7), np.array(7), torch.tensor(7), torch.tensor([7])])
def test_an_integer_of_any_library_is_an_int(value):
    number = as_integer("n", value, least=7, most=7)
    assert number == 7
    assert type(number) is int


NO_INTEGERS = [
    True,
    np.True_,
    torch.tensor(True),
    7.0,
    np.float32(7),
    torch.tensor(7.0),
    torch.tensor([7, 7]),
    "7",
    None,
]


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_bools_floats_texts_and_lists_are_no_integers(value):
    with pytest.raises(TraceError, match=r"^MRR101: n=.* must be an integer, got "):
        as_integer("n", value)


def test_bounds_are_included_and_what_lies_outside_says_so():
    assert [as_integer("n", value, least=-1, most=1) for value in (-1, 0, 1)] == [-1, 0, 1]
    assert as_integer("n", -(10**30)) == -(10**30)
    for value in (-2, 2):
        with pytest.raises(StoreError, match=rf"^MRR101: n={value} must be an integer in -1\.\.1, got int\.$"):
            as_integer("n", value, least=-1, most=1, error=StoreError)
    with pytest.raises(TraceError, match=r"^MRR101: n=-1 must be an integer of 0 or more, got int\.$"):
        as_integer("n", -1, least=0)


def test_a_value_that_python_does_not_write_is_named_by_its_type():
    assert shown(10**5000) == "a int that cannot be written out"
    assert shown("x" * 99, 5) == "'xxxx"


@pytest.fixture(params=["pybase64", "binascii"])
def either_library(request, monkeypatch):
    if request.param == "binascii":
        monkeypatch.setattr(base64_text, "_fast", None)
    elif base64_text._fast is None:
        pytest.skip("pybase64 is not installed: pip install '.[fast]'")


@pytest.mark.usefixtures("either_library")
def test_base64_is_read_from_texts_and_bytes():
    assert decode_base64("A" * 134 + "==") == b"\0" * 100
    assert decode_base64("AwEA/+8=") == decode_base64(b"AwEA/+8=") == b"\3\1\0\xff\xef"
    assert decode_base64("") == b""


@pytest.mark.usefixtures("either_library")
@pytest.mark.parametrize(
    "text", ["AwE!", "Aw EA", "AwEA\n", "AwE", "A===", "Aw==AwEA", "AwEA=", "AwEA====", "é" * 4, "AwE-"]
)
def test_nothing_in_a_base64_text_is_skipped(text):
    with pytest.raises(ValueError, match=r"."):
        decode_base64(text)
