"""PositionTrace: which positions every token attended to in every layer with an indexer, checked once when made.

Positions are those in the token's own sample, from 0, so that samples can be packed, split and concatenated without a change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_router_replay.checks import as_integer
from megatron_router_replay.errors import TraceError, listed
from megatron_router_replay.indexer.codes import Array, code_words, decode_choices, encode_choices
from megatron_router_replay.trace.values import as_integer_tensor, as_layer_numbers, as_per_token

_BLOCK = 1 << 20
"""Positions that are checked at a time."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PositionTrace:
    """What indexers chose for a batch of tokens. `from_positions` and `concatenate` make it.

    A token at position p of its sample has p + 1 candidates, positions 0..p. It attends to all of them if they are topk or
    fewer, and nothing is stored; otherwise to topk of them, which are stored as `indexer.codes` says. Tensors lie on the CPU.

    Args:
        positions_in_sample: [num_tokens] int32, the token's own position in its sample; -1: nothing is known of this token.
        layer_numbers: Megatron's global layer_number (from 1) of each layer that has an indexer of its own, ascending.
        topk: positions that an indexer chooses, `index_topk`.
        codes: [num_words] int64, the choices row by row, in each row layer by layer.

    Two traces are equal if all their values are; a trace has no hash.

    Raises:
        TraceError: values of another kind, or codes of another size than follows from the tokens.
    """

    positions_in_sample: Tensor
    layer_numbers: tuple[int, ...]
    topk: int
    codes: Tensor
    # Where the codes of each row begin, and where those of the last one end, [num_tokens + 1] int64.
    _starts: Array = field(init=False, repr=False)
    _versions: tuple[int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        numbers, topk = as_layer_numbers(self.layer_numbers), as_integer("topk", self.topk, least=1, most=2**31 - 1)
        queries = _as_positions_in_sample(self.positions_in_sample)
        words = code_words(queries.numpy().astype(np.int64), topk) * len(numbers)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(words)])
        if self.codes.dtype != torch.int64 or self.codes.shape != (starts[-1],) or self.codes.device.type != "cpu":
            raise TraceError(
                f"MRR102: codes must be [{starts[-1]}] int64 on the CPU for these tokens, got {list(self.codes.shape)} "
                f"{self.codes.dtype} on {self.codes.device}: use PositionTrace.from_positions."
            )
        values = {"positions_in_sample": queries, "layer_numbers": numbers, "topk": topk, "_starts": starts}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_versions", self._count_changes())

    @classmethod
    def from_positions(
        cls, positions: Any, *, positions_in_sample: Any, layer_numbers: Iterable[int], topk: int
    ) -> PositionTrace:
        """Return the trace of positions as an indexer returns them.

        Args:
            positions: [num_tokens, num_layers, topk] integers, torch on any device or numpy: positions in the sample, in
                any order, -1 where there is none. All -1 in a row that is not known. Sorted ones are read faster.
            positions_in_sample, layer_numbers, topk: as the class has them.

        Raises:
            TraceError: shapes disagree, or a row is not what an indexer can have chosen: a key after the token, a key
                twice, too few keys; it names the row, the layer and the values.
        """
        chosen, queries = as_integer_tensor("positions", positions), _as_positions_in_sample(positions_in_sample)
        numbers, topk = as_layer_numbers(layer_numbers), as_integer("topk", topk, least=1, most=2**31 - 1)
        if chosen.shape != (len(queries), len(numbers), topk):
            raise TraceError(
                f"MRR102: positions must be [{len(queries)} tokens, {len(numbers)} layers, topk={topk}], got shape "
                f"{list(chosen.shape)}."
            )
        tokens = queries.numpy().astype(np.int64)
        words = code_words(tokens, topk)
        starts = np.cumsum(words * len(numbers)) - words * len(numbers)
        codes = np.zeros(int((words * len(numbers)).sum()), np.int64)
        step = max(1, _BLOCK // max(1, chosen[:1].numel()))
        for begin in range(0, len(queries), step):
            rows = slice(begin, begin + step)
            ordered = _checked(chosen[rows].cpu().numpy(), tokens[rows], numbers, first_row=begin)
            stored = np.flatnonzero(words[rows]) + begin
            layers = np.arange(len(numbers), dtype=np.int64)
            places = starts[stored, None] + layers * words[stored, None]
            entries = ordered[stored - begin].reshape(-1, topk)
            encode_choices(entries, np.repeat(tokens[stored], len(numbers)), places.reshape(-1), codes)
        return cls(positions_in_sample=queries, layer_numbers=numbers, topk=topk, codes=torch.from_numpy(codes))

    @classmethod
    def concatenate(cls, traces: Sequence[PositionTrace]) -> PositionTrace:
        """Return the rows of all traces, in order.

        Raises:
            TraceError: there is none, or their layers or topk differ.
        """
        traces = list(traces)
        if not traces or any(not isinstance(trace, cls) for trace in traces):
            raise TraceError(
                f"MRR107: cannot concatenate {[type(trace).__name__ for trace in traces][:4]}: give a list of PositionTraces."
            )
        for i, trace in enumerate(traces):
            trace.check_unchanged()
            check_alike(traces[0], trace, f"concatenate trace {i}")
        return cls(
            positions_in_sample=torch.cat([trace.positions_in_sample for trace in traces]),
            layer_numbers=traces[0].layer_numbers,
            topk=traces[0].topk,
            codes=torch.cat([trace.codes for trace in traces]),
        )

    def rows(self, rows: Tensor, layer_numbers: Sequence[int]) -> Tensor:
        """Return the positions that these rows attended to in these layers.

        Args:
            rows: [m] integers, each in 0..num_tokens-1; a row may appear more than once.
            layer_numbers: in the order of the result.

        Returns:
            [m, len(layer_numbers), topk] int32 on the CPU: positions in the row's sample, ascending; -1 behind them where
            there are fewer candidates than topk.

        Raises:
            TraceError: a row lies outside the trace or is not known, a layer is not in it, a code is damaged, or the trace
                was changed in place.
        """
        self.check_unchanged()  # a trainer may compute on it in place between two micro-batches
        index = as_integer_tensor("rows", rows).cpu().to(torch.int64).numpy()
        if index.ndim != 1 or (index.size and not 0 <= index.min() <= index.max() < self.num_tokens):
            seen = f"rows {index.min()}..{index.max()}" if index.ndim == 1 else f"shape {list(index.shape)}"
            raise TraceError(
                f"MRR106: cannot take {seen} of a trace of {self.num_tokens} tokens: rows are one-dimensional and count "
                "from 0; padding (-1) has no row."
            )
        queries = self.positions_in_sample.numpy()[index].astype(np.int64)
        unknown = index[queries < 0]
        if len(unknown):
            raise TraceError(
                f"MRR106: cannot take row {unknown[0]} ({len(unknown)} of {len(index)} such rows): nothing is known of it, "
                "because its token was not recorded. An engine never runs the last token of a sample."
            )
        layers = np.array([self._layer_index(number) for number in layer_numbers], np.int64)
        words = code_words(queries, self.topk)
        chosen = np.empty((len(queries), len(layers), self.topk), np.int32)
        everything = np.arange(self.topk, dtype=np.int32)
        few, stored = np.flatnonzero(words == 0), np.flatnonzero(words)
        chosen[few] = np.where(everything <= queries[few, None], everything, -1)[:, None]
        places = (self._starts[index[stored], None] + layers * words[stored, None]).reshape(-1)
        try:
            decoded = decode_choices(self.codes.numpy(), np.repeat(queries[stored], len(layers)), places, self.topk)
        except ValueError as error:
            raise TraceError(f"MRR110: the codes of the trace are damaged: {error}. Make it anew.") from None
        chosen[stored] = decoded.reshape(-1, len(layers), self.topk)
        return torch.from_numpy(chosen)

    def check_unchanged(self) -> None:
        """Raise if a tensor of the trace was changed in place since it was made.

        See `RoutingTrace.check_unchanged`.

        Raises:
            TraceError: names the tensor.
        """
        pairs = zip(("positions_in_sample", "codes"), self._count_changes(), self._versions, strict=True)
        if changed := [name for name, now, made in pairs if now != made]:
            raise TraceError(
                f"MRR110: {' and '.join(changed)} of the positions were changed in place after they were made: nobody has "
                "checked what they hold now. Make a new PositionTrace."
            )

    def _count_changes(self) -> tuple[int, int]:
        # Tensors made in inference_mode count nothing.
        positions, codes = self.positions_in_sample, self.codes
        return 0 if positions.is_inference() else positions._version, 0 if codes.is_inference() else codes._version

    @property
    def num_tokens(self) -> int:
        return len(self.positions_in_sample)

    @property
    def nbytes(self) -> int:
        """Bytes that the trace takes in memory."""
        return int(self.codes.nbytes + self.positions_in_sample.nbytes + self._starts.nbytes)

    def __len__(self) -> int:
        return self.num_tokens

    def __repr__(self) -> str:
        known = int((self.positions_in_sample >= 0).sum())
        stored = int((self.positions_in_sample >= self.topk).sum())
        return (
            f"PositionTrace({self.num_tokens} tokens ({known} known, {stored} stored), layers "
            f"[{listed(self.layer_numbers)}], top-{self.topk}, {self.nbytes / 2**20:.1f} MiB)"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PositionTrace):
            return NotImplemented
        # One set of positions has one code, so codes compare as choices do.
        return (
            (self.layer_numbers, self.topk) == (other.layer_numbers, other.topk)
            and torch.equal(self.positions_in_sample, other.positions_in_sample)
            and torch.equal(self.codes, other.codes)
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        self.check_unchanged()  # the copy would count from now on
        return _from_values, (self.positions_in_sample, self.layer_numbers, self.topk, self.codes)

    def _layer_index(self, layer_number: int) -> int:
        try:
            return self.layer_numbers.index(layer_number)
        except ValueError:
            raise TraceError(
                f"MRR104: the trace has no indexer in layer_number {layer_number}; it has [{listed(self.layer_numbers)}]."
            ) from None


def _from_values(
    positions_in_sample: Tensor, layer_numbers: tuple[int, ...], topk: int, codes: Tensor
) -> PositionTrace:
    return PositionTrace(positions_in_sample=positions_in_sample, layer_numbers=layer_numbers, topk=topk, codes=codes)


def check_alike(a: PositionTrace, b: PositionTrace, attempt: str) -> None:
    """Raise TraceError unless two traces have the same layers and topk.

    Args:
        attempt: what is done with b, for the message.
    """
    for name in ("layer_numbers", "topk"):
        if getattr(a, name) != getattr(b, name):
            raise TraceError(
                f"MRR107: cannot {attempt} with {name}={getattr(b, name)} and {name}={getattr(a, name)}: they are of "
                "different models."
            )


def _as_positions_in_sample(value: Any) -> Tensor:
    """Return [num_tokens] int32 on the CPU, -1 or more; a copy."""
    tensor = as_integer_tensor("positions_in_sample", value)
    if tensor.dim() != 1:
        raise TraceError(f"MRR102: positions_in_sample must be [num_tokens], got shape {list(tensor.shape)}.")
    queries = as_per_token("positions_in_sample", tensor, len(tensor))
    assert queries is not None
    if queries.numel() and int(queries.min()) < -1:
        raise TraceError(
            f"MRR101: positions_in_sample holds {int(queries.min())}: positions count from 0, -1 is unknown."
        )
    return queries.cpu()


def _checked(chosen: Array, queries: Array, layer_numbers: Sequence[int], *, first_row: int) -> Array:
    """Return rows of positions, each ascending, int32; or raise TraceError.

    Args:
        chosen: [n, num_layers, topk], any integer dtype.
        queries: [n] int64, the position of each token in its sample.
        first_row: the caller's number of row 0.
    """
    topk = chosen.shape[2]
    # Before int32 wraps what lies beyond it.
    outside = np.asarray((chosen.min(axis=2) < -1) | (chosen.max(axis=2) > queries[:, None]))
    _refuse(outside, chosen, queries, layer_numbers, first_row, "a key lies outside {window}")
    ordered = chosen.astype(np.int32, copy=False)
    # Sorting takes most of the time; a caller may have sorted on a GPU.
    if not (ordered[..., 1:] >= ordered[..., :-1]).all():
        ordered = np.sort(ordered, axis=2)
    # As many -1 stand in front as there are fewer candidates than topk.
    absent = topk - np.minimum(queries + 1, topk)
    first = ordered[np.arange(len(queries)), :, np.minimum(absent, topk - 1)]
    before = ordered[np.arange(len(queries)), :, np.maximum(absent, 1) - 1]
    wrong = ((first < 0) & (absent < topk)[:, None]) | ((before >= 0) & (absent > 0)[:, None])
    _refuse(wrong, ordered, queries, layer_numbers, first_row, "it names {count} keys where it must name {expected}")
    same = ordered[..., 1:] == ordered[..., :-1]
    few = np.flatnonzero(absent)
    same[few] &= ordered[few, :, 1:] >= 0
    repeated = np.asarray(same.any(axis=2))
    _refuse(repeated, ordered, queries, layer_numbers, first_row, "a key is named twice")
    return ordered


def _refuse(
    wrong: Array, chosen: Array, queries: Array, layer_numbers: Sequence[int], first_row: int, problem: str
) -> None:
    if not wrong.any():
        return
    row, layer = (int(i) for i in np.argwhere(wrong)[0])
    values, position = chosen[row, layer], int(queries[row])
    expected = min(position + 1, len(values))
    window = f"0..{position}, the token and those before it" if position >= 0 else "the sample: the token is not known"
    words = problem.format(window=window, count=int((values >= 0).sum()), expected=expected)
    layers = [layer_numbers[i] for i in np.flatnonzero(wrong.any(axis=0)).tolist()]
    shown = ", ".join(map(str, values[:8].tolist())) + (", ..." if len(values) > 8 else "")
    raise TraceError(
        f"MRR113: row {first_row + row}, layer {layer_numbers[layer]}, position {position} of its sample, chose [{shown}] "
        f"({values.min()} to {values.max()}): {words} ({int(wrong.sum())} such choices, layers [{listed(layers)}]). "
        "Positions count from 0 in the token's own sample, not in a packed row or a KV cache."
    )
