"""Every command, as a new user meets it: good, empty, damaged, wrong-kind and missing input."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay import engines
from megatron_router_replay.cli.convert import Engine
from megatron_router_replay.diagnostics.runlog import RunLog
from megatron_router_replay.mcore.report import SessionReport
from megatron_router_replay.store import TraceStore
from tests.unit.cli.runner import run_command
from tests.unit.store.store_traces import assert_same, full_trace, make_trace

CAPTURES = Path(__file__).parents[1] / "data" / "engine_captures"
COMMANDS = ("inspect", "diff", "plot", "convert", "request", "doctor", "verify-run", "demo")


def call(*arguments, code=0):
    result = run_command(*arguments, columns=80)
    assert result.exit_code == code, (arguments, result.output, result.stderr, result.exception)
    if code == 2:
        assert result.stdout == ""
        assert result.stderr.startswith(("error: ", "Usage:"))
        assert "Traceback" not in result.stderr
    return result


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with one of everything; paths in the tests are relative to it."""
    monkeypatch.chdir(tmp_path)
    trace = make_trace(
        600, layer_numbers=(2, 3, 4), num_experts=16, token_ids=torch.arange(600), sequence_lengths=[300, 300]
    )
    mrr.save_trace(trace, "good.safetensors")
    mrr.save_trace(trace._with(topk_indices=trace.topk_indices.roll(1, 0)), "shifted.safetensors")
    mrr.save_trace(trace._with(topk_indices=trace.topk_indices.flip(2)), "reordered.safetensors")
    mrr.save_trace(make_trace(600, num_experts=8), "other_model.safetensors")
    mrr.save_trace(make_trace(0, layer_numbers=(2, 3, 4), num_experts=16), "no_tokens.safetensors")
    Path("empty.safetensors").touch()
    damaged = bytearray(Path("good.safetensors").read_bytes())
    damaged[-700] ^= 1
    Path("damaged.safetensors").write_bytes(damaged)
    Path("truncated.safetensors").write_bytes(damaged[:-100])
    Path("text.safetensors").write_text("hello " * 100)
    Path("nothing").mkdir()
    store = TraceStore("store")
    for step in (3, 4):
        store.save(trace.select_layers([2]), step=step, rank=0)
        store.save(trace.select_layers([3, 4]), step=step, rank=1)
    return tmp_path


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


@pytest.mark.parametrize("ending", ["npz", "json", "safetensors"])
def test_convert_round_trips(folder, ending):
    mrr.save_trace(full_trace(9), "full.safetensors")
    call("convert", "full.safetensors", f"out.{ending}")
    call("convert", f"out.{ending}", "back.safetensors")
    assert_same(mrr.load_trace("back.safetensors"), full_trace(9))


def test_convert_refuses_to_read_a_trace_as_a_payload(folder):
    """It would be read as the trace that it is, and --engine would mean nothing without a word."""
    call("convert", "good.safetensors", "good.npz")
    call("convert", "good.safetensors", "good.json")
    Path("below.json").write_text(json.dumps({"a": json.loads(Path("good.json").read_text())}))
    Path("ids.json").write_text("[[1]]")
    model, ids = ["--model", CAPTURES / "configs" / "qwen3moe.json"], ["--token-ids", "ids.json"]
    for source, options, named in (
        ("good.safetensors", ["--engine", "vllm"], "--engine"),
        ("good.safetensors", ["--engine", "vllm", *model, "--key", "a", *ids], "--engine, --model, --key, --token-ids"),
        ("store", ["--engine", "array", "--step", 3], "--engine"),
        ("good.npz", [*model, "--key", "topk_indices"], "--model, --key"),
        ("good.json", ["--engine", "vllm", *model], "--engine, --model"),
        ("below.json", ["--key", "a", *ids], "--token-ids"),
    ):
        error = call("convert", source, "x.safetensors", *options, code=2).stderr
        assert f"{source} is read as a trace" in error
        assert f"leave {named} out" in error
        assert not Path("x.safetensors").exists()
    call("convert", "below.json", "x.safetensors", "--key", "a")


def test_convert_joins_the_parts_of_ranks(folder):
    call("convert", "store", "whole.safetensors", "--step", 3)
    call("diff", "whole.safetensors", "good.safetensors")


def test_convert_reads_what_a_vllm_server_sent(folder):
    payload, model = CAPTURES / "vllm_cpu_0.30.0_qwen3moe_http.json", CAPTURES / "configs" / "qwen3moe.json"
    key = ["--engine", "vllm", "--model", model, "--key", "completions.response"]
    values = json.loads(call("convert", payload, "vllm.safetensors", *key, "--json").output)
    assert (values["num_tokens"], values["layer_numbers"], values["num_experts"]) == (30, [1, 3, 4], 8)
    assert values["rows_with_route"] == 29


def test_convert_reads_any_array_with_named_axes(folder):
    routes = make_trace(50, layer_numbers=(1, 3, 4), seed=2).topk_indices
    full = torch.zeros(50, 4, 2, dtype=torch.uint8)
    full[:, [0, 2, 3]] = routes
    np.savez("array.npz", routes=full.transpose(0, 1).numpy())
    model = ["--model", CAPTURES / "configs" / "qwen3moe.json"]
    call("convert", "array.npz", "a.safetensors", "--engine", "array", "--axes", "layer,token,expert", *model)
    assert torch.equal(mrr.load_trace("a.safetensors").topk_indices, routes)
    assert (
        "axes"
        in call("convert", "array.npz", "b.safetensors", "--engine", "array", "--axes", "x", *model, code=2).stderr
    )


def test_convert_reads_every_engine_that_sends_files():
    in_process = {"transformers"}  # it reads what forward hooks saw
    known = {name for name in engines.__all__ if hasattr(getattr(engines, name), "decode")}
    assert {each.value for each in Engine} == known - in_process


def test_convert_reads_outputs_of_tensorrt_llm(folder):
    model = CAPTURES / "configs" / "qwen3moe.json"
    rows = [[[0, 1], [2, 3], [4, 5]], [[1, 7], [0, 6], [2, 5]]]
    Path("out.json").write_text(
        json.dumps({"prompt_token_ids": [9, 8], "outputs": [{"index": 0, "token_ids": [7], "routed_experts": rows}]})
    )
    call("convert", "out.json", "x.safetensors", "--engine", "tensorrt_llm", "--model", model)
    trace = mrr.load_trace("x.safetensors")
    assert trace.topk_indices[:2].tolist() == rows
    assert trace.token_ids.tolist() == [9, 8, 7]
    assert trace.layer_numbers == (1, 3, 4)


def write_megatron_trace(layers):
    """Two ranks of Megatron-Core's routing trace; rank 1 has no more than the first two of the layers."""
    Path("routing").mkdir()
    for rank in (0, 1):
        lines = [
            {
                **{"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": rank},
                **{"num_tokens": 2, "topk": 2, "top_indices": [[rank, layer + 2], [step, layer + 4]]},
            }
            for step in (0, 5)
            for layer in layers[: 3 - rank]
        ]
        Path(f"routing/router_trace_rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_convert_reads_megatrons_own_routing_trace(folder):
    write_megatron_trace([0, 2, 3])
    options = ["--engine", "megatron_trace", "--model", CAPTURES / "configs" / "qwen3moe.json"]
    file = "routing/router_trace_rank0.jsonl"
    call("convert", file, "whole.safetensors", *options)
    trace = mrr.load_trace("whole.safetensors")
    assert trace.layer_numbers == (1, 3, 4)
    assert trace.sample_ids == ("step 0, forward 0", "step 5, forward 0")
    assert trace.topk_indices[:, :, 1].tolist() == [[2, 4, 5], [4, 6, 7]] * 2
    call("convert", file, "one.safetensors", *options, "--step", 5)
    assert mrr.load_trace("one.safetensors").topk_indices[:, 0].tolist() == [[0, 2], [5, 4]]
    part = ["convert", "routing/router_trace_rank1.jsonl", "part.safetensors", *options]
    assert "layer_numbers=..., --layers" in call(*part, code=2).stderr
    call(*part, "--layers", "1, 3")
    assert mrr.load_trace("part.safetensors").layer_numbers == (1, 3)
    Path("routing/router_trace_rank1.jsonl").unlink()
    call("convert", "routing", "folder.safetensors", *options)
    call("diff", "folder.safetensors", "whole.safetensors")


def test_what_a_megatron_trace_cannot_be_asked_is_named(folder):
    write_megatron_trace([0, 2, 3])
    options = ["--engine", "megatron_trace", "--model", CAPTURES / "configs" / "qwen3moe.json"]
    file, ids = "routing/router_trace_rank0.jsonl", Path("ids.json")
    ids.write_text("[[1, 2]]")
    for arguments, message in (
        (["routing", *options], "ranks [0, 1]: pass rank=..., or the file of one of them"),
        ([file, "--engine", "megatron_trace"], "needs --model"),
        ([file, *options, "--token-ids", ids], "does not say whose tokens"),
        ([file, *options, "--key", "step"], "has no keys"),
        ([file, *options, "--step", 3], "no route of a decoder layer in step 3"),
        ([file, *options, "--layers", "1,x"], "--layers '1,x' must be layer numbers"),
        (["good.safetensors", "--layers", "1"], "--layers is for --engine megatron_trace"),
        ([file, *options[2:]], "error: "),  # no engine: a .jsonl is no trace file
    ):
        assert message in call("convert", arguments[0], "x.safetensors", *arguments[1:], code=2).stderr
        assert not Path("x.safetensors").exists()


def test_convert_explains_what_is_missing(folder):
    payload = CAPTURES / "vllm_cpu_0.30.0_qwen3moe_http.json"
    assert "--engine and --model" in call("convert", payload, "x.safetensors", code=2).stderr
    assert "its ending must be one of" in call("convert", "good.safetensors", "x.pt", code=2).stderr
    assert "--force replaces it" in call("convert", "good.safetensors", "shifted.safetensors", code=2).stderr
    call("convert", "good.safetensors", "shifted.safetensors", "--force")
    model = CAPTURES / "configs" / "qwen3moe.json"
    wrong = ["--engine", "vllm", "--model", model, "--key", "completions.nothing"]
    assert "has nothing at" in call("convert", payload, "x.safetensors", *wrong, code=2).stderr
    np.savez("pickled.npz", x=np.array([{"a": 1}], dtype=object))
    assert "no npz file of plain arrays" in call("convert", "pickled.npz", "x.safetensors", code=2).stderr
    Path("damaged.npz").write_bytes(Path("pickled.npz").read_bytes()[:-30])
    assert "damaged.npz" in call("convert", "damaged.npz", "x.safetensors", code=2).stderr
    Path("empty.json").touch()
    assert "empty.json" in call("convert", "empty.json", "x.safetensors", code=2).stderr


def test_doctor_of_the_environment_and_of_a_hugging_face_config(folder):
    assert json.loads(call("doctor", "--json").output)["environment"]["packages"]["torch"]["version"]
    values = json.loads(call("doctor", "--config", CAPTURES / "configs" / "qwen3moe.json", "--json").output)["model"]
    assert (values["replayed_layers"], values["topk"], values["num_experts"]) == ([1, 3, 4], 2, 8)
    Path("unknown.json").write_text('{"model_type": "mystery_moe"}')
    assert "mystery_moe" in call("doctor", "--config", "unknown.json", code=2).stderr


@pytest.mark.parametrize(("version", "newer"), [("0.16.1", False), ("0.19.2", False), ("0.20.0", True)])
def test_doctor_asks_megatron_core_itself_for_its_version(folder, monkeypatch, version, newer):
    # pip's metadata may be that of another installation beside the one that is imported.
    monkeypatch.setattr("megatron.core.__version__", version)
    environment = json.loads(call("doctor", "--json").output)["environment"]
    assert environment["packages"]["megatron-core"]["version"] == version
    assert environment["notes"][0] == "sessions were run with Megatron-Core 0.16.1, 0.17.1, 0.18.2, 0.19.2"
    assert ["newer" in note for note in environment["notes"][1:]] == [True] * newer


MEGATRON = {"num_layers": 5, "num_moe_experts": 16, "moe_router_topk": 4, "moe_layer_freq": "[0]*1+[1]*4"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"moe_router_fusion": True}, ""),
        ({"moe_router_fusion": True, "moe_router_score_function": "sqrtsoftplus"}, ""),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        ({"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing=True"),
        ({"moe_expert_capacity_factor": 1.0}, "moe_token_drop_policy='probs'"),
        ({"moe_expert_capacity_factor": 4.0}, ""),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["moe_router"]}, "cuda_graph_impl"),
        ({"moe_n_hash_layers": 2}, "layers [2]: moe_n_hash_layers=2"),
        ({"mtp_num_layers": 1}, ""),
    ],
)
def test_doctor_of_a_megatron_config_names_what_is_refused(folder, changes, reason):
    Path("megatron.json").write_text(json.dumps({"args": MEGATRON | changes}))
    values = json.loads(call("doctor", "--config", "megatron.json", "--json", code=1 if reason else 0).output)["model"]
    assert values["moe_layers"] == [2, 3, 4, 5]
    assert len(values["refused"]) == bool(reason)
    assert reason in "".join(values["refused"])
    assert call("doctor", "--config", "megatron.json", code=1 if reason else 0).output.count("refused:") == bool(reason)


def test_doctor_of_a_hybrid_config_reads_the_pattern(folder):
    hybrid = {"num_layers": 6, "num_moe_experts": 16, "moe_router_topk": 4, "hybrid_layer_pattern": "MEM|*E-/ME"}
    Path("hybrid.json").write_text(json.dumps(hybrid))
    values = json.loads(call("doctor", "--config", "hybrid.json", "--json").output)["model"]
    assert values["moe_layers"] == [2, 5]
    Path("hybrid.json").write_text(json.dumps(hybrid | {"hybrid_layer_pattern": "ME"}))
    assert "names 2 layers" in call("doctor", "--config", "hybrid.json", code=2).stderr


@pytest.mark.parametrize(
    "broken", [{}, {"num_layers": 3}, MEGATRON | {"moe_layer_freq": "import os"}, [1], MEGATRON | {"num_layers": "x"}]
)
def test_doctor_of_a_config_that_is_none(folder, broken):
    Path("broken.json").write_text(json.dumps(broken))
    assert "broken.json" in call("doctor", "--config", "broken.json", code=2).stderr


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
