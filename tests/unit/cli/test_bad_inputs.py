"""No input makes a command print a traceback or write control characters to a terminal."""

from pathlib import Path

import pytest

import megatron_router_replay as mrr
from tests.unit.cli.runner import call
from tests.unit.store.store_traces import make_trace

HOSTILE = "a\x1b[31mred\x07\u202e\r\x9b2J"
DEEP = [b"null", b"[" * 100_000, b"\xff\xfe\x00\x01", b'{"\\ud800": "\\udfff"}']


@pytest.mark.parametrize("name", ["empty", "damaged", "truncated", "text", "missing", "nothing", *range(len(DEEP))])
def test_bad_files_and_folders_without_a_trace_are_named_and_exit_2(folder, name):
    if isinstance(name, int):
        Path("x.json").write_bytes(DEEP[name])
        name = "x.json"
    name = name if name in ("nothing", "x.json") else f"{name}.safetensors"
    for arguments in (["inspect", name], ["diff", name, "good.safetensors"], ["diff", "good.safetensors", name]):
        error = call(*arguments, code=2).stderr
        assert name in error
        assert ("holds no trace file" in error) == (name == "nothing")


def test_names_from_files_and_command_lines_are_printed_escaped(folder):
    mrr.save_trace(make_trace(4, sequence_lengths=[2, 2], sample_ids=[HOSTILE, "b"]), f"{HOSTILE}.safetensors")
    mrr.save_trace(make_trace(4, seed=3), "other.safetensors")
    file = f"{HOSTILE}.safetensors"
    for arguments in (
        ["inspect", file],
        ["inspect", f"{HOSTILE}/missing"],
        ["explain", HOSTILE],
        ["diff", file, "other.safetensors"],
    ):
        assert not {"\x1b", "\x07", "\u202e", "\r", "\x9b"} & set(call(*arguments, code=None).output), arguments


def test_a_page_that_cannot_be_written_is_named(folder):
    for path, words in (("no/x.html", "No such file"), ("nothing", "Is a directory")):
        assert words in call("diff", "good.safetensors", "shifted.safetensors", "--html", path, code=2).stderr
