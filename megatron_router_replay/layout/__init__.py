"""The place of each token's trace row: pure functions from tensors to tensors, without megatron.

A session finds the rows of a forward by its tokens. Rows by hand, `session.microbatch(rows, model)`, have the shape of
`input_ids` and contain the trace row of each position, -1 on padding: whatever moves `input_ids` moves them.
"""

from megatron_router_replay.layout.split import rows_for_router, split_context_parallel
from megatron_router_replay.lazy import FOUND_BY_TOKENS, lazy_names

__all__ = ["rows_for_router", "split_context_parallel"]

_WITHDRAWN = {
    **dict.fromkeys(("collate_packed", "collate_padded", "split_batch"), FOUND_BY_TOKENS),
    "check_tokens": "session.microbatch(rows, model, token_ids=...) compares rows by hand, every forward its own tokens.",
    "number_rows": "torch.split(torch.arange(trace.num_tokens), lengths).",
}
__getattr__, _ = lazy_names(__name__, {}, withdrawn=_WITHDRAWN)
