"""The pieces of the runs on real models, in seconds."""

import pytest
import torch

from examples.effect import freeze, rl
from examples.effect.experts import use_batched_experts
from examples.effect.floor import forced_logprobs
from examples.effect.policy import POLICY
from examples.effect.results import removed
from examples.grpo.rollout import Text, TransformersEngine
from examples.grpo.weights import random_hf_weights, save_hf_checkpoint
from megatron_router_replay.testing import (
    ParallelSizes,
    build_tiny_gpt,
    random_microbatches,
    run_schedule,
    tiny_gpt_config,
)
from tests.support.gradients import gradients


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


def test_a_step_of_r3_leaves_what_equal_routes_leave(workers_1, tmp_path):
    (steps,) = workers_1.run(rl.train, rl.Run(out=tmp_path, arm="r3", seed=0, steps=1, measure_every=1, floors=True))
    assert steps[0]["kl_live"] > 2 * steps[0]["kl"] > 0
    gap = {name: [value] for name, value in steps[0].items()}
    assert removed(gap)[0] == pytest.approx(1, abs=0.01)
    assert removed(gap, "kl_floor_engine")[0] == pytest.approx(1, abs=0.1)  # other samples of the same noise


def test_recomputes_flip_behind_another_order_of_sums_and_frozen_ones_do_not(workers_1):
    (live,) = workers_1.run(freeze.train, False, 1, 0)
    (frozen,) = workers_1.run(freeze.train, True, 1, 0)
    flips = live["flips_of_layer"]
    assert flips[1] == flips[5] == 0  # the input of a checkpoint's first layer is saved
    assert sum(flips.values()) == live["steps"][0]["flips"] > 0
    assert frozen["steps"][0]["flips"] == 0
    assert 0 < frozen["steps"][0]["error"] < live["steps"][0]["error"]


def test_without_another_order_nothing_differs(workers_1):
    (run,) = workers_1.run(freeze.train, False, 1, 0, False)
    assert (run["steps"][0]["flips"], run["steps"][0]["error"]) == (0, 0.0)


def looped_and_batched():
    """The loss and the gradients of one step with Megatron's loop over experts, and with all experts at once."""
    layout = ParallelSizes()
    layout.initialize()
    chunks = build_tiny_gpt(tiny_gpt_config(layout, num_layers=2), layout)
    results = []
    for batched in (False, True):
        if batched:
            use_batched_experts(chunks)
        (loss,) = run_schedule(chunks, layout, random_microbatches(1))
        results.append((loss, gradients(chunks)))
    return results


def test_batched_experts_are_megatrons(workers_1):
    ((loss, expected), (batched_loss, seen)) = workers_1.run(looped_and_batched)[0]
    torch.testing.assert_close(batched_loss, loss)
    for name, gradient in expected.items():
        torch.testing.assert_close(seen[name], gradient, atol=1e-6, rtol=1e-4, msg=name)
        assert gradient.any(), name
