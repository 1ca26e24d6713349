"""Every command, as a new user meets it: good, empty, damaged, wrong-kind and missing input; where packages are missing."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import megatron_router_replay as mrr
from megatron_router_replay.demo import DemoResult
from tests.unit.cli.runner import call, environment, run_with_stdout

COMMANDS = ("demo", "doctor", "inspect", "diff", "convert")
BAD = ("empty", "damaged", "truncated", "text", "missing")


def test_help_says_what_each_command_does_and_fits_80_columns():
    assert {
        line.split()[1] for line in call("--help").output.splitlines() if line.startswith("│ ") and line[2] != " "
    } >= set(COMMANDS)
    for command in ("", *COMMANDS):
        output = call(*([command] if command else []), "--help").output
        assert max(map(len, output.splitlines())) <= 80
        assert "Usage" in output
        assert "{" not in output
        assert "<bool>" not in output


def test_it_runs_as_a_module_and_in_a_pipe_without_colours_or_bars(folder):
    command = [sys.executable, "-m", "megatron_router_replay.cli", "diff", "good.safetensors", "shifted.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 1
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert done.stdout.isascii()
    assert "rows 1..599 (samples 0..1) of shifted hold good's rows 0..598 (1 row earlier)" in done.stdout


def test_inspect_a_file(folder):
    values = json.loads(call("inspect", "good.safetensors", "--json").output)
    assert (values["num_tokens"], values["layer_numbers"], values["topk"]) == (600, [2, 3, 4], 2)
    assert (values["missing_share"], values["samples"], values["token_ids"]) == (0.0, 2, True)
    text = call("inspect", "good.safetensors").output
    assert "MoE layers       3: 2..4" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "tokens           0" in call("inspect", "no_tokens.safetensors").output
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


@pytest.mark.parametrize("name", [*(f"{name}.safetensors" for name in BAD), "nothing"])
def test_bad_files_and_folders_without_a_trace_are_named_and_exit_2(folder, name):
    for arguments in (
        ["inspect", name],
        ["diff", name, "good.safetensors"],
        ["diff", "good.safetensors", name],
        ["convert", name, "out.safetensors"],
    ):
        said = call(*arguments, code=2).stderr
        assert name in said
        assert ("holds no trace file" in said) == (name == "nothing")


def test_json_is_a_flag_and_out_writes_the_same(folder):
    for arguments in (["inspect", "good.safetensors"], ["doctor"]):
        printed = json.loads(call(*arguments, "--json", "--out", "out.json").output)
        written = json.loads(Path("out.json").read_text())
        for values in (printed, written):
            values.pop("seconds", None)
        assert written == printed
    assert "folder does not exist" in call("inspect", "good.safetensors", "--out", "no/x.json", code=2).stderr


def test_diff_exit_codes(folder):
    assert "the traces are the same" in call("diff", "good.safetensors", "good.safetensors").output
    assert "the traces are the same" in call("diff", "good.safetensors", "reordered.safetensors").output
    call("diff", "good.safetensors", "shifted.safetensors", code=1)
    call("diff", "good.safetensors", "store", "--step-b", 3)
    assert "say which" in call("diff", "good.safetensors", "store", code=2).stderr
    assert "different models" in call("diff", "good.safetensors", "other_model.safetensors", code=2).stderr
    mrr.save_trace(mrr.load_trace("good.safetensors", rows=slice(0, 500)), "shorter.safetensors")
    assert "what both cover is the same" in call("diff", "good.safetensors", "shorter.safetensors", code=1).output
    call("diff", "good.safetensors", "shorter.safetensors", "--common")
    call("diff", "good.safetensors", "no_tokens.safetensors", "--common", code=1)
    assert "rows with a route in good only" in call("diff", "good.safetensors", "no_tokens.safetensors", code=1).output


def test_diff_as_json_and_as_text(folder):
    values = json.loads(call("diff", "good.safetensors", "shifted.safetensors", "--json", code=1).output)
    assert values["same"] is False
    assert values["facts"][0]["offset"] == -1
    text = call("diff", "good.safetensors", "shifted.safetensors", "--name-b", "engine", code=1).output
    assert "engine: shifted.safetensors, written" in text
    assert "of engine hold good's rows 0..598" in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("fact: ")) <= 80


def test_diff_writes_a_page(folder):
    shown = call("diff", "good.safetensors", "shifted.safetensors", "--html", "page.html", code=1)
    assert shown.stderr == "wrote page.html\n"
    page = Path("page.html").read_text()
    assert "<h1>Routing of good and shifted</h1>" in page
    assert "(1 row earlier)" in page
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
        assert "'word7' (7)" in Path("page.html").read_text()
    assert "there is no such file" in call(*arguments, "nothing", code=2).stderr
    assert "cannot read the tokenizer" in call(*arguments, "text.safetensors", code=2).stderr


def test_two_files_of_one_name_are_called_a_and_b(folder):
    Path("other").mkdir()
    call("convert", "shifted.safetensors", "other/good.safetensors")
    text = call("diff", "good.safetensors", "other/good.safetensors", code=1).output
    assert "of b hold a's rows 0..598" in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_bad_input_and_no_difference(folder):
    with open("/dev/full", "w") as full:
        code, errors = run_with_stdout(full.fileno(), "inspect", "good.safetensors")
    assert (code, errors.count("\n")) == (2, 1)
    assert errors.startswith("error: MRR501: cannot write the result to stdout: [Errno 28] No space left on device")
    for arguments in (["inspect", "good.safetensors"], ["diff", "good.safetensors", "store", "--step-b", 3]):
        done = call(*arguments, "--out", "/dev/full", code=2)
        assert "error: MRR501: cannot write /dev/full" in done.stderr


def test_a_closed_stdout_is_bad_input_and_no_difference(folder):
    reader, writer = os.pipe()
    os.close(reader)
    said = "error: MRR501: cannot write the result to stdout: [Errno 32] Broken pipe.\n"
    assert run_with_stdout(writer, "inspect", "good.safetensors") == (2, said)
    os.close(writer)
    for command in ("inspect good.safetensors", "diff good.safetensors good.safetensors"):
        command = f"exec {sys.executable} -m megatron_router_replay.cli {command} >&-"
        done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment())
        assert (done.returncode, done.stderr) == (2, "error: MRR501: cannot write the result: stdout is closed.\n")


def fail_to_write(*arguments):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (["diff", "good.safetensors", "shifted.safetensors", "--html", "old"], "old"),
        (["diff", "good.safetensors", "shifted.safetensors", "--out", "old"], "old"),
        (["convert", "good.safetensors", "old.safetensors", "--force"], "old.safetensors"),
    ],
)
def test_a_file_that_cannot_be_replaced_stays_as_it_was(folder, monkeypatch, arguments, file):
    Path(file).write_text("what was there")
    monkeypatch.setattr("os.fsync", fail_to_write)
    assert "No space left on device" in call(*arguments, code=2).stderr
    assert Path(file).read_text() == "what was there"
    assert not [path for path in Path().iterdir() if path.suffix == ".tmp"]


def test_out_through_a_link_replaces_what_it_leads_to_and_keeps_its_mode(folder):
    Path("target.json").write_text("{}")
    Path("target.json").chmod(0o640)
    Path("link.json").symlink_to("target.json")
    call("inspect", "good.safetensors", "--out", "link.json")
    assert Path("link.json").is_symlink()
    assert json.loads(Path("target.json").read_text())["num_tokens"] == 600
    assert Path("target.json").stat().st_mode & 0o777 == 0o640


def test_doctor_names_what_is_installed(folder):
    assert json.loads(call("doctor", "--json").output)["environment"]["packages"]["torch"]["version"]
    assert "nothing stands in the way of replay" in call("doctor").output


@pytest.mark.parametrize(("version", "newer"), [("0.16.1", False), ("0.19.2", False), ("0.20.0", True)])
def test_doctor_asks_megatron_core_itself_for_its_version(folder, monkeypatch, version, newer):
    # pip's metadata may be that of another installation beside the one that is imported.
    monkeypatch.setattr("megatron.core.__version__", version)
    environment = json.loads(call("doctor", "--json").output)["environment"]
    assert environment["packages"]["megatron-core"]["version"] == version
    assert environment["notes"][0] == "sessions were run with Megatron-Core 0.16.1, 0.17.1, 0.18.2, 0.19.2"
    assert ["newer" in note for note in environment["notes"][1:]] == [True] * newer


HIDE = "import sys; [sys.modules.__setitem__(name, None) for name in {names!r}]; "
RUN = "sys.argv[0] = 'router-replay'; from megatron_router_replay.cli import run; run()"


def run_without(names, *arguments, code):
    """Run the command line in a Python in which these modules cannot be imported."""
    command = [sys.executable, "-c", HIDE.format(names=names) + RUN, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert "fault of router-replay" not in done.stderr
    return done


def test_doctor_without_torch_says_that_it_is_missing_and_writes_that_to_a_file(tmp_path):
    done = run_without(["torch", "megatron"], "doctor", "--json", "--out", str(tmp_path / "doctor.json"), code=1)
    values = json.loads(done.stdout)
    assert values["problems"] == ["torch is not installed", "megatron-core is not installed"]
    assert values["environment"]["packages"]["torch"] is None
    assert values["environment"]["packages"]["numpy"]["version"]
    assert json.loads((tmp_path / "doctor.json").read_text())["problems"] == values["problems"]


@pytest.mark.parametrize(
    ("missing", "arguments", "code", "words"),
    [
        ("torch", ["inspect", "a.safetensors"], 2, "router-replay needs torch, which is not installed"),
        ("torch", ["doctor"], 1, "problem: torch is not installed.*problem: megatron-core cannot be imported: "),
        # As with a Megatron-Core of 0.18 and later without triton.
        ("megatron.core.tensor_parallel", ["doctor"], 1, "megatron-core cannot be imported: .*tensor_parallel"),
    ],
)
def test_what_is_missing_is_named(missing, arguments, code, words):
    done = run_without([missing], *arguments, code=code)
    assert re.search(words, done.stdout + done.stderr, re.S)


@pytest.mark.parametrize(
    ("changed", "code"), [({}, 0), ({"differ_with_replay": 1}, 1), ({"recomputes_identical": 3}, 1)]
)
def test_the_demo_exits_with_1_if_a_decision_is_not_exact(monkeypatch, changed, code):
    result = dict.fromkeys((each.name for each in fields(DemoResult)), 4) | {"differ_with_replay": 0} | changed
    monkeypatch.setattr("megatron_router_replay.demo.run_demo", lambda on_stage: DemoResult(**result))
    assert json.loads(call("demo", "--json", code=code).output) == result
