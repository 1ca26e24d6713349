"""The tokens of the rows: ids are compared with ids, each stated count with every other; the weights of each row."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_router_replay.engines import DecodeOptions, sglang, sglang_jax, vllm
from megatron_router_replay.engines.payload import Source
from megatron_router_replay.engines.reader import Reply, StatedCount, is_count, read_counts
from megatron_router_replay.engines.tokens import resolve_tokens
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import all_moe, int32_base64, response, routes, sglang_result, vllm_choice

PROMPT, OUTPUT = [5, 6, 7], [8, 9]
IDS = PROMPT + OUTPUT
SOURCE = Source(engine="E", field="f")
BOTH = {"prompt_token_ids": PROMPT, "output_token_ids": OUTPUT}


def resolve(options, *, counts=(), spans=(), **reply):
    stated = tuple(StatedCount(f"n_{kind}", kind, value) for kind, value in counts)
    reply["weight_versions"] = [{"version": "1", "start": start, "end": end} for start, end in spans] or None
    return resolve_tokens(Reply(source=SOURCE, fields=reply, counts=stated), DecodeOptions(**options))


@pytest.mark.parametrize(
    ("options", "reply"),
    [
        ({}, BOTH),
        ({"prompt_token_ids": PROMPT}, {"output_token_ids": OUTPUT}),
        ({"token_ids": IDS}, {"output_token_ids": OUTPUT}),
        ({"token_ids": IDS}, {"prompt_token_ids": PROMPT}),
        ({"token_ids": IDS, "prompt_token_ids": PROMPT}, {}),
        ({"token_ids": IDS}, {"counts": [("prompt", 3)]}),
        ({"token_ids": IDS}, {"counts": [("output", 2)]}),
        ({"token_ids": IDS}, {"spans": [(0, 2)]}),
        ({"token_ids": IDS, "num_tokens": 5}, BOTH),
    ],
)
def test_ids_and_the_border_follow_from_the_known_values(options, reply):
    tokens = resolve(options, **reply)
    assert tokens.token_ids.tolist() == IDS
    assert (tokens.num_tokens, tokens.num_prompt_tokens, tokens.nothing_generated) == (5, 3, False)


@pytest.mark.parametrize(
    ("options", "counts", "expected"),
    [
        ({"num_tokens": 5}, [], (5, None)),
        ({"num_tokens": 5}, [("prompt", 3)], (5, 3)),
        ({"num_tokens": 5}, [("output", 2)], (5, 3)),
        ({"num_tokens": 5}, [("prompt", 5)], (5, 5)),
        ({}, [("all", 5), ("prompt", 3), ("output", 2)], (5, 3)),
        ({}, [("all", 0)], (0, None)),
    ],
)
def test_counts_alone_give_the_number_of_tokens(options, counts, expected):
    tokens = resolve(options, counts=counts)
    assert (tokens.num_tokens, tokens.num_prompt_tokens, tokens.token_ids) == (*expected, None)
    assert tokens.nothing_generated == (expected[0] == expected[1])


def test_an_empty_prompt_or_output_is_known():
    assert resolve({}, prompt_token_ids=[], output_token_ids=OUTPUT).num_prompt_tokens == 0
    nothing = resolve({}, prompt_token_ids=PROMPT, output_token_ids=[])
    assert nothing.nothing_generated
    assert nothing.token_ids.tolist() == PROMPT


@pytest.mark.parametrize(
    ("options", "reply", "message"),
    [
        ({}, {}, "without token ids"),
        ({}, {"counts": [("prompt", 3)]}, "without token ids"),
        ({"prompt_token_ids": [5, 6, 8]}, {"prompt_token_ids": PROMPT}, r"\(3\) are not the prompt of the response \(3"),
        ({"token_ids": [5, 6, 8, 8, 9]}, {"prompt_token_ids": PROMPT}, "do not begin with the prompt"),
        ({"token_ids": [5, 6, 7, 9, 9]}, {"output_token_ids": OUTPUT}, "do not end with the output"),
        ({"token_ids": [9]}, {"output_token_ids": OUTPUT}, "do not end with the output"),
        ({"token_ids": [5, 6, 7, 1, 8, 9]}, BOTH,
         r"the prompt's ids \(3\) and the ids of the response's output \(2\)=5, but 6 tokens by the token ids"),
        ({"num_tokens": 6, "token_ids": IDS}, {}, "num_tokens=6, but 5 tokens by the token ids"),
        ({"prompt_token_ids": PROMPT, "num_tokens": 5}, {"counts": [("prompt", 2)]}, "n_prompt=2, but 3 prompt tokens"),
        ({"num_tokens": 5}, {"counts": [("prompt", 3), ("output", 3)]}, "n_output .*=6, but 5 tokens by num_tokens"),
        ({}, {"counts": [("all", 5), ("prompt", 3), ("output", 1)]}, "n_output .*=4, but 5 tokens by n_all"),
        ({"num_tokens": 5}, {"counts": [("prompt", 6)]}, "leaves -1 output tokens"),
        ({"num_tokens": 5}, {"counts": [("output", 6)]}, "leaves -1 prompt tokens"),
        ({}, BOTH | {"spans": [(0, 1)]}, r"weight_versions\[-1\]\.end=1, but 2 output tokens"),
    ],
)  # fmt: skip
def test_two_sources_that_disagree_are_both_named(options, reply, message):
    with pytest.raises(PayloadError, match=f"MRR309: .*{message}"):
        resolve(options, **reply)


def test_a_count_is_an_integer_of_0_or_more():
    assert is_count(0)
    assert is_count((1 << 48) - 1)
    for value in (-1, 1 << 48, True, 3.0, "3", None, np.int64(3)):
        assert not is_count(value)
    with pytest.raises(PayloadError, match=r"usage\.n is -1"):
        read_counts({"n": -1}, {"n": "all"}, prefix="usage", source=SOURCE)
    assert read_counts({"n": None}, {"n": "all", "m": "all"}, prefix="usage", source=SOURCE) == []


# The weights of each row: a reply whose weights changed on the way is stamped token by token

FIVE = [8, 9, 10, 11, 12]
MODEL = all_moe(3, 16)
ROWS = routes(7, 3, num_experts=16, topk=2).astype(np.uint8)


def spans(*parts):
    return [{"version": version, "start": start, "end": end} for version, start, end in parts]


def stamped(versions, given=None, name=None):
    """Return the version of each token of 3 of the prompt and 5 of the output; None if they have none."""
    fields = {"prompt_token_ids": PROMPT, "output_token_ids": FIVE, "weight_versions": versions, "weight_version": name}
    tokens = resolve_tokens(Reply(source=SOURCE, fields=fields), DecodeOptions(weight_version=given))
    return None if tokens.weight_version is None else tokens.weight_version.tolist()


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
        (spans(("6", 0, 0), ("7", 0, 3), ("8", 3, 3), ("6", 3, 5)), None, [7, 7, 7, 7, 7, 6, 6, 6]),
        (spans(("default", 0, 5)), None, None),
        (spans(("default", 0, 5)), 12, [12] * 8),
        (spans(("3", 0, 5)), None, [3] * 8),
        (spans(("3", 0, 5)), np.int64(12), [12] * 8),
        (spans(("3", 0, 5)), {"3": 13}, [13] * 8),
        (None, None, None),
        *((spans((str(number), 0, 5)), None, [number] * 8) for number in (2**31 - 1, -(2**31))),
        (spans(("123456789012", 0, 5)), None, None),  # more digits than a number of 32 bits has: a name
        *((None, number, [number] * 8) for number in (2**31 - 1, -(2**31))),
    ],
)
def test_each_row_has_the_version_of_the_forward_that_chose_it(versions, given, expected):
    assert stamped(versions, given) == expected


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
    results = [sglang_result(ROWS, 3, FIVE, weight_versions=each) for each in (CHANGED, spans(("7", 0, 5)), None)]
    aborted = sglang_result(None, 3, [], finish="abort")
    given = {"model": MODEL, "prompt_token_ids": PROMPT}
    trace = sglang.decode_batch([*results[:2], aborted], **given)
    assert trace.weight_version.tolist() == STAMPED + [7] * 8 + [-1] * 3
    with pytest.raises(PayloadError, match="has no weight version"):
        sglang.decode_batch(results[1:], **given)
    choices = {"choices": [vllm_choice(ROWS, PROMPT, FIVE, weight_versions=CHANGED)]}
    assert vllm.decode(choices, model=MODEL).weight_version.tolist() == STAMPED


def test_a_reply_without_versions_names_the_field_that_brings_them():
    reply = {"choices": [vllm_choice(ROWS, PROMPT, FIVE)]}  # as vLLM 0.33 replies without the field
    message = r'MRR313: .*does not name. Send "return_weight_versions": true .* with the request, or pass your number'
    with pytest.raises(PayloadError, match=message):
        vllm.decode(reply, model=MODEL, weight_version={"step-16": 16})
    with pytest.raises(PayloadError, match=r"MRR313: .*does not name. Pass your number of the only version"):
        sglang.decode(sglang_result(ROWS, 3, FIVE), model=MODEL, prompt_token_ids=PROMPT, weight_version={"a": 1})


def test_a_name_without_spans_is_of_all_tokens_of_the_only_choice():
    assert stamped(None, {"3": 13}, "3") == [13] * 8
    assert stamped(spans(("7", 0, 5)), None, "6") == [7] * 8
    assert stamped(None, None, "7") is None
    for metadata, given, expected in (
        ({"weight_versions": CHANGED}, None, STAMPED),
        ({"weight_version": "a"}, {"a": 9}, [9] * 8),
    ):
        shared = {"sglext": {"routed_experts": int32_base64(ROWS)}, "metadata": metadata}
        trace = sglang.decode(response(PROMPT, FIVE, shared=shared), model=MODEL, weight_version=given)
        assert trace.weight_version.tolist() == expected
    choices = [{"index": i, "finish_reason": "length", "routed_experts": int32_base64(ROWS)} for i in (0, 1)]
    several = {"id": "r", "choices": choices, "metadata": {"weight_versions": CHANGED, "weight_version": "7"}}
    assert sglang_jax.decode_batch(several, model=MODEL, num_tokens=[8, 8]).weight_version is None


def test_an_engine_may_send_prompt_and_output_in_one_list():
    own = replace(
        sglang_jax,
        title="Own",
        fields={"routed_experts": ("routes",), "token_ids": ("tokens",)},
        counts={"num_prompt": "prompt"},
    )
    reply = {"routes": routes(len(IDS) - 1, 2, num_experts=8, topk=2), "tokens": IDS, "num_prompt": len(PROMPT)}
    model = all_moe(2, 8)
    for options in ({}, {"token_ids": IDS}, {"prompt_token_ids": PROMPT}):
        assert own.decode(reply, model=model, **options).token_ids.tolist() == IDS
    for options, match in (
        ({"token_ids": [*IDS[:-1], 1]}, r"token_ids \(5\) are not the prompt and output of the response \(5 ids\)"),
        ({"prompt_token_ids": PROMPT[:2]}, "num_prompt=3, but 2 prompt tokens"),
        ({"prompt_token_ids": [1, *PROMPT[1:]]}, "do not begin with the prompt"),
    ):
        with pytest.raises(PayloadError, match=match):
            own.decode(reply, model=model, **options)
    stated = reply | {"num_prompt": len(IDS) + 1}
    with pytest.raises(PayloadError, match="leaves -1 output tokens"):
        own.decode(stated, model=model)
