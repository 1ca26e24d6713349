"""No input makes a command print a traceback or write control characters to a terminal."""

import pytest

import megatron_router_replay as mrr
from tests.unit.cli.runner import call
from tests.unit.store.store_traces import make_trace

HOSTILE = "a\x1b[31mred\x07\u202e\r\x9b2J"


@pytest.mark.parametrize("name", ["empty", "damaged", "text", "missing", "nothing"])
def test_bad_files_and_folders_without_a_trace_are_named_and_exit_2(folder, name):
    path = name if name == "nothing" else f"{name}.safetensors"
    for arguments in (["inspect", path], ["diff", path, "good.safetensors"], ["diff", "good.safetensors", path]):
        error = call(*arguments, code=2).stderr
        assert path in error
        assert ("holds no trace file" in error) == (name == "nothing")


def test_names_from_files_and_command_lines_are_printed_escaped(folder):
    file = f"{HOSTILE}.safetensors"
    mrr.save_trace(make_trace(4, sequence_lengths=[2, 2], sample_ids=[HOSTILE, "b"]), file)
    mrr.save_trace(make_trace(4, seed=3), "other.safetensors")
    for arguments in (
        ["inspect", file],
        ["inspect", f"{HOSTILE}/missing"],
        ["explain", HOSTILE],
        ["diff", file, "other.safetensors"],
    ):
        assert not {"\x1b", "\x07", "\u202e", "\r", "\x9b"} & set(call(*arguments, code=None).output), arguments


def test_a_page_that_cannot_be_written_is_named(folder):
    error = call("diff", "good.safetensors", "shifted.safetensors", "--html", "nothing", code=2).stderr
    assert "Is a directory" in error
