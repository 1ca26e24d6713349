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


def stamped(versions, given=None, **meta):
    """Return the version of each token of a reply, as a list; None if the trace has none."""
    result = sglang_result(ROWS, P, OUTPUT, weight_versions=versions, **meta)
    trace = engines.sglang.decode(result, model=MODEL, token_ids=PROMPT + OUTPUT, weight_version=given)
    return None if trace.weight_version is None else trace.weight_version.tolist()


CHANGED = spans(("6", 0, 2), ("7", 2, 5))
# Outputs 0 and 1 were sampled by version 6: by the forwards of the prompt (rows 0..2) and of output 0 (row 3). The forward
# of output 1 (row 4) sampled output 2 and is of version 7, as all after it.
STAMPED = [6, 6, 6, 6, 7, 7, 7, 7]


@pytest.mark.parametrize(
    ("versions", "given", "expected"),
    [
        *((CHANGED, given, STAMPED) for given in (None, 7, 6, {"6": 6, "7": 7})),
        (spans(("a", 0, 2), ("b", 2, 5)), {"a": 16, "b": 17}, [16, 16, 16, 16, 17, 17, 17, 17]),
        (spans(("a", 0, 2), ("b", 2, 5)), None, None),
        # Output 0 alone is of 6: the prompt's rows 0..2, whose forwards sampled it.
        (spans(("6", 0, 1), ("7", 1, 5)), None, [6, 6, 6, 7, 7, 7, 7, 7]),
        # The last output alone is of 7: row 6, whose forward sampled it, and its own row, which no forward made.
        (spans(("6", 0, 4), ("7", 4, 5)), None, [6, 6, 6, 6, 6, 6, 7, 7]),
        (spans(("6", 0, 1), ("7", 1, 2), ("8", 2, 4), ("6", 4, 5)), None, [6, 6, 6, 7, 8, 8, 6, 6]),
        (spans(("6", 0, 0), ("7", 0, 3), ("8", 3, 3), ("9", 3, 5)), None, [7, 7, 7, 7, 7, 9, 9, 9]),
        (spans(("default", 0, 5)), None, None),
        (spans(("default", 0, 5)), 12, [12] * 8),
        (spans(("3", 0, 5)), None, [3] * 8),
        (spans(("3", 0, 5)), np.int64(12), [12] * 8),
        (spans(("3", 0, 5)), {"3": 13}, [13] * 8),
        (None, None, None),
        (spans(("2147483647", 0, 5)), None, [2**31 - 1] * 8),
        (spans(("-2147483648", 0, 5)), None, [-(2**31)] * 8),
        (spans(("123456789012", 0, 5)), None, None),  # more digits than a number of 32 bits has: a name
        (None, 2**31 - 1, [2**31 - 1] * 8),
        (None, -(2**31), [-(2**31)] * 8),
    ],
)
def test_each_row_has_the_version_of_the_forward_that_chose_it(versions, given, expected):
    assert stamped(versions, given) == expected


def test_vllm_sends_the_same_spans():
    choices = {"choices": [vllm_choice(ROWS, PROMPT, OUTPUT, weight_versions=CHANGED)]}
    assert engines.vllm.decode(choices, model=MODEL).weight_version.tolist() == STAMPED


@pytest.mark.parametrize(
    ("versions", "given", "message"),
    [
        (spans(("a", 0, 2), ("b", 2, 5)), {"a": 16}, r"made by \['b'\]"),
        (spans(("a", 0, 2), ("b", 2, 5)), 17, r"weight_version=17.*\['a', 'b'\].*weight_version=\{"),
        (CHANGED, 8, r"weight_version=8"),
        (None, {"3": 13}, "weights that it does not name"),
        *((spans(("3", 0, 5)), given, r"weight_version=.* must be an integer in -2147483648")
          for given in (True, 1.5, "7", 2**31, -(2**31) - 1, {"3": 1.5}, {"3": 2**31})),
        *((versions, None, "weight_versions") for versions in (
            spans(("6", 0, 2), ("7", 3, 5)), spans(("6", 0, 3), ("7", 2, 5)), spans(("6", 1, 5)),
            spans(("6", 0, 2), ("7", 2, 4)), spans(("6", 0, 6)), spans(("6", 0, 3), ("7", 3, 2), ("8", 2, 5)),
            [{"version": "6"}], [{"version": None, "start": 0, "end": 5}], "6", [6], 6, {"version": "6"})),
    ],
)  # fmt: skip
def test_versions_that_cannot_be_stamped_are_refused(versions, given, message):
    with pytest.raises(PayloadError, match=message):
        stamped(versions, given)


def test_a_batch_is_stamped_sample_by_sample():
    results = [sglang_result(ROWS, P, OUTPUT, weight_versions=each) for each in (CHANGED, spans(("7", 0, 5)), None)]
    aborted = sglang_result(None, P, [], finish="abort")
    given = {"model": MODEL, "token_ids": [PROMPT + OUTPUT, PROMPT + OUTPUT, PROMPT]}
    trace = engines.sglang.decode_batch([*results[:2], aborted], **given)
    assert trace.weight_version.tolist() == STAMPED + [7] * 8 + [-1] * 3
    with pytest.raises(PayloadError, match="has no weight version"):
        engines.sglang.decode_batch(results[1:], model=MODEL, token_ids=given["token_ids"][:2])


def test_a_name_without_spans_is_of_all_tokens_of_the_only_choice():
    assert stamped(None, {"3": 13}, weight_version="3") == [13] * 8
    for metadata, given, expected in (
        ({"weight_versions": CHANGED}, None, STAMPED),
        ({"weight_version": "7"}, None, None),
        ({"weight_versions": spans(("7", 0, 5)), "weight_version": "7"}, None, [7] * 8),
        ({"weight_version": "a"}, {"a": 9}, [9] * 8),
    ):
        shared = {"sglext": {"routed_experts": int32_base64(ROWS)}, "metadata": metadata}
        reply = response(PROMPT, OUTPUT, ids=False, shared=shared)
        trace = engines.sglang.decode(reply, model=MODEL, weight_version=given)
        assert (None if trace.weight_version is None else trace.weight_version.tolist()) == expected
    choices = [{"index": i, "finish_reason": "length", "routed_experts": int32_base64(ROWS)} for i in (0, 1)]
    several = {"id": "r", "choices": choices, "metadata": {"weight_versions": CHANGED, "weight_version": "7"}}
    trace = engines.sglang_jax.decode_batch(several, model=MODEL, num_tokens=[P + G] * 2)
    assert trace.weight_version is None
