"""The kind of a trace: its fields, their checks, the bytes of a row, and their JSON.

A `TraceFormat` is what all traces of a run have in common. A `TraceHeader` adds the sizes of a single trace: with
these, memory can be laid out before a byte has come. Files and transports carry one or the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from megatron_router_replay.checks import as_integer, shown
from megatron_router_replay.errors import TraceError, listed
from megatron_router_replay.trace.ids import index_dtype
from megatron_router_replay.trace.routing_trace import RoutingTrace
from megatron_router_replay.trace.values import as_layer_numbers, as_sample_ids, as_sequence_lengths, check_topk


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceFormat:
    """The contents of a row of a trace; with the number of layers they fix the bytes of a row.

    Args:
        layer_numbers: Megatron's global layer_number (from 1) of each layer, strictly increasing.
        topk, num_experts: experts chosen by a route, and experts in each layer.
        has_token_ids, has_weight_version: whether each row also has these.

    Raises:
        TraceError: a value is of another type or out of range.
    """

    layer_numbers: tuple[int, ...]
    topk: int
    num_experts: int
    has_token_ids: bool = False
    has_weight_version: bool = False

    def __post_init__(self) -> None:
        for name in ("topk", "num_experts"):
            object.__setattr__(self, name, as_integer(name, getattr(self, name)))
        check_topk(self.topk, self.num_experts)
        object.__setattr__(self, "layer_numbers", as_layer_numbers(self.layer_numbers))
        for name in ("has_token_ids", "has_weight_version"):
            if type(getattr(self, name)) is not bool:
                raise TraceError(f"MRR101: {name}={shown(getattr(self, name))} must be true or false.")

    @classmethod
    def of(cls, trace: RoutingTrace) -> Self:
        """Return the format, or the header, of a trace."""
        present = {"has_token_ids": trace.token_ids is not None, "has_weight_version": trace.weight_version is not None}
        values: dict[str, Any] = {f.name: getattr(trace, f.name) for f in fields(cls) if f.name not in present}
        return cls(**values, **present)  # type: ignore[arg-type]

    @property
    def format(self) -> TraceFormat:
        """The contents of a row, without the sizes of a trace."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(TraceFormat)}
        return TraceFormat(**values)

    @property
    def num_layers(self) -> int:
        return len(self.layer_numbers)

    @property
    def per_token(self) -> dict[str, torch.dtype]:
        """The tensors with a single value a row, with their dtypes, in the order of files."""
        values = {"replay_mask": torch.bool}
        values |= {"token_ids": torch.int32} if self.has_token_ids else {}
        return values | ({"weight_version": torch.int32} if self.has_weight_version else {})

    def empty(self, num_rows: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return uninitialised memory for rows: topk_indices [num_rows, num_layers, topk] and the values per token."""
        ids = torch.empty(
            (num_rows, len(self.layer_numbers), self.topk), dtype=index_dtype(self.num_experts), device=device
        )
        per_token = {name: torch.empty(num_rows, dtype=dtype, device=device) for name, dtype in self.per_token.items()}
        return {"topk_indices": ids, **per_token}

    def row_bytes(self) -> int:
        """Return the bytes of a row: layers * topk ids of 1 or 2 bytes, a mask byte, 4 for each optional value."""
        return sum(memory.nbytes for memory in self.empty(1).values())

    def select_layers(self, layer_numbers: Sequence[int]) -> TraceFormat:
        """Return the format of some of the layers.

        Raises:
            TraceError: one of them is not a layer of this format.
        """
        missing = sorted(set(layer_numbers) - set(self.layer_numbers))
        if missing:
            raise TraceError(
                f"MRR104: there is no layer_number {missing[0]}; there are [{listed(self.layer_numbers)}]."
            )
        return replace(self.format, layer_numbers=tuple(layer_numbers))

    def to_json(self) -> dict[str, Any]:
        """Return plain values that `json.dumps` takes."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return what `to_json` described; other entries of `values` are ignored.

        Raises:
            TraceError: an entry is missing, of another type or out of range.
        """
        known: dict[str, Any] = {field.name: values.get(field.name) for field in fields(cls)}
        return cls(**known)


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceHeader(TraceFormat):
    """A trace without its tensors; their names, dtypes and shapes follow from it.

    Args:
        num_tokens: rows of the trace.
        sequence_lengths: tokens of each sample; their sum is num_tokens.
        sample_ids: a name for each sample; needs `sequence_lengths`.

    Raises:
        TraceError: a value is of another type or out of range, or values contradict each other.
    """

    num_tokens: int
    sequence_lengths: tuple[int, ...] | None = None
    sample_ids: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        TraceFormat.__post_init__(self)  # super() does not work in a dataclass with slots
        object.__setattr__(self, "num_tokens", as_integer("num_tokens", self.num_tokens, least=0, most=(1 << 63) - 1))
        lengths = as_sequence_lengths(self.sequence_lengths, self.num_tokens)
        object.__setattr__(self, "sequence_lengths", lengths)
        object.__setattr__(self, "sample_ids", as_sample_ids(self.sample_ids, lengths))


def views_of_bytes(flat: Tensor, format: TraceFormat, rows: int) -> dict[str, Tensor]:
    """Return the format's tensors for some rows as views of the first bytes of flat uint8 memory.

    The widest dtype comes first, so each begins at a multiple of its width.
    """
    if not rows:
        return format.empty(0)  # nothing to point to, and empty memory has strides that no view takes
    memory: dict[str, Tensor] = {}
    at = 0
    for name, like in sorted(format.empty(0).items(), key=lambda item: -item[1].dtype.itemsize):
        shape = (rows, *like.shape[1:])
        nbytes = math.prod(shape) * like.dtype.itemsize
        memory[name] = flat[at : at + nbytes].view(like.dtype).view(shape)
        at += nbytes
    return memory
