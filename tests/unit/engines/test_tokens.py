"""Whose rows they are: ids with ids, each stated count with every other, and what a response states of all its choices."""

import numpy as np
import pytest

from megatron_router_replay.engines import DecodeOptions
from megatron_router_replay.engines.payload import Source
from megatron_router_replay.engines.reply import (
    Reply,
    StatedCount,
    Usage,
    WeightSpan,
    is_count,
    read_counts,
    read_usage,
)
from megatron_router_replay.engines.tokens import SampleTokens, check_usages, resolve_tokens
from megatron_router_replay.errors import PayloadError

PROMPT, OUTPUT = [5, 6, 7], [8, 9]
SOURCE = Source(engine="E", field="f")


def resolve(options, *, counts=(), spans=(), **reply):
    stated = tuple(StatedCount(f"n_{kind}", kind, value) for kind, value in counts)
    spans = tuple(WeightSpan("1", *bounds) for bounds in spans)
    one = Reply(source=SOURCE, fields=reply, counts=stated, weight_spans=spans)
    return resolve_tokens(one, DecodeOptions(**options))


@pytest.mark.parametrize(
    ("options", "reply"),
    [
        ({}, {"prompt_token_ids": PROMPT, "output_token_ids": OUTPUT}),
        ({"prompt_token_ids": PROMPT}, {"output_token_ids": OUTPUT}),
        ({"token_ids": PROMPT + OUTPUT}, {"output_token_ids": OUTPUT}),
        ({"token_ids": PROMPT + OUTPUT}, {"prompt_token_ids": PROMPT}),
        ({"token_ids": PROMPT + OUTPUT, "prompt_token_ids": PROMPT}, {}),
        ({"token_ids": PROMPT + OUTPUT}, {"counts": [("prompt", 3)]}),
        ({"token_ids": PROMPT + OUTPUT}, {"counts": [("output", 2)]}),
        ({"token_ids": PROMPT + OUTPUT}, {"spans": [(0, 2)]}),
        ({"token_ids": PROMPT + OUTPUT, "num_tokens": 5}, {"prompt_token_ids": PROMPT, "output_token_ids": OUTPUT}),
    ],
)
def test_ids_and_the_border_follow_from_what_is_known(options, reply):
    tokens = resolve(options, **reply)
    assert tokens.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert (tokens.num_tokens, tokens.num_prompt_tokens, tokens.nothing_generated) == (5, 3, False)


@pytest.mark.parametrize(
    ("options", "counts", "expected"),
    [
        ({"num_tokens": 5}, [], (5, None)),
        ({"num_tokens": 5}, [("prompt", 3)], (5, 3)),
        ({"num_tokens": 5}, [("output", 2)], (5, 3)),
        ({"num_tokens": 5}, [("output", 5)], (5, 0)),
        ({"num_tokens": 5}, [("prompt", 5)], (5, 5)),
        ({}, [("prompt", 3), ("output", 2)], (5, 3)),
        ({}, [("all", 5), ("prompt", 3), ("output", 2)], (5, 3)),
        ({}, [("all", 0)], (0, None)),
    ],
)
def test_counts_alone_tell_how_many_tokens_there_are(options, counts, expected):
    tokens = resolve(options, counts=counts)
    assert (tokens.num_tokens, tokens.num_prompt_tokens) == expected
    assert tokens.token_ids is None
    assert tokens.nothing_generated == (expected[0] == expected[1])


@pytest.mark.parametrize("counts", [[], [("prompt", 3)], [("output", 2)]])
def test_tokens_that_nobody_counted_are_asked_for(counts):
    with pytest.raises(PayloadError, match="cannot tell how many tokens"):
        resolve({}, counts=counts)


BOTH = {"prompt_token_ids": PROMPT, "output_token_ids": OUTPUT}


@pytest.mark.parametrize(
    ("options", "reply", "message"),
    [
        ({"prompt_token_ids": [5, 6]}, {"prompt_token_ids": PROMPT}, r"\(2\) are not the prompt of the response \(3"),
        ({"prompt_token_ids": [5, 6, 8]}, {"prompt_token_ids": PROMPT}, "are not the prompt"),
        ({"token_ids": [5, 6, 8, 8, 9]}, {"prompt_token_ids": PROMPT}, "do not begin with the prompt"),
        ({"token_ids": [5, 6]}, {"prompt_token_ids": PROMPT}, "do not begin with the prompt"),
        ({"token_ids": [5, 6, 7, 9, 9]}, {"output_token_ids": OUTPUT}, "do not end with the output"),
        ({"token_ids": [9]}, {"output_token_ids": OUTPUT}, "do not end with the output"),
        (
            {"token_ids": [5, 6, 7, 1, 8, 9]},
            BOTH,
            r"the token ids=6, but the prompt's ids \(3\) and the ids of the response's output \(2\) make 5",
        ),
        ({"num_tokens": 6, "token_ids": PROMPT + OUTPUT}, {}, "num_tokens=6, but 5 tokens by the token ids"),
        ({"token_ids": PROMPT + OUTPUT}, {"counts": [("all", 6)]}, "n_all=6, but 5 tokens by the token ids"),
        ({"prompt_token_ids": PROMPT, "num_tokens": 5}, {"counts": [("prompt", 2)]}, "n_prompt=2, but 3 prompt tokens"),
        ({"num_tokens": 5}, {"counts": [("prompt", 3), ("output", 3)]}, "num_tokens=5, but n_prompt .* make 6"),
        ({}, {"counts": [("all", 5), ("prompt", 3), ("output", 1)]}, "n_all=5, but .* make 4"),
        ({"num_tokens": 5}, {"counts": [("prompt", 6)]}, "leaves -1 output tokens"),
        ({"num_tokens": 5}, {"counts": [("output", 6)]}, "leaves -1 prompt tokens"),
        (
            {"token_ids": PROMPT + OUTPUT, "prompt_token_ids": PROMPT},
            {"spans": [(0, 1), (1, 3)]},
            r"but the prompt's ids \(3\) and weight_versions\[-1\]\.end \(3\) make 6",
        ),
        ({}, BOTH | {"spans": [(0, 1)]}, r"weight_versions\[-1\]\.end=1, but 2 output tokens"),
    ],
)
def test_what_disagrees_is_refused_and_both_are_named(options, reply, message):
    with pytest.raises(PayloadError, match=message):
        resolve(options, **reply)


def test_an_empty_prompt_or_output_is_known():
    assert resolve({}, prompt_token_ids=[], output_token_ids=OUTPUT).num_prompt_tokens == 0
    assert resolve({"token_ids": OUTPUT}, output_token_ids=OUTPUT).num_prompt_tokens == 0
    nothing = resolve({}, prompt_token_ids=PROMPT, output_token_ids=[])
    assert nothing.nothing_generated
    assert nothing.token_ids.tolist() == PROMPT


# Of all choices together


def check(stated, prompts, outputs, totals=None, *, largest=False, decoded=True):
    """Check the usage of choices of which these sizes are known, by being decoded or by their own ids."""
    counts = tuple(StatedCount(kind, kind, value) for kind, value in stated.items())
    usage = Usage(source=SOURCE, counts=counts, largest_prompt=largest)
    ids = [[None if n is None else [0] * n for n in sizes] for sizes in (prompts, outputs)]
    replies = [
        Reply(source=SOURCE, usage=usage, fields={"prompt_token_ids": p, "output_token_ids": o}) for p, o in zip(*ids)
    ]
    known = {}
    if decoded:
        totals = [p + o for p, o in zip(prompts, outputs)] if totals is None else totals
        known = {
            i: SampleTokens(num_tokens=total, num_prompt_tokens=prompt, token_ids=None)
            for i, (prompt, total) in enumerate(zip(prompts, totals))
        }
    check_usages(replies, known)


@pytest.mark.parametrize("decoded", [True, False])
@pytest.mark.parametrize(
    ("prompts", "right"),
    [
        ([4, 4], {8, 4}),  # two prompts, or one with n = 2
        ([4, 6], {10}),
        ([4, 4, 6, 6], {20, 10}),
        ([4, 6, 4, 6], {20}),  # choices of one prompt are neighbours
        ([4, 4, 4, 4], {16, 8, 4}),
        ([4, 4, 4], {12, 4}),
        ([0, 0], {0}),
    ],
)
def test_prompts_are_counted_once_for_n_choices(prompts, right, decoded):
    outputs = [1] * len(prompts)
    for value in range(25):
        if value in right:
            check({"prompt": value}, prompts, outputs, decoded=decoded)
            continue
        with pytest.raises(PayloadError, match=f"prompt={value}, but the tokens of its choices make "):
            check({"prompt": value}, prompts, outputs, decoded=decoded)


def test_of_totals_alone_the_prompts_are_what_the_outputs_leave():
    unknown, totals = [None, None], [7, 9]  # 16 - 4 = 12 tokens of prompts: each counted, or one of two
    for right, output in ((12, 4), (6, 4), (13, 3)):
        check({"prompt": right, "output": output}, unknown, unknown, totals)
    for wrong, output, message in ((11, 4, "6 or 12"), (13, 4, "6 or 12"), (4, 4, "6 or 12"), (12, 3, "13:")):
        with pytest.raises(PayloadError, match=rf"prompt={wrong}.* make {message}"):
            check({"prompt": wrong, "output": output}, unknown, unknown, totals)
    check({"prompt": 1, "output": 2}, unknown, unknown, [5, 7], largest=True)  # which say nothing of the largest


def test_what_is_not_known_is_not_compared():
    check({"prompt": 99, "output": 99}, [4, None], [None, 3], decoded=False)
    check({"prompt": 99}, [None, None], [3, 3], [7, 7])
    check({}, [4, 4], [3, 3])


def test_each_count_of_one_choice_is_its_own():
    stated = {"usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "other": "x"}}
    counts, usage = read_usage(stated, source=SOURCE, num_choices=1)
    assert counts == (("usage.prompt_tokens", "prompt", 3), ("usage.completion_tokens", "output", 2),
                      ("usage.total_tokens", "all", 5))  # fmt: skip
    assert usage is None
    counts, usage = read_usage(stated, source=SOURCE, num_choices=2, largest_prompt=True)
    assert (counts, len(usage.counts), usage.largest_prompt) == ((), 3, True)
    assert read_usage({}, source=SOURCE, num_choices=2) == ((), None)
    assert not read_usage(stated, source=SOURCE, num_choices=2)[1].largest_prompt


@pytest.mark.parametrize("change", [{"total_tokens": 6}, {"prompt_tokens": 4}, {"completion_tokens": 1}])
def test_counts_that_contradict_each_other(change):
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5} | change
    with pytest.raises(PayloadError, match="is not usage"):
        read_usage({"usage": usage}, source=SOURCE, num_choices=2)
    assert len(read_usage({"usage": usage | {"total_tokens": None}}, source=SOURCE, num_choices=1)[0]) == 2


def test_what_counts_something():
    assert is_count(0)
    assert is_count((1 << 48) - 1)
    for value in (-1, 1 << 48, True, 3.0, "3", None, np.int64(3)):
        assert not is_count(value)
    with pytest.raises(PayloadError, match=r"usage\.n is -1"):
        read_counts({"n": -1}, {"n": "all"}, prefix="usage", source=SOURCE)
    assert read_counts({"n": None}, {"n": "all", "m": "all"}, prefix="usage", source=SOURCE) == ()
