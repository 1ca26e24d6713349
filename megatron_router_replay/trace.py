"""RoutingTrace: which experts every token used in every MoE layer, checked once when made.

Token-major, as inference engines send it, so that samples concatenate with one copy and a micro-batch is one
gather of whole rows. Nothing here is widened to int64; that is left to the router of one layer and one micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megatron_router_replay.errors import TraceError
from megatron_router_replay.ids import check_topk_indices, index_dtype, spread_experts
from megatron_router_replay.runs import as_slice

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoutingTrace:
    """The routes of a batch of tokens: one row per token, one entry per MoE layer.

    Args:
        topk_indices: [num_tokens, num_layers, topk], torch or numpy, any integer dtype. Stored as a copy in
            `index_dtype(num_experts)`. A row of -1 in every layer has no route.
        layer_numbers: Megatron's global layer_number (from 1) of each entry of axis 1, strictly increasing.
        num_experts: experts in each layer, shared experts not counted.
        replay_mask: [num_tokens] bool, True: this row has a route, False: the live router decides. Default: all True
            except rows of -1. Rows without a route hold `topk` distinct ids, spread over all experts.
        token_ids: [num_tokens] any integer dtype, stored as int32; proves that routes and tokens still match.
        sequence_lengths: tokens of each sample, in order; their sum is num_tokens.
        sample_ids: a name for each sample; needs `sequence_lengths`.
        weight_version: [num_tokens] or one int: version of the weights that chose the routes, stored as int32.

    Raises:
        TraceError: shapes disagree, an id is outside 0..num_experts-1, a row names an expert twice, a row is -1 in
            some places only.
    """

    topk_indices: Tensor
    layer_numbers: tuple[int, ...]
    num_experts: int
    replay_mask: Tensor = None  # type: ignore[assignment]  # None on the way in, a tensor ever after
    token_ids: Tensor | None = None
    sequence_lengths: tuple[int, ...] | None = None
    sample_ids: tuple[str, ...] | None = None
    weight_version: Tensor | None = None

    if TYPE_CHECKING:  # what goes in is wider than what is stored

        def __init__(
            self,
            *,
            topk_indices: ArrayLike | Tensor,
            layer_numbers: Iterable[int],
            num_experts: int,
            replay_mask: ArrayLike | Tensor | None = None,
            token_ids: ArrayLike | Tensor | None = None,
            sequence_lengths: Iterable[int] | None = None,
            sample_ids: Iterable[str] | None = None,
            weight_version: ArrayLike | Tensor | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        num_experts = _as_int("num_experts", self.num_experts)
        indices = _as_integer_tensor("topk_indices", self.topk_indices)
        if indices.dim() != 3:
            raise TraceError(f"topk_indices must be [num_tokens, num_layers, topk], got shape {list(indices.shape)}.")
        num_tokens, num_layers, topk = indices.shape
        if topk < 1 or topk > num_experts:
            raise TraceError(f"topk_indices has topk={topk}, which must lie in 1..num_experts={num_experts}.")
        layer_numbers = _as_layer_numbers(self.layer_numbers, num_layers)
        mask = _as_replay_mask(self.replay_mask, indices)
        index_dtype(num_experts)  # refuses a number of experts that no dtype holds
        # Checked as they came, before narrowing: a cast would wrap 300 to 44, and 256 to expert 0.
        check_topk_indices(indices, num_experts=num_experts, layer_numbers=layer_numbers, replay_mask=mask)
        indices = _as_stored_indices(indices, mask, num_experts)

        per_token = {
            name: _as_per_token(name, getattr(self, name), num_tokens) for name in ("token_ids", "weight_version")
        }
        lengths = _as_sequence_lengths(self.sequence_lengths, num_tokens)
        checked = dict(
            topk_indices=indices,
            layer_numbers=layer_numbers,
            num_experts=num_experts,
            replay_mask=mask,
            sequence_lengths=lengths,
            sample_ids=_as_sample_ids(self.sample_ids, lengths),
            **per_token,
        )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_checked(
        cls,
        *,
        topk_indices: Tensor,
        layer_numbers: tuple[int, ...],
        num_experts: int,
        replay_mask: Tensor,
        token_ids: Tensor | None = None,
        weight_version: Tensor | None = None,
        # Any: a type checker takes **tensors for every keyword, these two as well.
        sequence_lengths: Any = None,
        sample_ids: Any = None,
    ) -> RoutingTrace:
        """Make a trace of values that are proven valid, without a copy and without a check; for parts of this package.

        All values are as a checked trace stores them.
        """
        trace = object.__new__(cls)
        values = locals()
        for name in _FIELDS:
            object.__setattr__(trace, name, values[name])
        return trace

    @property
    def num_tokens(self) -> int:
        return int(self.topk_indices.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.topk_indices.shape[1])

    @property
    def topk(self) -> int:
        return int(self.topk_indices.shape[2])

    @property
    def device(self) -> torch.device:
        return self.topk_indices.device

    def __len__(self) -> int:
        return self.num_tokens

    def __repr__(self) -> str:
        routed = int(self.replay_mask.sum())
        return (
            f"RoutingTrace({self.num_tokens} tokens ({routed} with a route), layers {list(self.layer_numbers)}, "
            f"top-{self.topk} of {self.num_experts} experts, {str(self.topk_indices.dtype).removeprefix('torch.')})"
        )

    def layer(self, layer_number: int) -> Tensor:
        """Return the routes of one layer, [num_tokens, topk], a view."""
        return self.topk_indices[:, self._layer_index(layer_number)]

    def select_layers(self, layer_numbers: Sequence[int]) -> RoutingTrace:
        """Return the trace of these layers, in the order of their numbers; a view where they are neighbours.

        Raises:
            TraceError: the trace has no such layer.
        """
        numbers = tuple(sorted(layer_numbers))
        indices = as_slice([self._layer_index(number) for number in numbers])
        return self._with(topk_indices=self.topk_indices[:, indices], layer_numbers=numbers)

    def slice_rows(self, start: int, stop: int) -> RoutingTrace:
        """Return rows start..stop-1 as a view; sample metadata is dropped.

        Raises:
            TraceError: not 0 <= start <= stop <= num_tokens.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise TraceError(f"cannot take rows {start}..{stop} of a trace of {self.num_tokens} tokens.")
        return self._rows(slice(start, stop), sequence_lengths=None, sample_ids=None)

    def gather_rows(self, rows: Tensor | Sequence[int]) -> RoutingTrace:
        """Return a copy with these rows in this order; sample metadata is dropped.

        Args:
            rows: [n] any integer dtype, each in 0..num_tokens-1; a row may appear more than once.

        Raises:
            TraceError: a row lies outside the trace.
        """
        index = _as_integer_tensor("rows", rows).to(device=self.device, dtype=torch.int64)
        if index.dim() != 1:
            raise TraceError(f"rows must be one-dimensional, got shape {list(index.shape)}.")
        if index.numel() and not (0 <= int(index.min()) and int(index.max()) < self.num_tokens):
            raise TraceError(
                f"cannot gather rows {int(index.min())}..{int(index.max())} of a trace of {self.num_tokens} tokens: "
                "rows count from 0; padding (-1) has no row."
            )
        return self._rows(index, sequence_lengths=None, sample_ids=None)

    def select_samples(self, samples: Sequence[int]) -> RoutingTrace:
        """Return these samples in this order; filters, permutes or repeats whole samples with their tokens.

        Raises:
            TraceError: the trace has no sequence_lengths, or a sample lies outside it.
        """
        starts, lengths = self._sample_bounds()
        for sample in samples:
            if not 0 <= sample < len(lengths):
                raise TraceError(f"cannot select sample {sample} of {len(lengths)} samples.")
        return self._pick([(sample, lengths[sample]) for sample in samples], starts)

    def truncate_samples(self, max_lengths: Sequence[int]) -> RoutingTrace:
        """Return every sample cut to its first `max_lengths[i]` tokens.

        Raises:
            TraceError: the trace has no sequence_lengths, or there is not one length >= 0 a sample.
        """
        starts, lengths = self._sample_bounds()
        if len(max_lengths) != len(lengths) or any(limit < 0 for limit in max_lengths):
            raise TraceError(
                f"cannot truncate {len(lengths)} samples to {list(max_lengths)}: give one length >= 0 a sample."
            )
        return self._pick([(i, min(lengths[i], limit)) for i, limit in enumerate(max_lengths)], starts)

    def samples(self) -> Iterator[RoutingTrace]:
        """Yield each sample's trace, as views.

        Raises:
            TraceError: the trace has no sequence_lengths.
        """
        starts, lengths = self._sample_bounds()
        for i, (start, length) in enumerate(zip(starts, lengths)):
            names = None if self.sample_ids is None else (self.sample_ids[i],)
            yield self._rows(slice(start, start + length), sequence_lengths=(length,), sample_ids=names)

    def to(self, device: torch.device | str) -> RoutingTrace:
        """Return the trace with its tensors on `device`."""
        moved = {name: value.to(device) for name in _TENSOR_FIELDS if (value := getattr(self, name)) is not None}
        return self._with(**moved)

    def _pick(self, picks: list[tuple[int, int]], starts: list[int]) -> RoutingTrace:
        rows = [torch.arange(starts[sample], starts[sample] + length) for sample, length in picks]
        index = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
        names = None if self.sample_ids is None else tuple(self.sample_ids[sample] for sample, _ in picks)
        lengths = tuple(length for _, length in picks)
        return self._rows(index.to(self.device), sequence_lengths=lengths, sample_ids=names)

    def _rows(self, index: slice | Tensor, **metadata: Any) -> RoutingTrace:
        taken = {name: value[index] for name in _TENSOR_FIELDS if (value := getattr(self, name)) is not None}
        return self._with(**taken, **metadata)

    def _with(self, **changes: Any) -> RoutingTrace:
        values: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        return RoutingTrace.from_checked(**(values | changes))

    def _layer_index(self, layer_number: int) -> int:
        try:
            return self.layer_numbers.index(layer_number)
        except ValueError:
            raise TraceError(
                f"the trace has no layer_number {layer_number}; it has {list(self.layer_numbers)}."
            ) from None

    def _sample_bounds(self) -> tuple[list[int], list[int]]:
        if self.sequence_lengths is None:
            raise TraceError("this trace does not know its samples: make it with sequence_lengths=...")
        lengths = list(self.sequence_lengths)
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(int).tolist() if lengths else []
        return starts, lengths


_FIELDS = tuple(field.name for field in fields(RoutingTrace))
_TENSOR_FIELDS = ("topk_indices", "replay_mask", "token_ids", "weight_version")


def concat_traces(traces: Sequence[RoutingTrace]) -> RoutingTrace:
    """Return one trace with the rows of all, in order; row i of the second starts behind the last of the first.

    Metadata that every trace has is kept; a trace without sequence_lengths counts as one sample.

    Raises:
        TraceError: no traces; layers, num_experts or topk differ; only some have token_ids, sample_ids or
            weight_version.
    """
    if not traces:
        raise TraceError("cannot concatenate no traces: at least one is needed.")
    first = traces[0]
    for i, trace in enumerate(traces):
        for name in ("layer_numbers", "num_experts", "topk"):
            if getattr(trace, name) != getattr(first, name):
                raise TraceError(
                    f"cannot concatenate trace {i} with {name}={getattr(trace, name)} "
                    f"behind trace 0 with {name}={getattr(first, name)}: they are of different models."
                )
    joined: dict[str, Any] = {
        "topk_indices": torch.cat([trace.topk_indices for trace in traces]),
        "replay_mask": torch.cat([trace.replay_mask for trace in traces]),
    }
    for name in ("token_ids", "weight_version"):
        if _all_or_none(name, traces):
            joined[name] = torch.cat([getattr(trace, name) for trace in traces])
    if any(trace.sequence_lengths is not None for trace in traces):
        joined["sequence_lengths"] = tuple(
            length for trace in traces for length in (trace.sequence_lengths or (trace.num_tokens,))
        )
    if _all_or_none("sample_ids", traces):
        joined["sample_ids"] = tuple(name for trace in traces for name in trace.sample_ids or ())
    return first._with(**{"sequence_lengths": None, **joined})


def _as_int(name: str, value: Any) -> int:
    try:
        return int(value.__index__())
    except AttributeError:
        raise TraceError(f"{name} must be an integer, got {value!r}.") from None


def _as_integer_tensor(name: str, value: Any) -> Tensor:
    """Return `value` as a tensor of an integer dtype that torch can compute with; may share memory with it."""
    if isinstance(value, Tensor):
        tensor = value.detach()
    else:
        array = np.asarray(value)
        if array.dtype.kind not in "iu" and array.size:
            raise TraceError(f"{name} must hold integers, got {array.dtype} from {type(value).__name__}.")
        # torch has no arithmetic for the wide unsigned types, no other byte order, and warns of read-only memory.
        wide_unsigned = array.dtype.kind == "u" and array.dtype.itemsize > 1
        dtype = np.dtype(np.int64) if wide_unsigned or not array.size else array.dtype.newbyteorder("=")
        tensor = torch.from_numpy(array.astype(dtype))
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        raise TraceError(f"{name} must hold integers, got {tensor.dtype}.")
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        tensor = tensor.to(torch.int64)
    return tensor


def _as_layer_numbers(value: Any, num_layers: int) -> tuple[int, ...]:
    numbers = tuple(_as_int("layer_numbers", number) for number in value)
    if len(numbers) != num_layers:
        raise TraceError(
            f"layer_numbers names {len(numbers)} layers, topk_indices has {num_layers} on axis 1: one number a layer, "
            "dense layers left out of both."
        )
    if list(numbers) != sorted(set(numbers)) or (numbers and numbers[0] < 1):
        raise TraceError(f"layer_numbers must increase from 1 or more, got {list(numbers)}.")
    return numbers


def _as_replay_mask(value: Any, indices: Tensor) -> Tensor:
    num_tokens = indices.shape[0]
    negative = (indices < 0).flatten(1) if indices.dtype is not torch.uint8 else None
    missing = torch.zeros(num_tokens, dtype=torch.bool, device=indices.device)
    if negative is not None and negative.shape[1]:
        missing = (indices == -1).flatten(1).all(dim=1)
    if value is None:
        return ~missing
    mask = value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    if mask.dtype is not torch.bool or mask.shape != (num_tokens,):
        raise TraceError(
            f"replay_mask must be [{num_tokens}] bool, got {list(mask.shape)} {str(mask.dtype).removeprefix('torch.')}."
        )
    return mask.to(indices.device) & ~missing


def _as_stored_indices(indices: Tensor, mask: Tensor, num_experts: int) -> Tensor:
    stored = indices.to(index_dtype(num_experts), copy=True)
    unused = (~mask).nonzero()[:, 0]
    if unused.numel():
        spread = spread_experts(0, stored.shape[0], topk=stored.shape[2], num_experts=num_experts).to(stored.device)
        stored[unused] = spread[unused].unsqueeze(1)
    return stored


def _as_per_token(name: str, value: Any, num_tokens: int) -> Tensor | None:
    if value is None:
        return None
    tensor = _as_integer_tensor(name, value)
    if tensor.dim() == 0:
        tensor = tensor.expand(num_tokens)
    if tensor.shape != (num_tokens,):
        raise TraceError(f"{name} must be [{num_tokens}], one a token, got shape {list(tensor.shape)}.")
    if tensor.numel() and not (-(2**31) <= int(tensor.min()) and int(tensor.max()) < 2**31):
        raise TraceError(f"{name} reaches {int(tensor.max())}, which int32 cannot hold.")
    return tensor.to(torch.int32, copy=True)


def _as_sequence_lengths(value: Any, num_tokens: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    lengths = tuple(_as_int("sequence_lengths", length) for length in value)
    if any(length < 0 for length in lengths) or sum(lengths) != num_tokens:
        raise TraceError(
            f"sequence_lengths {list(lengths)} add up to {sum(lengths)}, the trace has {num_tokens} tokens."
        )
    return lengths


def _as_sample_ids(value: Any, lengths: tuple[int, ...] | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = tuple(str(name) for name in value)
    if lengths is None or len(names) != len(lengths):
        known = None if lengths is None else len(lengths)
        raise TraceError(f"sample_ids names {len(names)} samples, sequence_lengths {known}.")
    return names


def _all_or_none(name: str, traces: Sequence[RoutingTrace]) -> bool:
    having = [i for i, trace in enumerate(traces) if getattr(trace, name) is not None]
    if having and len(having) != len(traces):
        missing = next(i for i, trace in enumerate(traces) if getattr(trace, name) is None)
        raise TraceError(f"cannot concatenate: trace {having[0]} has {name}, trace {missing} has none.")
    return bool(having)
