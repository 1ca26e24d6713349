"""What SGLang's OpenAI endpoints, prime-rl, verifiers and dynamo send since autumn 2026, built from their sources."""

import base64
import copy

import numpy as np
import pytest
import torch

from megatron_router_replay import engines
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import (
    dynamo_reply,
    int32_base64,
    npy_base64,
    response,
    routes,
    tensor,
    tokens,
    usage,
    vllm_output,
)

SIZES = {"num_layers": 3, "moe_layer_numbers": (1, 2, 3), "num_experts": 300, "topk": 2}
MODEL = engines.ModelRoutingInfo(**SIZES)
KIMI = engines.ModelRoutingInfo(**SIZES, model_type="kimi_k3")
P, G = 7, 5
S = P + G
PROMPT = tokens(P)
OUTPUTS = [tokens(G, seed=2), tokens(G, seed=3)]
IDS = PROMPT + OUTPUTS[0]
OTHER = [*IDS[:-1], IDS[-1] + 1]
ROWS = [routes(S - 1, 3, num_experts=300, topk=2, seed=seed) for seed in (0, 1)]
ROWS[1][:P] = ROWS[0][:P]


def chat(n=1, *, ids="", left_out=0, prompt_ids=PROMPT, own_routes=False):
    """A reply of SGLang's chat endpoint: `ids` of "choice" and "sglext", routes in meta_info or those of the first alone."""
    choices = []
    for i in range(n):
        choice = {"index": i, "message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}
        if "choice" in ids:
            choice |= {"prompt_token_ids": prompt_ids, "response_token_ids": OUTPUTS[i]}
        if own_routes:
            counts = {"prompt_tokens": P - left_out, "completion_tokens": G}
            choice["meta_info"] = {"id": f"r{i}", "routed_experts": int32_base64(ROWS[i])} | counts
        choices.append(choice)
    sglext = {} if own_routes else {"routed_experts": int32_base64(ROWS[0])}
    if "sglext" in ids:
        sglext |= {"input_ids": prompt_ids, "output_ids": OUTPUTS[:n]}
    reply = {"id": "r", "object": "chat.completion", "choices": choices, "usage": usage(P - left_out, n * G)}
    return reply | ({"sglext": sglext} if sglext else {})


def streamed(n=1, **options):
    """The same as a stream: text first, then the ends of the choices, then sglext, then the usage."""
    whole = chat(n, **options)
    reply = {"id": "r", "object": "chat.completion.chunk"}
    delta = {"delta": {"content": "x"}, "finish_reason": None}
    chunks = [reply | {"choices": [delta | {"index": i}]} for i in range(n) for _ in range(2)]
    chunks += [reply | {"choices": [{"index": i, "delta": {}, "finish_reason": "length"}]} for i in range(n)]
    return [*chunks, *(reply | {"choices": [], name: whole[name]} for name in ("sglext", "usage"))]


def check(trace, number=0):
    assert torch.equal(trace.topk_indices[:-1].long(), torch.from_numpy(ROWS[number]))
    assert trace.replay_mask.tolist() == [True] * (S - 1) + [False]
    assert trace.token_ids.tolist() == PROMPT + OUTPUTS[number]


SGLANG = {
    "choice": chat(ids="choice"),
    "sglext": chat(ids="sglext"),
    "both": chat(ids="choice sglext"),
    "meta_info": chat(ids="choice", own_routes=True),
    "stream": streamed(ids="sglext"),
    # Releases before pull request 35323 repeat the first choice's routes.
    "routes twice": chat(ids="sglext") | {"choices": chat(own_routes=True)["choices"]},
}


@pytest.mark.parametrize("form", SGLANG)
def test_sglangs_openai_replies_have_ids_that_are_compared(form):
    check(engines.sglang.decode(SGLANG[form], model=MODEL))
    check(engines.sglang.decode(SGLANG[form], model=MODEL, token_ids=IDS))
    for wrong in (OTHER, [IDS[0] + 1, *IDS[1:]]):
        with pytest.raises(PayloadError, match=r"token_ids .* do not (begin|end) with"):
            engines.sglang.decode(SGLANG[form], model=MODEL, token_ids=wrong)


def test_a_reply_whose_ids_or_routes_contradict_each_other_is_refused():
    for place, value, message in (
        ("response_token_ids", OUTPUTS[1], "states different output_token_ids"),
        ("prompt_token_ids", PROMPT[::-1], "states different prompt_token_ids"),
    ):
        reply = copy.deepcopy(SGLANG["both"])
        reply["choices"][0][place] = value
        with pytest.raises(PayloadError, match=message):
            engines.sglang.decode(reply, model=MODEL)
    reply = copy.deepcopy(SGLANG["routes twice"])
    reply["sglext"]["routed_experts"] = int32_base64(ROWS[1])
    with pytest.raises(PayloadError, match=r"carr(y|ies) routes"):
        engines.sglang.decode(reply, model=MODEL)
    reply = copy.deepcopy(SGLANG["sglext"])
    reply["sglext"]["output_ids"] = OUTPUTS
    with pytest.raises(PayloadError, match="2 output_ids for 1 choices"):
        engines.sglang.decode(reply, model=MODEL)


@pytest.mark.parametrize("ids", ["choice", "sglext", "choice sglext"])
def test_every_choice_of_an_sglang_reply_with_meta_info_has_its_own_routes(ids):
    reply = chat(2, ids=ids, own_routes=True)
    for result in (reply, reply | {"choices": reply["choices"][::-1]}):
        for number, sample in enumerate(engines.sglang.decode_batch(result, model=MODEL).samples()):
            check(sample, number)
        check(engines.sglang.decode(result, model=MODEL, choice=1), 1)
    for lost in (chat(2, ids=ids), streamed(2, ids=ids)):
        with pytest.raises(PayloadError, match=r"first result only.*return_meta_info"):
            engines.sglang.decode_batch(lost, model=MODEL, token_ids=[PROMPT + output for output in OUTPUTS])
    del reply["choices"][1]["meta_info"]["routed_experts"]
    with pytest.raises(PayloadError, match=r"choice 1.*missing"):
        engines.sglang.decode_batch(reply, model=MODEL)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("given", [True, False])
def test_the_usage_of_kimi_k3_leaves_out_its_three_token_stub(n, given):
    options = {"token_ids": [PROMPT + output for output in OUTPUTS[:n]]} if given else {}
    for own_routes in {n == 2, True}:
        ids, decode = "" if given else "choice", engines.sglang.decode_batch
        for number, one in enumerate(
            decode(chat(n, ids=ids, left_out=3, own_routes=own_routes), model=KIMI, **options).samples()
        ):
            check(one, number)
        for left_out, model in ((0, KIMI), (2, KIMI), (3, MODEL)):
            with pytest.raises(PayloadError, match="MRR309"):
                decode(chat(n, ids=ids, left_out=left_out, own_routes=own_routes), model=model, **options)


def test_only_the_chat_endpoint_leaves_tokens_of_kimi_k3_out():
    completions = chat()
    completions["choices"][0]["text"] = completions["choices"][0].pop("message")["content"]
    check(engines.sglang.decode(completions, model=KIMI, token_ids=IDS))
    config = {"model_type": "kimi_k3", "text_config": {"model_type": "kimi_linear", "num_hidden_layers": 3}}
    config["text_config"] |= {"first_k_dense_replace": 0, "num_experts": 300, "num_experts_per_token": 2}
    info = engines.ModelRoutingInfo.from_hf_config(config)
    assert (info.model_type, info.moe_layer_numbers, info.topk) == ("kimi_k3", (1, 2, 3), 2)
    config["model_type"] = "kimi_linear_vl"
    assert engines.ModelRoutingInfo.from_hf_config(config).model_type == "kimi_linear"


# A dict of bytes, their shape and where they start


TENSOR_FORMS = {
    "prime-rl's server": ("vllm", lambda routed: response(PROMPT, OUTPUTS[0], "r", routed_experts=routed)),
    "a step of verifiers": (
        "vllm",
        lambda routed: {"prompt_ids": PROMPT, "completion_ids": OUTPUTS[0], "routed_experts": routed},
    ),
    "dynamo": ("dynamo", lambda routed: dynamo_reply(routed, PROMPT, OUTPUTS[0])),
}


@pytest.mark.parametrize("form", TENSOR_FORMS)
@pytest.mark.parametrize("dtype", ["uint16", "int16", "int32"])
@pytest.mark.parametrize("start", [0, 4])
def test_a_tensor_in_a_dict_says_its_shape_dtype_and_start(form, dtype, start):
    name, reply = TENSOR_FORMS[form]
    engine = getattr(engines, name)
    sent = tensor(ROWS[0][start:], dtype, start=start)
    for routed in (sent, sent | {"data": memoryview(base64.b64decode(sent["data"]))}):
        for options in ({}, {"start": start}, {"token_ids": IDS}):
            trace = engine.decode(reply(routed), model=MODEL, **options)
            assert trace.replay_mask.tolist() == [start <= i < S - 1 for i in range(S)]
            assert torch.equal(trace.topk_indices[start:-1].long(), torch.from_numpy(ROWS[0][start:]))
    with pytest.raises(PayloadError, match=f"rows begin at token {start}, not at start=6"):
        engine.decode(reply(sent), model=MODEL, start=6)
    with pytest.raises(PayloadError, match="do not end with the output"):
        engine.decode(reply(sent), model=MODEL, token_ids=OTHER)
    with pytest.raises(PayloadError, match="rows for tokens"):
        engine.decode(reply(sent | {"start": start + 1}), model=MODEL)


def test_a_tensor_without_a_dtype_holds_bytes():
    model = engines.ModelRoutingInfo(**SIZES | {"num_experts": 16})
    rows = ROWS[0] % 16 // 2 * 2 + [0, 1]
    sent = {name: value for name, value in tensor(rows, "uint8").items() if name in ("data", "shape")}
    trace = engines.vllm.decode(sent, model=model, token_ids=IDS)
    assert torch.equal(trace.topk_indices[:-1].long(), torch.from_numpy(rows))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "dtype is 'float32', expected one of"),
        ({"dtype": "uint8"}, "promises .* = 66 bytes, 132 follow"),
        ({"shape": [S, 3, 2]}, "promises .* = 144 bytes, 132 follow"),
        ({"shape": [-11, -3, 2]}, "has the shape"),
        ({"shape": [S - 1, 6]}, "has the shape"),
        ({"shape": "x"}, "has the shape"),
        ({"shape": [10**12, 0, 10**9]}, "impossible|has the shape|promises"),
        ({"start": -1}, "start is -1"),
        ({"start": True}, "start is True"),
        ({"data": "@@"}, "not base64"),
        ({"data": 5}, "data is int"),
        ({"data": "A" * 10**6}, "base64 characters"),
    ],
    ids=str,
)
def test_a_tensor_that_is_none_says_why(change, message):
    with pytest.raises(PayloadError, match=message):
        engines.vllm.decode(tensor(ROWS[0]) | change, model=MODEL, token_ids=IDS)


def test_dynamo_reads_what_vllm_sends_and_refuses_several_choices():
    check(engines.dynamo.decode(dynamo_reply(npy_base64(ROWS[0].astype(np.uint16)), PROMPT, OUTPUTS[0]), model=MODEL))
    reply = dynamo_reply(tensor(ROWS[0]), PROMPT, OUTPUTS[0])
    reply["choices"].append(reply["choices"][0] | {"index": 1})
    with pytest.raises(PayloadError, match=r"missing|one choice"):
        engines.dynamo.decode_batch(reply, model=MODEL, token_ids=[IDS, IDS])
    with pytest.raises(PayloadError, match=r"extra_fields.*engine_data"):
        engines.dynamo.decode({"choices": [{"index": 0}]}, model=MODEL, token_ids=IDS)


@pytest.mark.parametrize("cached", [1, 5])
def test_rows_that_vllm_left_out_of_a_cached_prefix_are_named(cached):
    output = vllm_output(ROWS[0][cached:].astype(np.uint16), PROMPT, OUTPUTS[0])
    with pytest.raises(
        PayloadError, match="--enable-omit-prefix-routed-experts leaves out the rows of a cached prefix"
    ):
        engines.vllm.decode(output, model=MODEL)
    assert engines.vllm.decode(output, model=MODEL, start=cached).replay_mask.sum() == S - 1 - cached
