"""Replies of the right shape that lie, in every engine's form: what the data shows is refused, and nothing else is."""

import base64
import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_router_replay import engines
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import all_moe, envelope, npy_base64, routes, sglang_result, tokens, vllm_output
from tests.unit.engines.engine_payloads import decode as decode_form

L, E, K = 6, 32, 2
MODEL = all_moe(L, E, K)
P, G = 20, 21
S = P + G
PROMPT, OUTPUT = tokens(P), tokens(G, seed=2)
IDS = PROMPT + OUTPUT
GOOD = routes(S - 1, L, num_experts=E, topk=K).astype(np.int32)


FORMS = [
    "vllm object", "sglang generate", "sglang_jax completions", "megatron request", "tensorrt_llm choice",
    "transformers hooks", "lmdeploy object", "nemo_gym item", "array array",
]  # fmt: skip


def decode(form, rows, **options):
    return decode_form(form, rows, PROMPT, OUTPUT, model=options.pop("model", MODEL), **options)


def changed(where, value):
    rows = GOOD.copy()
    rows[where] = value
    return rows


LIES = {
    "lost": (range(P), changed(slice(0, P), 0), r"120 routes are all zero.* rows 0\.\.19"),
    "absent": ([4, 5], changed([4, 5], -1), r"2 rows 4\.\.5.* are -1 in every layer"),
}


@pytest.mark.parametrize("form", ["sglang generate", "sglang_jax completions"])
def test_bytes_that_fit_a_different_number_of_layers_have_no_surplus_rows(form):
    # 40 rows of 6 layers are 48 rows of 5: taken as 8 surplus rows, all but the first would be another token's.
    model = all_moe(5, E, K)
    with pytest.raises(PayloadError, match=r"MRR305: .*has 48 rows .*6 layers fit them as well as the config's 5"):
        decode(form, GOOD, model=model, allow_surplus_rows=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lie", LIES)
def test_a_reply_that_lies_is_refused_or_live_and_said_where_that_is_allowed(form, lie, caplog):
    missing, rows, message = LIES[lie]
    with pytest.raises(PayloadError, match=message):
        decode(form, rows)
    with caplog.at_level(logging.WARNING):
        trace = decode(form, rows, missing="live")
    assert (~trace.replay_mask).nonzero()[:, 0].tolist() == [*missing, S - 1]
    kept = [row for row in range(S - 1) if row not in missing]
    assert torch.equal(trace.topk_indices[kept].int(), torch.from_numpy(GOOD[kept]))
    assert "missing='live'" in caplog.text
    for row in missing:  # distinct experts, spread
        assert len(set(trace.topk_indices[row, 0].tolist())) == K
    assert str(len(missing)) in caplog.text


def without_routes(reply):
    reply.outputs[0].routed_experts = None
    return reply


BAD_SAMPLES = {
    "an id that is no expert's": lambda: vllm_output(changed([3], E), PROMPT, OUTPUT),
    "a row too few": lambda: vllm_output(GOOD[:-1], PROMPT, OUTPUT),
    "a layer too few": lambda: vllm_output(GOOD[:, 1:], PROMPT, OUTPUT),
    "a payload that was cut": lambda: vllm_output(npy_base64(GOOD)[:-5], PROMPT, OUTPUT),
    "no routes": lambda: without_routes(vllm_output(GOOD, PROMPT, OUTPUT)),
}


@pytest.mark.parametrize("fault", BAD_SAMPLES)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_live_router_decides_a_sample_that_is_refused_and_no_other(fault, place, caplog):
    """AReaL's and NeMo-RL's users: one bad reply must not end a run, where the caller allows it."""
    replies = [vllm_output(GOOD, PROMPT, OUTPUT) for _ in range(3)]
    replies[place] = BAD_SAMPLES[fault]()
    with pytest.raises(PayloadError) as raised:
        engines.vllm.decode_batch(replies, model=MODEL)
    with caplog.at_level(logging.WARNING):
        samples = list(engines.vllm.decode_batch(replies, model=MODEL, missing="live", weight_version=7).samples())
    assert f"sample {place}" in caplog.text
    assert f"{raised.value.code}:" in caplog.text
    assert "The live router decides this sample" in caplog.text
    for number, sample in enumerate(samples):
        assert sample.replay_mask.tolist() == [number != place] * (S - 1) + [False]
        assert sample.token_ids.tolist() == IDS
        assert set(sample.weight_version[:-1].tolist()) == {-1 if number == place else 7}
        assert all(len(set(route)) == K for route in sample.topk_indices[:, 0].tolist())
        if number != place:
            assert torch.equal(sample.topk_indices[:-1].int(), torch.from_numpy(GOOD))
    for whole in (replies[place : place + 1], replies[place]):  # nothing in it has a route: that is no lost sample
        with pytest.raises(PayloadError, match=raised.value.code):
            engines.vllm.decode_batch(whole, model=MODEL, missing="live")


def test_a_sample_whose_tokens_disagree_is_refused_whatever_may_be_missing():
    """Nobody knows which tokens the live router would decide."""
    replies = [vllm_output(GOOD, PROMPT, OUTPUT) for _ in range(2)]
    with pytest.raises(PayloadError, match="do not end with the output"):
        engines.vllm.decode_batch(replies, model=MODEL, token_ids=[IDS, [*IDS[:-1], 1]], missing="live")


@pytest.mark.parametrize(
    "form", ["vllm object", "megatron request", "transformers hooks", "lmdeploy object", "array array"]
)
def test_uint8_of_a_model_of_more_than_256_experts_is_refused(form):
    model = all_moe(L, 300, K)
    with pytest.raises(PayloadError, match="ids are uint8, which cannot hold the ids of 300 experts"):
        decode(form, GOOD.astype(np.uint8), model=model)


def test_forwards_of_transformers_end_with_the_prompt():
    def seen(*sizes):
        parts = np.split(GOOD[: sum(sizes)], np.cumsum(sizes)[:-1])
        return {n: [torch.from_numpy(part[:, n - 1].copy()) for part in parts] for n in range(1, L + 1)}

    given = {"model": MODEL, "token_ids": IDS, "prompt_token_ids": PROMPT}
    for sizes in ((P, *[1] * (G - 1)), (8, P - 8, *[1] * (G - 1))):  # prefilled at once, or in two chunks
        assert engines.transformers.decode(seen(*sizes), **given).replay_mask.sum() == S - 1
    with pytest.raises(PayloadError, match=r"forwards of 21, 1, 1.* none of which ends with the prompt's 20 tokens"):
        engines.transformers.decode(seen(P + 1, *[1] * (G - 2)), **given)


# What is sent


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_sglangs_narrow_wire(dtype):
    reply = sglang_result(GOOD, P, OUTPUT)
    text = base64.b64encode(GOOD.astype(dtype).tobytes()).decode()
    reply["meta_info"] |= {"routed_experts": text, "routed_experts_dtype": dtype}
    openai = {"choices": [{"index": 0}], "sglext": {"routed_experts": text, "routed_experts_dtype": dtype}}
    for result in (reply, openai):
        trace = engines.sglang.decode(result, model=MODEL, token_ids=IDS)
        assert torch.equal(trace.topk_indices[:-1].int(), torch.from_numpy(GOOD))
    if dtype != "int32":
        with pytest.raises(PayloadError, match=r"pass the whole reply|bytes are .* rows"):
            engines.sglang.decode(text, model=MODEL, token_ids=IDS)
    reply["meta_info"]["routed_experts_dtype"] = "float32"
    with pytest.raises(PayloadError, match="routed_experts_dtype is 'float32', expected one of int32, uint16, uint8"):
        engines.sglang.decode(reply, model=MODEL, token_ids=IDS)


def test_joined_prefill_and_decode_replies_never_believe_the_decoders_prompt():
    first = vllm_output(GOOD[:P].astype(np.uint8), PROMPT, [7])
    for rubbish in (0, 99, GOOD[20:40]):
        rows = GOOD.astype(np.uint8)
        rows[:P] = rubbish
        second = vllm_output(rows, PROMPT, OUTPUT)
        trace = engines.join_prefill_decode(first, second, engine=engines.vllm, model=MODEL, sample_id="a")
        assert torch.equal(trace.topk_indices[:-1].int(), torch.from_numpy(GOOD))
        assert trace.replay_mask.tolist() == [True] * (S - 1) + [False]
        assert (trace.token_ids.tolist(), trace.sample_ids) == (IDS, ("a",))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((GOOD[: P - 1], PROMPT[:-1], [7]), (GOOD, PROMPT, OUTPUT), "prompt of 19 tokens, the decode reply of 20"),
        ((GOOD[:P], [*PROMPT[:-1], 1], [7]), (GOOD, PROMPT, OUTPUT), "token 19 is"),
        (
            (GOOD[: P - 1], PROMPT, []),
            (GOOD, PROMPT, OUTPUT),
            "no route of prompt token 19: ask the prefill server for one",
        ),
        ((GOOD[:P], PROMPT, [7]), (GOOD[:-1], PROMPT, OUTPUT), "has 39 rows"),
        ((GOOD[:P], PROMPT, [7]), (changed(30, 0), PROMPT, OUTPUT), "all zero.* row 30"),
    ],
)
def test_replies_of_different_requests_are_not_joined(first, second, message):
    with pytest.raises(PayloadError, match=message):
        engines.join_prefill_decode(vllm_output(*first), vllm_output(*second), engine=engines.vllm, model=MODEL)


def test_nothing_proves_that_replies_without_ids_are_of_one_request():
    replies = [{"choices": [{"index": 0, "routed_experts": GOOD[:n]}], "usage": {"prompt_tokens": P, "completion_tokens": g}}
               for n, g in ((P, 1), (S - 1, G))]  # fmt: skip
    with pytest.raises(PayloadError, match="a turn has no token ids, so nothing proves"):
        engines.join_prefill_decode(*replies, engine=engines.vllm, model=MODEL)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
@pytest.mark.parametrize("last", [None, [-1, -1], [0, 1]])
def test_nemo_gyms_envelope_with_and_without_a_row_of_the_last_token(dtype, last):
    rows = GOOD if last is None else np.concatenate([GOOD, np.tile(last, (1, L, 1))])
    item = {"prompt_token_ids": PROMPT, "generation_token_ids": OUTPUT, "routed_experts": envelope(rows, dtype)}
    trace = engines.nemo_gym.decode(item, model=MODEL)
    assert torch.equal(trace.topk_indices[:-1].int(), torch.from_numpy(GOOD))
    assert engines.nemo_gym.decode(envelope(rows, dtype), model=MODEL, token_ids=IDS).replay_mask.sum() == S - 1
    assert engines.nemo_gym.decode_batch([item, item], model=MODEL).sequence_lengths == (S, S)


@pytest.mark.parametrize("start", [0, 3])
def test_a_route_in_the_row_of_the_last_token_is_one_too_late_for_nemo_gym(start):
    rows = np.concatenate([GOOD[:1], GOOD])[: S - start]
    with pytest.raises(PayloadError, match=r"the last one is a route.* one too late"):
        engines.nemo_gym.decode(envelope(rows), model=MODEL, token_ids=IDS, start=start)
    rows[-1] = -1
    engines.nemo_gym.decode(envelope(rows), model=MODEL, token_ids=IDS, start=start)


def test_a_literal_envelope():
    model = engines.ModelRoutingInfo(num_layers=2, moe_layer_numbers=(2,), num_experts=8, topk=2)
    text = "nrlre1:int16:2x1x2:AQACAAMABAA="  # 1 0 2 0 3 0 4 0
    assert engines.nemo_gym.decode(text, model=model, num_tokens=3).topk_indices[:2].tolist() == [[[1, 2]], [[3, 4]]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nrlre2:int16:2x1x2:AAAA", "expected nrlre1"),
        ("nrlre1:float16:2x1x2:AAAA", "expected nrlre1"),
        (envelope(GOOD).replace(":40x", ":41x"), r"promises \[41, 6, 2\] int16 = 984 bytes, 960 follow"),
        (envelope(GOOD).replace("x6x", "x5x"), "promises"),
        (envelope(GOOD)[:-3], "not base64"),
        ("nrlre1:int16:2x0x2:", "has 0 layers"),
    ],
)
def test_envelopes_that_are_none_say_why(text, message):
    with pytest.raises(PayloadError, match=message):
        engines.nemo_gym.decode(text, model=MODEL, token_ids=IDS)


def test_dense_columns_of_lmdeploy_are_memory_that_nobody_wrote():
    model = engines.ModelRoutingInfo(num_layers=L + 1, moe_layer_numbers=tuple(range(2, L + 2)), num_experts=E, topk=K)
    rows = np.concatenate([np.full((S - 1, 1, K), 54321), GOOD], axis=1).astype(np.uint16)
    reply = SimpleNamespace(token_ids=OUTPUT, input_token_len=P, generate_token_len=G, routed_experts=rows, index=0)
    trace = engines.lmdeploy.decode(reply, model=model, prompt_token_ids=PROMPT)
    assert torch.equal(trace.topk_indices[:-1].int(), torch.from_numpy(GOOD))
    reply.input_token_len = P + 1
    with pytest.raises(PayloadError, match="input_token_len=21"):
        engines.lmdeploy.decode(reply, model=model, prompt_token_ids=PROMPT)


# Replies that are none


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "the result is None"),
        ({"error": {"message": "model overloaded", "code": 503}}, "answered with an error: .*'model overloaded'"),
        ({"object": "error", "message": "too long"}, "answered with an error: 'too long'"),
        ({"detail": [{"msg": "field required"}]}, "answered with an error: .*field required"),
        (json.dumps([{"text": ""}]), "is the text .* parse JSON first"),
        ('data: {"choices": []}', "is the text .* of a stream each chunk"),
        ("Internal Server Error", "is the text 'Internal Server Error'"),
        ("<html>", "is the text '<html>'"),
        (SimpleNamespace(status=200, read=bytes), "cannot read routes from SimpleNamespace.*not awaited"),
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt_llm", "nemo_gym"])
def test_what_is_no_reply_gets_its_own_sentence(engine, result, message):
    module = getattr(engines, engine)
    for call in (
        lambda: module.decode(result, model=MODEL, num_tokens=4),
        lambda: module.decode_batch([result], model=MODEL, num_tokens=[4]),
    ):
        with pytest.raises(PayloadError, match=message):
            call()


def test_what_is_no_model_says_what_is_one():
    with pytest.raises(PayloadError, match=r"got Linear. A Megatron-Core model is read by mcore.routing_info"):
        engines.vllm.decode(GOOD, model=torch.nn.Linear(1, 1), token_ids=IDS)
    with pytest.raises(
        PayloadError, match=r"no such file or folder here\. The id of a model on a hub is not looked up"
    ):
        engines.vllm.decode(GOOD, model="Qwen/Qwen3-30B-A3B", token_ids=IDS)
