"""RoutingTrace: which experts every token used in every MoE layer, checked once when made.

Token-major, as inference engines send it, so that samples concatenate with one copy and a micro-batch is one
gather of whole rows. Ids stay narrow; each router widens those of its layer and micro-batch to int64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megatron_router_replay.checks import as_integer, with_checked_options
from megatron_router_replay.errors import TraceError, listed
from megatron_router_replay.trace.from_samples import join_samples
from megatron_router_replay.trace.rows import take_rows
from megatron_router_replay.trace.runs import as_slice
from megatron_router_replay.trace.values import (
    as_integer_tensor,
    as_layer_numbers,
    as_mask,
    as_per_token,
    as_replay_mask,
    as_sample_ids,
    as_sequence_lengths,
    as_stored_indices,
    check_holds_experts,
    check_topk,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoutingTrace:
    """The routes of a batch of tokens: one row per token, one entry per MoE layer.

    Args:
        topk_indices: [num_tokens, num_layers, topk], torch or numpy, any integer dtype up to num_experts - 1. Stored as a
            copy in `index_dtype(num_experts)`. A row of -1 in every layer has no route.
        layer_numbers: Megatron's global layer_number (from 1) of each entry of axis 1, strictly increasing.
        num_experts: experts in each layer, shared experts not counted.
        replay_mask: [num_tokens] bool, True: this row has a route, False: the live router decides. Default: all True
            except rows of -1. Rows without a route have `topk` distinct ids, spread over all experts.
        token_ids: [num_tokens] any integer dtype, stored as int32; proves that routes and tokens still match.
        sequence_lengths: tokens of each sample, in order; their sum is num_tokens.
        sample_ids: a name for each sample; needs `sequence_lengths`.
        weight_version: [num_tokens] or one int: version of the weights that chose the routes, stored as int32.

    Two traces are equal if all their values are, wherever their tensors are; the ids of rows without a route do not
    count. So a trace has no hash: it is no key of a dictionary.

    Raises:
        TraceError: shapes disagree, a dtype is too narrow, an id is outside 0..num_experts-1, a row names an expert twice,
            a row is -1 in some places only.
    """

    topk_indices: Tensor
    layer_numbers: tuple[int, ...]
    num_experts: int
    replay_mask: Tensor = None  # type: ignore[assignment]  # None on the way in, later a tensor
    token_ids: Tensor | None = None
    sequence_lengths: tuple[int, ...] | None = None
    sample_ids: tuple[str, ...] | None = None
    weight_version: Tensor | None = None
    # How often each tensor had been changed in place when the trace was made: torch counts that for a tensor and its views.
    _versions: tuple[int, ...] = field(init=False, default=())
    _derived: dict[Any, Any] = field(init=False, default_factory=dict)

    if TYPE_CHECKING:  # wider types go in than are stored

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
        num_experts = as_integer("num_experts", self.num_experts)
        indices = as_integer_tensor("topk_indices", self.topk_indices)
        if indices.dim() != 3:
            raise TraceError(
                f"MRR102: topk_indices must be [num_tokens, num_layers, topk], got shape {list(indices.shape)}."
            )
        num_tokens, num_layers, topk = indices.shape
        check_topk(topk, num_experts)
        layer_numbers = as_layer_numbers(self.layer_numbers)
        if len(layer_numbers) != num_layers:
            raise TraceError(
                f"MRR104: layer_numbers names {len(layer_numbers)} layers, topk_indices has {num_layers} on axis 1: "
                "one number a layer, dense layers left out of both."
            )
        check_holds_experts("topk_indices", indices, num_experts)
        mask = as_replay_mask(self.replay_mask, indices)
        indices = as_stored_indices(indices, mask, num_experts=num_experts, layer_numbers=layer_numbers)

        lengths = as_sequence_lengths(self.sequence_lengths, num_tokens)
        self._store(
            topk_indices=indices,
            layer_numbers=layer_numbers,
            num_experts=num_experts,
            replay_mask=mask,
            token_ids=as_per_token("token_ids", self.token_ids, num_tokens),
            weight_version=as_per_token("weight_version", self.weight_version, num_tokens),
            sequence_lengths=lengths,
            sample_ids=as_sample_ids(self.sample_ids, lengths),
        )

    @classmethod
    @with_checked_options
    def from_samples(
        cls,
        tokens: Sequence[ArrayLike | Tensor],
        routes: Sequence[ArrayLike | Tensor],
        *,
        num_experts: int,
        layer_numbers: Iterable[int],
        replay_mask: Sequence[ArrayLike | Tensor] | None = None,
        weight_version: Any = None,
        last_token: Literal["unrouted", "routed"] | None = None,
        sample_ids: Iterable[str] | None = None,
    ) -> RoutingTrace:
        """Make a trace of samples, which `replay` finds by their tokens.

        Args:
            tokens: [T] ids of each sample, prompt and response.
            routes: [T or T - 1, layers, topk] of each sample, any integer dtype up to num_experts - 1. A row of -1 in
                every layer has no route: the live router decides it.
            num_experts: experts in each layer, shared experts not counted.
            layer_numbers: Megatron's number (from 1) of each MoE layer, as `mcore.layer_numbers_of(model)` or
                `ModelRoutingInfo.moe_layer_numbers` has them. Routes have one entry for each, or one for every decoder
                layer; entries of dense layers are dropped.
            replay_mask: [T] bool of each sample, False: no route.
            weight_version: one integer, or for each sample one or [T].
            last_token: "routed": a forward ran all tokens, and there are T rows. "unrouted": a T-th row is dropped, because
                the engine never ran the last token of a sample. None: as "unrouted", and a T-th row must be -1, or filler
                (zeros, or 0, 1, ..., topk - 1): a route there means that the rows may be one token late.
            sample_ids: a name for each sample.

        Raises:
            TraceError: a sample has fewer rows, ids that no router can choose, a dtype that is too narrow, rows that seem to
                be one token late, or one row over many tokens that differ; names it.
        """
        values = join_samples(
            tokens,
            routes,
            num_experts=num_experts,
            layer_numbers=layer_numbers,
            replay_mask=replay_mask,
            weight_version=weight_version,
            last_token=last_token,
        )
        # Every row was checked while it was copied.
        return cls.from_checked(**values, sample_ids=as_sample_ids(sample_ids, values["sequence_lengths"]))

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
        """Make a trace of proven values, without a copy and a check. Parts of this package call it.

        All values are as a checked trace stores them.
        """
        values = {name: value for name, value in locals().items() if name != "cls"}
        # Neither __init__ nor __post_init__ runs: those copy, and read every id once more.
        trace = object.__new__(cls)
        trace._store(**values)
        return trace

    def _store(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the class is frozen, for its callers and for itself
        object.__setattr__(self, "_versions", self._count_changes())
        object.__setattr__(self, "_derived", {})

    def __reduce__(self) -> tuple[Any, ...]:
        # Made anew: the tensors of a copy or of another process count their changes from 0.
        self.check_unchanged()
        return _from_values, ({name: getattr(self, name) for name in _FIELDS},)

    def check_unchanged(self) -> None:
        """Raise if a tensor of the trace was changed in place since it was made.

        Sessions and everything that makes a trace of this one call it; it costs microseconds. It does not see what numpy, or
        a collective of torch.distributed, writes into the same memory.

        Raises:
            TraceError: names the tensor.
        """
        versions = self._count_changes()
        if versions != self._versions:
            changed = [name for (name, _), a, b in zip(self._tensors(), versions, self._versions) if a != b]
            raise TraceError(
                f"MRR110: {', '.join(changed)} of the trace was changed in place after it was checked: its values "
                "may be no routes at all. Make a new RoutingTrace of the changed values."
            )

    def _count_changes(self) -> tuple[int, ...]:
        # Tensors made in inference_mode count nothing.
        return tuple(0 if tensor.is_inference() else tensor._version for _, tensor in self._tensors())

    @property
    def derived(self) -> dict[Any, Any]:
        """Values that sessions derived from the trace, such as its index; never copied."""
        return self._derived

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
        """Return the number of samples, as `list(trace)` has them; `num_tokens` counts rows."""
        return len(self._known_lengths())

    def __iter__(self) -> Iterator[RoutingTrace]:
        """Yield each sample's trace, as views."""
        ends = self._ends()
        return (self._samples(slice(i, i + 1), ends) for i in range(len(ends) - 1))

    def __getitem__(self, index: int | slice) -> RoutingTrace:
        """Return a sample, `trace[0]`, or several, `trace[:100]`, as of a list; `gather_rows` takes rows.

        Neighbours are a view.

        Raises:
            TraceError: the trace has no sequence_lengths, or the index is neither an integer nor a slice.
            IndexError: the trace has no such sample.
        """
        ends = self._ends()
        numbers = range(len(ends) - 1)
        if isinstance(index, slice):
            return self._samples(as_slice(numbers[index]), ends)
        number = as_integer("index", index)
        try:
            number = numbers[number]
        except IndexError:  # no TraceError: Python's own protocols end at an IndexError
            raise IndexError(f"MRR106: the trace has {len(numbers)} samples, and no sample {number}.") from None
        return self._samples(slice(number, number + 1), ends)

    def __repr__(self) -> str:
        routed = f"{int(self.replay_mask.sum())} with a route"
        # Without them nothing proves that the routes are of the tokens that they are replayed for.
        proof = "" if self.token_ids is not None else ", without token ids"
        return (
            f"RoutingTrace({self.num_tokens} tokens ({routed}){proof}, layers [{listed(self.layer_numbers)}], "
            f"top-{self.topk} of {self.num_experts} experts, {str(self.topk_indices.dtype).removeprefix('torch.')})"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutingTrace):
            return NotImplemented
        plain = ("layer_numbers", "num_experts", "topk", "sequence_lengths", "sample_ids")
        if any(getattr(self, name) != getattr(other, name) for name in plain):
            return False
        if not all(_equal(getattr(self, name), getattr(other, name)) for name in TENSOR_FIELDS[1:]):
            return False
        routed = self.replay_mask
        return _equal(self.topk_indices[routed], other.topk_indices[routed.to(other.device)])

    __hash__ = None  # type: ignore[assignment]  # its tensors are compared by value, and have no hash that fits

    def layer(self, layer_number: int) -> Tensor:
        """Return the routes of a layer, [num_tokens, topk], a view."""
        return self.topk_indices[:, self._layer_index(layer_number)]

    def select_layers(self, layer_numbers: Sequence[int]) -> RoutingTrace:
        """Return the trace of these layers, in the order of their numbers. It is a view where they are neighbours.

        Raises:
            TraceError: the trace has no such layer.
        """
        numbers = tuple(sorted({as_integer("layer_number", number) for number in layer_numbers}))
        indices = as_slice([self._layer_index(number) for number in numbers])
        return self._with(topk_indices=self.topk_indices[:, indices], layer_numbers=numbers)

    def renumber(self, layer_numbers: Mapping[int, int]) -> RoutingTrace:
        """Return the trace with different layer numbers.

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
                f"MRR104: cannot renumber layers [{listed(self.layer_numbers)}]: the mapping has no number for "
                f"layer {missing[0]}. Name every layer, also those that keep their number."
            )
        new = [as_integer("a layer number", layer_numbers[number]) for number in self.layer_numbers]
        # Layers are sorted by their numbers, whatever the mapping does to that.
        order = sorted(range(len(new)), key=new.__getitem__)
        numbers = as_layer_numbers([new[i] for i in order])
        return self._with(topk_indices=self.topk_indices[:, as_slice(order)], layer_numbers=numbers)

    def with_samples(self, sequence_lengths: Iterable[int], sample_ids: Iterable[str] | None = None) -> RoutingTrace:
        """Return the trace with its rows cut into samples of these lengths, in order.

        Raises:
            TraceError: the lengths do not add up to num_tokens, or there is not one name for each.
        """
        lengths = as_sequence_lengths(sequence_lengths, self.num_tokens)
        return self._with(sequence_lengths=lengths, sample_ids=as_sample_ids(sample_ids, lengths))

    def without_routes(self, mask: ArrayLike | Tensor) -> RoutingTrace:
        """Return the trace without the routes of some rows. The live router decides these rows, and they count as live.

        Args:
            mask: [num_tokens] bool, True: this row has no route from now on, as one that the engine never sent.

        Raises:
            TraceError: mask has another shape or dtype.
        """
        removed = as_mask("the mask", mask, self.num_tokens).to(self.device)
        return self._with(replay_mask=self.replay_mask & ~removed)

    def gather_rows(self, rows: Tensor | Sequence[int] | slice) -> RoutingTrace:
        """Return these rows in this order, a copy; of a slice a view. The result has no samples: `with_samples` names them.

        Args:
            rows: [n] any integer dtype, each in 0..num_tokens-1; a row may appear more than once. Or a slice.

        Raises:
            TraceError: a row lies outside the trace.
        """
        if isinstance(rows, slice):
            return self._rows(rows, sequence_lengths=None, sample_ids=None)
        index = as_integer_tensor("rows", rows).to(device=self.device, dtype=torch.int64)
        if index.dim() != 1:
            raise TraceError(f"MRR106: rows must be one-dimensional, got shape {list(index.shape)}.")
        # A -1 would take the last row, silently.
        if index.numel() and not (0 <= int(index.min()) and int(index.max()) < self.num_tokens):
            raise TraceError(
                f"MRR106: cannot gather rows {int(index.min())}..{int(index.max())} of a trace of {self.num_tokens} tokens: "
                "rows count from 0; padding (-1) has no row."
            )
        return self._rows(index, sequence_lengths=None, sample_ids=None)

    def samples(self) -> Iterator[RoutingTrace]:
        """Yield each sample's trace, as views; so does the trace itself.

        Raises:
            TraceError: the trace has no sequence_lengths.
        """
        return iter(self)

    def to(self, device: torch.device | str) -> RoutingTrace:
        """Return the trace with its tensors on `device`."""
        return self._with(**{name: tensor.to(device) for name, tensor in self._tensors()})

    def clone(self) -> RoutingTrace:
        """Return the trace with its tensors in memory of their own."""
        copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in self._tensors()}
        return self._with(**copies)

    def _samples(self, chosen: slice | list[int], ends: list[int]) -> RoutingTrace:
        """Return these samples; sample i has the rows ends[i]..ends[i + 1] - 1."""
        numbers = range(chosen.start, chosen.stop) if isinstance(chosen, slice) else chosen
        rows: slice | Tensor
        if isinstance(chosen, slice):
            rows = slice(ends[chosen.start], ends[chosen.stop])
        else:
            rows = torch.cat([torch.arange(ends[i], ends[i + 1], device=self.device) for i in chosen])
        names = None if self.sample_ids is None else tuple(self.sample_ids[i] for i in numbers)
        return self._rows(rows, sequence_lengths=tuple(ends[i + 1] - ends[i] for i in numbers), sample_ids=names)

    def _rows(self, index: slice | Tensor, **metadata: Any) -> RoutingTrace:
        taken = {name: tensor[index] for name, tensor in self._tensors() if name != "topk_indices"}
        return self._with(topk_indices=take_rows(self.topk_indices, index), **taken, **metadata)

    def _ends(self) -> list[int]:
        """Return [samples + 1], the row where each sample ends, after 0; summed once, for a rollout has thousands."""
        if "ends" not in self._derived:
            self._derived["ends"] = [0, *accumulate(self._known_lengths())]
        ends: list[int] = self._derived["ends"]
        return ends

    def _known_lengths(self) -> tuple[int, ...]:
        if self.sequence_lengths is None:
            raise TraceError(
                "MRR105: this trace has no sample lengths: make it with sequence_lengths=..., or cut it by "
                "trace.with_samples(lengths). trace.num_tokens counts its rows, trace.gather_rows takes some."
            )
        return self.sequence_lengths

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
                f"MRR104: the trace has no layer_number {layer_number}; it has [{listed(self.layer_numbers)}]."
            ) from None


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b.to(a.device))


def _from_values(values: dict[str, Any]) -> RoutingTrace:
    return RoutingTrace.from_checked(**values)


_FIELDS = tuple(field.name for field in fields(RoutingTrace) if not field.name.startswith("_"))
TENSOR_FIELDS = ("topk_indices", "replay_mask", "token_ids", "weight_version")
"""The tensors of a trace, one row a token each; all but the first two may be None."""
