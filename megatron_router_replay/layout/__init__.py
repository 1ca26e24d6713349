"""The place of each token's trace row: pure functions from tensors to tensors, without megatron.

A session finds the rows of a forward by its tokens. Rows by hand, `session.microbatch(rows, model)`, have the shape of
`input_ids` and contain the trace row of each position, -1 on padding: whatever moves `input_ids` moves them.
"""

from megatron_router_replay.layout.split import rows_for_router, split_context_parallel

__all__ = ["rows_for_router", "split_context_parallel"]
