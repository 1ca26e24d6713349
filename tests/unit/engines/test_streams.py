"""Streams with a missing, repeated or broken chunk raise; choices are placed by their index, whatever arrives first."""

import contextlib
import copy

import numpy as np
import pytest
import torch

from megatron_router_replay import engines
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import (
    all_moe,
    choice_of,
    int32_base64,
    npy_base64,
    routes,
    sglang_stream,
    tokens,
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


def jax_choice_chunks(index):
    choices = [{"index": index, "text": "x", "finish_reason": None} for _ in range(G - 1)]
    choices.append({"index": index, "finish_reason": "length", "routed_experts": int32_base64(rows(index))})
    return [{"id": "r", "choices": [choice], "usage": None} for choice in choices]


STREAMS = {
    "vllm": ("vllm", vllm_chunks()),
    "vllm, chunks of 2": ("vllm", vllm_chunks(size=2)),
    "sglang cumulative": ("sglang", sglang_chunks()),
    "sglang incremental": ("sglang", sglang_chunks(incremental=True)),
    "sglang incremental, chunks of 2": ("sglang", sglang_chunks(incremental=True, size=2)),
    "sglang_jax incremental": ("sglang_jax", sglang_chunks(incremental=True)),
}


def decode(engine, chunks, **options):
    return getattr(engines, engine).decode(chunks, model=MODEL, prompt_token_ids=PROMPT, **options)


def check(trace):
    for index, sample in enumerate(trace.samples()):
        assert torch.equal(sample.topk_indices[:-1], torch.from_numpy(rows(index)))
        assert sample.replay_mask.tolist() == [True] * (S - 1) + [False]
        if sample.token_ids is not None:
            assert sample.token_ids.tolist() == PROMPT + output(index)


def broken(chunks):
    for i in range(len(chunks)):
        yield f"chunk {i} missing", [*chunks[:i], *chunks[i + 1 :]]
        yield f"chunk {i} repeated", [*chunks[: i + 1], *chunks[i:]]
        yield f"chunk {i} repeated at the end", [*chunks, chunks[i]]
        yield f"cut before chunk {i}", chunks[:i]
    for i in range(len(chunks) - 1):
        yield f"chunk {i} instead of {i + 1}", [*chunks[: i + 1], chunks[i], *chunks[i + 2 :]]
    for junk in (None, "cut", {}, [], 3):
        yield f"{junk!r} in the middle", [chunks[0], junk, *chunks[1:]]


@pytest.mark.parametrize("stream", STREAMS)
def test_a_stream_is_right_or_raises_whichever_chunk_is_missing_repeated_or_broken(stream):
    engine, chunks = STREAMS[stream]
    check(decode(engine, chunks))
    # vLLM's chunks have no number of their own: one that replaces its neighbour changes ids, never their number.
    unseen = [f"chunk {i} instead of {i + 1}" for i in range(len(chunks) - 2)] if engine == "vllm" else []
    for name, changed in broken(chunks):
        if name not in unseen:
            with contextlib.suppress(PayloadError):
                check(decode(engine, changed))


@pytest.mark.parametrize(("engine", "chunks"), [("vllm", vllm_chunks()), ("sglang", sglang_chunks(incremental=True))])
def test_a_chunk_whose_ids_are_broken_raises(engine, chunks):
    for junk in (None, "5", 5, [1.5], ["a"]):
        changed = copy.deepcopy(chunks)
        place = changed[1]["choices"][0] if engine == "vllm" else changed[1]
        place["token_ids" if engine == "vllm" else "output_ids"] = junk
        with pytest.raises(PayloadError):
            decode(engine, changed)


def test_the_usage_and_weight_versions_of_the_last_chunk_count():
    for field, value in (
        ("usage", {"prompt_tokens": P, "completion_tokens": G + 1, "total_tokens": S + 1}),
        ("weight_versions", [{"version": "1", "start": 0, "end": G + 1}]),
    ):
        chunks = copy.deepcopy(vllm_chunks())
        (chunks[-1] if field == "usage" else chunks[-1]["choices"][0])[field] = value
        with pytest.raises(PayloadError, match=field):
            decode("vllm", chunks)
    end = {"request_id": "r", "choices": [], "usage": {"prompt_tokens": P, "completion_tokens": G, "total_tokens": S}}
    assert len(decode("vllm", [*vllm_chunks(), end])) == S
    end["usage"]["completion_tokens"] = G - 1
    with pytest.raises(PayloadError, match="usage"):
        decode("vllm", [*vllm_chunks(), end])


ORDERS = [[0, 1, 2], [2, 1, 0], [1, 2, 0]]


def interleaved(streams, order):
    """The choices finish in this order, their chunks in turn before that."""
    merged = [stream[i] for i in range(G - 1) for stream in streams]
    return merged + [streams[i][-1] for i in order]


@pytest.mark.parametrize("order", ORDERS)
def test_choices_of_streams_are_placed_by_their_index(order):
    for arrive in (interleaved([vllm_chunks(i) for i in range(3)], order), [c for i in order for c in vllm_chunks(i)]):
        check(engines.vllm.decode_batch(arrive, model=MODEL, prompt_token_ids=PROMPT))
    for incremental in (True, False):
        streams = [sglang_chunks(i, request=f"r{9 - i}", incremental=incremental) for i in range(3)]
        for engine in (engines.sglang, engines.sglang_jax):
            for arrive in (interleaved(streams, order), [c for i in order for c in streams[i]]):
                check(engine.decode_batch(arrive, model=MODEL, prompt_token_ids=[PROMPT] * 3))
    streams = [jax_choice_chunks(i) for i in range(3)]
    check(engines.sglang_jax.decode_batch(interleaved(streams, order), model=MODEL, num_tokens=[S] * 3))


@pytest.mark.parametrize("order", ORDERS)
def test_choices_of_a_response_are_placed_by_their_index(order):
    whole = [choice_of(rows(i), PROMPT, output(i), i) for i in order]
    check(engines.vllm.decode_batch({"id": "r", "choices": whole}, model=MODEL))
    third = engines.vllm.decode({"id": "r", "choices": whole}, model=MODEL, choice=2)
    assert torch.equal(third.topk_indices[:-1], torch.from_numpy(rows(2)))
    whole = [{"index": i, "finish_reason": "length", "routed_experts": int32_base64(rows(i))} for i in order]
    check(engines.sglang_jax.decode_batch({"id": "r", "choices": whole}, model=MODEL, num_tokens=[S] * 3))
    whole = [sglang_chunks(i, request=f"r{i}")[-1] for i in order]
    check(engines.sglang.decode_batch(whole, model=MODEL, prompt_token_ids=[PROMPT] * 3))


@pytest.mark.parametrize(
    "indexes", [[0, 2], [1, 2], [0, 0], [0, None], [0, "1"], ["0", "1"], [0, True], [False, True], [0, -1]], ids=str
)
def test_an_index_that_is_lost_doubled_or_no_place_raises(indexes):
    choices = {"id": "r", "choices": [choice_of(rows(0), PROMPT, output(0), i) for i in indexes]}
    listed = [sglang_chunks(i)[-1] | {"index": index} for i, index in enumerate(indexes)]
    for call, result, options in (
        (engines.vllm.decode_batch, choices, {}),
        (engines.vllm.decode, choices, {"choice": 0}),
        (engines.sglang.decode_batch, listed, {"prompt_token_ids": PROMPT}),
    ):
        with pytest.raises(PayloadError, match="index"):
            call(result, model=MODEL, **options)


def test_bare_choices_in_another_order_are_not_guessed():
    choices = [choice_of(rows(i), PROMPT, output(i), i) for i in (1, 0)]
    with pytest.raises(PayloadError, match="index"):
        engines.vllm.decode_batch(choices, model=MODEL)
    check(engines.vllm.decode_batch(choices[::-1], model=MODEL))


@pytest.mark.parametrize("request_id", [np.zeros((2, 2)), torch.zeros(3), [1], {"a": 1}, 1.5], ids=str)
def test_a_request_id_of_any_kind_is_compared_and_nothing_else_raises(request_id):
    chunks = sglang_chunks(0, incremental=True)
    for chunk in chunks:
        chunk["meta_info"]["id"] = request_id
    engine_calls = [engine.decode_batch for engine in (engines.sglang, engines.sglang_jax)]
    for call in engine_calls:
        check(call(chunks, model=MODEL, prompt_token_ids=PROMPT))
    chunks[2]["meta_info"]["id"] = "another"
    for call in engine_calls:
        with pytest.raises(PayloadError, match="are of several requests"):
            call(chunks, model=MODEL, prompt_token_ids=PROMPT)


@pytest.mark.parametrize("place", range(G))
def test_every_chunk_of_an_sglang_stream_states_the_prompt(place):
    chunks = sglang_chunks(incremental=True)
    chunks[place]["meta_info"]["prompt_tokens"] = P + 1
    with pytest.raises(PayloadError, match="prompt_tokens"):
        decode("sglang", chunks)


@pytest.mark.parametrize("incremental", [True, False])
def test_an_sglang_stream_that_does_not_say_how_many_ids_it_has_at_its_end_raises(incremental):
    chunks = sglang_chunks(incremental=incremental)
    chunks[-1]["meta_info"] |= {"completion_tokens": None, "finish_reason": {"type": "stop"}}
    with pytest.raises(PayloadError, match="A chunk is lost or came twice"):
        decode("sglang", chunks)
    chunks = sglang_chunks(incremental=incremental)
    del chunks[-1]["output_ids"]
    with pytest.raises(PayloadError, match="has the ids None while others have a list"):
        decode("sglang", chunks)


@pytest.mark.parametrize("place", range(G - 1))
@pytest.mark.parametrize("of", ["the choice", "the response", "the response, of two choices"])
def test_an_earlier_chunk_of_another_prompt_raises(of, place):
    chunks = vllm_chunks() if "two" not in of else interleaved([vllm_chunks(0), vllm_chunks(1)], [0, 1])
    for chunk in chunks:
        (chunk["choices"][0] if of == "the choice" else chunk)["prompt_token_ids"] = list(PROMPT)
    check(engines.vllm.decode_batch(chunks, model=MODEL))
    changed = chunks[place]["choices"][0] if of == "the choice" else chunks[place]
    changed["prompt_token_ids"] = [*PROMPT[:-1], PROMPT[-1] + 1]
    with pytest.raises(PayloadError, match=f"different prompt_token_ids, of {P} and {P} ids"):
        engines.vllm.decode_batch(chunks, model=MODEL)
    changed["prompt_token_ids"] = None  # some servers send them with one chunk only
    check(engines.vllm.decode_batch(chunks, model=MODEL))


def test_routes_of_two_chunks_of_one_choice_are_not_chosen_from():
    chunks = jax_choice_chunks(0)
    chunks[-2]["choices"][0]["routed_experts"] = int32_base64(rows(1))
    with pytest.raises(PayloadError, match="two parts of it carry routes"):
        engines.sglang_jax.decode(chunks, model=MODEL, num_tokens=S)
    chunks = vllm_chunks()
    chunks[-2]["choices"][0]["routed_experts"] = npy_base64(rows(1))
    with pytest.raises(PayloadError, match="two parts of it carry routes"):
        decode("vllm", chunks)


def test_chunks_without_the_id_that_others_have_are_not_guessed():
    def without_id(chunks):
        return [{name: value for name, value in chunk.items() if name != "request_id"} for chunk in chunks]

    assert len(decode("vllm", without_id(vllm_chunks()))) == S
    both = [*vllm_chunks(), *without_id(vllm_chunks())]
    with pytest.raises(PayloadError, match="several requests"):
        engines.vllm.decode_batch(both, model=MODEL, prompt_token_ids=PROMPT)


def test_choices_of_one_chunk_each_are_one_response():
    """Both are finished, so their index alone says that they are chunks."""
    finished = [choice_of(rows(i)[:P], PROMPT, output(i)[:1], i, finish_reason="length") for i in (1, 0)]
    chunks = [{"request_id": "r", "choices": [each]} for each in finished]
    trace = engines.vllm.decode_batch(chunks, model=MODEL, prompt_token_ids=PROMPT)
    for index, sample in enumerate(trace.samples()):
        assert sample.token_ids.tolist() == PROMPT + output(index)[:1]
        assert torch.equal(sample.topk_indices[:-1], torch.from_numpy(rows(index)[:P]))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (vllm_chunks()[:-1], "ends before index .0. is finished"),
        ({"choices": []}, "has no choices"),
        ([{"choices": []}], "has no choices"),
        ({"choices": None}, "choices are NoneType"),
        ({"choices": {"index": 0}}, "choices are dict"),
    ],
)
def test_what_is_no_whole_response_says_why(result, message):
    with pytest.raises(PayloadError, match=message):
        decode("vllm", result)
