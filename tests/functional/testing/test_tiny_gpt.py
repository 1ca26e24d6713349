"""The tiny GPT trains alike in every layout, packed or padded: losses and gradients are those of one process."""

import pytest
import torch

from megatron_router_replay.errors import RouterReplayError
from megatron_router_replay.testing import ParallelSizes
from tests.support.gradients import gradients, merge_by_name
from tests.support.megatron_state import megatrons_context_parallel_split
from tests.support.microbatches import pack_microbatch, split_microbatch
from tests.support.schedule import random_microbatches, run_schedule
from tests.support.tiny_gpt import build_tiny_gpt, tiny_gpt_config

ONE, PP2, CP2 = ParallelSizes(), ParallelSizes(pp_size=2), ParallelSizes(cp_size=2)
ALL_FOUR = ParallelSizes(tp_size=2, pp_size=2, ep_size=2, vp_size=2)

_LENGTHS = (5, 16, 9)  # tokens of the packed sequences; none is a multiple of what padding asks for, but one


def sequence(index, length):
    return torch.randint(320, (length + 1,), generator=torch.Generator().manual_seed(index))


def batches(kind, layout):
    """Return micro-batches: without padding, packed, or the packed sequences one per row, each padded to the longest."""
    sequences = [sequence(index, length) for index, length in enumerate(_LENGTHS)]
    if kind == "packed":
        return [pack_microbatch(sequences, pad_to_multiple=2 * layout.cp_size * layout.tp_size)] * 2
    if kind == "padded":
        rows = [pack_microbatch([each], pad_to_multiple=16) for each in sequences]
        return [{key: torch.cat([row[key] for row in rows]) for key in rows[0] if key != "packed_seq_params"}] * 2
    return random_microbatches(4, batch_size=2)


def train(layout, microbatches, small_attention, fields):
    """Run on each rank: one step; returns its losses, which only a last stage has, and the gradients of its parameters."""
    from megatron.core import parallel_state

    layout.initialize()
    chunks = build_tiny_gpt(tiny_gpt_config(layout, **fields), layout, small_attention=small_attention)
    cp_rank = parallel_state.get_context_parallel_rank()
    own = [split_microbatch(each, cp_rank=cp_rank, cp_size=layout.cp_size) for each in microbatches]
    return run_schedule(chunks, layout, own), gradients(chunks)


def trained(on_ranks, layout, kind="full", *, small_attention=False, num_ranks=None, **fields):
    """Return the losses of a last stage, which all last stages have alike, and all gradients by global name."""
    num_ranks = num_ranks or layout.world_size
    results = on_ranks(num_ranks, train, layout, batches(kind, layout), small_attention, fields)
    first, *others = [torch.stack(losses) for losses, _ in results if losses]
    if layout.cp_size == 1:
        assert all(torch.equal(losses, first) for losses in others)
    return first, merge_by_name(found for _, found in results)


PACKED = {"kind": "packed", "small_attention": True}


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (ParallelSizes(tp_size=2, expert_tp_size=2), {}),
        (ONE, {"num_ranks": 2}),  # data parallel
        (ALL_FOUR, {}),
        # Kinds of models, on two stages.
        (PP2, {"moe_layer_freq": [0, 0, 1, 1]}),  # the first stage has no MoE layer
        (PP2, {"pipeline_model_parallel_layout": "Et|tttL"}),
        (PP2, {"moe_layer_freq": [0, 1, 1, 1], "mtp_num_layers": 1}),
        # The small attention, which context parallelism takes.
        (ONE, {"small_attention": True}),
        (CP2, {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]}),
        (ParallelSizes(tp_size=2, cp_size=2, ep_size=4), {}),
        # Packed sequences, as padded ones.
        (ONE, PACKED),
        (ParallelSizes(tp_size=2, cp_size=2), PACKED),
    ],
    ids=str,
)
def test_every_layout_trains_as_one_process_does(on_ranks, layout, options):
    of_layout = ("kind", "small_attention", "num_ranks")
    fields = {name: value for name, value in options.items() if name not in of_layout and "pipeline" not in name}
    expected = trained(on_ranks, ONE, "padded" if "kind" in options else "full", **fields)
    got = trained(on_ranks, layout, **options)
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=1e-5)
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        scale = gradient.abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(got[1][name], gradient, rtol=0, atol=2e-5 * scale + 1e-9, msg=name)


def test_packed_sequences_train_with_an_mtp_layer(on_ranks):
    expected, _ = trained(on_ranks, ONE, "packed", small_attention=True, mtp_num_layers=1)
    losses, _ = trained(on_ranks, CP2, "packed", mtp_num_layers=1)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)


def test_world_size_is_the_smallest_number_of_processes():
    assert ALL_FOUR.world_size == 4
    assert ParallelSizes(ep_size=2).world_size == 2
    assert ParallelSizes(tp_size=2, cp_size=2, ep_size=4, pp_size=2).world_size == 8
    assert not ParallelSizes(ep_size=2).sequence_parallel


def test_impossible_sizes_raise():
    with pytest.raises(RouterReplayError, match="vp_size needs"):
        ParallelSizes(vp_size=2)
    with pytest.raises(RouterReplayError, match="start at 1"):
        ParallelSizes(tp_size=0)


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
