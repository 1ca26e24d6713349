"""Micro-batches as context parallelism splits them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megatron_router_replay.testing.packed_attention import row_positions
from tests.support.schedule import Microbatch


def split_microbatch(microbatch: Mapping[str, Any], *, cp_rank: int, cp_size: int) -> Microbatch:
    """Return this context-parallel rank's zigzag part of every [b, s] tensor; the rest unchanged.

    The result equals Megatron's get_batch_on_this_cp_rank; a test compares them.
    """
    length = microbatch["tokens"].shape[1]
    _, positions = row_positions(length, cp_rank=cp_rank, cp_size=cp_size)
    return {
        key: value[:, positions] if isinstance(value, Tensor) and value.shape[1:2] == (length,) else value
        for key, value in microbatch.items()
    }
