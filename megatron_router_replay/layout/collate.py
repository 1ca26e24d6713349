"""An example collator: samples into a batch, where routing rows take the same path as the tokens.

    loader = DataLoader(samples, collate_fn=partial(collate_packed, pad_token_id=0, sequence_multiple=2 * cp_size))

Every per-token field of a sample goes through one call of `pad_sequences` or `pack_sequences` with the same options,
and through one `split_batch`. There is no second piece of code for rows that could drift from the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from megatron_router_replay.checks import shown
from megatron_router_replay.errors import LayoutError
from megatron_router_replay.layout.rows import PADDING_ROW, Side, number_rows, pack_sequences, pad_sequences
from megatron_router_replay.layout.split import Style, split_context_parallel

_Laid = TypeVar("_Laid")

Sample = Mapping[str, Tensor]
"""`input_ids` [length] and any more values of the same length; `routing_rows` if the samples are not in trace order."""

# Cross entropy ignores labels of -100. A row of -1 has no route; routing_padding says that it is padding, not a lost token.
_FILL = {"routing_rows": PADDING_ROW, "routing_padding": True, "labels": -100}


def collate_padded(
    samples: Sequence[Sample],
    *,
    pad_token_id: int,
    seq_length: int | None = None,
    side: Side = "right",
    multiple: int = 1,
) -> dict[str, Tensor]:
    """Return a padded batch of samples. It has their fields, position_ids, routing_rows and routing_padding, each [b, s].

    Args:
        samples: without `routing_rows`, the rows of sample i follow those of sample i - 1 in the trace.
        pad_token_id: input_ids of padding; labels are padded with -100, routing_rows with -1, all else with 0.
            routing_padding (bool) is True on padding: a session's `padding=`.
        seq_length, side, multiple: as for `pad_sequences`.

    Raises:
        LayoutError: as `pad_sequences`; samples have different fields, or fields of a sample different lengths.
    """
    pad = partial(pad_sequences, seq_length=seq_length, side=side, multiple=multiple)
    return _lay_out(samples, pad_token_id, pad)


def collate_packed(
    samples: Sequence[Sample],
    *,
    pad_token_id: int,
    sequence_multiple: int = 1,
    total_multiple: int = 1,
    total_length: int | None = None,
) -> dict[str, Tensor]:
    """Return a packed batch of samples. Its fields are [1, total] each, cu_seqlens and cu_seqlens_padded [num_seqs + 1]
    int32.

    Args:
        samples, pad_token_id: as for `collate_padded`.
        sequence_multiple, total_multiple, total_length: as for `pack_sequences`.

    Raises:
        LayoutError: as `pack_sequences`; samples have different fields, or fields of a sample different lengths.
    """
    pack = partial(
        pack_sequences,
        sequence_multiple=sequence_multiple,
        total_multiple=total_multiple,
        total_length=total_length,
    )
    packed = _lay_out(samples, pad_token_id, pack)
    bounds = packed["input_ids"]  # those of every field, for all have the same lengths
    return {name: field.values for name, field in packed.items()} | {
        "cu_seqlens": bounds.cu_seqlens,
        "cu_seqlens_padded": bounds.cu_seqlens_padded,
    }


def split_batch(
    batch: Mapping[str, Tensor], *, cp_rank: int, cp_size: int, style: Style = "zigzag"
) -> dict[str, Tensor]:
    """Return the part of a collated batch that this context-parallel rank keeps. Its cu_seqlens stay whole.

    Raises:
        LayoutError: as `split_context_parallel`.
    """
    bounds = batch.get("cu_seqlens_padded")
    return {
        name: values  # bounds of whole sequences: attention over several ranks needs them
        if name.startswith("cu_seqlens")
        else split_context_parallel(values, cp_rank=cp_rank, cp_size=cp_size, cu_seqlens_padded=bounds, style=style)
        for name, values in batch.items()
    }


def _lay_out(samples: Sequence[Sample], pad_token_id: int, lay_out: Callable[..., _Laid]) -> dict[str, _Laid]:
    """Return what `lay_out(sequences, fill=)` makes of each field of the samples."""
    if isinstance(samples, Mapping) or not all(isinstance(sample, Mapping) for sample in samples):
        what = "one sample" if isinstance(samples, Mapping) else f"a list with {shown(next(iter(samples), None))}"
        raise LayoutError(
            f"MRR205: cannot collate {what}: give a list of samples, each a dict of tensors, as [{{'input_ids': ids}}]."
        )
    lengths = [_checked_length(i, sample, samples[0]) for i, sample in enumerate(samples)]
    fields = {name: [sample[name] for sample in samples] for name in (samples[0] if samples else ())}
    # Made before anything is padded or packed, so that they take the same path as the tokens.
    fields.setdefault("position_ids", [torch.arange(length) for length in lengths])
    fields.setdefault("routing_rows", number_rows(lengths))
    fields.setdefault("routing_padding", [torch.zeros(length, dtype=torch.bool) for length in lengths])
    fill = _FILL | {"input_ids": pad_token_id}
    return {name: lay_out(values, fill=fill.get(name, 0)) for name, values in fields.items()}


def _checked_length(index: int, sample: Sample, first: Sample) -> int:
    for name, values in sample.items():
        if not isinstance(values, Tensor) or values.dim() == 0:
            raise LayoutError(
                f"MRR205: {name} of sample {index} is {shown(values)}: it must be a tensor [length, ...]."
            )
    lengths = {name: values.shape[0] for name, values in sample.items()}
    if "input_ids" not in lengths or set(lengths) != set(first) or len(set(lengths.values())) != 1:
        raise LayoutError(
            f"MRR205: sample {index} has fields of lengths {lengths}. Every sample needs the fields of sample 0, "
            f"{sorted(first)}, with input_ids among them and one value a token in each."
        )
    return lengths["input_ids"]
