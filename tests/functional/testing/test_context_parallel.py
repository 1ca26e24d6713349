import pytest
import torch

from megatron_router_replay.testing import ParallelSizes, random_microbatches
from tests.functional.testing.training import assert_same_training, train_on_ranks
from tests.support.microbatches import pack_microbatch, split_microbatch

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
    from megatron.core.utils import get_batch_on_this_cp_rank

    layout = ParallelSizes(cp_size=2)
    layout.initialize()
    (microbatch, _) = random_microbatches(2, batch_size=2)
    ours = split_microbatch(microbatch, cp_rank=parallel_state.get_context_parallel_rank(), cp_size=2)
    return ours, get_batch_on_this_cp_rank(dict(microbatch))


def losses_and_gradients(workers, layout, kind="full", core_attention=None, **fields):
    return train_on_ranks(workers, layout, batches(kind, layout), core_attention, **fields)


def test_the_split_is_megatrons_own(workers_2):
    for ours, megatrons in workers_2.run(as_megatron_splits):
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
