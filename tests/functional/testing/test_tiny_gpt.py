"""The tiny GPT trains alike in every layout, packed or padded: losses and gradients are those of one process."""

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
from tests.support.gradients import gradients, merge_by_name
from tests.support.megatron_state import megatrons_context_parallel_split
from tests.support.microbatches import pack_microbatch, split_microbatch


def train(layout, microbatches, core_attention, fields):
    """Run on each rank: one step; returns its losses, which only a last stage has, and the gradients of its parameters."""
    from megatron.core import parallel_state

    layout.initialize()
    chunks = build_tiny_gpt(tiny_gpt_config(layout, **fields), layout, core_attention=core_attention)
    cp_rank = parallel_state.get_context_parallel_rank()
    own = [split_microbatch(each, cp_rank=cp_rank, cp_size=layout.cp_size) for each in microbatches]
    return run_schedule(chunks, layout, own), gradients(chunks)


def train_on_ranks(on_ranks, layout, microbatches, core_attention=None, *, num_ranks=None, **fields):
    """Return the losses of a last stage, which all last stages have alike, and all gradients by global name."""
    results = on_ranks(num_ranks or layout.world_size, train, layout, microbatches, core_attention, fields)
    first, *others = [torch.stack(losses) for losses, _ in results if losses]
    if layout.cp_size == 1:
        assert all(torch.equal(losses, first) for losses in others)
    return first, merge_by_name(found for _, found in results)


def assert_same_training(got, expected):
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=1e-5)
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(got[1][name], gradient, rtol=0, atol=2e-5 * scale + 1e-9, msg=name)


_PP4_VPP2 = ParallelSizes(pp_size=4, vp_size=2)
_ALL_FOUR = ParallelSizes(tp_size=2, pp_size=2, ep_size=2, vp_size=2)


def slow(*values):
    """Many tests of sessions train such a model as well and would fail with it, so it runs with the slow ones."""
    return pytest.param(*values, marks=pytest.mark.slow)


def losses_and_gradients(on_ranks, layout, **fields):
    return train_on_ranks(on_ranks, layout, random_microbatches(4, batch_size=2), **fields)


@pytest.fixture(scope="module")
def one_process(on_ranks):
    return losses_and_gradients(on_ranks, ParallelSizes())


def test_one_process_trains(one_process):
    losses, found = one_process
    assert losses.shape == (4,)
    assert all(gradient.abs().sum() > 0 for gradient in found.values())
    assert "decoder.layers.3.mlp.experts.local_experts.7.linear_fc2.weight" in found


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (2, ParallelSizes(tp_size=2, expert_tp_size=2)),
        (2, ParallelSizes(pp_size=2, vp_size=2)),
        (2, ParallelSizes()),  # data parallel
        (4, _ALL_FOUR),
        slow(4, ParallelSizes(tp_size=2, ep_size=4)),
    ],
    ids=str,
)
def test_several_processes_train_as_one_does(on_ranks, one_process, num_ranks, layout):
    assert_same_training(losses_and_gradients(on_ranks, layout, num_ranks=num_ranks), one_process)


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        slow(_PP4_VPP2, {"num_layers": 8}),
        (_ALL_FOUR, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    ],
    ids=str,
)
def test_a_layout_gives_the_same_bits_twice(on_ranks, layout, fields):
    first, second = (losses_and_gradients(on_ranks, layout, **fields) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], gradient) for name, gradient in second[1].items())


@pytest.mark.slow
def test_eight_chunks_train_as_one_does(on_ranks):
    expected = losses_and_gradients(on_ranks, ParallelSizes(), num_layers=8)
    assert_same_training(losses_and_gradients(on_ranks, _PP4_VPP2, num_layers=8), expected)


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
def test_every_kind_of_model_trains_on_two_stages_as_on_one(on_ranks, fields):
    single = {k: v for k, v in fields.items() if "pipeline" not in k}
    expected = losses_and_gradients(on_ranks, ParallelSizes(), **single)
    assert_same_training(losses_and_gradients(on_ranks, ParallelSizes(pp_size=2), **fields), expected)


def evaluate(layout):
    """Return the losses, and the chunk and the first token of every call of the hook."""
    layout.initialize()
    chunks = build_tiny_gpt(tiny_gpt_config(layout), layout)
    calls = []

    def before_forward(microbatch, model):
        calls.append((chunks.index(model), int(microbatch["tokens"][0, 0])))

    microbatches = random_microbatches(4, batch_size=2)
    return run_schedule(chunks, layout, microbatches, forward_only=True, before_forward=before_forward), calls


def test_the_hook_sees_every_microbatch_of_every_chunk_and_the_last_stage_has_losses(on_ranks):
    first_tokens = [int(m["tokens"][0, 0]) for m in random_microbatches(4, batch_size=2)]
    ranks = on_ranks(2, evaluate, ParallelSizes(pp_size=2, vp_size=2))
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


_LENGTHS = (5, 16, 9)  # tokens of the packed sequences; none is a multiple of what padding asks for, but one


def padded_batch():
    """One sequence per row, each padded at its end to the longest."""
    rows = [pack_microbatch([sequence(i, length)], pad_to_multiple=16) for i, length in enumerate(_LENGTHS)]
    return {key: torch.cat([row[key] for row in rows]) for key in rows[0] if key != "packed_seq_params"}


def sequence(index, length):
    return torch.randint(320, (length + 1,), generator=torch.Generator().manual_seed(index))


def batches(kind, layout):
    if kind == "padded":
        return [padded_batch()] * 2
    if kind == "packed":
        multiple = 2 * layout.cp_size * layout.tp_size
        sequences = [sequence(index, length) for index, length in enumerate(_LENGTHS)]
        return [pack_microbatch(sequences, pad_to_multiple=multiple)] * 2
    return random_microbatches(2, batch_size=2)


def as_megatron_splits():
    from megatron.core import parallel_state

    layout = ParallelSizes(cp_size=2)
    layout.initialize()
    (microbatch, _) = random_microbatches(2, batch_size=2)
    ours = split_microbatch(microbatch, cp_rank=parallel_state.get_context_parallel_rank(), cp_size=2)
    return ours, megatrons_context_parallel_split(dict(microbatch))


def trained_on(on_ranks, layout, kind="full", core_attention=None, **fields):
    return train_on_ranks(on_ranks, layout, batches(kind, layout), core_attention, **fields)


def test_the_split_is_megatrons_own(on_ranks):
    for ours, megatrons in on_ranks(2, as_megatron_splits):
        assert ours.keys() == megatrons.keys()
        assert all(torch.equal(ours[key], megatrons[key]) for key in ours)


def test_the_small_attention_trains_as_megatrons_own_does(on_ranks):
    expected = trained_on(on_ranks, ParallelSizes(), core_attention="local")
    assert_same_training(trained_on(on_ranks, ParallelSizes(), core_attention="small"), expected)


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        (ParallelSizes(cp_size=2), {}),
        (ParallelSizes(cp_size=2, ep_size=2), {}),
        (ParallelSizes(cp_size=2), {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]}),
        (ParallelSizes(tp_size=2, cp_size=2, ep_size=4), {}),
        (ParallelSizes(pp_size=2, cp_size=2), {}),
    ],
    ids=str,
)
def test_context_parallel_ranks_train_as_one_process_does(on_ranks, layout, fields):
    expected = trained_on(on_ranks, ParallelSizes(), core_attention="local", **fields)
    assert_same_training(trained_on(on_ranks, layout, **fields), expected)


@pytest.mark.parametrize(
    "layout",
    [
        ParallelSizes(),
        ParallelSizes(tp_size=2),
        ParallelSizes(cp_size=2),
        ParallelSizes(pp_size=2),
        ParallelSizes(tp_size=2, cp_size=2),
    ],
    ids=str,
)
def test_packed_sequences_train_as_padded_ones_do(on_ranks, layout):
    expected = trained_on(on_ranks, ParallelSizes(), "padded")
    got = trained_on(on_ranks, layout, "packed", core_attention="small")
    assert_same_training(got, expected)


def test_packed_sequences_train_with_an_mtp_layer(on_ranks):
    expected = trained_on(on_ranks, ParallelSizes(), "packed", core_attention="small", mtp_num_layers=1)
    got = trained_on(on_ranks, ParallelSizes(cp_size=2), "packed", mtp_num_layers=1)
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=1e-5)
