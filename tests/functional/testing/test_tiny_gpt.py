import pytest
import torch

from megatron_router_replay.errors import RouterReplayError
from megatron_router_replay.testing import (
    ParallelSizes,
    build_tiny_gpt,
    random_microbatches,
    run_schedule,
    tiny_gpt_config,
)
from tests.functional.testing.training import assert_same_training, train_on_ranks

_PP4_VPP2 = ParallelSizes(pp_size=4, vp_size=2)
_ALL_FOUR = ParallelSizes(tp_size=2, pp_size=2, ep_size=2, vp_size=2)


def slow(*values):
    """Many tests of sessions train such a model as well and would fail with it, so it runs with the slow ones."""
    return pytest.param(*values, marks=pytest.mark.slow)


def losses_and_gradients(workers, layout, **fields):
    return train_on_ranks(workers, layout, random_microbatches(4, batch_size=2), **fields)


@pytest.fixture(scope="module")
def one_process(workers_1):
    return losses_and_gradients(workers_1, ParallelSizes())


def test_one_process_trains(one_process):
    losses, found = one_process
    assert losses.shape == (4,)
    assert all(gradient.abs().sum() > 0 for gradient in found.values())
    assert "decoder.layers.3.mlp.experts.local_experts.7.linear_fc2.weight" in found


@pytest.mark.parametrize(
    "layout",
    [
        ParallelSizes(tp_size=2, expert_tp_size=2),
        ParallelSizes(pp_size=2, vp_size=2),
        ParallelSizes(),  # data parallel 2
    ],
    ids=str,
)
def test_two_processes_train_as_one_does(workers_2, one_process, layout):
    assert_same_training(losses_and_gradients(workers_2, layout), one_process)


@pytest.mark.parametrize("layout", [_ALL_FOUR, slow(ParallelSizes(tp_size=2, ep_size=4))], ids=str)
def test_four_processes_train_as_one_does(workers_4, one_process, layout):
    assert_same_training(losses_and_gradients(workers_4, layout), one_process)


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        slow(_PP4_VPP2, {"num_layers": 8}),
        (_ALL_FOUR, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    ],
    ids=str,
)
def test_a_layout_gives_the_same_bits_twice(workers_4, layout, fields):
    first, second = (losses_and_gradients(workers_4, layout, **fields) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], gradient) for name, gradient in second[1].items())


@pytest.mark.slow
def test_eight_chunks_train_as_one_does(workers_1, workers_4):
    expected = losses_and_gradients(workers_1, ParallelSizes(), num_layers=8)
    assert_same_training(losses_and_gradients(workers_4, _PP4_VPP2, num_layers=8), expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"moe_layer_freq": [0, 0, 1, 1]},  # the first stage has no MoE layer
        slow({"num_layers": 5, "num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 3}),
        {"pipeline_model_parallel_layout": "Et|tttL"},
        {"moe_layer_freq": [0, 1, 1, 1], "mtp_num_layers": 1},
        slow({"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}),
        slow({"moe_router_num_groups": 4, "moe_router_group_topk": 2}),
        slow({"moe_token_dispatcher_type": "allgather"}),
        slow({"moe_expert_capacity_factor": 1.0}),
        slow({"moe_shared_expert_intermediate_size": 32}),
        slow({"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]}),
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01},
    ],
    ids=str,
)
def test_every_kind_of_model_trains_on_two_stages_as_on_one(workers_1, workers_2, fields):
    single = {k: v for k, v in fields.items() if "pipeline" not in k}
    expected = losses_and_gradients(workers_1, ParallelSizes(), **single)
    assert_same_training(losses_and_gradients(workers_2, ParallelSizes(pp_size=2), **fields), expected)


def evaluate(layout):
    """Return the losses, and the chunk and the first token of every call of the hook."""
    layout.initialize()
    chunks = build_tiny_gpt(tiny_gpt_config(layout), layout)
    calls = []

    def before_forward(microbatch, model):
        calls.append((chunks.index(model), int(microbatch["tokens"][0, 0])))

    microbatches = random_microbatches(4, batch_size=2)
    return run_schedule(chunks, layout, microbatches, forward_only=True, before_forward=before_forward), calls


def test_the_hook_sees_every_microbatch_of_every_chunk_and_the_last_stage_has_losses(workers_2):
    first_tokens = [int(m["tokens"][0, 0]) for m in random_microbatches(4, batch_size=2)]
    ranks = workers_2.run(evaluate, ParallelSizes(pp_size=2, vp_size=2))
    assert [len(losses) for losses, _ in ranks] == [0, 4]
    for _, calls in ranks:
        assert sorted(calls) == sorted((chunk, token) for chunk in (0, 1) for token in first_tokens)
        assert [token for chunk, token in calls if chunk == 1] == first_tokens


def test_world_size_is_the_smallest_number_of_processes():
    assert _ALL_FOUR.world_size == 4
    assert ParallelSizes(ep_size=2).world_size == 2
    assert ParallelSizes(tp_size=2, cp_size=2, ep_size=4, pp_size=2).world_size == 8
    assert not ParallelSizes(ep_size=2).sequence_parallel


def test_impossible_sizes_raise():
    with pytest.raises(RouterReplayError, match="vp_size needs"):
        ParallelSizes(vp_size=2)
    with pytest.raises(RouterReplayError, match="start at 1"):
        ParallelSizes(tp_size=0)
