"""Every command, as a new user meets it: good, empty, damaged, wrong-kind and missing input; convert and doctor beside it."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.diagnostics.runlog import RunLog
from megatron_router_replay.mcore.report import SessionReport
from tests.unit.cli.runner import call

COMMANDS = ("inspect", "diff", "plot", "convert", "request", "doctor", "verify-run", "demo")
BAD = ("empty", "damaged", "truncated", "text", "missing")


def test_help_says_what_each_command_does_and_fits_80_columns():
    assert {
        line.split()[1] for line in call("--help").output.splitlines() if line.startswith("│ ") and line[2] != " "
    } >= set(COMMANDS)
    for command in ("", *COMMANDS):
        output = call(*([command] if command else []), "--help").output
        assert max(map(len, output.splitlines())) <= 80
        assert "Usage" in output


def test_it_runs_as_a_module_and_in_a_pipe_without_colours_or_bars(folder):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_router_replay.cli", "diff", "good.safetensors", "shifted.safetensors"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert done.stdout.isascii()
    assert "b looks like a shifted down by one row" in done.stdout


def test_in_a_terminal_of_80_columns_long_lines_are_folded(folder):
    pty = pytest.importorskip("pty", reason="no terminals here")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "80", "TERM": "xterm"}
    command = [sys.executable, "-m", "megatron_router_replay.cli", "diff", "good.safetensors", "shifted.safetensors"]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, env=environment, timeout=120)
    os.close(theirs)
    text = ""
    with contextlib.suppress(OSError):  # Linux: the other end is closed
        while part := os.read(ours, 65536):
            text += part.decode()
    os.close(ours)
    assert done.returncode == 1
    assert "looks like a shifted down" in text
    assert max(map(len, text.splitlines())) <= 80


def test_inspect_a_file(folder):
    values = json.loads(call("inspect", "good.safetensors", "--json").output)
    assert (values["num_tokens"], values["layer_numbers"], values["topk"]) == (600, [2, 3, 4], 2)
    assert (values["missing_share"], values["samples"], values["token_ids"]) == (0.0, 2, True)
    text = call("inspect", "good.safetensors").output
    assert "MoE layers         3: 2..4" in text
    assert max(map(len, text.splitlines())) <= 80


def test_inspect_a_trace_without_tokens(folder):
    assert "tokens             0" in call("inspect", "no_tokens.safetensors").output
    assert json.loads(call("inspect", "no_tokens.safetensors", "--json").output)["imbalance_by_layer"] == [None] * 3


def test_inspect_a_folder_of_steps_and_one_of_them(folder):
    values = json.loads(call("inspect", "store", "--json").output)
    assert [(step["step"], step["ranks"], step["layer_numbers"]) for step in values["steps"]] == [
        (3, 2, [2, 3, 4]),
        (4, 2, [2, 3, 4]),
    ]
    assert "a folder of 2 steps" in call("inspect", "store").output
    assert json.loads(call("inspect", "store", "--step", 4, "--json").output)["num_tokens"] == 600
    assert "has no step 9" in call("inspect", "store", "--step", 9, code=2).stderr


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named_and_exit_2(folder, name):
    file = f"{name}.safetensors"
    for arguments in (
        ["inspect", file],
        ["diff", file, "good.safetensors"],
        ["diff", "good.safetensors", file],
        ["plot", file],
        ["convert", file, "out.npz"],
        ["verify-run", file],
        ["doctor", "--config", file],
    ):
        assert file in call(*arguments, code=2).stderr


def test_a_folder_without_traces_is_named(folder):
    for arguments in (
        ["inspect", "nothing"],
        ["diff", "nothing", "good.safetensors"],
        ["convert", "nothing", "out.npz"],
    ):
        assert "holds no trace file" in call(*arguments, code=2).stderr


@pytest.mark.parametrize("ending", ["safetensors", "npz", "json"])
def test_inspect_reads_what_convert_writes(folder, ending):
    call("convert", "good.safetensors", f"out.{ending}")
    values = json.loads(call("inspect", f"out.{ending}", "--json").output)
    assert (values["num_tokens"], values["layer_numbers"], values["samples"]) == (600, [2, 3, 4], 2)


def test_json_is_a_flag_and_out_writes_the_same(folder):
    for arguments in (["inspect", "good.safetensors"], ["doctor"], ["request", "--engine", "vllm"]):
        printed = json.loads(call(*arguments, "--json", "--out", "out.json").output)
        written = json.loads(Path("out.json").read_text())
        for values in (printed, written):
            values.pop("seconds", None)
        assert written == printed
    assert "folder does not exist" in call("inspect", "good.safetensors", "--out", "no/x.json", code=2).stderr


def test_diff_exit_codes(folder):
    assert "the traces are the same" in call("diff", "good.safetensors", "good.safetensors").output
    assert "the traces are the same" in call("diff", "good.safetensors", "reordered.safetensors").output
    call("diff", "good.safetensors", "reordered.safetensors", "--order", code=1)
    call("diff", "good.safetensors", "shifted.safetensors", code=1)
    call("diff", "good.safetensors", "store", "--step-b", 3)
    assert "say which" in call("diff", "good.safetensors", "store", code=2).stderr
    assert "different models" in call("diff", "good.safetensors", "other_model.safetensors", code=2).stderr
    mrr.save_trace(mrr.load_trace("good.safetensors", rows=slice(0, 500)), "shorter.safetensors")
    assert "what both cover is the same" in call("diff", "good.safetensors", "shorter.safetensors", code=1).output
    call("diff", "good.safetensors", "shorter.safetensors", "--common")
    call("diff", "good.safetensors", "no_tokens.safetensors", "--common", code=1)
    assert "rows with a route in a only" in call("diff", "good.safetensors", "no_tokens.safetensors", code=1).output


def test_diff_as_json_and_as_text(folder):
    values = json.loads(call("diff", "good.safetensors", "shifted.safetensors", "--json", code=1).output)
    assert values["same"] is False
    assert values["findings"][0]["shift"] == 1
    text = call("diff", "good.safetensors", "shifted.safetensors", "--name-b", "engine", code=1).output
    assert "b: shifted.safetensors (engine)" in text
    assert "  what to do next: Look for a start that is off by one" in text
    sentences = ("finding: ", "  what to do next: ")
    assert max(len(line) for line in text.splitlines() if not line.startswith(sentences)) <= 80


def test_diff_writes_a_page(folder):
    pytest.importorskip("jinja2", reason="the page needs jinja2")
    call("diff", "good.safetensors", "shifted.safetensors", "--html", "page.html", code=1)
    assert "shifted down by one row" in Path("page.html").read_text()
    assert (
        "folder does not exist"
        in call("diff", "good.safetensors", "good.safetensors", "--html", "no/x.html", code=2).stderr
    )


def test_a_tokenizer_shows_tokens_as_text(folder):
    tokenizers = pytest.importorskip("tokenizers", reason="--tokenizer needs the package tokenizers")
    vocabulary = {f"word{i}": i for i in range(600)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="word0")).save("tokenizer.json")
    arguments = ("diff", "good.safetensors", "shifted.safetensors", "--html", "page.html", "--tokenizer")
    for path in (".", "tokenizer.json"):
        call(*arguments, path, code=1)
        assert "\\u0027word7\\u0027 (7)" in Path("page.html").read_text()
    assert "there is no such file" in call(*arguments, "nothing", code=2).stderr
    assert "cannot read the tokenizer" in call(*arguments, "text.safetensors", code=2).stderr


def test_plot_of_one_and_of_two_traces(folder):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    assert call("plot", "good.safetensors", "--out", "one").output.split() == ["one/load.png", "one/load_map.png"]
    files = json.loads(call("plot", "good.safetensors", "shifted.safetensors", "--out", "two", "--json").output)[
        "files"
    ]
    assert files == ["two/disagreement.png", "two/agreement.png", "two/load.png"]
    assert all(Path(file).read_bytes().startswith(b"\x89PNG") for file in files)


def write_log(path, trace, *, replayed=4):
    with RunLog(path) as log:
        log.begin(step=1)
        log.microbatch(torch.arange(4), trace)
        log.end(SessionReport(kind="replay", routers=3, microbatches=1, tokens=4, rows_replayed=replayed, forwards=3))
        log.metrics(1, {"loss": 1.5})
        log.metrics(2, {"loss": 1.25})


def test_verify_run_and_curves(folder):
    trace = mrr.load_trace("good.safetensors")
    write_log("run.jsonl", trace)
    write_log("other.jsonl", mrr.load_trace("shifted.safetensors"))
    write_log("wrong.jsonl", trace, replayed=3)
    assert "everything adds up" in call("verify-run", "run.jsonl").output
    assert "step 1: 3 of 3 checksums differ" in call("verify-run", "run.jsonl", "other.jsonl", code=1).output
    assert "rows_replayed=3, its micro-batches add up to 4" in call("verify-run", "wrong.jsonl", code=1).output
    assert json.loads(call("verify-run", "run.jsonl", "--json").output)["problems"] == []
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    assert call("plot", "run.jsonl", "--metric", "loss").output.strip() == "curves.png"
    assert "it has: loss" in call("plot", "run.jsonl", "--metric", "x", code=2).stderr
