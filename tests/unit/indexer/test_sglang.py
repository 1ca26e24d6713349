"""SGLang's replies with indexer_topk: what is read, and what is refused instead of guessed."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from megatron_router_replay.base64_text import encode_base64
from megatron_router_replay.errors import PayloadError
from megatron_router_replay.indexer import PositionTrace, decode_indexer_topk
from tests.unit.indexer.choices import choose

MODEL = {"num_layers": 5, "layer_numbers": (1, 2, 4), "topk": 4}
"""Layer 3 shares the choice of layer 2, layer 5 that of layer 4."""

OWN = choose([*range(9)], num_layers=3, topk=4).numpy()
"""Of 10 tokens: 6 of the prompt, 4 of the output."""

ALL = OWN[:, [0, 1, 1, 2, 2]]
EXPECTED = PositionTrace.from_positions(
    np.concatenate([OWN, np.full((1, 3, 4), -1)]), positions_in_sample=[*range(9), -1], layer_numbers=(1, 2, 4), topk=4
)


def as_text(positions):
    return encode_base64(np.ascontiguousarray(positions, "<i4").tobytes())


def reply(positions=ALL, **meta):
    fields = {"id": "a", "prompt_tokens": 6, "completion_tokens": 4, "finish_reason": {"type": "length", "length": 4}}
    return {"text": "", "output_ids": [7] * 4, "meta_info": {**fields, "indexer_topk": as_text(positions), **meta}}


@pytest.mark.parametrize("positions", [ALL, OWN], ids=["all hidden layers", "a fork's"])
def test_a_reply_of_generate_is_read(positions):
    trace = decode_indexer_topk(reply(positions), **MODEL)
    assert trace == EXPECTED
    assert trace.rows(torch.tensor([2]), [4]).tolist() == [[[0, 1, 2, -1]]]
    assert decode_indexer_topk(reply(positions), token_ids=[*range(6), 7, 7, 7, 7], **MODEL) == EXPECTED


def test_a_stream_has_it_in_its_last_chunk():
    first = reply(indexer_topk=None, completion_tokens=1, finish_reason=None) | {"output_ids": [7]}
    assert decode_indexer_topk([first, reply()], **MODEL) == EXPECTED


def test_the_text_or_array_alone_needs_the_number_of_tokens():
    for value in (as_text(ALL), ALL, torch.from_numpy(ALL), ALL.reshape(-1), ALL.tobytes()):
        assert decode_indexer_topk(value, num_tokens=10, **MODEL) == EXPECTED
    with pytest.raises(PayloadError, match="MRR309: SGLang: indexer_topk of the array: cannot tell how many tokens"):
        decode_indexer_topk(as_text(ALL), **MODEL)


def test_a_sample_of_one_token_has_no_positions():
    trace = decode_indexer_topk("", num_tokens=1, **MODEL)
    assert (trace.num_tokens, trace.positions_in_sample.tolist()) == (1, [-1])


def changed(row, layer, keys):
    copy = ALL.copy()
    copy[row, layer] = keys
    return copy


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (
            reply(indexer_topk=None),
            "MRR302: SGLang: indexer_topk of request a: missing. Start the server with --enable-",
        ),
        (
            reply(ALL[:-1]),
            "MRR306: SGLang: indexer_topk of request a: holds 160 values of int32 in the shape [160], expected 9",
        ),
        (reply(np.concatenate([ALL, ALL[-1:]])), "(10.000 such rows)"),
        (reply(np.concatenate([ALL] * 2)), "MRR305: SGLang: indexer_topk of request a: "),
        (reply(ALL[..., :3]), "(6.750 such rows)"),
        (reply(indexer_topk=as_text(ALL)[:-8] + "AA=="), "holds 715 values of |S1"),
        (reply(indexer_topk="?" * 12), "MRR310: SGLang: indexer_topk of request a: not base64"),
        (reply(completion_tokens=5), "MRR309: "),
        ([reply(), reply()], "MRR312: SGLang: indexer_topk of sample 0, request a: the result holds 2 samples"),
        (None, "MRR301: SGLang: the result is None"),
        (
            reply(changed(7, 2, [0, 1, 2, 3])),
            "MRR306: SGLang: indexer_topk of request a: layer 3 shares the choice of layer 2, ",
        ),
        (
            reply(changed(7, 0, [0, 1, 2, 8])),
            "MRR113: SGLang: indexer_topk of request a: row 7, layer 1, position 7 of its",
        ),
        (
            reply(ALL + 64),
            "Run SGLang with SGLANG_DSA_FUSE_TOPK=0, because its fused kernel returns slots of the KV cache",
        ),
    ],
)
def test_what_does_not_fit_is_refused(result, problem):
    with pytest.raises(PayloadError, match=re.escape(problem)):
        decode_indexer_topk(result, **MODEL)


def test_layers_that_share_are_compared_in_the_first_row_that_differs():
    wrong = changed(7, 2, [0, 1, 2, 3] if set(ALL[7, 1]) != {0, 1, 2, 3} else [4, 5, 6, 7])
    with pytest.raises(PayloadError, match=r"differs from it in 1 of 9 rows, the first is row 7\. Are layer_numbers"):
        decode_indexer_topk(reply(wrong), **MODEL)
    own = {"num_layers": 5, "layer_numbers": (1, 2, 3, 4), "topk": 4}
    assert decode_indexer_topk(reply(wrong), **own).layer_numbers == (1, 2, 3, 4)
