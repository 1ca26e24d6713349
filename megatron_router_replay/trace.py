"""RoutingTrace: which experts every token used in every MoE layer, checked once when made.

Token-major, as inference engines send it, so that samples concatenate with one copy and a micro-batch is one
gather of whole rows. Nothing here is widened to int64; that is left to the router of one layer and one micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_router_replay.errors import TraceError
from megatron_router_replay.ids import check_topk_indices, index_dtype
from megatron_router_replay.left_live import NOT_KEPT, STALE, Stale, check_stale, describe_stale, find_stale, leave_out
from megatron_router_replay.runs import as_slice
from megatron_router_replay.trace_values import (
    as_int,
    as_integer_tensor,
    as_layer_numbers,
    as_mask,
    as_per_token,
    as_replay_mask,
    as_sample_ids,
    as_sequence_lengths,
    as_stored_indices,
)

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

    Attributes:
        left_live: [num_tokens] uint8, which choice left a row that has a route to the live router: `keep` (1) or
            `limit_age` (2), 0: none; None: no choice was made. It stays with the rows in memory. Files, envelopes,
            transports and merges refuse a trace in which rows were left out: choose where the trace is replayed.

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
    left_live: Tensor | None = field(init=False, default=None)
    # How often each tensor had been changed in place when the trace was made: torch counts that for a tensor and its views.
    _versions: tuple[int, ...] = field(init=False, default=())

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
        num_experts = as_int("num_experts", self.num_experts)
        indices = as_integer_tensor("topk_indices", self.topk_indices)
        if indices.dim() != 3:
            raise TraceError(f"topk_indices must be [num_tokens, num_layers, topk], got shape {list(indices.shape)}.")
        num_tokens, num_layers, topk = indices.shape
        if topk < 1 or topk > num_experts:
            raise TraceError(f"topk_indices has topk={topk}, which must lie in 1..num_experts={num_experts}.")
        layer_numbers = as_layer_numbers(self.layer_numbers, num_layers)
        mask = as_replay_mask(self.replay_mask, indices)
        index_dtype(num_experts)  # refuses a number of experts that no dtype holds
        # Checked as they came, before narrowing: a cast would wrap 300 to 44, and 256 to expert 0.
        check_topk_indices(indices, num_experts=num_experts, layer_numbers=layer_numbers, replay_mask=mask)
        indices = as_stored_indices(indices, mask, num_experts)

        per_token = {
            name: as_per_token(name, getattr(self, name), num_tokens) for name in ("token_ids", "weight_version")
        }
        lengths = as_sequence_lengths(self.sequence_lengths, num_tokens)
        checked = dict(
            topk_indices=indices,
            layer_numbers=layer_numbers,
            num_experts=num_experts,
            replay_mask=mask,
            sequence_lengths=lengths,
            sample_ids=as_sample_ids(self.sample_ids, lengths),
            **per_token,
        )
        # The class is frozen, for its callers and for itself.
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_versions", self._count_changes())

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
        left_live: Tensor | None = None,
        # Any: a type checker takes **tensors for every keyword, these two as well.
        sequence_lengths: Any = None,
        sample_ids: Any = None,
    ) -> RoutingTrace:
        """Make a trace of values that are proven valid, without a copy and without a check; for parts of this package.

        All values are as a checked trace stores them.
        """
        # Neither __init__ nor __post_init__ runs: those copy, and read every id once more.
        trace = object.__new__(cls)
        values = locals()
        for name in _FIELDS:
            object.__setattr__(trace, name, values[name])
        object.__setattr__(trace, "_versions", trace._count_changes())
        return trace

    def __reduce__(self) -> tuple[Any, ...]:
        # Made anew: the tensors of a copy or of another process count their changes from 0.
        self.check_unchanged()
        return _from_values, ({name: getattr(self, name) for name in _FIELDS},)

    def check_unchanged(self) -> None:
        """Raise if a tensor of the trace was changed in place since it was made: nobody has checked what it holds now.

        Sessions and everything that makes a trace of this one call it; it costs microseconds. It does not see what numpy, or
        a collective of torch.distributed, writes into the same memory.

        Raises:
            TraceError: names the tensor.
        """
        versions = self._count_changes()
        if versions != self._versions:
            changed = [name for (name, _), a, b in zip(self._tensors(), versions, self._versions) if a != b]
            raise TraceError(
                f"{', '.join(changed)} of the trace was changed in place after it was checked: what it holds now may be no "
                "routes at all. Make a new RoutingTrace of the changed values."
            )

    def _count_changes(self) -> tuple[int, ...]:
        # Tensors made in inference_mode count nothing.
        return tuple(0 if tensor.is_inference() else tensor._version for _, tensor in self._tensors())

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

    def __getitem__(self, rows: slice) -> RoutingTrace:
        """Return some rows, in order, as a view: `trace[:5]`, `trace[-3:]`, `trace[::2]`; sample metadata is dropped.

        Raises:
            TraceError: anything but a slice with a step of 1 or more.
        """
        if not isinstance(rows, slice) or (rows.step is not None and rows.step < 1):
            raise TraceError(
                f"cannot take {rows!r} of a trace: trace[start:stop] takes neighbours, trace.gather_rows(rows) any rows in "
                "any order, trace.select_samples(samples) whole samples."
            )
        return self._rows(rows, sequence_lengths=None, sample_ids=None)

    def __iter__(self) -> Iterator[RoutingTrace]:
        """Yield each sample's trace, as `samples` does; `len(trace)` counts tokens."""
        return self.samples()

    def __repr__(self) -> str:
        routed = f"{int(self.replay_mask.sum())} with a route"
        if self.left_live is not None:
            routed = f"{routed}, {int((self.left_live > 0).sum())} left live by choice"
        return (
            f"RoutingTrace({self.num_tokens} tokens ({routed}), layers {list(self.layer_numbers)}, "
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
        numbers = tuple(sorted(set(layer_numbers)))
        indices = as_slice([self._layer_index(number) for number in numbers])
        return self._with(topk_indices=self.topk_indices[:, indices], layer_numbers=numbers)

    def renumber(self, layer_numbers: Mapping[int, int]) -> RoutingTrace:
        """Return the trace with other layer numbers, for a model whose routers are numbered otherwise than the engine's.

        A hybrid model in which only layers 2, 4, 6 have routers, served as a model of layers 1, 2, 3, takes
        `trace.renumber({1: 2, 2: 4, 3: 6})`.

        Args:
            layer_numbers: new number of each layer of the trace; numbers of other layers are not looked at.

        Raises:
            TraceError: a layer gets no number, two layers the same one, or a number is below 1.
        """
        missing = [number for number in self.layer_numbers if number not in layer_numbers]
        if missing:
            raise TraceError(
                f"cannot renumber layers {list(self.layer_numbers)}: the mapping says nothing of layer {missing[0]}. Name "
                "every layer, also those that keep their number."
            )
        new = [as_int("a layer number", layer_numbers[number]) for number in self.layer_numbers]
        if len(set(new)) != len(new):
            raise TraceError(
                f"cannot renumber layers {list(self.layer_numbers)} to {new}: two layers would share a number."
            )
        # Layers stand in the order of their numbers, whatever the mapping does to that.
        order = sorted(range(len(new)), key=new.__getitem__)
        numbers = as_layer_numbers([new[i] for i in order], self.num_layers)
        return self._with(topk_indices=self.topk_indices[:, as_slice(order)], layer_numbers=numbers)

    def keep(self, mask: ArrayLike | Tensor) -> RoutingTrace:
        """Return the trace with routes only where `mask` is True; the live router decides every other row, by choice.

        A session counts such rows apart (`rows_not_kept`) and lets them be trained on; see docs/stale.md.

        Args:
            mask: [num_tokens] bool, in the order of the rows. A row that has no route gets none by being kept.

        Raises:
            TraceError: mask has another shape or dtype.
        """
        return self._leave_out(~as_mask("the mask", mask, self.num_tokens).to(self.device), NOT_KEPT)

    def limit_age(self, max_age: int, *, trainer_version: int, stale: Stale) -> RoutingTrace:
        """Return the trace with routes that are at most `max_age` weight versions older than the trainer's weights.

        The age of a row is trainer_version - its weight_version, so that one sample of a partial rollout has rows of
        several ages. A row without a route has none. Call it once, with the same numbers on every rank, before rows are
        split; `take_routes(max_age=...)` does.

        Args:
            max_age: >= 0; 0 keeps the routes of the trainer's own version alone.
            trainer_version: >= 0, of the weights that are trained, counted as `weight_version` is.
            stale: what becomes of an older row. "live": the live router decides it, by choice, and a session counts it
                apart (`rows_stale`); "raise"; "replay": as if it were not, after the versions were checked.

        Raises:
            TraceError: a route has no weight version, or one that is newer than the trainer's; a number is negative or no
                integer; stale="raise" and a row is older.
        """
        check_stale(stale)
        older = self.find_stale(max_age, trainer_version=trainer_version)
        if stale == "raise" and bool(older.any()):
            assert self.weight_version is not None, "ages are known"
            described = describe_stale(
                older, self.weight_version, trainer_version=trainer_version, sequence_lengths=self.sequence_lengths
            )
            raise TraceError(
                f"{described}, with max_age={max_age}. stale='live' lets the live router decide such rows."
            )
        return self._leave_out(older, STALE) if stale == "live" else self

    def find_stale(self, max_age: int, *, trainer_version: int) -> Tensor:
        """Return which rows have a route that is older than `max_age`, [num_tokens] bool; arguments as `limit_age`.

        Raises:
            TraceError: as `limit_age`.
        """
        return find_stale(
            self.weight_version,
            self.replay_mask,
            max_age=max_age,
            trainer_version=trainer_version,
            sequence_lengths=self.sequence_lengths,
        )

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
        index = as_integer_tensor("rows", rows).to(device=self.device, dtype=torch.int64)
        if index.dim() != 1:
            raise TraceError(f"rows must be one-dimensional, got shape {list(index.shape)}.")
        # A -1 would take the last row, silently.
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
        return self._with(**{name: tensor.to(device) for name, tensor in self._tensors()})

    def _leave_out(self, rows: Tensor, choice: int) -> RoutingTrace:
        left_live = leave_out(rows, choice, replay_mask=self.replay_mask, left_live=self.left_live)
        return self._with(replay_mask=self.replay_mask & ~rows, left_live=left_live)

    def _pick(self, picks: list[tuple[int, int]], starts: list[int]) -> RoutingTrace:
        rows = [torch.arange(starts[sample], starts[sample] + length) for sample, length in picks]
        index = torch.cat([torch.empty(0, dtype=torch.int64), *rows])  # of no samples as well
        names = None if self.sample_ids is None else tuple(self.sample_ids[sample] for sample, _ in picks)
        lengths = tuple(length for _, length in picks)
        return self._rows(index.to(self.device), sequence_lengths=lengths, sample_ids=names)

    def _rows(self, index: slice | Tensor, **metadata: Any) -> RoutingTrace:
        return self._with(**{name: tensor[index] for name, tensor in self._tensors()}, **metadata)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name in TENSOR_FIELDS if (tensor := getattr(self, name)) is not None)

    def _with(self, **changes: Any) -> RoutingTrace:
        self.check_unchanged()  # the new trace would count from now on
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
        return [0, *accumulate(self.sequence_lengths)][:-1], list(self.sequence_lengths)


def _from_values(values: dict[str, Any]) -> RoutingTrace:
    return RoutingTrace.from_checked(**values)


_FIELDS = tuple(field.name for field in fields(RoutingTrace) if not field.name.startswith("_"))
TENSOR_FIELDS = ("topk_indices", "replay_mask", "token_ids", "weight_version", "left_live")
"""The tensors of a trace, one row a token each; all but the first two may be None."""


def concat_traces(traces: Sequence[RoutingTrace]) -> RoutingTrace:
    """Return one trace with the rows of all, in order; row i of the second starts behind the last of the first.

    Metadata that every trace has is kept. A trace without sequence_lengths counts as one sample; one with lengths () is a
    batch of no samples and changes nothing.

    Raises:
        TraceError: no traces; layers, num_experts or topk differ; only some have token_ids, sample_ids or
            weight_version.
    """
    if not traces:
        raise TraceError("cannot concatenate no traces: at least one is needed.")
    first = traces[0]
    for i, trace in enumerate(traces):
        trace.check_unchanged()
        for name in ("layer_numbers", "num_experts", "topk"):
            if getattr(trace, name) != getattr(first, name):
                raise TraceError(
                    f"cannot concatenate trace {i} with {name}={getattr(trace, name)} "
                    f"behind trace 0 with {name}={getattr(first, name)}: they are of different models."
                )
    values = {name: [getattr(trace, name) for trace in traces] for name in ("topk_indices", "replay_mask")}
    for name in ("token_ids", "weight_version"):
        # A trace without rows has as many token ids as it has rows, whether it says so or not.
        values[name] = _of_all(name, traces, needed=[trace.num_tokens > 0 for trace in traces])
    if any(trace.left_live is not None for trace in traces):
        # A trace of which nothing was chosen has left out no row.
        values["left_live"] = [
            torch.zeros_like(trace.replay_mask, dtype=torch.uint8) if trace.left_live is None else trace.left_live
            for trace in traces
        ]
    lengths = names = None
    if any(trace.sequence_lengths is not None for trace in traces):
        # Not "or": the lengths () of a batch of no samples are no missing lengths.
        per_trace = [(t.num_tokens,) if t.sequence_lengths is None else t.sequence_lengths for t in traces]
        lengths = tuple(length for part in per_trace for length in part)
        found = _of_all("sample_ids", traces, needed=[len(part) > 0 for part in per_trace])
        names = tuple(name for part in found for name in part) if found else None
    tensors = {name: torch.cat(parts) if parts else None for name, parts in values.items()}
    return first._with(**tensors, sequence_lengths=lengths, sample_ids=names)


def _of_all(name: str, traces: Sequence[RoutingTrace], *, needed: Sequence[bool]) -> list[Any]:
    """Return this value of every trace that has it; none have it, or all that are `needed` do."""
    having = [i for i, trace in enumerate(traces) if getattr(trace, name) is not None]
    missing = [i for i, trace in enumerate(traces) if getattr(trace, name) is None and needed[i]]
    if having and missing:
        raise TraceError(f"cannot concatenate: trace {having[0]} has {name}, trace {missing[0]} has none.")
    return [getattr(traces[i], name) for i in having]
