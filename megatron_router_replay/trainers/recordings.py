"""R2: rows for tokens that have no routes yet, and what a recording made of them, in the container of the tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_router_replay.errors import LayoutError, ReplayStateError
from megatron_router_replay.layout import check_tokens, number_rows
from megatron_router_replay.trainers.containers import Container, TokenLayout, flatten

if TYPE_CHECKING:
    from megatron_router_replay.mcore import RecordSession


def number_batch(tokens: Any, attention_mask: Any = None, *, lengths: Any = None) -> Container:
    """Return the rows of tokens that have no routes yet: 0, 1, 2, ... over all samples, in their container.

    Args:
        tokens: jagged nested [B, T_i], padded [B, S], or a list of [T_i].
        attention_mask: [B, S], non-zero where a padded batch has tokens; None: everywhere.
        lengths: [B], tokens of each sample of a batch that is padded on the right; instead of attention_mask.

    Returns:
        int64, -1 on padding.

    Raises:
        LayoutError: shapes disagree.
    """
    layout = TokenLayout.of(tokens, attention_mask=attention_mask, lengths=lengths)
    return layout.join(number_rows(layout.lengths), fill=-1)


def recorded_routes(
    session: RecordSession,
    *,
    like: Any,
    attention_mask: Any = None,
    lengths: Any = None,
    rows: Any = None,
    groups: Sequence[dist.ProcessGroup] | None = None,
) -> Container:
    """Return the recorded routes of a batch, in the container of its tokens.

    They are whole on every rank that shares the batch.

    A collective over `groups`.

    Args:
        session: the recording, after its `with` block.
        like, attention_mask, lengths: the tokens, as for `number_batch`.
        rows: of these tokens, in their container; None: those of `number_batch`. Give them where a batch was numbered before
            it was split over data-parallel ranks.
        groups: the groups over which the batch's tokens and layers are spread; None: Megatron's tensor-, context- and
            pipeline-parallel groups. Not the data-parallel one, whose ranks number other tokens from 0.

    Returns:
        [B, T_i or S, L_moe, topk] on the CPU or the tokens' device, in the compact dtype (uint8 up to 256 experts, else
        int16), for all MoE layers of the model; 0 on padding. `mrr.stamp` takes each sample of it.

    Raises:
        ReplayStateError: a token was recorded nowhere.
        TraceError: two ranks recorded the same token with different experts, or there are more rows than tokens.
        LayoutError: a row was recorded for another token than `like` has there.
    """
    layout = TokenLayout.of(like, attention_mask=attention_mask, lengths=lengths)
    if groups is None:
        groups = _model_parallel_groups()
    # The row of each token, in the order of the samples: without rows= it is the token's own number.
    at = torch.arange(layout.num_tokens) if rows is None else flatten(layout.split(rows, "rows")).to(torch.int64)
    if at.numel() and int(at.min()) < 0:
        raise LayoutError("MRR807: rows hold a token with row -1, whose routes were not recorded.")
    length = int(at.max()) + 1 if at.numel() else 0
    # gather() without groups is one over the whole job.
    trace = session.gather(*groups, num_tokens=length) if groups else session.trace(num_tokens=length)
    # Not left to the live router: what was lost here would be trained with other experts than its old log-probs had.
    missing = (~trace.replay_mask[at]).nonzero()[:, 0]
    if missing.numel():
        first = int(missing[0])
        sample = bisect_right(list(accumulate(layout.lengths)), first)
        position = first - sum(layout.lengths[:sample])
        raise ReplayStateError(
            f"MRR807: {missing.numel()} of {layout.num_tokens} tokens were recorded nowhere, the first is token "
            f"{position} of sample {sample}: was each micro-batch forwarded, with its routing_rows, and are all ranks "
            "that share the batch in the groups?"
        )
    if trace.token_ids is not None:
        check_tokens(at.unsqueeze(0), flatten(layout.split(like, "like")).unsqueeze(0), token_ids=trace.token_ids)
    indices = trace.topk_indices.cpu()
    parts = torch.split(indices if rows is None else indices[at], list(layout.lengths))
    return layout.join(list(parts), fill=0)


def _model_parallel_groups() -> tuple[dist.ProcessGroup, ...]:
    """Return the tensor-, context- and pipeline-parallel groups of this rank; none without torch.distributed.

    Together they hold every rank that routes tokens of this rank's batch, and no rank of another data-parallel batch.
    """
    if not dist.is_initialized():
        return ()
    from megatron.core import parallel_state

    return (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
