"""Where each token's trace row goes: pure functions from tensors to tensors, without megatron.

`routing_rows` has the shape of `input_ids` and holds the trace row of each position, -1 on padding. Whatever is done to
`input_ids` is done to it with the same function.
"""

from megatron_router_replay.layout.collate import collate_packed, collate_padded, split_batch
from megatron_router_replay.layout.rows import check_tokens, number_rows
from megatron_router_replay.layout.split import rows_for_router, split_context_parallel

__all__ = [
    "check_tokens",
    "collate_packed",
    "collate_padded",
    "number_rows",
    "rows_for_router",
    "split_batch",
    "split_context_parallel",
]
