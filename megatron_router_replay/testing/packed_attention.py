"""A core attention for GPTModel on a CPU that takes packed sequences and context parallelism.

Megatron-Core's local DotProductAttention refuses both, and the classes that take them need Transformer Engine. This one is
exact and short, not fast: it gathers all keys and values and masks them by sequence and position.
"""

import math
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class PackedAttention(torch.nn.Module):
    """Attend causally within each sequence.

    `load_qwen3_moe` and other builders of models take the class as `core_attention`. Megatron's SelfAttention builds and
    calls it as any core attention. Under context parallelism each packed sequence is split zigzag, as Megatron and
    Transformer Engine do; see `row_positions`. Grouped-query attention is supported. Masks are ignored, so padding must
    follow the tokens. There are no biases, dropout or windows.
    """

    def __init__(self, config: Any, *args: Any, pg_collection: Any, softmax_scale: Any = None, **kwargs: Any) -> None:
        super().__init__()
        assert not config.attention_dropout, "PackedAttention has no dropout"
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attend.

        Args:
            query: [s, b, heads, d], or packed [t, heads, d]; this context-parallel rank's rows.
            key, value: the same with one head per query group.
            attention_mask: ignored, as trainers give one for padding on the right.
            packed_seq_params: Megatron's PackedSeqParams with cu_seqlens of the whole row, before the split.

        Returns:
            [s, b, heads * d], or packed [t, heads * d].
        """
        cu_seqlens = cu_seqlens_in_memory(packed_seq_params)
        if cu_seqlens is not None:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        cp_rank, cp_size = self.cp_group.rank(), self.cp_group.size()
        length = query.shape[0] * cp_size
        rows_by_rank = [
            row_positions(length, cp_rank=rank, cp_size=cp_size, cu_seqlens=cu_seqlens) for rank in range(cp_size)
        ]
        query_rows, key_rows = rows_by_rank[cp_rank], torch.cat(rows_by_rank, dim=1)
        if cp_size > 1:
            key, value = _GatherRows.apply(key, self.cp_group), _GatherRows.apply(value, self.cp_group)  # type: ignore[no-untyped-call]
        visible = (query_rows[0, :, None] == key_rows[0]) & (query_rows[1, :, None] >= key_rows[1])

        heads_per_group = query.shape[2] // key.shape[2]
        key = key.repeat_interleave(heads_per_group, dim=2)
        value = value.repeat_interleave(heads_per_group, dim=2)
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.softmax_scale
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        context = torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)
        return context.flatten(1) if cu_seqlens is not None else context


def row_positions(length: int, *, cp_rank: int, cp_size: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return the sequence and the position of each row of a context-parallel rank.

    Each sequence is cut into 2 * cp_size equal chunks; rank r has chunks r and 2 * cp_size - 1 - r.

    Args:
        length: rows of the whole row of tokens, over all ranks.
        cp_rank, cp_size: this rank's place in the context-parallel group.
        cu_seqlens: [num_seqs + 1] starts of packed sequences in the whole row; None: one sequence.

    Returns:
        [2, length // cp_size] int64: sequence index and position, in this rank's row order.

    Source: Megatron-Core 0.16.1, utils.get_batch_on_this_cp_rank; Transformer Engine's thd_get_partitioned_indices.
    """
    starts = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    assert starts[-1] == length, f"packed rows end at {starts[-1]}, but there are {length} rows"
    rows = []
    for index, (start, end) in enumerate(pairwise(starts)):
        positions = torch.arange(end - start)
        if cp_size > 1:
            pieces = positions.view(2 * cp_size, -1)
            positions = pieces[[cp_rank, 2 * cp_size - 1 - cp_rank]].flatten()
        rows.append(torch.stack([torch.full_like(positions, index), positions]))
    return torch.cat(rows, dim=1)


def cu_seqlens_in_memory(packed_seq_params: Any) -> Tensor | None:
    """Return the starts of the sequences as they lie in memory, padding included."""
    if packed_seq_params is None:
        return None
    padded: Tensor | None = packed_seq_params.cu_seqlens_q_padded
    unpadded: Tensor | None = packed_seq_params.cu_seqlens_q
    return padded if padded is not None else unpadded


class _GatherRows(torch.autograd.Function):
    """Concatenate every rank's rows along axis 0, in rank order; the backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None
