"""Every form of every engine: how many rows are legal, whose counts they must equal; lists of which no reply is lost."""

import numpy as np
import pytest
import torch

from megatron_router_replay import engines
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import (
    FORMS,
    all_moe,
    decode,
    npy_base64,
    response,
    routes,
    sglang_result,
    tokens,
    usage,
    vllm_output,
)
from tests.unit.engines.test_streams import PROMPT as STREAM_PROMPT
from tests.unit.engines.test_streams import sglang_chunks, vllm_chunks

MODEL = all_moe(3, 16)
P, G = 7, 5
S = P + G
PROMPT, OUTPUT = tokens(P), tokens(G, seed=2)
IDS = PROMPT + OUTPUT
ROWS = routes(S + 4, 3, num_experts=16, topk=2).astype(np.uint8)
SENT = ROWS[: S - 1]
EXACT = [form for form in FORMS if form != "transformers hooks"]  # which sees full forwards


def rows_of(form, num_rows, **options):
    start = options.get("start", 0)
    return decode(form, ROWS[start : start + num_rows], PROMPT, OUTPUT, model=MODEL, **options)


@pytest.mark.parametrize("form", EXACT)
@pytest.mark.parametrize("start", [0, 1, 3, S - 2, S - 1])
def test_exactly_s_minus_1_minus_start_rows_are_legal(form, start):
    legal = S - 1 - start
    trace = rows_of(form, legal, start=start)
    assert trace.replay_mask.tolist() == [False] * start + [True] * legal + [False]
    assert torch.equal(trace.topk_indices[start:-1].int(), torch.from_numpy(ROWS[start : S - 1]).int())
    # One row more or less is a shift: a lost token, a start that is off by one, ids without BOS.
    if form != "nemo_gym item":  # which may have a row of the last token, if it is filler
        with pytest.raises(PayloadError, match=rf"{legal + 1} rows|bytes"):
            rows_of(form, legal + 1, start=start)
    for wrong in {0, 1, legal - 1, legal + 2} - {legal, legal + 1, -1}:
        with pytest.raises(PayloadError, match=rf"{wrong} rows|bytes"):
            rows_of(form, wrong, start=start)


@pytest.mark.parametrize("form", [form for form in EXACT if not form.startswith(("megatron", "nemo_gym"))])
@pytest.mark.parametrize("surplus", [2, 4])  # 12 rows of 3 layers could be 18 of 2, in bytes without a shape
def test_surplus_rows_are_dropped_only_when_asked(form, surplus):
    with pytest.raises(PayloadError):
        rows_of(form, S - 1 + surplus)
    trace = rows_of(form, S - 1 + surplus, allow_surplus_rows=True)
    assert trace.replay_mask.tolist() == [True] * (S - 1) + [False]
    with pytest.raises(PayloadError):
        rows_of(form, S - 2, allow_surplus_rows=True)


@pytest.mark.parametrize("form", ["vllm object", "sglang generate", "megatron request", "tensorrt_llm object"])
@pytest.mark.parametrize("num_rows", [P - 1, P])
def test_a_prompt_alone_may_have_a_row_for_its_last_token(form, num_rows):
    trace = decode(form, ROWS[:num_rows], PROMPT, [], model=MODEL)
    assert trace.replay_mask.tolist() == [True] * num_rows + [False] * (P - num_rows)


@pytest.mark.parametrize(("prompt", "generation", "legal"), [
    (P, G - 1, True), (P, G, True), (P, G - 2, False), (P, G + 1, False), (P - 1, G, False), (P - 1, G + 1, False),
    (P + 1, G - 1, False), (P + 1, G - 2, False), (0, S - 1, False),
])  # fmt: skip
def test_vllm_0_21_has_p_rows_and_g_minus_1_or_g(prompt, generation, legal):
    parts = ROWS[P : P + generation].astype(np.int16), ROWS[:prompt].astype(np.int16)
    output = vllm_output(parts[0], PROMPT, OUTPUT, prompt_array=parts[1])
    if not legal:
        with pytest.raises(PayloadError):
            engines.vllm.decode(output, model=MODEL)
        return
    trace = engines.vllm.decode(output, model=MODEL)
    assert trace.replay_mask.tolist() == [True] * (S - 1) + [False]
    assert torch.equal(trace.topk_indices[:-1], torch.from_numpy(SENT))


def test_an_aborted_sample_without_ids_has_only_rows_without_a_route():
    trace = engines.sglang.decode(sglang_result(None, P, [], finish="abort"), model=MODEL)
    assert (trace.token_ids, trace.sequence_lengths, bool(trace.replay_mask.any())) == (None, (P,), False)
    assert all(len(set(route)) == 2 for route in trace.topk_indices[:, 0].tolist())


@pytest.mark.parametrize("form", ["vllm array", "sglang array", "megatron array", "array array"])
def test_the_trace_keeps_no_buffer_of_the_caller(form):
    ids, rows = np.array(IDS, np.int32), SENT.copy()
    trace = decode(form, rows, PROMPT, OUTPUT, model=MODEL, token_ids=ids)
    before = trace.token_ids.clone(), trace.topk_indices.clone()
    ids += 1
    rows[:] = rows[:, :, ::-1].copy()
    assert torch.equal(trace.token_ids, before[0])
    assert torch.equal(trace.topk_indices, before[1])


# Lists: every reply is a sample, and replies are no stream

LENGTHS = [(7, 5), (4, 6), (9, 2)]
LISTED = [
    "vllm completions", "vllm without ids", "vllm object", "sglang generate", "sglang openai", "sglang_jax generate",
    "sglang_jax completions",
]  # fmt: skip


def sample(i):
    prompt, output = LENGTHS[i]
    rows = routes(prompt + output - 1, 3, num_experts=16, topk=2, seed=i).astype(np.uint8)
    return rows, tokens(prompt, seed=40 + i), tokens(output, seed=50 + i)


def replies(form, requests):
    return [FORMS[form](*sample(i), request) for i, request in enumerate(requests)]


@pytest.mark.parametrize("form", LISTED)
@pytest.mark.parametrize("requests", ["a", "abc", "aaa", "aba", [None, None, None]])
def test_every_reply_of_a_list_is_a_sample(form, requests):
    decode_batch, listed = getattr(engines, form.split()[0]).decode_batch, replies(form, requests)
    trace = decode_batch(listed, model=MODEL)
    assert trace.sequence_lengths == tuple(map(sum, LENGTHS[: len(requests)]))
    for i, one in enumerate(trace.samples()):
        assert torch.equal(one.topk_indices[:-1], torch.from_numpy(sample(i)[0]))
    assert torch.equal(decode_batch([[reply] for reply in listed], model=MODEL).topk_indices, trace.topk_indices)
    for reply in listed if "object" not in form else ():  # a reply that says nothing of its end is whole
        (reply["choices"][0] if "choices" in reply else reply["meta_info"]).pop("finish_reason")
    assert torch.equal(decode_batch(listed, model=MODEL).topk_indices, trace.topk_indices)


@pytest.mark.parametrize("requests", ["abc", "aaa"])
@pytest.mark.parametrize("aborted", [0, 1, 2])
def test_an_aborted_reply_of_a_list_stays_a_sample(requests, aborted):
    lengths = tuple(sum(size) if i != aborted else size[0] for i, size in enumerate(LENGTHS))
    listed = replies("sglang generate", requests)
    listed[aborted] = sglang_result(None, LENGTHS[aborted][0], [], request=requests[aborted], finish="abort")
    outputs = replies("vllm object", requests)
    outputs[aborted] = vllm_output(None, sample(aborted)[1], [], finish_reason="abort")
    for engine, results in ((engines.sglang, listed), (engines.sglang_jax, listed), (engines.vllm, outputs)):
        trace = engine.decode_batch(results, model=MODEL)
        assert trace.sequence_lengths == lengths
        assert [bool(one.replay_mask.any()) for one in trace.samples()] == [i != aborted for i in range(3)]


@pytest.mark.parametrize("form", LISTED)
@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("requests", ["abc", "aaa"])
def test_a_reply_without_routes_raises_instead_of_being_left_out(form, lost, requests):
    listed = replies(form, requests)
    reply = listed[lost]
    if "object" in form:
        reply.outputs[0].routed_experts = None
    elif "choices" in reply:
        reply.pop("sglext", None)
        reply["choices"][0].pop("routed_experts", None)
    else:
        reply["meta_info"]["routed_experts"] = None
    with pytest.raises(PayloadError, match="missing"):
        getattr(engines, form.split()[0]).decode_batch(listed, model=MODEL)


def test_streams_of_several_requests_are_lists_of_their_own():
    for engine, chunks in (("vllm", vllm_chunks), ("sglang", sglang_chunks), ("sglang_jax", sglang_chunks)):
        decode_batch, streams = getattr(engines, engine).decode_batch, [chunks(request="b"), chunks(request="a")]
        for prompts in (STREAM_PROMPT, [STREAM_PROMPT, STREAM_PROMPT]):  # one for all, or one a sample
            assert len(decode_batch(streams, model=MODEL, prompt_token_ids=prompts).sequence_lengths) == 2
        for together in (streams[0] + streams[1], [chunk for pair in zip(*streams) for chunk in pair]):
            with pytest.raises(PayloadError, match=r"several requests|came twice"):
                decode_batch(together, model=MODEL, prompt_token_ids=STREAM_PROMPT)


# Stated counts: every one equals the tokens it is used for; `test_tokens` has the rule, here is who reads what


def vllm_reply(**fields):
    return response(PROMPT, OUTPUT, "a", routed_experts=npy_base64(SENT), **fields)


def sglang_reply(**meta):
    result = sglang_result(SENT, P, OUTPUT)
    result["meta_info"] |= meta
    return result


def weights(end):
    return [{"version": "1", "start": 0, "end": end}]


def count_refused(field, engine, result, **options):
    with pytest.raises(PayloadError, match=field):
        getattr(engines, engine).decode(result, model=MODEL, **options)


STATED = [
    ("vllm", r"usage\.(prompt|completion)_tokens", lambda p, g: vllm_reply() | {"usage": usage(p, g)}),
    ("vllm", "weight_versions", lambda p, g: vllm_reply() | {"weight_versions": weights(g)}),
    ("vllm", "weight_versions", lambda p, g: vllm_reply(weight_versions=weights(g))),
    ("sglang", "weight_versions", lambda p, g: sglang_reply(weight_versions=weights(g))),
    ("sglang", r"finish_reason\.length",
     lambda p, g: sglang_reply(completion_tokens=None, finish_reason={"type": "length", "length": g})),
    *((engine, r"meta_info\.(prompt|completion)_tokens",
       lambda p, g: sglang_reply(prompt_tokens=p, completion_tokens=g)) for engine in ("sglang", "sglang_jax")),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "field", "reply"), STATED)
@pytest.mark.parametrize("options", [{"token_ids": IDS}, {"prompt_token_ids": PROMPT}], ids=["ids", "prompt"])
def test_a_stated_count_equals_the_tokens(engine, field, reply, options):
    assert len(getattr(engines, engine).decode(reply(P, G), model=MODEL, **options)) == S
    for counts in ((P - 1, G), (P + 1, G), (P, G - 1), (P, G + 1), (P + 1, G - 1), (P - 1, G + 1)):
        if reply(*counts) != reply(P, G):
            count_refused(field, engine, reply(*counts), **options)


def test_where_the_prompt_of_a_callers_ids_ends_the_reply_says():
    without_ids = response(PROMPT, OUTPUT, "a", ids=False, routed_experts=npy_base64(SENT))
    without_ids["usage"] = usage(P + 1, G - 1)
    assert len(engines.vllm.decode(without_ids, model=MODEL, token_ids=IDS)) == S
    count_refused(r"usage\.prompt_tokens", "vllm", without_ids, token_ids=IDS, prompt_token_ids=PROMPT)


@pytest.mark.parametrize("value", ["7", 7.0, True, -1, [7]])
def test_a_count_that_is_none_is_refused(value):
    count_refused("prompt_tokens", "vllm", vllm_reply() | {"usage": {"prompt_tokens": value}})
    count_refused("prompt_tokens", "sglang", sglang_result(SENT, value, OUTPUT), token_ids=IDS)
