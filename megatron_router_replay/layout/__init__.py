"""Where each token's trace row goes: pure functions from tensors to tensors, without megatron.

`routing_rows` has the shape of `input_ids` and holds the trace row of each position, -1 on padding. Whatever is done to
`input_ids` is done to it with the same function.
"""

from megatron_router_replay.layout.check import check_rows
from megatron_router_replay.layout.collate import collate_packed, collate_padded, split_batch
from megatron_router_replay.layout.context_parallel import (
    context_parallel_positions,
    merge_context_parallel,
    split_context_parallel,
)
from megatron_router_replay.layout.rows import (
    PADDING_ROW,
    Packed,
    number_rows,
    pack_rows,
    pack_sequences,
    pad_rows,
    pad_sequences,
    pad_to_multiple,
)
from megatron_router_replay.layout.sequence_parallel import (
    merge_router_rows,
    merge_sequence_parallel,
    rows_for_router,
    split_sequence_parallel,
)

__all__ = [
    "PADDING_ROW",
    "Packed",
    "check_rows",
    "collate_packed",
    "collate_padded",
    "context_parallel_positions",
    "merge_context_parallel",
    "merge_router_rows",
    "merge_sequence_parallel",
    "number_rows",
    "pack_rows",
    "pack_sequences",
    "pad_rows",
    "pad_sequences",
    "pad_to_multiple",
    "rows_for_router",
    "split_batch",
    "split_context_parallel",
    "split_sequence_parallel",
]
