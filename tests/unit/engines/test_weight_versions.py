"""A reply whose weights changed on the way is stamped token by token: a row has the version of its own forward."""

import numpy as np
import pytest

from megatron_router_replay import engines
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import (
    all_moe,
    int32_base64,
    response,
    routes,
    sglang_result,
    tokens,
    vllm_choice,
)

MODEL = all_moe(3, 16)
P, G = 3, 5
PROMPT, OUTPUT = tokens(P), tokens(G, seed=2)
ROWS = routes(P + G - 1, 3, num_experts=16, topk=2).astype(np.uint8)


def spans(*parts):
    return [{"version": version, "start": start, "end": end} for version, start, end in parts]


CHANGED = spans(("6", 0, 2), ("7", 2, 5))
# Outputs 0 and 1 were sampled by version 6: by the forwards of the prompt (rows 0..2) and of output 0 (row 3). The forward
# of output 1 (row 4) sampled output 2 and is of version 7, as all after it.
STAMPED = [6, 6, 6, 6, 7, 7, 7, 7]


def sglang(versions, **meta):
    result = sglang_result(ROWS, P, OUTPUT, weight_versions=versions, **meta)
    return engines.sglang, result, {"token_ids": PROMPT + OUTPUT}


def vllm(versions):
    return engines.vllm, {"choices": [vllm_choice(ROWS, PROMPT, OUTPUT, weight_versions=versions)]}, {}


@pytest.mark.parametrize("build", [sglang, vllm])
@pytest.mark.parametrize("given", [None, 7, 6, {"6": 6, "7": 7}])
def test_a_change_on_the_way_is_stamped_per_token(build, given):
    engine, result, options = build(CHANGED)
    trace = engine.decode(result, model=MODEL, weight_version=given, **options)
    assert trace.weight_version.tolist() == STAMPED


def test_the_callers_numbers_for_the_engines_names():
    engine, result, options = sglang(spans(("step-a", 0, 2), ("step-b", 2, 5)))
    trace = engine.decode(result, model=MODEL, weight_version={"step-a": 16, "step-b": 17}, **options)
    assert trace.weight_version.tolist() == [version + 10 for version in STAMPED]
    with pytest.raises(PayloadError, match="step-b"):
        engine.decode(result, model=MODEL, weight_version={"step-a": 16}, **options)
    with pytest.raises(PayloadError, match=r"weight_version=17.*\['step-a', 'step-b'\].*weight_version=\{"):
        engine.decode(result, model=MODEL, weight_version=17, **options)
    assert engine.decode(result, model=MODEL, **options).weight_version is None


@pytest.mark.parametrize(
    ("versions", "given", "expected"),
    [
        (spans(("default", 0, 5)), None, None),
        (spans(("default", 0, 5)), 12, [12] * 8),
        (spans(("3", 0, 5)), None, [3] * 8),
        (spans(("3", 0, 5)), 12, [12] * 8),
        (spans(("3", 0, 5)), {"3": 13}, [13] * 8),
        (None, 12, [12] * 8),
        (None, None, None),
        (spans(("2147483647", 0, 5)), None, [2**31 - 1] * 8),
        (spans(("-2147483648", 0, 5)), None, [-(2**31)] * 8),
        (spans(("123456789012", 0, 5)), None, None),  # more digits than a number of 32 bits has: a name
        (None, 2**31 - 1, [2**31 - 1] * 8),
        (None, -(2**31), [-(2**31)] * 8),
        (spans(("3", 0, 5)), np.int64(12), [12] * 8),
    ],
)
def test_a_reply_of_one_version(versions, given, expected):
    engine, result, options = sglang(versions)
    trace = engine.decode(result, model=MODEL, weight_version=given, **options)
    assert (trace.weight_version is None) if expected is None else (trace.weight_version.tolist() == expected)


@pytest.mark.parametrize(
    "versions",
    [
        spans(("6", 0, 2), ("7", 3, 5)),
        spans(("6", 0, 3), ("7", 2, 5)),
        spans(("6", 1, 5)),
        spans(("6", 0, 2), ("7", 2, 4)),
        spans(("6", 0, 6)),
        [{"version": "6"}],
        [{"version": None, "start": 0, "end": 5}],
        "6",
        [6],
        6,
        {"version": "6"},
        spans(("6", 0, 3), ("7", 3, 2), ("8", 2, 5)),
    ],
)
def test_spans_that_do_not_cover_the_output_are_refused(versions):
    engine, result, options = sglang(versions)
    with pytest.raises(PayloadError, match="weight_versions"):
        engine.decode(result, model=MODEL, **options)


def test_a_batch_is_stamped_sample_by_sample():
    results = [sglang(CHANGED)[1], sglang(spans(("7", 0, 5)))[1], sglang_result(None, P, [], finish="abort")]
    ids = [PROMPT + OUTPUT, PROMPT + OUTPUT, PROMPT]
    trace = engines.sglang.decode_batch(results, model=MODEL, token_ids=ids)
    assert trace.weight_version.tolist() == STAMPED + [7] * 8 + [-1] * 3
    with pytest.raises(PayloadError, match="has no weight version"):
        engines.sglang.decode_batch([results[0], sglang(None)[1]], model=MODEL, token_ids=ids[:2])


def test_a_name_for_the_callers_mapping_without_spans_is_missing():
    engine, result, options = sglang(None)
    with pytest.raises(PayloadError, match="weight_version"):
        engine.decode(result, model=MODEL, weight_version={"3": 13}, **options)
    engine, result, options = sglang(None, weight_version="3")
    trace = engine.decode(result, model=MODEL, weight_version={"3": 13}, **options)
    assert trace.weight_version.tolist() == [13] * 8


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        # Output 0 alone is of 6: the prompt's rows 0..2, whose forwards sampled it.
        (spans(("6", 0, 1), ("7", 1, 5)), [6, 6, 6, 7, 7, 7, 7, 7]),
        # The last output alone is of 7: row 6, whose forward sampled it, and its own row, which no forward made.
        (spans(("6", 0, 4), ("7", 4, 5)), [6, 6, 6, 6, 6, 6, 7, 7]),
        (spans(("6", 0, 1), ("7", 1, 2), ("8", 2, 4), ("6", 4, 5)), [6, 6, 6, 7, 8, 8, 6, 6]),
        (spans(("6", 0, 0), ("7", 0, 3), ("8", 3, 3), ("9", 3, 5)), [7, 7, 7, 7, 7, 9, 9, 9]),
    ],
)
@pytest.mark.parametrize("build", [sglang, vllm])
def test_each_span_stamps_the_rows_that_sampled_its_tokens(build, versions, expected):
    engine, result, options = build(versions)
    assert engine.decode(result, model=MODEL, **options).weight_version.tolist() == expected


@pytest.mark.parametrize("given", [True, 1.5, "7", 2**31, -(2**31) - 1, {"3": 1.5}, {"3": 2**31}])
def test_a_weight_version_that_is_no_integer_of_32_bits_is_refused(given):
    for versions in (spans(("3", 0, 5)), None):
        engine, result, options = sglang(versions, weight_version="3")
        with pytest.raises(PayloadError, match=r"weight_version=.* must be an integer in -2147483648"):
            engine.decode(result, model=MODEL, weight_version=given, **options)


def test_the_metadata_of_an_openai_response_stamps_its_only_choice():
    def reply(metadata):
        shared = {"sglext": {"routed_experts": int32_base64(ROWS)}, "metadata": metadata}
        return response(PROMPT, OUTPUT, ids=False, shared=shared)

    for metadata, expected in (
        ({"weight_versions": CHANGED}, STAMPED),
        ({"weight_version": "7"}, None),
        ({"weight_versions": spans(("7", 0, 5)), "weight_version": "7"}, [7] * 8),
    ):
        trace = engines.sglang.decode(reply(metadata), model=MODEL)
        assert (None if trace.weight_version is None else trace.weight_version.tolist()) == expected
    trace = engines.sglang.decode(reply({"weight_version": "a"}), model=MODEL, weight_version={"a": 9})
    assert trace.weight_version.tolist() == [9] * 8


def test_the_metadata_of_several_choices_says_of_none_which_weights_it_had():
    choices = [{"index": i, "finish_reason": "length", "routed_experts": int32_base64(ROWS)} for i in (0, 1)]
    response = {"id": "r", "choices": choices, "metadata": {"weight_versions": CHANGED, "weight_version": "7"}}
    trace = engines.sglang_jax.decode_batch(response, model=MODEL, num_tokens=[P + G] * 2)
    assert trace.weight_version is None
