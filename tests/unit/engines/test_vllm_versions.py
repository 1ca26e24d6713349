"""vLLM's forms of which there is no capture, built from what its versions send."""

import numpy as np
import pytest
import torch

from megatron_router_replay import engines
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import choice_of, routes, tokens, vllm_output, with_dense

MOE = [1, 2, 4]
MODEL = engines.ModelRoutingInfo(num_layers=5, moe_layer_numbers=(2, 3, 5), num_experts=300, topk=4)
FIRST_DENSE = engines.ModelRoutingInfo(num_layers=5, moe_layer_numbers=(3, 4, 5), num_experts=64, topk=4)
P, G = 7, 5
PROMPT, OUTPUT = tokens(P), tokens(G, seed=2)
IDS = PROMPT + OUTPUT
WANT = routes(P + G - 1, 3, num_experts=300, topk=4).astype(np.int16)
DENSE_WANT = routes(P + G - 1, 3, num_experts=64, topk=4)


def split(want):
    """0.21: the prompt's rows, then those of what was generated."""
    return vllm_output(want[P:], PROMPT, OUTPUT, prompt_array=want[:P])


def check(trace, want):
    assert torch.equal(trace.topk_indices[: len(want)].long(), torch.from_numpy(want))
    assert trace.replay_mask.tolist() == [True] * len(want) + [False] * (len(trace) - len(want))
    assert trace.token_ids.tolist() == IDS


@pytest.mark.parametrize("num_experts", [64, 256, 257, 512])
def test_each_version_sends_its_dtype_over_all_layers(num_experts):
    model = engines.ModelRoutingInfo(num_layers=5, moe_layer_numbers=(2, 3, 5), num_experts=num_experts, topk=4)
    want = routes(P + G - 1, 3, num_experts=num_experts, topk=4)
    array = with_dense(want, 5, MOE)
    narrow = array.astype(np.uint8 if num_experts <= 256 else np.uint16)
    for sent in (
        vllm_output(array.astype(np.int32), PROMPT, OUTPUT),  # 0.14 to 0.20
        {"choices": [choice_of(narrow, PROMPT, OUTPUT)]},  # 0.22
    ):
        trace = engines.vllm.decode(sent, model=model)
        check(trace, want)
        assert trace.topk_indices.dtype is (torch.uint8 if num_experts <= 256 else torch.int16)


def padded(compact):
    """0.21 with first_k_dense_replace: as many columns as layers, the MoE layers first, zeros behind."""
    return np.concatenate([compact, np.zeros((len(compact), 2, 4), compact.dtype)], axis=1).astype(np.int16)


def test_0_21_with_first_dense_layers_has_the_moe_layers_in_the_first_columns():
    trace = engines.vllm.decode(split(padded(DENSE_WANT)), model=FIRST_DENSE)
    check(trace, DENSE_WANT)
    assert trace.layer_numbers == (3, 4, 5)
    named = {"axes": ("token", "layer", "expert"), "layer_numbers": (3, 4, 5, 1, 2)}
    check(engines.array.decode(padded(DENSE_WANT), model=FIRST_DENSE, token_ids=IDS, **named), DENSE_WANT)


def test_0_21_columns_are_never_read_as_those_of_other_versions():
    with pytest.raises(PayloadError, match="column 0 is of a dense layer by the model's config, but row 0"):
        engines.vllm.decode(padded(DENSE_WANT), model=FIRST_DENSE, token_ids=IDS)
    with pytest.raises(PayloadError, match="has 3 layers, expected 5"):
        engines.vllm.decode(DENSE_WANT, model=FIRST_DENSE, token_ids=IDS)
    full = with_dense(DENSE_WANT, 5, [2, 3, 4]).astype(np.int16)
    with pytest.raises(PayloadError, match="not filler"):
        engines.vllm.decode(split(full), model=FIRST_DENSE)


def test_no_rows_are_of_no_version():
    for columns in (3, 5):
        trace = engines.vllm.decode(np.zeros((0, columns, 4), np.uint8), model=FIRST_DENSE, num_tokens=1)
        assert trace.replay_mask.tolist() == [False]


def test_0_21_prompt_routes_are_shared_by_n_completions():
    want = routes(P, 3, num_experts=300, topk=4).astype(np.int16)
    generations = [routes(G - 1, 3, num_experts=300, topk=4, seed=s).astype(np.int16) for s in (5, 6)]
    choices = [
        {"index": i, "token_ids": OUTPUT, "prompt_token_ids": PROMPT, "routed_experts": g.tolist()}
        for i, g in enumerate(generations)
    ]
    trace = engines.vllm.decode_batch({"prompt_routed_experts": want.tolist(), "choices": choices}, model=MODEL)
    for sample, generation in zip(trace.samples(), generations):
        check(sample, np.concatenate([want, generation]).astype(np.int64))


def test_0_21_refuses_prompt_routes_of_another_prompt_of_the_batch():
    choices = [
        {"index": i, "token_ids": OUTPUT, "prompt_token_ids": prompt, "routed_experts": WANT[P:].tolist()}
        for i, prompt in enumerate([PROMPT, tokens(P, seed=9)])
    ]
    response = {"prompt_routed_experts": WANT[:P].tolist(), "choices": choices}
    with pytest.raises(PayloadError, match="first prompt of a request only"):
        engines.vllm.decode_batch(response, model=MODEL)
    for choice in choices:
        del choice["prompt_token_ids"]
    with pytest.raises(PayloadError, match="not all choices are proven"):
        engines.vllm.decode_batch(response, model=MODEL, token_ids=[IDS, IDS])


def test_0_21_prefix_cache_hits_lose_prompt_rows_and_raise():
    lost = WANT.copy()
    lost[:4] = 0
    with pytest.raises(PayloadError, match=r"all zero.*rows 0\.\.3.*prefix-cache hit"):
        engines.vllm.decode(split(lost), model=MODEL)


def test_0_21_one_output_token_has_no_generation_rows():
    want = routes(P, 3, num_experts=300, topk=4)
    for generation in (None, [], np.zeros((0, 3, 4), np.int16), np.zeros((0, 5, 4), np.int16)):
        output = vllm_output(generation, PROMPT, OUTPUT[:1], prompt_array=want.astype(np.int16))
        trace = engines.vllm.decode(output, model=MODEL)
        assert trace.replay_mask.tolist() == [True] * P + [False]


def test_0_21_over_http_needs_no_ids_of_one_choice_whose_counts_are_stated():
    want = routes(P + G - 1, 3, num_experts=300, topk=4)
    response = {
        "prompt_routed_experts": want[:P].tolist(),
        "choices": [{"index": 0, "routed_experts": want[P:].tolist()}],
        "usage": {"prompt_tokens": P, "completion_tokens": G, "total_tokens": P + G},
    }
    trace = engines.vllm.decode(response, model=MODEL)
    assert torch.equal(trace.topk_indices[: P + G - 1].long(), torch.from_numpy(want))
    response["usage"] |= {"prompt_tokens": P - 1, "completion_tokens": G + 1}
    with pytest.raises(PayloadError, match=f"has {P} rows for {P - 1} prompt tokens"):
        engines.vllm.decode(response, model=MODEL)
    del response["usage"]
    with pytest.raises(PayloadError, match="nothing says how many tokens the prompt has"):
        engines.vllm.decode(response, model=MODEL, num_tokens=P + G)


def test_0_21_prompt_and_generation_have_one_shape():
    want = routes(P + G, 3, num_experts=300, topk=4).astype(np.int16)
    for narrow in (want[P:-1, :2], want[P:-1, :, :3]):
        with pytest.raises(PayloadError, match="prompt and generation differ in shape"):
            engines.vllm.decode(vllm_output(narrow, PROMPT, OUTPUT, prompt_array=want[:P]), model=MODEL)


@pytest.mark.parametrize("start", [1, 4])
def test_0_21_knows_no_start(start):
    """All rows for tokens from 1 on are as many as multi-token prediction sends for these: each row would be one too late."""
    with pytest.raises(PayloadError, match=f"start={start}, but vLLM 0.21 always sends every row"):
        engines.vllm.decode(split(WANT), model=MODEL, start=start)
