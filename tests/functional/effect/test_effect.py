"""The experiments of docs/effect.md in seconds; faults, rounding, pictures and tables by hand."""

import pytest
import torch

import megatron_router_replay as mrr
from examples.effect import freeze, rl
from examples.effect.arms import ARMS, shifted, without_a_third
from examples.effect.figures import IMAGES, pictures, tables
from examples.effect.floor import forced_logprobs
from examples.effect.policy import POLICY, int8_rounded
from examples.effect.results import removed
from examples.grpo.rollout import Text, TransformersEngine
from examples.grpo.weights import random_hf_weights, save_hf_checkpoint


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


PAGE = IMAGES.parent / "effect.md"


def test_pictures_and_tables_are_those_of_the_results():
    for name, text in pictures().items():
        assert (IMAGES / name).read_text() == text, name
    for table in tables():
        assert table in PAGE.read_text()


@pytest.mark.slow
def test_a_model_forced_to_its_own_experts_is_itself_and_to_others_is_not(tmp_path):
    config = POLICY | {"num_hidden_layers": 2}
    weights = random_hf_weights(0, config)
    save_hf_checkpoint(tmp_path, weights, config)
    engine = TransformersEngine(tmp_path, eos_token_id=2, dtype=torch.float32)
    engine.load_weights(weights)
    (sample,) = engine.generate([torch.tensor([1, 9, 5])], per_prompt=1, max_new_tokens=6, seed=0)
    text = Text(token_ids=sample.token_ids, generated=sample.generated, logprobs=sample.logprobs, group=0)
    own = sample.trace.topk_indices.long().masked_fill(~sample.trace.replay_mask.view(-1, 1, 1), -1)
    assert own[-1].tolist() == [[-1, -1], [-1, -1]]
    sampled = sample.logprobs[sample.generated]
    torch.testing.assert_close(forced_logprobs(engine.model, [text], [own]), sampled, atol=1e-5, rtol=0)
    other = torch.where(own < 0, own, (own + 1) % 64)
    assert (forced_logprobs(engine.model, [text], [other]) - sampled).abs().max() > 0.1
    # Afterwards the routers are the model's own again.
    (again,) = engine.generate([torch.tensor([1, 9, 5])], per_prompt=1, max_new_tokens=6, seed=0)
    assert torch.equal(again.logprobs, sample.logprobs)


@pytest.mark.slow
def test_a_step_of_r3_leaves_what_equal_routes_leave(workers_1, tmp_path):
    (steps,) = workers_1.run(rl.train, rl.Run(out=tmp_path, arm="r3", seed=0, steps=1, measure_every=1, floors=True))
    assert steps[0]["kl_live"] > 2 * steps[0]["kl"] > 0
    gap = {name: [value] for name, value in steps[0].items()}
    assert removed(gap)[0] == pytest.approx(1, abs=0.01)
    assert removed(gap, "kl_floor_engine")[0] == pytest.approx(1, abs=0.1)  # other samples of the same noise


@pytest.mark.slow
def test_recomputes_flip_behind_another_order_of_sums_and_frozen_ones_do_not(workers_1):
    (live,) = workers_1.run(freeze.train, False, 1, 0)
    (frozen,) = workers_1.run(freeze.train, True, 1, 0)
    flips = live["flips_of_layer"]
    assert flips[1] == flips[5] == 0  # the input of a checkpoint's first layer is saved
    assert sum(flips.values()) == live["steps"][0]["flips"] > 0
    assert frozen["steps"][0]["flips"] == 0
    assert 0 < frozen["steps"][0]["error"] < live["steps"][0]["error"]


@pytest.mark.slow
def test_without_another_order_nothing_differs(workers_1):
    (run,) = workers_1.run(freeze.train, False, 1, 0, False)
    assert (run["steps"][0]["flips"], run["steps"][0]["error"]) == (0, 0.0)
