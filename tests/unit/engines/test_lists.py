"""`decode_batch` of a list loses no sample and makes no stream of replies; a list of one behaves as a list of two."""

import numpy as np
import pytest
import torch

from megatron_router_replay import engines
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import int32_base64, npy_base64, routes, sglang_result, tokens, vllm_output
from tests.unit.engines.test_streams import PROMPT as STREAM_PROMPT
from tests.unit.engines.test_streams import sglang_chunks, vllm_chunks

MODEL = engines.ModelRoutingInfo(num_layers=3, moe_layer_numbers=(1, 2, 3), num_experts=16, topk=2)
LENGTHS = [(7, 5), (4, 6), (9, 2)]


def rows(i):
    return routes(sum(LENGTHS[i]) - 1, 3, num_experts=16, topk=2, seed=i).astype(np.uint8)


def ids(i):
    prompt, output = LENGTHS[i]
    return tokens(prompt, seed=40 + i), tokens(output, seed=50 + i)


def usage(i):
    return {"prompt_tokens": LENGTHS[i][0], "completion_tokens": LENGTHS[i][1], "total_tokens": sum(LENGTHS[i])}


def vllm_completion(i, request):
    prompt, output = ids(i)
    choice = {"index": 0, "finish_reason": "length", "token_ids": output, "prompt_token_ids": prompt}
    return {
        "id": request,
        "object": "text_completion",
        "choices": [choice | {"routed_experts": npy_base64(rows(i))}],
        "usage": usage(i),
    }


def vllm_without_ids(i, request):
    choice = {"index": 0, "finish_reason": "length", "routed_experts": npy_base64(rows(i))}
    return {"id": request, "object": "chat.completion", "choices": [choice], "usage": usage(i)}


def vllm_object(i, request):
    output = vllm_output(rows(i), *ids(i))
    output.request_id = request
    return output


def sglang_generate(i, request):
    return sglang_result(rows(i), LENGTHS[i][0], ids(i)[1], request=request)


def sglang_chat(i, request):
    choice = {"index": 0, "finish_reason": "length"}
    return {
        "id": request,
        "object": "chat.completion",
        "choices": [choice],
        "usage": usage(i),
        "sglext": {"routed_experts": int32_base64(rows(i))},
    }


def jax_completion(i, request):
    choice = {"index": 0, "finish_reason": "length", "routed_experts": int32_base64(rows(i))}
    return {"id": request, "object": "text_completion", "choices": [choice], "usage": usage(i)}


FORMS = {
    "vllm completions": ("vllm", vllm_completion),
    "vllm without ids": ("vllm", vllm_without_ids),
    "vllm objects": ("vllm", vllm_object),
    "sglang generate": ("sglang", sglang_generate),
    "sglang chat": ("sglang", sglang_chat),
    "sglang_jax generate": ("sglang_jax", sglang_generate),
    "sglang_jax completions": ("sglang_jax", jax_completion),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("requests", [["a", "b", "c"], ["a", "a", "a"], ["a", "b", "a"], [None, None, None]])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_reply_of_a_list_is_a_sample(form, requests, count):
    engine, build = FORMS[form]
    replies = [build(i, requests[i]) for i in range(count)]
    trace = getattr(engines, engine).decode_batch(replies, model=MODEL)
    assert trace.sequence_lengths == tuple(sum(LENGTHS[i]) for i in range(count))
    for i, sample in enumerate(trace.samples()):
        assert torch.equal(sample.topk_indices[:-1], torch.from_numpy(rows(i)))
    nested = getattr(engines, engine).decode_batch([[reply] for reply in replies], model=MODEL)
    assert torch.equal(nested.topk_indices, trace.topk_indices)


@pytest.mark.parametrize("requests", [["a", "b", "c"], ["a", "a", "a"]])
@pytest.mark.parametrize("aborted", [0, 1, 2])
def test_an_aborted_reply_of_a_list_stays_a_sample(requests, aborted):
    replies = [sglang_generate(i, requests[i]) for i in range(3)]
    replies[aborted] = sglang_result(None, LENGTHS[aborted][0], [], request=requests[aborted], finish="abort")
    for engine in (engines.sglang, engines.sglang_jax):
        trace = engine.decode_batch(replies, model=MODEL)
        lengths = [sum(LENGTHS[i]) if i != aborted else LENGTHS[i][0] for i in range(3)]
        assert trace.sequence_lengths == tuple(lengths)
        for i, sample in enumerate(trace.samples()):
            assert bool(sample.replay_mask.any()) == (i != aborted)
    outputs = [vllm_object(i, requests[i]) for i in range(3)]
    outputs[aborted] = vllm_output(None, ids(aborted)[0], [], finish_reason="abort")
    assert engines.vllm.decode_batch(outputs, model=MODEL).sequence_lengths == tuple(lengths)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("requests", [["a", "b", "c"], ["a", "a", "a"]])
def test_a_reply_without_routes_raises_instead_of_being_left_out(form, lost, requests):
    engine, build = FORMS[form]
    replies = [build(i, requests[i]) for i in range(3)]
    reply = replies[lost]
    if "objects" in form:
        reply.outputs[0].routed_experts = None
    elif "choices" in reply:
        reply.pop("sglext", None)
        reply["choices"][0].pop("routed_experts", None)
    else:
        reply["meta_info"]["routed_experts"] = None
    with pytest.raises(PayloadError, match="missing"):
        getattr(engines, engine).decode_batch(replies, model=MODEL)


def test_streams_of_several_requests_in_one_list_are_told_apart_by_their_ids():
    for engine, chunks in (("vllm", vllm_chunks), ("sglang", sglang_chunks), ("sglang_jax", sglang_chunks)):
        together = [chunk for pair in zip(chunks(request="b"), chunks(request="a")) for chunk in pair]
        for result in (together, [chunks(request="b"), chunks(request="a")], [chunks(), chunks()]):
            trace = getattr(engines, engine).decode_batch(
                result, model=MODEL, prompt_token_ids=[STREAM_PROMPT, STREAM_PROMPT]
            )
            assert len(trace.sequence_lengths) == 2


def test_prompt_token_ids_are_one_prompt_for_all_or_one_a_sample():
    chunks = [*vllm_chunks(0), *vllm_chunks(1)]
    shared = engines.vllm.decode_batch(chunks, model=MODEL, prompt_token_ids=STREAM_PROMPT)
    each = engines.vllm.decode_batch(chunks, model=MODEL, prompt_token_ids=[STREAM_PROMPT] * 2)
    assert torch.equal(shared.token_ids, each.token_ids)
    with pytest.raises(PayloadError, match="3 prompt_token_ids for 2"):
        engines.vllm.decode_batch(chunks, model=MODEL, prompt_token_ids=[STREAM_PROMPT] * 3)


def test_a_list_of_one_behaves_as_a_list_of_two():
    """With usage and without ids it was refused, because it was read as a stream."""
    one = vllm_without_ids(0, "a")
    assert engines.vllm.decode_batch([one], model=MODEL).sequence_lengths == (12,)
    assert engines.vllm.decode([one], model=MODEL).sequence_lengths == (12,)
    assert engines.vllm.decode_batch([one, one], model=MODEL).sequence_lengths == (12, 12)
