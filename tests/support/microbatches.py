"""Micro-batches as context parallelism splits them, and packed ones."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.schedule import Microbatch
from tests.support.small_attention import cu_seqlens_in_memory, row_positions


def split_microbatch(microbatch: Mapping[str, Any], *, cp_rank: int, cp_size: int) -> Microbatch:
    """Return this context-parallel rank's zigzag part of every [b, s] tensor; the rest unchanged.

    With packed_seq_params (b = 1) every packed sequence is split by itself. Without, the result equals Megatron's
    get_batch_on_this_cp_rank; a test compares them.
    """
    cu_seqlens = cu_seqlens_in_memory(microbatch.get("packed_seq_params"))
    length = microbatch["tokens"].shape[1]
    sequences, positions = row_positions(length, cp_rank=cp_rank, cp_size=cp_size, cu_seqlens=cu_seqlens)
    rows = positions if cu_seqlens is None else cu_seqlens[sequences] + positions
    return {
        key: value[:, rows] if isinstance(value, Tensor) and value.shape[1:2] == (length,) else value
        for key, value in microbatch.items()
    }


def pack_microbatch(sequences: Sequence[Tensor], *, pad_to_multiple: int = 1) -> Microbatch:
    """Return one packed (THD) micro-batch of token sequences [s + 1] each: s tokens and their next tokens.

    Args:
        sequences: token ids; the last of each is a label only.
        pad_to_multiple: each sequence is padded to a multiple of this; padding has loss_mask 0. It must be
            2 * cp_size under context parallelism, times tp_size under sequence parallelism.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = [sequence.numel() - 1 for sequence in sequences]
    padded = [-(-length // pad_to_multiple) * pad_to_multiple for length in lengths]

    def packed(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([nn.functional.pad(part, (0, size - part.numel())) for part, size in zip(parts, padded)])[None]

    cu_seqlens = torch.tensor([0, *accumulate(padded)], dtype=torch.int32)
    return {
        "tokens": packed([sequence[:-1] for sequence in sequences]),
        "labels": packed([sequence[1:] for sequence in sequences]),
        "loss_mask": packed([torch.ones(length) for length in lengths]),
        "position_ids": torch.cat([torch.arange(size) for size in padded])[None],
        "packed_seq_params": PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max(padded),
            max_seqlen_kv=max(padded),
        ),
    }
