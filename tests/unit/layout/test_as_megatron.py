"""Each split compared with Megatron-Core's own, on rows numbered 0, 1, 2, ..."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from megatron_router_replay.layout.split import rows_for_router, split_context_parallel, split_sequence_parallel
from tests.support.megatron_state import megatrons_context_parallel_split
from tests.support.packing import pack_rows

pytest.importorskip("megatron.core", reason="compares with Megatron-Core's own splits")
from megatron.core import utils
from megatron.core.tensor_parallel import mappings


@contextmanager
def group_as_seen_by(rank: int, size: int):
    """Yield a process group of `size` in which this process is `rank`; torch's fake backend never communicates."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("b", "s", "cp_size"), [(1, 8, 2), (3, 24, 2), (2, 24, 3), (1, 16, 4), (2, 10, 1)])
def test_zigzag_is_megatrons_split_of_a_padded_batch(b, s, cp_size):
    rows = torch.arange(b * s).view(b, s)
    for rank in range(cp_size):
        with group_as_seen_by(rank, cp_size) as group:
            theirs = megatrons_context_parallel_split({"tokens": rows}, cp_group=group)["tokens"]
        assert torch.equal(split_context_parallel(rows, cp_rank=rank, cp_size=cp_size), theirs)


@pytest.mark.parametrize(("b", "s", "tp_size"), [(1, 8, 2), (3, 12, 4), (2, 5, 1)])
def test_rows_for_router_is_megatrons_scatter_and_flatten(b, s, tp_size):
    rows = torch.arange(b * s).view(b, s)
    # As LanguageModelEmbedding.forward and TopKRouter.routing: [b, s, h] -> [s, b, h] -> scatter -> [n, h].
    hidden = rows.unsqueeze(2).transpose(0, 1).contiguous()
    for rank in range(tp_size):
        with group_as_seen_by(rank, tp_size) as group:
            theirs = mappings._split_along_first_dim(hidden, group)
            assert torch.equal(split_sequence_parallel(hidden, tp_rank=rank, tp_size=tp_size), theirs)
        ours = rows_for_router(rows, tp_rank=rank, tp_size=tp_size, sequence_parallel=True)
        assert torch.equal(ours, theirs.reshape(-1, 1)[:, 0])


def thd_get_partitioned_indices(cu_seqlens: list[int], total: int, world_size: int, rank: int) -> list[int]:
    """The kernel of transformer_engine 2.x (common/fused_attn/context_parallel.cu), one thread after another."""
    bounds = [bound // world_size for bound in cu_seqlens]
    output = []
    for token_id in range(total // world_size):
        seq = max(i for i in range(len(bounds)) if bounds[i] <= token_id)
        seq_len = bounds[seq + 1] - bounds[seq]
        index = token_id - bounds[seq]
        offset = rank if index < seq_len // 2 else (world_size - 1) * 2 - rank
        output.append(index + bounds[seq] * world_size + seq_len // 2 * offset)
    return output


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", [[5], [3, 9, 1], [12, 0, 24, 7]])
def test_zigzag_is_transformer_engines_split_of_packed_sequences(lengths, cp_size):
    rows, _, bounds = pack_rows(lengths, multiple=2 * cp_size, total_multiple=16)
    for rank in range(cp_size):
        index = thd_get_partitioned_indices(bounds.tolist(), rows.shape[1], cp_size, rank)
        ours = split_context_parallel(rows, cp_rank=rank, cp_size=cp_size, cu_seqlens_padded=bounds)
        assert torch.equal(ours, rows[:, index])


@pytest.mark.gpu
@pytest.mark.skipif(
    utils.tex is None, reason="Megatron-Core splits packed sequences with a kernel of transformer_engine"
)
def test_zigzag_is_megatrons_split_of_packed_sequences():
    packed = pack_rows([3, 9, 1], multiple=4, total_multiple=16)
    rows, cu_seqlens, bounds = (tensor.cuda() for tensor in packed)
    longest = bounds.diff().max().view(1)
    for rank in range(2):
        theirs, _ = utils.get_thd_batch_on_this_cp_rank(
            {"tokens": rows}, cu_seqlens, bounds, longest, cp_size=2, cp_rank=rank
        )
        ours = split_context_parallel(rows, cp_rank=rank, cp_size=2, cu_seqlens_padded=bounds)
        assert torch.equal(ours, theirs["tokens"])
