"""The tokens of the rows: ids are compared with ids, and each stated count with every other."""

import numpy as np
import pytest

from megatron_router_replay.engines import DecodeOptions
from megatron_router_replay.engines.payload import Source
from megatron_router_replay.engines.reader import Reply, StatedCount, is_count, read_counts
from megatron_router_replay.engines.tokens import resolve_tokens
from megatron_router_replay.errors import PayloadError

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
        ({"num_tokens": 5}, [("output", 5)], (5, 0)),
        ({"num_tokens": 5}, [("prompt", 5)], (5, 5)),
        ({}, [("prompt", 3), ("output", 2)], (5, 3)),
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
        ({}, {}, "the number of tokens of these rows is unknown"),
        ({}, {"counts": [("prompt", 3)]}, "the number of tokens of these rows is unknown"),
        ({}, {"counts": [("output", 2)]}, "the number of tokens of these rows is unknown"),
        ({"prompt_token_ids": [5, 6]}, {"prompt_token_ids": PROMPT}, r"\(2\) are not the prompt of the response \(3"),
        ({"prompt_token_ids": [5, 6, 8]}, {"prompt_token_ids": PROMPT}, "are not the prompt"),
        ({"token_ids": [5, 6, 8, 8, 9]}, {"prompt_token_ids": PROMPT}, "do not begin with the prompt"),
        ({"token_ids": [5, 6]}, {"prompt_token_ids": PROMPT}, "do not begin with the prompt"),
        ({"token_ids": [5, 6, 7, 9, 9]}, {"output_token_ids": OUTPUT}, "do not end with the output"),
        ({"token_ids": [9]}, {"output_token_ids": OUTPUT}, "do not end with the output"),
        ({"token_ids": [5, 6, 7, 1, 8, 9]}, BOTH,
         r"the prompt's ids \(3\) and the ids of the response's output \(2\)=5, but 6 tokens by the token ids"),
        ({"num_tokens": 6, "token_ids": IDS}, {}, "num_tokens=6, but 5 tokens by the token ids"),
        ({"token_ids": IDS}, {"counts": [("all", 6)]}, "n_all=6, but 5 tokens by the token ids"),
        ({"prompt_token_ids": PROMPT, "num_tokens": 5}, {"counts": [("prompt", 2)]}, "n_prompt=2, but 3 prompt tokens"),
        ({"num_tokens": 5}, {"counts": [("prompt", 3), ("output", 3)]}, "n_output .*=6, but 5 tokens by num_tokens"),
        ({}, {"counts": [("all", 5), ("prompt", 3), ("output", 1)]}, "n_output .*=4, but 5 tokens by n_all"),
        ({"num_tokens": 5}, {"counts": [("prompt", 6)]}, "leaves -1 output tokens"),
        ({"num_tokens": 5}, {"counts": [("output", 6)]}, "leaves -1 prompt tokens"),
        ({"token_ids": IDS, "prompt_token_ids": PROMPT}, {"spans": [(0, 1), (1, 3)]},
         r"the prompt's ids \(3\) and weight_versions\[-1\]\.end \(3\)=6, but 5 tokens"),
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
