"""The planted faults and the engine's rounded weights, by hand."""

import pytest
import torch

import megatron_router_replay as mrr
from examples.effect.arms import ARMS, shifted, without_a_third
from examples.effect.policy import int8_rounded


def trace_of(rows, lengths):
    return mrr.RoutingTrace(
        topk_indices=[[row] for row in rows],
        layer_numbers=[1],
        num_experts=8,
        sequence_lengths=lengths,
        token_ids=range(len(rows)),
    )


def test_a_shift_takes_the_route_of_the_token_before_within_a_sample():
    trace = trace_of([[0, 1], [1, 2], [2, 3], [4, 5], [-1, -1]], [3, 2])
    moved = shifted(trace)
    assert moved.topk_indices[:4, 0].tolist() == [[0, 1], [0, 1], [1, 2], [4, 5]]
    assert moved.replay_mask.tolist() == [True, True, True, True, False]  # as many routes as before, nothing to count
    assert torch.equal(moved.token_ids, trace.token_ids)  # the tokens are right, so no check of them can notice


def test_a_third_of_the_routes_is_lost_and_the_others_stay():
    rows = [[row % 8, (row + 1) % 8] for row in range(3000)]
    trace = trace_of(rows, [3000])
    left = without_a_third(trace, seed=0)
    assert int(left.replay_mask.sum()) == pytest.approx(2000, abs=100)  # four standard deviations
    assert left.topk_indices[left.replay_mask][:, 0].tolist() == [rows[i] for i in left.replay_mask.nonzero()[:, 0]]
    assert not torch.equal(left.replay_mask, without_a_third(trace, seed=1).replay_mask)


def test_each_arm_replays_its_routes():
    engine, trainer = trace_of([[0, 1]], [1]), trace_of([[2, 3]], [1])
    assert ARMS["off"](engine, trainer, 0) is None
    assert ARMS["r2"](engine, trainer, 0) is trainer
    assert ARMS["r3"](engine, trainer, 0) is engine


def test_matrices_are_rounded_to_255_values_a_row_and_routers_stay():
    weights = {
        "a.q_proj.weight": torch.tensor([[127.0, 0.6, -1.4], [2.54, 0.031, 0.0]]),
        "a.gate.weight": torch.rand(2, 2),
    }
    rounded = int8_rounded(weights)
    torch.testing.assert_close(rounded["a.q_proj.weight"], torch.tensor([[127.0, 1.0, -1.0], [2.54, 0.04, 0.0]]))
    assert rounded["a.gate.weight"] is weights["a.gate.weight"]
