"""Micro-batches as context parallelism splits them, and packed ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.testing.attention import cu_seqlens_in_memory, row_positions
from megatron_router_replay.testing.schedule import Microbatch


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

    tokens, labels, loss_mask, position_ids, starts = [], [], [], [], [0]
    for sequence in sequences:
        length = sequence.numel() - 1
        padding = -length % pad_to_multiple
        tokens.append(torch.nn.functional.pad(sequence[:-1], (0, padding)))
        labels.append(torch.nn.functional.pad(sequence[1:], (0, padding)))
        loss_mask.append(torch.nn.functional.pad(torch.ones(length), (0, padding)))
        position_ids.append(torch.arange(length + padding))
        starts.append(starts[-1] + length + padding)
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    return {
        "tokens": torch.cat(tokens)[None],
        "labels": torch.cat(labels)[None],
        "loss_mask": torch.cat(loss_mask)[None],
        "position_ids": torch.cat(position_ids)[None],
        "packed_seq_params": PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
    }
