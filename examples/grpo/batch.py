"""Samples -> packed micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from examples.grpo.rollout import Text
from megatron_router_replay.layout import split_context_parallel
from megatron_router_replay.testing import ParallelSizes

Microbatch = dict[str, Any]


class RolloutBatch:
    """A rollout's samples in one numbering: batch row r is token r of all samples behind one another.

    What training knows about a token is a tensor by batch row. Log-probs, advantages and masks sit at the row that
    *predicts* the token, one before it; the last row of each sample predicts nothing.

    Args:
        samples: of the whole rollout.
        advantages: [num_samples].
        own: the samples that this rank trains on, in the order of its traces; None: all.
    """

    def __init__(self, samples: Sequence[Text], advantages: Tensor, own: Sequence[int] | None = None) -> None:
        self.samples = samples
        lengths = [len(sample.token_ids) for sample in samples]
        self.num_rows = sum(lengths)
        self.rows = torch.arange(self.num_rows).split(lengths)
        self.own = range(len(samples)) if own is None else own
        self.loss_mask = self._predicting([sample.generated.float() for sample in samples])
        self.rollout_logprobs = self._predicting([sample.logprobs for sample in samples])
        self.advantages = torch.cat([advantage.expand(len(rows)) for advantage, rows in zip(advantages, self.rows)])
        self.old_logprobs = torch.zeros(self.num_rows)
        self.ref_logprobs = torch.zeros(self.num_rows)

    @property
    def own_rows(self) -> Tensor:
        """[rows of this rank's traces] int64, the batch row of each."""
        return torch.cat([self.rows[sample] for sample in self.own])

    def microbatches(
        self,
        chosen: Sequence[int],
        layout: ParallelSizes,
        *,
        per_microbatch: int,
        max_tokens: int,
        dp_size: int,
        cp_rank: int,
    ) -> list[Microbatch]:
        """Return micro-batches of this rank's samples among the chosen, all of one length, [1, total / cp_size] a field.

        Args:
            per_microbatch: samples packed into one row.
            max_tokens: of one sample; decides the length.
            dp_size, cp_rank: of this rank.
        """
        mine = [sample for sample in chosen if sample in self.own]
        if len(chosen) % (dp_size * per_microbatch):
            raise ValueError(
                f"{len(chosen)} samples a gradient step do not fill micro-batches of {per_microbatch} on {dp_size} "
                "data-parallel ranks: make them a multiple."
            )
        multiple = 2 * layout.cp_size * layout.tp_size
        total = per_microbatch * (-(-max_tokens // multiple) * multiple)
        result = []
        for start in range(0, len(mine), per_microbatch):
            fields = [self._fields(sample) for sample in mine[start : start + per_microbatch]]
            batch: Microbatch = {}
            for name in fields[0]:
                values = [field[name] for field in fields]
                fill = {"labels": -100, "is_padding": True}.get(name, 0)
                row, unpadded, bounds = pack_sequences(values, fill=fill, multiple=multiple, total=total)
                batch[name] = split_context_parallel(
                    row, cp_rank=cp_rank, cp_size=layout.cp_size, cu_seqlens_padded=bounds
                )
            batch["packed_seq_params"] = _packed_seq_params(unpadded, bounds)
            result.append(batch)
        return result

    def _fields(self, sample: int) -> dict[str, Tensor]:
        rows = self.rows[sample]
        token_ids = self.samples[sample].token_ids
        by_row = {
            name: getattr(self, name)[rows] for name in ("loss_mask", "advantages", "old_logprobs", "ref_logprobs")
        }
        labels = torch.cat([token_ids[1:], token_ids[:1]])  # the last one has loss_mask 0
        return {
            "input_ids": token_ids,
            "labels": labels,
            "position_ids": torch.arange(len(rows)),
            "is_padding": torch.zeros(len(rows), dtype=torch.bool),
            "batch_rows": rows,
            **by_row,
        }

    def _predicting(self, by_token: Sequence[Tensor]) -> Tensor:
        return torch.cat([torch.cat([values[1:], values.new_zeros(1)]) for values in by_token])


def pack_sequences(
    sequences: Sequence[Tensor], *, fill: float, multiple: int, total: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sequences as one row [1, total], each padded to a multiple, and where they start, unpadded and padded.

    The last sequence takes the rest of `total`: positions of no sequence would be one of their own to attention.
    """
    lengths = [len(sequence) for sequence in sequences]
    padded = [-(-length // multiple) * multiple for length in lengths]
    if sum(padded) > total:
        raise ValueError(f"samples of {lengths} tokens do not fit into {total} positions: max_tokens is too small.")
    padded[-1] += total - sum(padded)
    row = torch.cat([pad(values, (0, size - len(values)), value=fill) for values, size in zip(sequences, padded)])
    unpadded, bounds = (torch.tensor([0, *sizes]).cumsum(0).to(torch.int32) for sizes in (lengths, padded))
    return row.unsqueeze(0), unpadded, bounds


def _packed_seq_params(unpadded: Tensor, bounds: Tensor) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    longest = int(bounds.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=unpadded,  # so that padding is known, and no token is taken for it
        cu_seqlens_kv=unpadded,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
