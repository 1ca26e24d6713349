"""Megatron-Core trains alike on a CPU in every layout: losses and gradients are those of one process."""

import pytest
import torch

from megatron_router_replay.errors import RouterReplayError
from megatron_router_replay.testing import ParallelSizes
from tests.support.gradients import gradients, merge_by_name
from tests.support.megatron_state import megatrons_context_parallel_split
from tests.support.microbatches import split_microbatch
from tests.support.schedule import random_microbatches, run_schedule
from tests.support.tiny_gpt import build_tiny_gpt, tiny_gpt_config

pytestmark = pytest.mark.slow
ONE, PP2, CP2 = ParallelSizes(), ParallelSizes(pp_size=2), ParallelSizes(cp_size=2)
ALL_FOUR = ParallelSizes(tp_size=2, pp_size=2, ep_size=2, vp_size=2)


def train(layout, fields):
    """Run on each rank: one step; returns its losses, which only a last stage has, and the gradients of its parameters."""
    from megatron.core import parallel_state

    layout.initialize()
    # Only the small attention takes context parallelism.
    chunks = build_tiny_gpt(tiny_gpt_config(layout, **fields), layout, small_attention=layout.cp_size > 1)
    cp_rank = parallel_state.get_context_parallel_rank()
    microbatches = random_microbatches(4, batch_size=2)
    own = [split_microbatch(each, cp_rank=cp_rank, cp_size=layout.cp_size) for each in microbatches]
    return run_schedule(chunks, layout, own), gradients(chunks)


def trained(on_ranks, layout, num_ranks, **fields):
    """Return the losses of a last stage, which all last stages have alike, and all gradients by global name."""
    results = on_ranks(num_ranks, train, layout, fields)
    first, *others = [torch.stack(losses) for losses, _ in results if losses]
    if layout.cp_size == 1:
        assert all(torch.equal(losses, first) for losses in others)
    return first, merge_by_name(found for _, found in results)


@pytest.mark.parametrize(
    ("layout", "num_ranks", "fields"),
    [
        (ParallelSizes(tp_size=2, expert_tp_size=2), 2, {}),
        (ONE, 2, {}),  # data parallel
        (ALL_FOUR, 4, {}),
        (PP2, 2, {"moe_layer_freq": [0, 0, 1, 1], "mtp_num_layers": 1}),  # the first stage has no MoE layer
        (CP2, 2, {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]}),
        (ParallelSizes(tp_size=2, cp_size=2, ep_size=4), 4, {}),
    ],
    ids=str,
)
def test_every_layout_trains_as_one_process_does(on_ranks, layout, num_ranks, fields):
    expected = trained(on_ranks, ONE, 1, **fields)
    got = trained(on_ranks, layout, num_ranks, **fields)
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=1e-5)
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        scale = gradient.abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(got[1][name], gradient, rtol=0, atol=2e-5 * scale + 1e-9, msg=name)


def test_world_size_is_the_smallest_number_of_processes_and_impossible_sizes_raise():
    assert ALL_FOUR.world_size == 4
    assert ParallelSizes(ep_size=2).world_size == 2
    assert ParallelSizes(tp_size=2, cp_size=2, ep_size=4, pp_size=2).world_size == 8
    assert not ParallelSizes(ep_size=2).sequence_parallel
    for wrong in ({"vp_size": 2}, {"tp_size": 0}):
        with pytest.raises(RouterReplayError, match=r"MRR904: .* is no layout"):
            ParallelSizes(**wrong)


def as_megatron_splits():
    from megatron.core import parallel_state

    CP2.initialize()
    (microbatch, _) = random_microbatches(2, batch_size=2)
    ours = split_microbatch(microbatch, cp_rank=parallel_state.get_context_parallel_rank(), cp_size=2)
    return ours, megatrons_context_parallel_split(dict(microbatch))


def test_the_split_is_megatrons_own(on_ranks):
    for ours, megatrons in on_ranks(2, as_megatron_splits):
        assert ours.keys() == megatrons.keys()
        assert all(torch.equal(ours[key], megatrons[key]) for key in ours)
