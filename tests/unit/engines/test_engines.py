"""The forms of single engines: vLLM 0.21, prime-rl's dict of bytes, SGLang's OpenAI endpoints, Megatron's server, arrays."""

import base64
import copy

import numpy as np
import pytest
import torch

from megatron_router_replay import engines
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import (
    FORMS,
    chat_choice,
    decode,
    int32_base64,
    response,
    routes,
    sglang_result,
    tensor,
    tokens,
    usage,
    vllm_output,
    with_dense,
)

SIZES = {"num_layers": 3, "moe_layer_numbers": (1, 2, 3), "num_experts": 300, "topk": 2}
MODEL = engines.ModelRoutingInfo(**SIZES)
DENSE = engines.ModelRoutingInfo(num_layers=5, moe_layer_numbers=(3, 4, 5), num_experts=300, topk=2)
P, G = 7, 5
S = P + G
PROMPT = tokens(P)
OUTPUTS = [tokens(G, seed=2), tokens(G, seed=3)]
IDS = PROMPT + OUTPUTS[0]
ROWS = [routes(S - 1, 3, num_experts=300, topk=2, seed=seed) for seed in (0, 1)]
ROWS[1][:P] = ROWS[0][:P]


def check(trace, number=0, start=0):
    assert torch.equal(trace.topk_indices[start:-1].long(), torch.from_numpy(ROWS[number][start:]))
    assert trace.replay_mask.tolist() == [start <= i < S - 1 for i in range(S)]
    assert trace.token_ids.tolist() == PROMPT + OUTPUTS[number]


def refused(message, call, *arguments, model=MODEL, **options):
    with pytest.raises(PayloadError, match=message):
        call(*arguments, model=model, **options)


# Every form


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("start", [0, 3])
def test_one_row_more_or_less_is_a_shift(form, start):
    """A lost token, ids without BOS and a start that is off by one all change the number of rows."""
    for num_rows in (0, S - 2 - start, S - 1 - start, S - start, S + 1 - start):
        rows = routes(S + 3, 3, num_experts=300, topk=2, seed=0)[start : start + num_rows].astype(np.uint16)
        if num_rows == S - 1 - start:
            trace = decode(form, rows, PROMPT, OUTPUTS[0], model=MODEL, start=start)
            assert trace.replay_mask.tolist() == [start <= i < S - 1 for i in range(S)]
            assert torch.equal(trace.topk_indices[start:-1].int(), torch.from_numpy(rows).int())
        else:
            with pytest.raises(PayloadError, match=rf"MRR305: .*has {num_rows} rows"):
                decode(form, rows, PROMPT, OUTPUTS[0], model=MODEL, start=start)


# vLLM 0.21: the prompt's rows and those of the generation


def split(rows, *, num_prompt=P, dtype=np.int16):
    return vllm_output(
        rows[num_prompt:].astype(dtype), PROMPT, OUTPUTS[0], prompt_array=rows[:num_prompt].astype(dtype)
    )


@pytest.mark.parametrize(("prompt", "generation", "legal"), [
    (P, G - 1, True), (P, G, True), (P, G - 2, False), (P, G + 1, False), (P - 1, G, False), (P - 1, G + 1, False),
    (P + 1, G - 1, False), (P + 1, G - 2, False), (0, S - 1, False),
])  # fmt: skip
def test_vllm_0_21_has_p_rows_and_g_minus_1_or_with_mtp_g(prompt, generation, legal):
    rows = routes(S + 2, 3, num_experts=300, topk=2, seed=0)
    rows[: S - 1] = ROWS[0]
    parts = split(np.concatenate([rows[:prompt], rows[P : P + generation]]), num_prompt=prompt)
    if legal:
        check(engines.vllm.decode(parts, model=MODEL))
    else:
        refused("MRR305", engines.vllm.decode, parts)


def test_vllm_0_21_columns_are_never_read_as_those_of_other_versions():
    """With first_k_dense_replace: as many columns as layers, the MoE layers first, then zeros."""
    padded = np.concatenate([ROWS[0], np.zeros((S - 1, 2, 2), int)], axis=1)
    for sent in (split(ROWS[0]), split(padded)):
        check(engines.vllm.decode(sent, model=DENSE))
    refused("column 0 is of a dense layer", engines.vllm.decode, padded, model=DENSE, token_ids=IDS)
    refused("has 3 layers, expected 5", engines.vllm.decode, ROWS[0], model=DENSE, token_ids=IDS)
    refused("not filler", engines.vllm.decode, split(with_dense(ROWS[0], 5, [2, 3, 4])), model=DENSE)
    refused("rows begin at token 0, not at start=1", engines.vllm.decode, split(ROWS[0]), start=1)
    output = vllm_output(ROWS[0][P:, :2], PROMPT, OUTPUTS[0], prompt_array=ROWS[0][:P])
    refused("prompt and generation differ in shape", engines.vllm.decode, output)


@pytest.mark.parametrize("generation", [None, [], np.zeros((0, 5, 2), np.int16)])
def test_vllm_0_21_of_one_output_token_has_no_generation_rows(generation):
    output = vllm_output(generation, PROMPT, [9], prompt_array=ROWS[0][:P].astype(np.int16))
    assert engines.vllm.decode(output, model=MODEL).replay_mask.tolist() == [True] * P + [False]


def test_vllm_0_21_prompt_routes_are_shared_by_choices_that_prove_their_prompt():
    choices = [
        {"index": i, "token_ids": OUTPUTS[i], "prompt_token_ids": PROMPT, "routed_experts": ROWS[i][P:].tolist()}
        for i in (0, 1)
    ]
    reply = {"prompt_routed_experts": ROWS[0][:P].tolist(), "choices": choices}
    for i, one in enumerate(engines.vllm.decode_batch(reply, model=MODEL).samples()):
        check(one, i)
    choices[1]["prompt_token_ids"] = PROMPT[::-1]
    refused("first prompt of a request only", engines.vllm.decode_batch, reply)
    for choice in choices:
        del choice["prompt_token_ids"]
    refused("not all choices are proven", engines.vllm.decode_batch, reply, token_ids=[IDS, IDS])
    del choices[1], choices[0]["token_ids"]
    check(engines.vllm.decode(reply | {"usage": usage(P, G)}, model=MODEL, token_ids=IDS))
    refused(f"has {P} rows for {P - 1}", engines.vllm.decode, reply | {"usage": usage(P - 1, G + 1)}, num_tokens=S)
    refused("the number of prompt tokens is unknown", engines.vllm.decode, reply, num_tokens=S)


# A dict of bytes, their shape and their start; a start that SGLang states


TENSOR_FORMS = {
    "prime-rl": lambda routed: response(PROMPT, OUTPUTS[0], routed_experts=routed),
    "verifiers": lambda routed: {"prompt_ids": PROMPT, "completion_ids": OUTPUTS[0], "routed_experts": routed},
}


def slime(start, **meta):
    result = sglang_result(ROWS[0][start:], P, OUTPUTS[0], routed_experts_start_len=start, **meta)
    return engines.sglang, result, {"prompt_token_ids": PROMPT}


@pytest.mark.parametrize("form", [*TENSOR_FORMS, "slime"])
@pytest.mark.parametrize("start", [0, 4])
def test_a_reply_that_states_its_start_needs_none(form, start):
    if form == "slime":
        engine, reply, given = slime(start)
        shifted = slime(start)[1]
        shifted["meta_info"]["routed_experts_start_len"] += 1
    else:
        engine, given, sent = engines.vllm, {}, tensor(ROWS[0][start:], start=start)
        reply, shifted = TENSOR_FORMS[form](sent), TENSOR_FORMS[form](sent | {"start": start + 1})
        raw = TENSOR_FORMS[form](sent | {"data": memoryview(base64.b64decode(sent["data"]))})
        check(engine.decode(raw, model=MODEL), start=start)
    for options in ({}, {"start": start}, {"token_ids": IDS}):
        check(engine.decode(reply, model=MODEL, **given | options), start=start)
    refused(f"rows begin at token {start}, not at start=6", engine.decode, reply, start=6, **given)
    refused("rows for tokens", engine.decode, shifted, **given)


@pytest.mark.parametrize("value", [-1, True, "4"])
def test_a_start_that_is_no_token_is_refused(value):
    engine, reply, given = slime(4)
    reply["meta_info"]["routed_experts_start_len"] = value
    refused("MRR305: .*routed_experts_start_len is", engine.decode, reply, **given)
    refused("MRR305: .*start is", engines.vllm.decode, tensor(ROWS[0], start=value), token_ids=IDS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "dtype is 'float32', expected one of"),
        ({"dtype": None}, "promises .* = 66 bytes, 132 follow"),  # uint8
        ({"shape": [S, 3, 2]}, "promises .* = 144 bytes, 132 follow"),
        *(({"shape": shape}, "has the shape") for shape in ([-11, -3, 2], [S - 1, 6], "x")),
        ({"shape": [10**12 - 1, 0, 10**9]}, "promises .* = 0 bytes"),
        ({"data": "@@"}, "not base64"),
        ({"data": 5}, "data is int"),
    ],
    ids=str,
)
def test_a_tensor_that_is_none_says_why(change, message):
    refused(message, engines.vllm.decode, tensor(ROWS[0]) | change, token_ids=IDS)


# SGLang's OpenAI endpoints


def chat(n=1, *, ids="", own_routes=False, left_out=0):
    """A reply of the chat endpoint: `ids` of "choice" and "sglext", routes in meta_info or those of the first alone."""
    choices = [chat_choice(ROWS[i], PROMPT, OUTPUTS[i], i) for i in range(n)]
    sglext = {} if own_routes else {"routed_experts": int32_base64(ROWS[0])}
    for choice in choices:
        choice["meta_info"]["prompt_tokens"] -= left_out
        for name in (["meta_info"] if not own_routes else []) + (
            ["prompt_token_ids", "response_token_ids"] if "choice" not in ids else []
        ):
            del choice[name]
    if "sglext" in ids:
        sglext |= {"input_ids": PROMPT, "output_ids": OUTPUTS[:n]}
    reply = {"id": "r", "object": "chat.completion", "choices": choices, "usage": usage(P - left_out, n * G)}
    return reply | ({"sglext": sglext} if sglext else {})


def streamed(**options):
    """The same as a stream: text first, then the end of the choice, then sglext, then the usage."""
    whole, chunk = chat(**options), {"id": "r", "object": "chat.completion.chunk"}
    ends = [{"index": 0, "delta": {}, "finish_reason": reason} for reason in (None, None, "length")]
    return [chunk | {"choices": [end]} for end in ends] + [
        chunk | {"choices": [], name: whole[name]} for name in ("sglext", "usage")
    ]


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
    for wrong in ([*IDS[:-1], IDS[-1] + 1], [IDS[0] + 1, *IDS[1:]]):
        refused(r"token_ids .* do not (begin|end) with", engines.sglang.decode, SGLANG[form], token_ids=wrong)


@pytest.mark.parametrize(
    ("form", "path", "value", "message"),
    [
        ("both", ("choices", 0, "response_token_ids"), OUTPUTS[1], "states different output_token_ids"),
        ("both", ("choices", 0, "prompt_token_ids"), PROMPT[::-1], "states different prompt_token_ids"),
        ("routes twice", ("sglext", "routed_experts"), int32_base64(ROWS[1]), "two parts of it carry routes"),
        ("sglext", ("sglext", "output_ids"), OUTPUTS, "2 lists of output ids for 1 choices"),
        ("sglext", ("sglext", "output_ids"), 3, "3 lists of output ids for 1 choices"),
    ],
)
def test_a_reply_whose_ids_or_routes_contradict_each_other_is_refused(form, path, value, message):
    reply = copy.deepcopy(SGLANG[form])
    place = reply
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    refused(message, engines.sglang.decode, reply)


@pytest.mark.parametrize("ids", ["choice", "sglext"])
def test_every_choice_of_an_sglang_reply_with_meta_info_has_its_own_routes(ids):
    reply = chat(2, ids=ids, own_routes=True)
    for result in (reply, reply | {"choices": reply["choices"][::-1]}):
        for number, one in enumerate(engines.sglang.decode_batch(result, model=MODEL).samples()):
            check(one, number)
    both = [PROMPT + output for output in OUTPUTS]
    refused("first result only.*return_meta_info", engines.sglang.decode_batch, chat(2, ids=ids), token_ids=both)
    del reply["choices"][1]["meta_info"]["routed_experts"]
    refused("choice 1.*missing", engines.sglang.decode_batch, reply)


@pytest.mark.parametrize("own_routes", [True, False])
def test_the_chat_endpoint_leaves_the_three_token_stub_of_kimi_k3_out(own_routes):
    kimi = engines.ModelRoutingInfo(**SIZES, model_type="kimi_k3")
    check(engines.sglang.decode(chat(ids="choice", left_out=3, own_routes=own_routes), model=kimi))
    for left_out, model in ((0, kimi), (2, kimi), (3, MODEL)):
        reply = chat(ids="choice", left_out=left_out, own_routes=own_routes)
        refused("MRR309", engines.sglang.decode, reply, model=model)
    completions = chat()
    del completions["choices"][0]["message"]
    check(engines.sglang.decode(completions, model=kimi, token_ids=IDS))
    config = {"model_type": "kimi_k3", "text_config": {"model_type": "kimi_linear", "num_hidden_layers": 3}}
    config["text_config"] |= {"first_k_dense_replace": 0, "num_experts": 300, "num_experts_per_token": 2}
    assert engines.ModelRoutingInfo.from_hf_config(config).model_type == "kimi_k3"


def test_sglang_qwen3_moe_sends_ids_on_dense_layers():
    values = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 300, "num_experts_per_tok": 2}
    values |= {"decoder_sparse_step": 1, "mlp_only_layers": [0]}
    array = np.concatenate([ROWS[0][:, :1], ROWS[0]], axis=1).astype(np.int32)
    check(engines.sglang.decode(array, model=values, token_ids=IDS))
    qwen2 = values | {"model_type": "qwen2_moe"}
    for decoder, model in ((engines.vllm, values), (engines.sglang, qwen2), (engines.sglang_jax, values)):
        refused("column 0 is of a dense layer", decoder.decode, array, model=model, token_ids=IDS)


# Megatron's text generation server and serialised requests, as 0.17 to 0.19 send them


def megatron_choice(i, form, **more):
    plain = ROWS[i].tolist()
    whole = plain if form == "0.17" else ["ndarray", {"data": plain, "dtype": "int16"}]
    fields = {"moe_topk_indices": whole, "prompt_moe_topk_indices": whole[:P], "finish_reason": "length"}
    return {"index": i, "prompt_token_ids": PROMPT, "generation_token_ids": OUTPUTS[i]} | fields | more


@pytest.mark.parametrize("form", ["0.17", "0.18"])
def test_both_forms_of_megatrons_server_with_their_ids(form):
    counts = {"prompt_tokens": P, "completion_tokens": 2 * G, "total_tokens": P + 2 * G}  # the sum of outputs
    reply = {"id": "c", "choices": [megatron_choice(i, form) for i in (1, 0)], "usage": counts}
    for choice in reply["choices"][:1]:  # chat replies repeat the ids in the message
        choice["message"] = {name: choice.pop(name) for name in ("prompt_token_ids", "generation_token_ids")}
    for i, one in enumerate(engines.megatron.decode_batch(reply, model=MODEL).samples()):
        check(one, i)
    bare = {name: value for name, value in megatron_choice(0, form).items() if "ids" not in name}
    check(engines.megatron.decode({"choices": [bare]}, model=MODEL, token_ids=IDS))  # completions of 0.17 have no ids
    refused("MRR309: .*without token ids", engines.megatron.decode, bare)
    del bare["moe_topk_indices"]
    refused("prompt_moe_topk_indices alone", engines.megatron.decode, bare, token_ids=IDS)
    refused("MRR311: .* is a list of replies", engines.megatron.decode, [megatron_choice(0, form)] * 2)
    # Megatron-Core 0.18, DynamicInferenceRequestRecord.merge: each part of a suspended request begins at the first token.
    parts = np.concatenate([ROWS[0][:6], ROWS[0]]).tolist()
    refused("has 17 rows", engines.megatron.decode, megatron_choice(0, form, moe_topk_indices=parts))


@pytest.mark.parametrize(
    "wrapped",
    [
        ["ndarray", {"data": ROWS[0].tolist()}],
        ["ndarray", {"data": ROWS[0].tolist(), "dtype": "float32"}],
        ["ndarray", {"data": ROWS[0].tolist(), "dtype": "uint8"}],  # ids beyond its dtype
        ["ndarray", {"data": (ROWS[0] % 256).tolist(), "dtype": "uint8"}],  # which a cast has wrapped
        ["array", {"data": ROWS[0].tolist(), "dtype": "int16"}],
    ],
)
def test_other_wrappers_are_refused(wrapped):
    refused("MRR3", engines.megatron.decode, megatron_choice(0, "0.18", moe_topk_indices=wrapped))


def test_serialised_requests():
    request = {"prompt_tokens": ["tensor", PROMPT], "generated_tokens": OUTPUTS[0]}
    request["routing_indices"] = ["ndarray", {"data": ROWS[0].tolist(), "dtype": "int16"}]
    old = request | {"routing_indices": ["tensor", ROWS[0].tolist()], "prompt_tokens": PROMPT}
    for one in engines.megatron.decode_batch([request, old], model=MODEL).samples():
        check(one)
    short = {name: value for name, value in request.items() if name != "prompt_tokens"} | {"prompt_length": P}
    check(engines.megatron.decode(short, model=MODEL, prompt_token_ids=PROMPT))  # 0.19 leaves the prompt out
    refused(f"prompt_length={P}, but {P - 1} prompt", engines.megatron.decode, short, prompt_token_ids=PROMPT[1:])


# Arrays with named axes


def test_arrays_name_their_axes_and_layers():
    given = {"model": MODEL, "token_ids": IDS}
    axes = ("token", "layer", "expert")
    layers_first = np.moveaxis(ROWS[0], 0, 2)[None]  # [1, layer, expert, token]
    check(engines.array.decode(layers_first, **given, axes=("batch", "layer", "expert", "token")))
    check(engines.array.decode(ROWS[0][:, [2, 0, 1]], **given, axes=axes, layer_numbers=(3, 1, 2)))
    check(engines.array.decode(ROWS[0], **given | {"model": DENSE}, axes=axes, layer_numbers=(3, 4, 5)))
    every = with_dense(ROWS[0], 5, [2, 3, 4])  # as Python objects of vLLM 0.18 to 0.20 have them
    check(engines.array.decode(every, **given | {"model": DENSE}, axes=axes))
    full = np.concatenate([ROWS[0], ROWS[0][:1]])
    assert engines.array.decode(full, **given, axes=axes, last_token_routed=True).replay_mask.all()
    refused("has 12 rows", engines.array.decode, full, token_ids=IDS, axes=axes)
    array = engines.array.decode
    refused("names 4 layers, the array has 3", array, ROWS[0], token_ids=IDS, axes=axes, layer_numbers=(1, 2, 3, 4))
    refused(r"no routes of the MoE layers \[3\]", array, ROWS[0], token_ids=IDS, axes=axes, layer_numbers=(1, 2, 4))
    refused("missing='skip' must be", array, ROWS[0], token_ids=IDS, axes=axes, missing="skip")
    for wrong in (axes[:2], ("token", "token", "expert"), ("batch", "layer", "expert"), (*axes, "batch")):
        refused("axes", array, ROWS[0], token_ids=IDS, axes=wrong)
    refused("only axes of length 1", array, np.stack([ROWS[0]] * 2, 3), token_ids=IDS, axes=(*axes, "batch"))
