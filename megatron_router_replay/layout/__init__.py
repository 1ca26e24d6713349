"""Where each token's trace row goes: pure functions from tensors to tensors, without megatron.

`routing_rows` has the shape of `input_ids` and holds the trace row of each position, -1 on padding. Whatever is done to
`input_ids` is done to it with the same function.
"""

from megatron_router_replay.layout.sequence_parallel import (
    merge_router_rows,
    merge_sequence_parallel,
    rows_for_router,
    split_sequence_parallel,
)

__all__ = [
    "merge_router_rows",
    "merge_sequence_parallel",
    "rows_for_router",
    "split_sequence_parallel",
]
