"""raise_together: all ranks of a group get all values, or all raise."""

import pytest
import torch.distributed as dist

from megatron_router_replay.errors import TraceError
from megatron_router_replay.together import raise_together


class UnpicklableError(Exception):
    def __reduce__(self):
        raise TypeError("cannot be pickled")


def error_of_peers(ranks, text):
    return TraceError(f"MRR107: ranks {ranks} failed: {text}")


def on_this_rank(failing):
    """Return the error, or the values of both ranks; then the values of this rank as a group of its own."""
    rank = dist.get_rank()
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    try:
        first = raise_together(UnpicklableError(f"rank {rank}") if rank in failing else 10 + rank, error_of_peers)
    except Exception as error:
        first = f"{type(error).__name__}: {error}"
    return first, raise_together(rank, error_of_peers, alone)


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ((), [[10, 11], [10, 11]]),
        ((1,), ["TraceError: MRR107: ranks [1] failed: UnpicklableError: rank 1", "UnpicklableError: rank 1"]),
        ((0, 1), ["UnpicklableError: rank 0", "UnpicklableError: rank 1"]),
    ],
)
def test_all_ranks_get_all_values_or_all_raise(on_ranks, failing, expected):
    assert on_ranks(2, on_this_rank, failing) == [(expected[0], [0]), (expected[1], [1])]


def test_a_job_without_process_groups_is_one_rank():
    assert raise_together(7, error_of_peers) == [7]
    with pytest.raises(KeyError):
        raise_together(KeyError("lost"), error_of_peers)
