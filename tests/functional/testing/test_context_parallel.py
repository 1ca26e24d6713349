import pytest
import torch

from megatron_router_replay.testing import (
    ParallelSizes,
    build_tiny_gpt,
    random_microbatches,
    run_schedule,
    tiny_gpt_config,
)
from tests.support.gradients import gradients, merge_by_name
from tests.support.microbatches import pack_microbatch, split_microbatch

_LENGTHS = (5, 16, 9)  # tokens of the packed sequences; none is a multiple of what padding asks for, but one


def padded_batch(pad_to_multiple):
    """One sequence per row, each padded at its end to the longest."""
    rows = []
    for index, length in enumerate(_LENGTHS):
        packed = pack_microbatch([sequence(index, length)], pad_to_multiple=16)
        rows.append({key: value for key, value in packed.items() if key != "packed_seq_params"})
    return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}


def sequence(index, length):
    return torch.randint(320, (length + 1,), generator=torch.Generator().manual_seed(index))


def batches(kind, layout):
    if kind == "padded":
        return [padded_batch(16)] * 2
    if kind == "packed":
        multiple = 2 * layout.cp_size * layout.tp_size
        sequences = [sequence(index, length) for index, length in enumerate(_LENGTHS)]
        return [pack_microbatch(sequences, pad_to_multiple=multiple)] * 2
    return random_microbatches(2, batch_size=2)


def train(layout, kind, core_attention, fields):
    from megatron.core import parallel_state

    layout.initialize()
    chunks = build_tiny_gpt(tiny_gpt_config(layout, **fields), layout, core_attention=core_attention)
    cp_rank = parallel_state.get_context_parallel_rank()
    microbatches = [
        split_microbatch(microbatch, cp_rank=cp_rank, cp_size=layout.cp_size) for microbatch in batches(kind, layout)
    ]
    losses = run_schedule(chunks, layout, microbatches)
    return losses, gradients(chunks)


def as_megatron_splits(kind):
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    layout = ParallelSizes(cp_size=2)
    layout.initialize()
    (microbatch, _) = random_microbatches(2, batch_size=2)
    ours = split_microbatch(microbatch, cp_rank=parallel_state.get_context_parallel_rank(), cp_size=2)
    return ours, get_batch_on_this_cp_rank(dict(microbatch))


def losses_and_gradients(workers, layout, kind="full", core_attention=None, **fields):
    results = workers.run(train, layout, kind, core_attention, fields)
    return torch.stack(next(r[0] for r in results if r[0])), merge_by_name(r[1] for r in results)


def assert_same_training(got, expected):
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=1e-5)
    for name, gradient in expected[1].items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(got[1][name], gradient, rtol=0, atol=2e-5 * scale + 1e-9, msg=name)


def test_the_split_is_megatrons_own(workers_2):
    for ours, megatrons in workers_2.run(as_megatron_splits, "full"):
        assert ours.keys() == megatrons.keys()
        assert all(torch.equal(ours[key], megatrons[key]) for key in ours)


def test_the_small_attention_trains_as_megatrons_own_does(workers_1):
    expected = losses_and_gradients(workers_1, ParallelSizes(), core_attention="local")
    assert_same_training(losses_and_gradients(workers_1, ParallelSizes(), core_attention="small"), expected)


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
def test_context_parallel_ranks_train_as_one_process_does(request, workers_1, layout, fields):
    workers = request.getfixturevalue(f"workers_{layout.world_size}")
    expected = losses_and_gradients(workers_1, ParallelSizes(), core_attention="local", **fields)
    assert_same_training(losses_and_gradients(workers, layout, **fields), expected)


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
def test_packed_sequences_train_as_padded_ones_do(request, workers_1, layout):
    expected = losses_and_gradients(workers_1, ParallelSizes(), "padded")
    workers = request.getfixturevalue(f"workers_{layout.world_size}")
    got = losses_and_gradients(workers, layout, "packed", core_attention="small")
    assert_same_training(got, expected)


def test_packed_sequences_train_with_an_mtp_layer(workers_1, workers_2):
    expected = losses_and_gradients(workers_1, ParallelSizes(), "packed", core_attention="small", mtp_num_layers=1)
    got = losses_and_gradients(workers_2, ParallelSizes(cp_size=2), "packed", mtp_num_layers=1)
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=1e-5)
