"""No input makes a command print a traceback or write control characters to a terminal."""

from pathlib import Path

import pytest

import megatron_router_replay as mrr
from tests.unit.cli.runner import call
from tests.unit.store.store_traces import make_trace

BAD = ("empty", "damaged", "truncated", "text", "missing")
HOSTILE = "a\x1b[31mred\x07\u202e\r\x9b2J"


@pytest.mark.parametrize("name", [*(f"{name}.safetensors" for name in BAD), "nothing"])
def test_bad_files_and_folders_without_a_trace_are_named_and_exit_2(folder, name):
    commands = (["inspect", name], ["diff", name, "good.safetensors"], ["diff", "good.safetensors", name])
    for arguments in commands:
        error = call(*arguments, code=2).stderr
        assert name in error
        assert ("holds no trace file" in error) == (name == "nothing")


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe\x00\x01", b'{"\\ud800": "\\udfff"}'],
    ids=len,
)
def test_a_file_that_is_no_trace_is_refused(folder, content):
    Path("x.json").write_bytes(content)
    assert "x.json" in call("inspect", "x.json", code=2).stderr
    assert "x.json" in call("diff", "x.json", "good.safetensors", code=2).stderr


def test_names_from_files_and_command_lines_are_printed_escaped(folder):
    mrr.save_trace(make_trace(4, sequence_lengths=[2, 2], sample_ids=[HOSTILE, "b"]), f"{HOSTILE}.safetensors")
    mrr.save_trace(make_trace(4, seed=3), "other.safetensors")
    file = f"{HOSTILE}.safetensors"
    for arguments in (
        ["inspect", file],
        ["inspect", f"{HOSTILE}/missing"],
        ["explain", HOSTILE],
        ["diff", file, "other.safetensors"],
        ["diff", file, "other.safetensors", "--name-b", HOSTILE],
    ):
        assert not {"\x1b", "\x07", "\u202e", "\r", "\x9b"} & set(call(*arguments, code=None).output), arguments


def test_a_file_that_cannot_be_replaced_stays_as_it_was(folder, monkeypatch):
    def full_disk(*arguments):
        raise OSError(28, "No space left on device")

    Path("old").write_text("old content")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full_disk)
        for option in ("--html", "--out"):
            done = call("diff", "good.safetensors", "shifted.safetensors", option, "old", code=2)
            assert "No space left on device" in done.stderr
    assert Path("old").read_text() == "old content"
    assert not [*Path().glob(".*")]
    assert "folder does not exist" in call("inspect", "good.safetensors", "--out", "no/x.json", code=2).stderr
    assert "it is a folder" in call("inspect", "good.safetensors", "--out", "nothing", code=2).stderr


def test_out_through_a_link_replaces_its_target_and_keeps_the_mode(folder):
    Path("target.json").touch(0o640)
    Path("link.json").symlink_to("target.json")
    call("inspect", "good.safetensors", "--out", "link.json")
    assert Path("link.json").is_symlink()
    assert Path("target.json").read_text().startswith("{")
    assert Path("target.json").stat().st_mode & 0o777 == 0o640
