"""Results -> replies: which forms are one result, the choices in the order of their index, streams that are incomplete."""

import copy
import json
import urllib.request

import numpy as np
import pytest
import torch

from megatron_router_replay import engines
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import (
    FORMS,
    all_moe,
    int32_base64,
    npy_base64,
    response,
    routes,
    sglang_result,
    sglang_stream,
    tokens,
    usage,
    vllm_choice,
    vllm_output,
    vllm_stream,
)

MODEL = all_moe(3, 16)
P, G = 7, 5
S = P + G
PROMPT = tokens(P)


def rows(index):
    """The prompt is the same for all, and so are its routes."""
    own, prompt = (routes(S - 1, 3, num_experts=16, topk=2, seed=seed) for seed in (index, 0))
    return np.concatenate([prompt[:P], own[P:]]).astype(np.uint8)


def output(index):
    return tokens(G, seed=20 + index)


def vllm_chunks(index=0, **options):
    return vllm_stream(rows(index), output(index), index=index, **options)


def sglang_chunks(index=None, **options):
    return sglang_stream(rows(index or 0), P, output(index or 0), index=index, **options)


def jax_chunks(index=0):
    choices = [{"index": index, "text": "x", "finish_reason": None} for _ in range(G - 1)]
    choices.append({"index": index, "finish_reason": "length", "routed_experts": int32_base64(rows(index))})
    return [{"id": "r", "choices": [choice], "usage": None} for choice in choices]


def check(trace, number=None):
    samples = list(trace.samples())
    assert number in (None, len(samples))
    for index, sample in enumerate(samples):
        assert torch.equal(sample.topk_indices[:-1], torch.from_numpy(rows(index)))
        assert sample.replay_mask.tolist() == [True] * (S - 1) + [False]
        if sample.token_ids is not None:
            assert sample.token_ids.tolist() == PROMPT + output(index)


def refused(message, call, *arguments, **options):
    with pytest.raises(PayloadError, match=message):
        call(*arguments, model=MODEL, **options)


@pytest.mark.parametrize("form", [form for form in FORMS if "request" in FORMS[form].__code__.co_varnames])
@pytest.mark.parametrize("requests", ["abc", "aaa"])
def test_a_list_is_results_for_decode_batch_and_one_stream_for_decode(form, requests):
    engine, lengths = getattr(engines, form.split()[0]), [(7, 5), (4, 6), (9, 2)]
    sent = [routes(p + g - 1, 3, num_experts=16, topk=2, seed=p).astype(np.uint8) for p, g in lengths]
    ids = [(tokens(p, seed=p), tokens(g, seed=g)) for p, g in lengths]
    replies = [FORMS[form](one, *each, request) for one, each, request in zip(sent, ids, requests)]
    trace = engine.decode_batch(replies, model=MODEL)
    assert trace.sequence_lengths == tuple(map(sum, lengths))
    for one, expected in zip(trace.samples(), sent, strict=True):
        assert torch.equal(one.topk_indices[:-1], torch.from_numpy(expected))
    # A list of one reply is a stream of one chunk.
    assert engine.decode(replies[:1], model=MODEL).topk_indices.equal(trace.topk_indices[: sum(lengths[0])])
    refused("MRR311: .*(several results|several requests)", engine.decode, replies)
    refused("MRR301: .*the list of results is empty", engine.decode_batch, [])


STREAMS = {
    "vllm": vllm_chunks(),
    "vllm, chunks of 2": vllm_chunks(size=2),
    "sglang": sglang_chunks(),
    "sglang incremental": sglang_chunks(incremental=True),
    "sglang incremental, chunks of 2": sglang_chunks(incremental=True, size=2),
    "sglang_jax completions": jax_chunks(),
}


def damaged(chunks, *, is_numbered, has_all):
    """Yield the list with a chunk lost, doubled, cut off, swapped or broken, unless nothing in it can reveal that.

    A chunk of all ids so far makes the earlier ones superfluous (`has_all`). Chunks without a number are equal but for ids.
    """
    last = len(chunks) - 1
    for i in range(len(chunks)):
        if not has_all or i == last:
            yield [*chunks[:i], *chunks[i + 1 :]]
        if not has_all:
            yield [*chunks[: i + 1], *chunks[i:]]
        yield [*chunks, chunks[i]]
        yield chunks[:i]
        if not has_all and i < last and (is_numbered or i == last - 1):
            yield [*chunks[: i + 1], chunks[i], *chunks[i + 2 :]]
    yield [chunks[0], None, *chunks[1:]]


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_complete_or_raises(name):
    engine, chunks = getattr(engines, name.split()[0].strip(",")), STREAMS[name]
    given = {"num_tokens": S} if "completions" in name else {"prompt_token_ids": PROMPT}
    check(engine.decode(chunks, model=MODEL, **given), 1)
    check(engine.decode_batch([chunks], model=MODEL, **{n: [v] for n, v in given.items()}), 1)
    refused("MRR311.*one result: give decode their list", engine.decode_batch, chunks)
    has_all = name == "sglang" or "completions" in name  # its text chunks have nothing that decode needs
    for changed in damaged(chunks, is_numbered="sglang" in name, has_all=has_all):
        refused("MRR3", engine.decode, changed, **given)


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 2, 0]])
def test_choices_come_sorted_by_their_index(order):
    whole = {"id": "r", "choices": [vllm_choice(rows(i), PROMPT, output(i), i) for i in order]}
    check(engines.vllm.decode_batch(whole, model=MODEL), 3)
    refused("MRR312: .*has 3 choices", engines.vllm.decode, whole)
    streams = {
        engines.vllm: [vllm_chunks(i) for i in range(3)],
        engines.sglang: [sglang_chunks(i, request=f"r{9 - i}", incremental=True) for i in range(3)],
        engines.sglang_jax: [jax_chunks(i) for i in range(3)],
    }
    for engine, parts in streams.items():
        given = {"num_tokens": [S] * 3} if engine is engines.sglang_jax else {"prompt_token_ids": PROMPT}
        in_turn = [stream[i] for i in range(G - 1) for stream in parts] + [parts[i][-1] for i in order]
        for chunks in (in_turn, [chunk for i in order for chunk in parts[i]]):
            check(engine.decode_batch([chunks], model=MODEL, **given), 3)


@pytest.mark.parametrize("indexes", [[0, 0], [0, None], [0, "1"], [False, True], [0, -1], [10**9000]])
def test_an_index_that_is_doubled_or_no_place_raises(indexes):
    choices = {"id": "r", "choices": [vllm_choice(rows(0), PROMPT, output(0), i) for i in indexes]}
    refused("MRR312: .*index", engines.vllm.decode_batch, choices)


def test_a_sample_of_n_may_be_decoded_alone_and_bad_ones_dropped():
    choices = [vllm_choice(rows(i), PROMPT, output(i), i) for i in range(4)]
    alone = [{"id": "r", "choices": [choice]} for choice in choices]  # one dict a sample
    for i in (3, 0, 2):
        trace = engines.vllm.decode(alone[i], model=MODEL)
        assert trace.token_ids.tolist() == PROMPT + output(i)
        assert torch.equal(trace.topk_indices[:-1], torch.from_numpy(rows(i)))
    for some in ([3], [0, 2], [1, 2, 3], [3, 1, 2]):
        kept = engines.vllm.decode_batch({"id": "r", "choices": [choices[i] for i in some]}, model=MODEL)
        assert kept.token_ids.tolist() == [id for i in sorted(some) for id in PROMPT + output(i)], "by index"
        listed = engines.vllm.decode_batch([alone[i] for i in some], model=MODEL)
        assert listed.token_ids.tolist() == [id for i in some for id in PROMPT + output(i)], "in the list's order"
    refused("MRR312: .*has 2 choices", engines.vllm.decode, [alone[1], alone[3]])
    # SGLang lists ids in the response, by the index of each choice.
    meta = {"index": 3, "finish_reason": "length", "meta_info": {"routed_experts": int32_base64(rows(1))}}
    one = {"id": "r", "choices": [meta], "sglext": {"output_ids": [output(1)]}}
    assert engines.sglang.decode(one, model=MODEL, prompt_token_ids=PROMPT).token_ids.tolist() == PROMPT + output(1)
    two = one | {"choices": [meta | {"index": 0}, meta], "sglext": {"output_ids": [output(0), output(1)]}}
    refused("MRR312: .*2 lists of output ids for 2 choices: is one lost", engines.sglang.decode_batch, two)


def test_a_usage_that_counts_more_tokens_than_the_choices_have_lost_one():
    choices = [vllm_choice(rows(i), PROMPT, output(i), i) for i in range(3)]
    whole = {"id": "r", "choices": choices, "usage": usage(P, 3 * G)}
    check(engines.vllm.decode_batch(whole, model=MODEL), 3)
    for some in ([0, 1], [0, 2], [1, 2]):
        reply = whole | {"choices": [choices[i] for i in some]}
        refused(
            f"MRR312: .*usage.completion_tokens={3 * G}, but its 2 choices have {2 * G}",
            engines.vllm.decode_batch,
            reply,
        )
    refused("MRR309: .*usage.completion_tokens=15.*a choice", engines.vllm.decode, whole | {"choices": choices[2:]})
    # Without ids, a count of each choice is enough; without either nothing can be said.
    metas = [{"index": i, "finish_reason": "length", "meta_info": {"completion_tokens": G}} for i in (0, 1)]
    for meta in metas:
        meta["meta_info"] |= {"routed_experts": int32_base64(rows(0)), "prompt_tokens": P}
    reply = {"choices": metas, "usage": usage(P, 3 * G)}
    refused("MRR312: .*usage", engines.sglang.decode_batch, reply)
    assert engines.sglang.decode_batch(reply | {"usage": usage(P, 2 * G)}, model=MODEL).num_tokens == 2 * S
    del metas[0]["meta_info"]["completion_tokens"]
    assert engines.sglang.decode_batch(reply, model=MODEL, num_tokens=[S, S]).num_tokens == 2 * S


def test_a_stream_that_lost_all_chunks_of_a_choice_raises():
    chunks = [chunk for i in (0, 2) for chunk in vllm_chunks(i)]
    refused("MRR312: .*of this stream have index", engines.vllm.decode_batch, [chunks], prompt_token_ids=PROMPT)


def test_a_choice_without_its_response_is_a_sample_wherever_it_was():
    choices = [vllm_choice(rows(i), PROMPT, output(i), i) for i in (0, 1)]
    turned = engines.vllm.decode_batch(choices[::-1], model=MODEL)
    assert torch.equal(turned.topk_indices[: S - 1], torch.from_numpy(rows(1)))  # the order of the list
    assert engines.vllm.decode(choices[1], model=MODEL).token_ids.tolist() == PROMPT + output(1)
    completion = vllm_output(rows(0), PROMPT, output(0)).outputs[0]  # a Python object
    check(engines.vllm.decode(completion, model=MODEL, prompt_token_ids=PROMPT), 1)


def test_chunks_of_several_requests_are_refused():
    chunks = sglang_chunks(0, request=None, incremental=True)
    check(engines.sglang.decode(chunks, model=MODEL, prompt_token_ids=PROMPT))
    chunks[2]["meta_info"]["id"] = "another"
    refused("are of several requests", engines.sglang.decode, chunks, prompt_token_ids=PROMPT)
    both = [chunk for pair in zip(vllm_chunks(request="a"), vllm_chunks(1, request="b")) for chunk in pair]
    refused("are of several requests", engines.vllm.decode_batch, [both], prompt_token_ids=PROMPT)


def test_the_parts_of_a_stream_agree_about_prompt_routes_and_counts():
    chunks = vllm_chunks()
    for chunk in chunks:
        chunk["choices"][0]["prompt_token_ids"] = list(PROMPT)
    check(engines.vllm.decode(chunks, model=MODEL))
    for place in range(G - 1):
        changed = copy.deepcopy(chunks)
        changed[place]["choices"][0]["prompt_token_ids"][-1] += 1
        refused("different prompt_token_ids", engines.vllm.decode, changed)
        changed = sglang_chunks(incremental=True)
        changed[place]["meta_info"]["prompt_tokens"] = P + 1
        refused("prompt_tokens", engines.sglang.decode, changed, prompt_token_ids=PROMPT)
    chunks[-2]["choices"][0]["routed_experts"] = npy_base64(rows(1))
    refused("two parts of it carry routes", engines.vllm.decode, chunks)
    end = {"request_id": "r", "choices": [], "usage": usage(P, G)}
    check(engines.vllm.decode([*vllm_chunks(), end], model=MODEL, prompt_token_ids=PROMPT))
    end["usage"] = usage(P, G - 1)
    refused("usage", engines.vllm.decode, [*vllm_chunks(), end], prompt_token_ids=PROMPT)
    chunks = vllm_chunks()
    for number, chunk in enumerate(chunks, 1):  # continuous_usage_stats: each counts the tokens so far
        chunk["usage"] = usage(P, number)
    check(engines.vllm.decode(chunks, model=MODEL, prompt_token_ids=PROMPT))
    chunks = sglang_chunks()
    chunks[-1]["meta_info"] |= {"completion_tokens": None, "finish_reason": {"type": "stop"}}
    refused("A chunk is lost or came twice", engines.sglang.decode, chunks, prompt_token_ids=PROMPT)
    chunks = vllm_chunks()
    chunks[1]["choices"][0]["token_ids"] = None
    refused("MRR311: .*chunk 1 of the stream has the ids None", engines.vllm.decode, chunks, prompt_token_ids=PROMPT)


def test_an_aborted_reply_without_output_has_no_routes_and_one_with_output_must():
    aborted = vllm_output(None, PROMPT, [], finish_reason="abort")
    assert engines.vllm.decode(aborted, model=MODEL).replay_mask.tolist() == [False] * P
    without_ids = engines.sglang.decode(sglang_result(None, P, [], finish="abort"), model=MODEL)
    assert (without_ids.token_ids, without_ids.sequence_lengths) == (None, (P,))
    replies = [vllm_output(rows(0), PROMPT, output(0)), aborted]
    assert engines.vllm.decode_batch(replies, model=MODEL).sequence_lengths == (S, P)
    # It had no weights either, whose names the caller gives numbers to.
    replies[0].outputs[0].weight_versions = [{"version": "a", "start": 0, "end": G}]
    versions = engines.vllm.decode_batch(replies, model=MODEL, weight_version={"a": 7}).weight_version
    assert versions.tolist() == [7] * S + [-1] * P
    for ids, reason in (([5], "abort"), ([5, 6], "abort"), ([], "length")):
        lost = vllm_output(None, PROMPT, ids, finish_reason=reason)
        refused("missing, though the model has MoE layers", engines.vllm.decode, lost)
        refused("of sample 1, request r0: missing", engines.vllm.decode_batch, [replies[0], lost])
    choices = [vllm_choice(rows(i), PROMPT, output(i), i, routed_experts=None) for i in (0, 1)]
    refused("of choice 0, request 7: missing", engines.vllm.decode_batch, {"id": 7, "choices": choices})


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"prompt_tokens": P + 1}, f"meta_info.prompt_tokens={P + 1}, but {P} prompt tokens"),
        ({"completion_tokens": G - 1}, f"meta_info.completion_tokens={G - 1}, but {G} output tokens"),
        (
            {"finish_reason": {"type": "length", "length": G + 1}},
            f"finish_reason.length={G + 1}, but {G} output tokens",
        ),
        ({"prompt_tokens": -1}, "prompt_tokens is -1"),
    ],
)
def test_a_count_that_a_reply_states_equals_the_tokens(meta, message):
    """Every place that states one; `test_tokens` has the rule."""
    given = {"prompt_token_ids": PROMPT}
    refused(f"MRR309: .*{message}", engines.sglang.decode, sglang_result(rows(0), P, output(0), **meta), **given)
    reply = response(PROMPT, output(0), routed_experts=npy_base64(rows(0)))
    check(engines.vllm.decode(reply, model=MODEL), 1)
    refused("MRR309: .*usage", engines.vllm.decode, reply | {"usage": usage(P, G + 1)})


# Results that are no reply


async def coroutine():
    return {}


Response = type("Response", (), {"status_code": 200, "json": lambda self: {}})  # as requests' and httpx'


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "MRR301: .*the result is None"),
        ({"error": {"message": "overloaded", "code": 503}}, "MRR301: .*an error of the server: .*'overloaded'"),
        ({"object": "error", "message": "too long"}, "MRR301: .*an error of the server: 'too long'"),
        ({"detail": [{"msg": "field required"}]}, "MRR301: .*an error of the server: .*field required"),
        (json.dumps([{"text": ""}]), "MRR301: .*the text .* parse JSON first"),
        (json.dumps({"choices": []}).encode(), "MRR301: .*the text .* parse JSON first"),
        ('data: {"choices": []}', "MRR301: .*the text .* of a stream each chunk"),
        (b"Internal Server Error", "MRR301: .*the text b'Internal Server Error'"),
        (urllib.request.urlopen("data:application/json,{}"), r"MRR301: .*a response of HTTP: parse JSON first"),
        (Response(), "MRR301: .*a Response, a response of HTTP: parse JSON first, with response.json"),
        ({"choices": []}, "MRR301: .*has no choices"),
        ({"choices": None}, "MRR301: .*choices are NoneType"),
        ({"choices": [{"index": 0, "finish_reason": None}]}, "MRR311: .*ends before index .0. is finished"),
        (7, "MRR310: .*cannot read routes from int"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_result_that_is_no_reply_gets_its_own_sentence(result, message):
    refused(message, engines.vllm.decode, result, num_tokens=4)
    refused(message, engines.vllm.decode_batch, [result], num_tokens=[4])


def test_a_reply_without_routes_names_the_switches_and_the_front_end_that_has_none():
    refused(
        "MRR302: .*Rust front end sends them on /inference/v1/generate alone",
        engines.vllm.decode,
        response(PROMPT, [5]),
    )
    message = "MRR302: .*return_routed_experts=true.*SGLANG_RUST_SERVER=1. carries no routes"
    refused(message, engines.sglang.decode, sglang_result(None, P, [5]))


def test_a_reply_without_ids_names_the_request_before_the_options():
    reply = response(PROMPT, output(0), ids=False, routed_experts=npy_base64(rows(0)), shared={"usage": None})
    message = (
        "MRR309: .*without token ids.*: send .return_token_ids.: true with the request, or pass the engine's own ids"
    )
    refused(message, engines.vllm.decode, reply)
    shared = {"sglext": {"routed_experts": int32_base64(rows(0))}, "usage": None}
    message = 'MRR309: .*without token ids.*: send "return_token_ids": true .OpenAI endpoints. with the request, or'
    refused(message, engines.sglang.decode, response(PROMPT, output(0), ids=False, shared=shared))
    # The generate endpoint has the ids of the output; the caller has the prompt's.
    reply["choices"][0]["token_ids"] = output(0)
    refused(
        "MRR309: .*ids of the output alone.*pass the prompt that you sent as prompt_token_ids",
        engines.vllm.decode,
        reply,
    )
    refused(
        "MRR309: .*without token ids.*: pass the engine's own ids",
        engines.megatron.decode,
        {"routing_indices": rows(0)},
    )


def test_a_coroutine_was_not_awaited():
    pending = coroutine()
    refused("MRR301: .*a coroutine that was not awaited", engines.vllm.decode, pending, num_tokens=4)
    pending.close()
