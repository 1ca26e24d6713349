"""What kind of trace this is: its fields, their checks, the bytes of a row, and the JSON of both.

A `TraceFormat` is what all traces of a run have in common. A `TraceHeader` adds the sizes of one trace; with it, memory for
the trace can be laid out before a byte of it has come. Files, envelopes and transports carry one or the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.errors import TraceError
from megatron_router_replay.ids import index_dtype
from megatron_router_replay.left_live import check_nothing_left_out
from megatron_router_replay.trace import RoutingTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceFormat:
    """What a row of a trace holds; together with the number of layers it fixes the bytes of a row.

    Args:
        layer_numbers: Megatron's global layer_number (from 1) of each layer, strictly increasing.
        topk, num_experts: experts chosen by a route, and experts in each layer.
        has_token_ids, has_weight_version: whether each row also holds these.

    Raises:
        TraceError: a value is of another type or out of range.
    """

    layer_numbers: tuple[int, ...]
    topk: int
    num_experts: int
    has_token_ids: bool = False
    has_weight_version: bool = False

    def __post_init__(self) -> None:
        index_dtype(self.num_experts)
        if not 1 <= self.topk <= self.num_experts:
            raise TraceError(f"topk={self.topk} must lie in 1..num_experts={self.num_experts}.")
        numbers = self.layer_numbers
        if (numbers and numbers[0] < 1) or any(a >= b for a, b in pairwise(numbers)):
            raise TraceError(f"layer_numbers must increase from 1 or more, got {list(numbers)[:100]}.")

    @classmethod
    def of(cls, trace: RoutingTrace) -> TraceFormat:
        """Return the format of a trace.

        Raises:
            TraceError: rows of it were left live by choice, which no file and no message holds.
        """
        check_nothing_left_out(trace.left_live, "save or send a trace", "the trace where it is replayed")
        return cls(
            layer_numbers=trace.layer_numbers,
            topk=trace.topk,
            num_experts=trace.num_experts,
            has_token_ids=trace.token_ids is not None,
            has_weight_version=trace.weight_version is not None,
        )

    @property
    def num_layers(self) -> int:
        return len(self.layer_numbers)

    @property
    def index_dtype(self) -> torch.dtype:
        return index_dtype(self.num_experts)

    @property
    def per_token(self) -> dict[str, torch.dtype]:
        """The tensors that hold one value a row whatever its layers, with their dtypes, in the order of files."""
        values = {"replay_mask": torch.bool}
        values |= {"token_ids": torch.int32} if self.has_token_ids else {}
        return values | ({"weight_version": torch.int32} if self.has_weight_version else {})

    def row_bytes(self, num_layers: int | None = None) -> int:
        """Return the bytes of one row: layers * topk ids of 1 or 2 bytes, a mask byte, 4 for each optional value.

        Args:
            num_layers: of a part of the layers; default: all.
        """
        layers = self.num_layers if num_layers is None else num_layers
        return layers * self.topk * self.index_dtype.itemsize + sum(dtype.itemsize for dtype in self.per_token.values())

    def empty(
        self, num_rows: int, num_layers: int | None = None, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Return uninitialised memory for rows: topk_indices [num_rows, num_layers, topk] and the values per token."""
        layers = self.num_layers if num_layers is None else num_layers
        ids = torch.empty((num_rows, layers, self.topk), dtype=self.index_dtype, device=device)
        per_token = {name: torch.empty(num_rows, dtype=dtype, device=device) for name, dtype in self.per_token.items()}
        return {"topk_indices": ids, **per_token}

    def select_layers(self, layer_numbers: Sequence[int]) -> TraceFormat:
        """Return the same format for some of the layers.

        Raises:
            TraceError: one of them is not a layer of this format.
        """
        missing = sorted(set(layer_numbers) - set(self.layer_numbers))
        if missing:
            raise TraceError(f"there is no layer_number {missing[0]}; there are {list(self.layer_numbers)}.")
        return TraceFormat(**{**TraceFormat.to_json(self), "layer_numbers": tuple(layer_numbers)})

    def to_json(self) -> dict[str, Any]:
        """Return plain values that `json.dumps` takes."""
        # Not those of a subclass: a TraceHeader asks for its format alone by this very function.
        return {field.name: getattr(self, field.name) for field in fields(TraceFormat)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TraceFormat:
        """Return what `to_json` described; other entries of `values` are ignored.

        Raises:
            TraceError: an entry is missing, of another type or out of range.
        """
        topk, num_experts = (as_integer(name, values.get(name)) for name in ("topk", "num_experts"))
        return cls(
            layer_numbers=as_integers("layer_numbers", values.get("layer_numbers")),
            topk=topk,
            num_experts=num_experts,
            has_token_ids=_as_bool("has_token_ids", values.get("has_token_ids")),
            has_weight_version=_as_bool("has_weight_version", values.get("has_weight_version")),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceHeader(TraceFormat):
    """Everything about a trace but its tensors, whose names, dtypes and shapes follow from it.

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
        TraceFormat.__post_init__(self)
        if self.num_tokens < 0:
            raise TraceError(f"num_tokens={self.num_tokens} must be 0 or more.")
        lengths = self.sequence_lengths
        if lengths is not None and (sum(lengths) != self.num_tokens or any(length < 0 for length in lengths)):
            raise TraceError(f"sequence_lengths add up to {sum(lengths)}, num_tokens is {self.num_tokens}.")
        if self.sample_ids is not None and (lengths is None or len(lengths) != len(self.sample_ids)):
            raise TraceError("sample_ids do not name one sample for each of sequence_lengths.")

    @classmethod
    def of(cls, trace: RoutingTrace) -> TraceHeader:
        """Return the header of a trace."""
        return cls(
            **TraceFormat.of(trace).to_json(),
            num_tokens=trace.num_tokens,
            sequence_lengths=trace.sequence_lengths,
            sample_ids=trace.sample_ids,
        )

    @property
    def format(self) -> TraceFormat:
        """What a row holds, without the sizes of this trace."""
        return TraceFormat(**TraceFormat.to_json(self))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of the trace."""
        return self.num_tokens * self.row_bytes()

    def to_json(self) -> dict[str, Any]:
        """Return plain values that `json.dumps` takes."""
        return {field.name: getattr(self, field.name) for field in fields(TraceHeader)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TraceHeader:
        """Return what `to_json` described; other entries of `values` are ignored.

        Raises:
            TraceError: an entry is missing, of another type or out of range.
        """
        lengths, names = values.get("sequence_lengths"), values.get("sample_ids")
        return cls(
            **TraceFormat.from_json(values).to_json(),
            num_tokens=as_integer("num_tokens", values.get("num_tokens")),
            sequence_lengths=None if lengths is None else as_integers("sequence_lengths", lengths),
            sample_ids=None if names is None else as_strings("sample_ids", names),
        )


def as_integer(name: str, value: Any) -> int:
    """Return a JSON integer, or raise TraceError; larger ones than any size of ours are refused before they are used."""
    if type(value) is not int or abs(value) >= 1 << 63:
        raise TraceError(f"{name} is {str(value)[:40]!r}, not an integer of 64 bits.")
    return value


def as_integers(name: str, values: Any) -> tuple[int, ...]:
    """Return a JSON list of integers, or raise TraceError."""
    if not isinstance(values, list | tuple):
        raise TraceError(f"{name} is {str(values)[:40]!r}, not a list of integers.")
    return tuple(as_integer(name, value) for value in values)


def as_strings(name: str, values: Any) -> tuple[str, ...]:
    """Return a JSON list of strings, or raise TraceError."""
    if not isinstance(values, list | tuple) or any(type(value) is not str for value in values):
        raise TraceError(f"{name} is {str(values)[:100]!r}, not a list of strings.")
    return tuple(values)


def _as_bool(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise TraceError(f"{name} is {str(value)[:40]!r}, not true or false.")
    return value
