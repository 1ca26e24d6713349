"""Which rows the ranks of Megatron-Core's groups have in common, and which part of a sequence is a rank's."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_router_replay.mcore.batches.chunk import Chunk
from megatron_router_replay.testing import ParallelSizes


def shares(sizes, sequence_parallel):
    ParallelSizes(**sizes).initialize()
    router = SimpleNamespace(
        weight=torch.zeros(1),
        config=SimpleNamespace(sequence_parallel=sequence_parallel),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        tp_cp_group=parallel_state.get_tensor_and_context_parallel_group(),
    )
    chunk = Chunk(0, [torch.nn.Identity()], [SimpleNamespace(router=router, layer_number=1)], rank=0, missing="")
    return chunk.row_sharing, chunk.forward_part, chunk.sequence_share, chunk.router_shape((3, 8))


@pytest.mark.parametrize(
    ("sizes", "sequence_parallel", "row_sharing", "forward_part", "sequence_share", "length"),
    [
        # Of each rank: its number among those with its rows, how many ranks share its sequences, the lowest of these.
        ({"tp_size": 2}, False, [(0, 1, 0), (1, 1, 0), (0, 1, 2), (1, 1, 2)], [0, 0, 0, 0], [(0, 1)] * 4, 8),
        ({"tp_size": 2}, True, [(0, 2, 0)] * 2 + [(0, 2, 2)] * 2, [0, 1, 0, 1], [(0, 2), (1, 2)] * 2, 4),
        ({"cp_size": 2}, False, [(0, 2, 0)] * 2 + [(0, 2, 2)] * 2, [0, 1, 0, 1], [(0, 1)] * 4, 8),
        (
            {"tp_size": 2, "cp_size": 2},
            False,
            [(0, 2, 0), (1, 2, 0), (0, 2, 0), (1, 2, 0)],
            [0, 0, 2, 2],
            [(0, 1)] * 4,
            8,
        ),
        ({"tp_size": 2, "cp_size": 2}, True, [(0, 4, 0)] * 4, [0, 1, 2, 3], [(0, 2), (1, 2)] * 2, 4),
        ({"tp_size": 4}, True, [(0, 4, 0)] * 4, [0, 1, 2, 3], [(0, 4), (1, 4), (2, 4), (3, 4)], 2),
    ],
)
def test_ranks_share_rows_and_sequences(
    sizes, sequence_parallel, row_sharing, forward_part, sequence_share, length, on_ranks
):
    expected = list(zip(row_sharing, forward_part, sequence_share, [(length, 3)] * 4, strict=True))
    assert on_ranks(4, shares, sizes, sequence_parallel) == expected


def stage_of(kind):
    """Return the stage of a chunk under Megatron-Core's own groups, and where its model has some of its own."""
    ParallelSizes(pp_size=1 if kind == "one stage" else 2).initialize()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    module = torch.nn.Identity()
    if "model" in kind:
        group = groups[dist.get_rank() // 2]
        module.pg_collection = SimpleNamespace(pp=None if kind == "model without" else group)
    router = SimpleNamespace(
        weight=torch.zeros(1), config=SimpleNamespace(sequence_parallel=False), tp_group=groups[dist.get_rank() // 2]
    )
    return Chunk(0, [module], [SimpleNamespace(router=router, layer_number=1)], rank=0, missing="").stage


@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        ("one stage", [None] * 4),
        ("two stages", [(0, 0), (1, 0), (0, 1), (1, 1)]),
        ("model with groups", [(0, 0), (0, 1), (2, 0), (2, 1)]),
        ("model without", [None] * 4),
    ],
)
def test_the_stage_is_that_of_the_models_own_groups(kind, stages, on_ranks):
    assert on_ranks(4, stage_of, kind) == stages
