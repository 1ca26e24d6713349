"""Counts that a response states of all its choices together: what they may be, and what they may not."""

from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_router_replay.engines.payload import Source
from megatron_router_replay.engines.reply import (
    Reply,
    StatedCount,
    Usage,
    check_usage,
    first_known,
    get_field,
    is_count,
    read_counts,
    read_usage,
    says,
)
from megatron_router_replay.errors import PayloadError

SOURCE = Source(engine="E", field="f")


def check(stated, prompts, outputs, totals=None, *, largest=False):
    counts = tuple(StatedCount(name=kind, kind=kind, value=value) for kind, value in stated.items())
    if totals is None:
        totals = [None if None in (p, o) else p + o for p, o in zip(prompts, outputs)]
    check_usage(Usage(source=SOURCE, counts=counts, largest_prompt=largest), prompts, outputs, totals)


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
def test_prompts_are_counted_once_for_n_choices(prompts, right):
    outputs = [1] * len(prompts)
    for value in range(25):
        if value in right:
            check({"prompt": value}, prompts, outputs)
            continue
        with pytest.raises(PayloadError, match=f"prompt={value}, but the tokens of its choices make "):
            check({"prompt": value}, prompts, outputs)


def test_outputs_are_summed():
    check({"output": 7}, [4, 4], [3, 4])
    for value in (6, 8):
        with pytest.raises(PayloadError, match=f"output={value}.* make 7"):
            check({"output": value}, [4, 4], [3, 4])


def test_the_largest_prompt_is_stated_by_some():
    check({"prompt": 6, "output": 2}, [4, 6], [1, 1], largest=True)
    for value in (4, 10):
        with pytest.raises(PayloadError, match=f"prompt={value}.* make 6"):
            check({"prompt": value}, [4, 6], [1, 1], largest=True)
    # Totals say nothing of the largest.
    check({"prompt": 1, "output": 2}, [None, None], [None, None], [5, 7], largest=True)


def test_of_totals_alone_the_prompts_are_what_the_outputs_leave():
    totals = [7, 9]  # 16 - 4 = 12 tokens of prompts: each counted, or one of two
    for right in (12, 6):
        check({"prompt": right, "output": 4}, [None, None], [None, None], totals)
    for wrong in (11, 13, 4):
        with pytest.raises(PayloadError, match=rf"prompt={wrong}.* make 6 or 12"):
            check({"prompt": wrong, "output": 4}, [None, None], [None, None], totals)
    with pytest.raises(PayloadError, match=r"prompt=12.* make 13:"):
        check({"prompt": 12, "output": 3}, [None, None], [None, None], totals)
    check({"prompt": 13, "output": 3}, [None, None], [None, None], totals)


def test_what_is_not_known_is_not_compared():
    check({"prompt": 99, "output": 99}, [4, None], [None, 3], [5, None])
    check({"prompt": 99}, [None, None], [3, 3], [7, 7])
    check({}, [4, 4], [3, 3])


def test_each_count_of_one_choice_is_its_own():
    stated = {"usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "other": "x"}}
    counts, usage = read_usage(stated, source=SOURCE, num_choices=1)
    assert [(count.name, count.kind, count.value) for count in counts] == [
        ("usage.prompt_tokens", "prompt", 3),
        ("usage.completion_tokens", "output", 2),
        ("usage.total_tokens", "all", 5),
    ]
    assert usage is None
    counts, usage = read_usage(stated, source=SOURCE, num_choices=2, largest_prompt=True)
    assert counts == ()
    assert len(usage.counts) == 3
    assert usage.largest_prompt
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


def test_a_reply_has_routes_if_either_of_its_arrays_is_there():
    assert not Reply(source=SOURCE, routed_experts=None).has_routes
    assert Reply(source=SOURCE, routed_experts=[]).has_routes
    assert Reply(source=SOURCE, routed_experts=None, prompt_routed_experts=[]).has_routes
    plain = Reply(source=SOURCE, routed_experts=None)
    assert (plain.prompt_is_proven, plain.aborted, Usage(source=SOURCE, counts=()).largest_prompt) == (
        True,
        False,
        False,
    )


@pytest.mark.parametrize("kind", [dict, UserDict, lambda fields: SimpleNamespace(**fields)])
def test_fields_are_read_of_json_and_of_objects(kind):
    assert get_field(kind({"index": 0}), "index") == 0
    assert get_field(kind({"index": 0}), "other") is None
    assert first_known(None, 0, 1) == 0
    assert first_known(None, None) is None


def test_a_field_that_holds_an_array_says_no_word():
    assert says("abort", "abort")
    assert not says("stop", "abort")
    assert says(np.zeros(2), "abort") is False
