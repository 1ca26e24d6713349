"""Each command on good input, and in environments where packages are missing."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import tomllib

import megatron_router_replay as mrr
from megatron_router_replay.cli.doctor import TORCH_OLDEST, TORCH_TESTED, _environment_text
from megatron_router_replay.cli.explain import error_rows
from megatron_router_replay.cli.output import size_words
from megatron_router_replay.demo import DemoResult
from megatron_router_replay.store import TraceStore
from tests.unit.cli.runner import call, environment

ROOT = Path(__file__).parents[3]


def as_json(*arguments, code=0):
    return json.loads(call(*arguments, "--json", code=code).stdout)


def test_help_fits_80_columns_and_loads_nothing_heavy():
    for command in ("", "demo", "doctor", "inspect", "diff", "explain"):
        output = call(*([command] if command else []), "--help").output
        assert "Usage" in output
        assert max(map(len, output.splitlines())) <= 80
        assert "convert" not in output
    command = [sys.executable, "-X", "importtime", "-m", "megatron_router_replay.cli", "--version"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
    assert done.stdout.strip() == mrr.__version__
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert {"typer", "megatron_router_replay"} <= imported
    assert not imported & {"torch", "numpy", "megatron", "safetensors", "transformers", "ray", "matplotlib"}


def test_it_runs_as_a_module_and_in_a_pipe_without_colours_or_bars(folder):
    command = [sys.executable, "-m", "megatron_router_replay.cli", "diff", "good.safetensors", "shifted.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    assert "rows 1..599 (samples 0..1) of shifted match good's rows 0..598 (1 row earlier)" in done.stdout


def test_inspect_a_file_and_a_folder_of_steps(folder):
    values = as_json("inspect", "good.safetensors")
    assert (values["num_tokens"], values["layer_numbers"], values["topk"]) == (600, [2, 3, 4], 2)
    assert (values["missing_share"], values["samples"], values["token_ids"]) == (0.0, 2, True)
    text = call("inspect", "good.safetensors").output
    assert "MoE layers       3: 2..4" in text
    assert max(map(len, text.splitlines())) <= 80
    assert as_json("inspect", "no_tokens.safetensors")["imbalance_by_layer"] == [None] * 3
    assert "a folder of 2 steps" in call("inspect", "store").output
    assert as_json("inspect", "store", "--step", 4)["num_tokens"] == 600
    TraceStore("store", run="b").save(mrr.load_trace("good.safetensors"), step=4, rank=0)  # a resumed run
    steps = as_json("inspect", "store")["steps"]
    names = ("step", "runs", "ranks", "parts", "layer_numbers")
    assert [tuple(step[name] for name in names) for step in steps] == [
        (3, ["a"], 2, 2, [2, 3, 4]),
        (4, ["a", "b"], 2, 3, [2, 3, 4]),
    ]
    assert "Name one, run=" in call("inspect", "store", "--step", 4, code=2).stderr
    assert as_json("inspect", "store", "--step", 4, "--run", "b")["num_tokens"] == 600
    call("diff", "good.safetensors", "store", "--step-b", 4, "--run-b", "b")


def test_diff_exit_codes_json_and_page(folder):
    assert "The traces are the same." in call("diff", "good.safetensors", "reordered.safetensors").output
    mrr.save_trace(mrr.load_trace("good.safetensors").gather_rows(slice(0, 500)), "shorter.safetensors")
    assert "what both cover is the same" in call("diff", "good.safetensors", "shorter.safetensors", code=1).output
    call("diff", "good.safetensors", "shorter.safetensors", "--common")
    call("diff", "good.safetensors", "no_tokens.safetensors", "--common", code=1)
    values = as_json("diff", "good.safetensors", "shifted.safetensors", code=1)
    assert values["same"] is False
    assert "(1 row earlier)" in values["facts"][0]["text"]
    done = call("diff", "good.safetensors", "shifted.safetensors", "--html", "page.html", code=1)
    assert done.stderr == "wrote page.html\n"
    assert "of shifted match good's rows 0..598" in done.stdout
    assert "<h1>Routing of good and shifted</h1>" in Path("page.html").read_text()
    Path("other").mkdir()
    Path("shifted.safetensors").rename("other/good.safetensors")
    text = call("diff", "good.safetensors", "other/good.safetensors", code=1).output
    assert "of b match a's rows 0..598" in text, "two files of one name"


def test_explain_prints_cause_and_fix_of_every_code():
    codes = re.findall(r"</a>(MRR\d{3}) \|", (ROOT / "docs/errors.md").read_text())
    assert list(error_rows()) == codes
    for code in codes:
        shown = call("explain", code).output
        assert shown.startswith(f"{code}\n\n")
        assert "\n\nFix. " in shown
        assert not set("`*[]#") & set(re.sub(r"\S*\[[^]]*\]\S*", "", shown)), shown
        assert max(map(len, shown.splitlines())) <= 80
    text = " ".join(call("explain", "204").output.split())
    assert "A sequence cannot be divided among tensor- or context-parallel ranks" in text
    assert "Fix. Pad each sequence to the multiple, or change the argument, that the message names." in text
    assert (
        call("explain", "TraceError: MRR204: cannot split 6 positions over tp_size=4").output
        == call("explain", "204").output
    )
    assert "no error has the code MRR999" in call("explain", "MRR999", code=2).stderr


def findings():
    done = call("doctor", "--json", code=None)
    environment = json.loads(done.output)["environment"]
    assert done.exit_code == (1 if environment["problems"] else 0)
    return environment


def test_doctor_finds_nothing_wrong_here_and_expects_the_torch_of_the_build():
    assert findings()["packages"]["torch"]["version"]
    lines = call("doctor").output.splitlines()
    assert lines[-1] == "ready for replay"
    assert max(len(line) for line in lines if not line.startswith("in /")) <= 80
    assert any(re.fullmatch(r"  torch +2\.\S+", line) for line in lines)
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={TORCH_OLDEST}" in dependencies
    assert f"\nTORCH ?= torch=={TORCH_TESTED}\n" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(
    ("attribute", "value", "kind", "words"),
    [
        ("torch.__version__", "2.5.1+cu124", "problems", "torch 2.5.1+cu124 is older than 2.6"),
        ("torch.__version__", "2.14.0", "notes", "torch 2.14.0 is newer than 2.13.0"),
        ("torch.distributed.is_available", lambda: False, "problems", "without torch.distributed"),
        # pip's metadata may be that of another installation than the one that is imported.
        ("megatron.core.__version__", "0.20.0", "notes", "this one is newer: sessions verify every routing map"),
        ("torch.utils.checkpoint._checkpoint_hook", None, "problems", "torch.utils.checkpoint has no _checkpoint_hook"),
    ],
)
def test_doctor_judges_torch_and_the_megatron_core_that_is_imported(monkeypatch, attribute, value, kind, words):
    assert not any(words in text for text in findings()[kind])
    if value is None:
        monkeypatch.delattr(attribute)
    else:
        monkeypatch.setattr(attribute, value)
    assert any(words in text for text in findings()[kind])


def test_doctor_names_each_folder_once_and_wraps_what_is_long():
    package = {"version": "1.2", "path": "/a/torch"}
    values = {
        "megatron_router_replay": "0.3",
        "python": "3.11",
        "packages": {
            "torch": package,
            "megatron-core": {"version": "0.19", "path": "/b/megatron/core"},
            "numpy": package | {"path": "/a/numpy"},
            "ray": None,
            "safetensors": None,
        },
        "gpus": ["H100"],
        "notes": [],
        "problems": ["x" * 30 + " " + "y" * 60 + " end"],
    }
    assert _environment_text(values) == [
        "megatron_router_replay 0.3, Python 3.11",
        "in /a:",
        "  torch              1.2",
        "  numpy              1.2",
        "in /b:",
        "  megatron-core      0.19",
        "  ray                not installed (optional)",
        "  safetensors        not installed",
        "  GPUs               H100",
        "  problem: " + "x" * 30 + "\n    " + "y" * 60 + " end",
    ]


HIDE = "import sys; [sys.modules.__setitem__(name, None) for name in {names!r}]; "
RUN = "sys.argv[0] = 'router-replay'; from megatron_router_replay.cli import run; run()"


@pytest.mark.parametrize(
    ("missing", "arguments", "code", "words"),
    [
        (["torch"], ["inspect", "a.safetensors"], 2, "router-replay needs torch, which is not installed"),
        (["torch", "megatron"], ["doctor"], 1, "problem: torch is not installed.*megatron-core is not installed"),
        # As with a Megatron-Core of 0.18 and later without triton.
        (["megatron.core.tensor_parallel"], ["doctor"], 1, "megatron-core cannot be imported: .*tensor_parallel"),
        (["typer"], ["doctor"], 1, r"router-replay needs typer: pip install '\.\[cli\]'"),
    ],
    ids=str,
)
def test_a_missing_package_is_named(missing, arguments, code, words):
    command = [sys.executable, "-c", HIDE.format(names=missing) + RUN, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert re.search(words, done.stdout + done.stderr, re.S)


@pytest.mark.parametrize(
    ("changed", "code"), [({}, 0), ({"differ_with_replay": 1}, 1), ({"recomputes_identical": 3}, 1)]
)
def test_the_demo_exits_with_1_if_a_decision_is_not_exact(monkeypatch, changed, code):
    result = dict.fromkeys((each.name for each in fields(DemoResult)), 4) | {"differ_with_replay": 0} | changed
    monkeypatch.setattr("megatron_router_replay.demo.run_demo", lambda on_stage: DemoResult(**result))
    done = call("demo", "--json", code=code)
    assert json.loads(done.stdout) == result
    assert ("mrr.explain(model_chunks)" in done.stderr) == (code == 0), "the next step"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
def test_a_stdout_that_takes_nothing_is_no_result(folder):
    command = [sys.executable, "-m", "megatron_router_replay.cli", "diff", "good.safetensors", "shifted.safetensors"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment())
    assert done.returncode == 2
    assert done.stderr.startswith("error: MRR501: cannot write to stdout: ")


def test_sizes_have_the_unit_that_shows_them():
    assert [size_words(size) for size in (0, 999, 33_300, 2_000_000, 1_234_500_000)] == [
        "0 bytes", "999 bytes", "33.3 kB", "2.0 MB", "1,234.5 MB"
    ]  # fmt: skip
