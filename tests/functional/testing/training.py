"""Train a tiny GPT under a layout, so that layouts can be compared by their losses and gradients."""

import torch

from megatron_router_replay.testing import build_tiny_gpt, run_schedule, tiny_gpt_config
from tests.support.gradients import gradients, merge_by_name
from tests.support.microbatches import split_microbatch


def train(layout, microbatches, core_attention, fields):
    """Run on each rank: one step; returns its losses, which only a last stage has, and the gradients of its parameters."""
    from megatron.core import parallel_state

    layout.initialize()
    chunks = build_tiny_gpt(tiny_gpt_config(layout, **fields), layout, core_attention=core_attention)
    cp_rank = parallel_state.get_context_parallel_rank()
    own = [split_microbatch(each, cp_rank=cp_rank, cp_size=layout.cp_size) for each in microbatches]
    return run_schedule(chunks, layout, own), gradients(chunks)


def train_on_ranks(workers, layout, microbatches, core_attention=None, **fields):
    """Return the losses of a last stage, which all last stages have alike, and all gradients by global name."""
    results = workers.run(train, layout, microbatches, core_attention, fields)
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
