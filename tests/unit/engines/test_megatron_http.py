"""Responses of Megatron-Core's text generation server, and serialised requests, as 0.17 to 0.19 send them."""

import copy

import numpy as np
import pytest
import torch

from megatron_router_replay import engines
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import all_moe, routes, tokens

MODEL = engines.ModelRoutingInfo(num_layers=4, moe_layer_numbers=(2, 3, 4), num_experts=300, topk=2)
LENGTHS = [(5, 4), (3, 6)]


def ids(i):
    return tokens(LENGTHS[i][0], seed=i), tokens(LENGTHS[i][1], seed=9 + i)


def rows(i):
    return routes(sum(LENGTHS[i]) - 1, 3, num_experts=300, topk=2, seed=i).astype(np.int16)


def choice(i, form, index=None):
    prompt, output = ids(i)
    plain = rows(i).tolist()
    whole = plain if form == "0.17" else ["ndarray", {"data": plain, "dtype": "int16"}]
    fields = {"moe_topk_indices": whole, "prompt_moe_topk_indices": whole[: len(prompt)]}
    fields |= {"prompt_token_ids": prompt, "generation_token_ids": output, "finish_reason": "length"}
    return {"index": i if index is None else index, "text": "x", **fields}


def response(form):
    counts = {"prompt_tokens": 5, "completion_tokens": 10, "total_tokens": 15}  # the largest prompt, the sum of outputs
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [choice(0, form), choice(1, form)],
        "usage": counts,
    }


def check(trace, i):
    assert torch.equal(trace.topk_indices[:-1], torch.from_numpy(rows(i)))
    assert trace.replay_mask.tolist() == [True] * (sum(LENGTHS[i]) - 1) + [False]
    assert trace.token_ids.tolist() == [*ids(i)[0], *ids(i)[1]]
    assert trace.layer_numbers == (2, 3, 4)


@pytest.mark.parametrize("form", ["0.17", "0.18"])
def test_both_forms_with_their_ids(form):
    trace = engines.megatron.decode_batch(response(form), model=MODEL)
    for i, sample in enumerate(trace.samples()):
        check(sample, i)
    check(engines.megatron.decode(response(form), model=MODEL, choice=1), 1)
    check(engines.megatron.decode(choice(0, form), model=MODEL), 0)
    reversed_choices = response(form) | {"choices": [choice(1, form), choice(0, form)]}
    assert torch.equal(engines.megatron.decode_batch(reversed_choices, model=MODEL).topk_indices, trace.topk_indices)
    assert len(engines.megatron.decode_batch([response(form), response(form)], model=MODEL).sequence_lengths) == 4


def test_completions_of_0_17_send_no_ids():
    bare = {"choices": [{"index": 0, "text": "x", "moe_topk_indices": rows(0).tolist()}]}
    both = [*ids(0)[0], *ids(0)[1]]
    check(engines.megatron.decode(bare, model=MODEL, token_ids=both), 0)
    with pytest.raises(PayloadError, match="cannot tell how many tokens"):
        engines.megatron.decode(bare, model=MODEL)
    with pytest.raises(PayloadError, match="has 8 rows"):
        engines.megatron.decode(bare, model=MODEL, token_ids=both[1:])
    with pytest.raises(PayloadError, match="are the layers of all pipeline stages there"):
        engines.megatron.decode(rows(0)[:, :2], model=MODEL, token_ids=both)


def test_ids_of_the_message_are_used():
    """Chat replies repeat the ids in the message."""
    reply = response("0.18")
    for item in reply["choices"]:
        item["message"] = {name: item.pop(name) for name in ("prompt_token_ids", "generation_token_ids")}
    for i, sample in enumerate(engines.megatron.decode_batch(reply, model=MODEL).samples()):
        check(sample, i)


@pytest.mark.parametrize("form", ["0.17", "0.18"])
def test_prompt_moe_topk_indices_alone_are_refused(form):
    reply = choice(0, form)
    del reply["moe_topk_indices"]
    prompt_rows = reply["prompt_moe_topk_indices"]
    for result in (reply, {"choices": [reply]}):
        with pytest.raises(PayloadError, match="prompt_moe_topk_indices alone"):
            engines.megatron.decode(result, model=MODEL)
    if form == "0.17":
        with pytest.raises(PayloadError, match="has 5 rows"):
            engines.megatron.decode(prompt_rows, model=MODEL, token_ids=[*ids(0)[0], *ids(0)[1]])


@pytest.mark.parametrize(
    "wrapped",
    [
        ["ndarray", {"data": [[[1, 2]] * 3] * 8}],
        ["ndarray", {"data": [[[1, 2]] * 3] * 8, "dtype": "float32"}],
        ["ndarray", {"data": [[[1, 2]] * 3] * 8, "dtype": "O"}],
        ["ndarray", {"data": [[[1, 299]] * 3] * 8, "dtype": "uint8"}],
        ["ndarray", {"data": [[[1, 2.5]] * 3] * 8, "dtype": "int16"}],
        ["ndarray", {"data": "AAAA", "dtype": "int16"}],
        ["ndarray", [[[1, 2]]]],
        ["array", {"data": [[[1, 2]] * 3] * 8, "dtype": "int16"}],
        ["ndarray"],
    ],
)
def test_other_wrappers_are_refused(wrapped):
    reply = choice(0, "0.18") | {"moe_topk_indices": wrapped}
    with pytest.raises(PayloadError):
        engines.megatron.decode(reply, model=MODEL)


@pytest.mark.parametrize(
    ("dtype", "top", "num_experts", "message"),
    [
        ("uint8", 255, 256, None),
        ("int8", 127, 128, None),
        ("uint8", 256, 257, "holds ids that uint8, its dtype, does not"),
        ("int8", 128, 129, "holds ids that int8, its dtype, does not"),
        ("uint8", 44, 300, "ids are uint8, which cannot hold the ids of 300 experts"),  # 44 was 300, before a cast
    ],
)
def test_ids_are_those_that_their_dtype_can_hold(dtype, top, num_experts, message):
    model = all_moe(1, num_experts)
    request = {"routing_indices": ["ndarray", {"data": [[[0, top]]], "dtype": dtype}]}
    if message is None:
        assert engines.megatron.decode(request, model=model, num_tokens=2).topk_indices[0].tolist() == [[0, top]]
        return
    with pytest.raises(PayloadError, match=message):
        engines.megatron.decode(request, model=model, num_tokens=2)


def test_serialised_requests():
    prompt, output = ids(0)
    request = {"prompt_tokens": ["tensor", prompt], "generated_tokens": output}
    request["routing_indices"] = ["ndarray", {"data": rows(0).tolist(), "dtype": "int16"}]
    check(engines.megatron.decode(request, model=MODEL), 0)
    old = request | {"routing_indices": ["tensor", rows(0).tolist()], "prompt_tokens": prompt}
    check(engines.megatron.decode(old, model=MODEL), 0)
    assert engines.megatron.decode_batch([request, old], model=MODEL).sequence_lengths == (9, 9)


def test_a_suspended_request_concatenates_routes_and_is_refused():
    """Megatron-Core 0.18, DynamicInferenceRequestRecord.merge: each part begins at the first token again."""
    prompt, output = ids(0)
    parts = np.concatenate([rows(0)[:6], rows(0)])
    reply = {"choices": [copy.deepcopy(choice(0, "0.17")) | {"moe_topk_indices": parts.tolist()}]}
    for options in ({}, {"allow_surplus_rows": True}):
        with pytest.raises(PayloadError, match="suspended"):
            engines.megatron.decode(reply, model=MODEL, **options)
