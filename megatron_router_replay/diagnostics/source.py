"""Read traces in memory, in files and in folders by blocks of rows; a file may be larger than memory.

A folder has the ranks' parts of one step: a `TraceStore`, or trace files that ranks saved side by side. Parts are merged
block by block, by rows and layers, as `merge_traces` does.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Union

import torch
from torch import Tensor

from megatron_router_replay.errors import StoreError, TraceError
from megatron_router_replay.store import TraceStore, merge_traces
from megatron_router_replay.store.atomic import naming
from megatron_router_replay.store.file import Reader
from megatron_router_replay.trace import RoutingTrace, concat_traces
from megatron_router_replay.trace.runs import neighbour_runs

PathLike = Union[str, "os.PathLike[str]"]
TraceLike = RoutingTrace | PathLike | Sequence[RoutingTrace | PathLike]
"""A trace, the path of a trace file or of a folder, or a list of these: the ranks' parts of a batch."""

BLOCK_BYTES = 16 << 20
"""Routes that are read at a time; a pass over a trace needs a few times this memory."""

_BLOCK_ROWS = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """The origin of a trace.

    Args:
        path: the file or folder that was given; empty: the trace was in memory, or a list of parts.
        files: the trace files that are read.
        step: the step of a `TraceStore`.
        weight_versions: of its rows, where known.
    """

    path: str = ""
    files: tuple[str, ...] = ()
    step: int | None = None
    weight_versions: tuple[int, ...] = ()


class TraceSource:
    """A trace that is read by blocks of rows; this class reads a trace in memory.

    Args:
        name: its name in messages.
        provenance: its files. Weight versions are known after its rows were read.
        sizes: a trace, or the header of a file.

    Attributes:
        num_tokens, layer_numbers, num_experts, topk, sequence_lengths, sample_ids: as in `RoutingTrace`.
    """

    def __init__(self, name: str, provenance: Provenance, sizes: Any) -> None:
        self.name, self.provenance, self._trace = name, provenance, sizes
        self.num_tokens: int = sizes.num_tokens
        self.layer_numbers: tuple[int, ...] = sizes.layer_numbers
        self.num_experts: int = sizes.num_experts
        self.topk: int = sizes.topk
        self.sequence_lengths: tuple[int, ...] | None = sizes.sequence_lengths
        self.sample_ids: tuple[str, ...] | None = sizes.sample_ids

    def read(self, start: int, stop: int, layer_numbers: Sequence[int] | None = None) -> RoutingTrace:
        """Return rows start..stop-1 on the CPU, without rows after the last one."""
        rows: RoutingTrace = self._trace[start:stop]
        # Layers come before the copy, which a trace on a GPU needs.
        return (rows if layer_numbers is None else rows.select_layers(layer_numbers)).to("cpu")

    def token_ids(self) -> Tensor | None:
        """Return the token ids of all rows, [num_tokens] on the CPU; None if the trace has none."""
        return self.read(0, self.num_tokens, ()).token_ids


class _File(TraceSource):
    def __init__(self, path: Path) -> None:
        with naming(path, "read"):
            self._reader = Reader(path)
        self._path = path
        super().__init__(str(path), Provenance(path=str(path), files=(str(path),)), self._reader.header)

    def read(self, start: int, stop: int, layer_numbers: Sequence[int] | None = None) -> RoutingTrace:
        with naming(self._path, "read"):
            rows = slice(min(start, self.num_tokens), min(stop, self.num_tokens))
            return self._reader.load(layer_numbers=layer_numbers, rows=rows)


class _Parts(TraceSource):
    def __init__(self, parts: Sequence[TraceSource], name: str) -> None:
        longest = max(parts, key=lambda part: (part.num_tokens, part.sequence_lengths is not None))
        super().__init__(
            name, Provenance(files=tuple(file for part in parts for file in part.provenance.files)), longest
        )
        # A stage of dense layers alone has no number of experts.
        with_layers = next((part for part in parts if part.layer_numbers), parts[0])
        self.num_experts, self.topk = with_layers.num_experts, with_layers.topk
        self.layer_numbers = tuple(sorted({number for part in parts for number in part.layer_numbers}))
        self._parts = parts

    def read(self, start: int, stop: int, layer_numbers: Sequence[int] | None = None) -> RoutingTrace:
        # A row has a route if all layers have one, so every layer of each part is read.
        pieces = [part.read(start, stop) for part in self._parts]
        try:
            merged = merge_traces(pieces, allow_gaps=True)
        except TraceError as error:
            raise TraceError(f"MRR107: cannot merge {self.name}, rows counted from {start} here: {error}") from None
        return merged if layer_numbers is None else merged.select_layers(layer_numbers)

    def token_ids(self) -> Tensor | None:
        merged = torch.full((self.num_tokens,), -1, dtype=torch.int64)
        parts = [tokens for part in self._parts if (tokens := part.token_ids()) is not None]
        for tokens in parts:
            merged[: len(tokens)] = torch.maximum(merged[: len(tokens)], tokens.to(torch.int64))  # -1 is unknown
        return merged if parts else None


class PairedSource(TraceSource):
    """A trace with its samples in the order of another trace's samples.

    Args:
        source: the trace.
        partners: for each sample of the other trace the sample of `source`, -1: none.
        lengths: sequence_lengths of the other trace. Rows without a partner get no route; rows of `source` without a
            partner come last, as one sample.
    """

    def __init__(self, source: TraceSource, partners: list[int], lengths: tuple[int, ...]) -> None:
        assert source.sequence_lengths is not None
        super().__init__(source.name, source.provenance, source)
        self._source, self.partners = source, tuple(partners)
        self._rows = torch.full((sum(lengths),), -1, dtype=torch.int64)
        rows = torch.arange(source.num_tokens).split_with_sizes(list(source.sequence_lengths))
        for place, partner in zip(self._rows.split_with_sizes(list(lengths)), partners):
            if partner >= 0:
                common = min(len(place), len(rows[partner]))
                place[:common] = rows[partner][:common]
        left = torch.ones(source.num_tokens, dtype=torch.bool)
        left[self._rows[self._rows >= 0]] = False
        self._rows = torch.cat([self._rows, left.nonzero().flatten()])
        self.sequence_lengths = (*lengths, *([int(left.sum())] if left.any() else []))
        self.num_tokens, self.sample_ids = len(self._rows), None

    def read(self, start: int, stop: int, layer_numbers: Sequence[int] | None = None) -> RoutingTrace:
        rows = self._rows[start:stop]
        known = rows >= 0
        # Row 0 is the filler of rows without a partner.
        parts = [self._source.read(0, 1, layer_numbers)]
        for _, first, count in neighbour_runs(rows[known].numpy()).tolist():
            parts.append(self._source.read(first, first + count, layer_numbers))
        index = torch.where(known, known.cumsum(0), 0)
        block = concat_traces(parts).gather_rows(index)
        tokens = None if block.token_ids is None else torch.where(known, block.token_ids, -1)
        return block._with(replay_mask=block.replay_mask & known, token_ids=tokens)


def pair_samples(a: TraceSource, b: TraceSource) -> TraceSource:
    """Return b with its samples in the order of a's, matched by their token ids; equal samples keep their order.

    A sample that has no equal one is compared with the sample of its own number if that has none either. Without token
    ids and sequence_lengths in both, or if the samples are in order already, b itself is returned.
    """
    lengths_a, lengths_b = a.sequence_lengths, b.sequence_lengths
    if not lengths_a or not lengths_b:
        return b
    contents_a, contents_b = _contents(a), _contents(b)
    if contents_a is None or contents_b is None or contents_a == contents_b:
        return b
    places: dict[bytes, deque[int]] = defaultdict(deque)
    for sample, content in enumerate(contents_b):
        places[content].append(sample)
    partners = [places[content].popleft() if places[content] else -1 for content in contents_a]
    if max(partners) < 0:  # different batches
        return b
    taken = set(partners)
    for sample, partner in enumerate(partners):
        if partner < 0 and sample < len(lengths_b) and sample not in taken:
            partners[sample] = sample
    in_order = partners == list(range(len(lengths_b))) and lengths_a == lengths_b
    return b if in_order else PairedSource(b, partners, lengths_a)


def _contents(source: TraceSource) -> list[bytes] | None:
    """Return a digest of each sample's token ids; None if they are unknown."""
    tokens = source.token_ids()
    if tokens is None or not source.sequence_lengths:
        return None
    samples = tokens.to(torch.int64).split_with_sizes(list(source.sequence_lengths))
    return [hashlib.blake2b(sample.numpy().tobytes(), digest_size=16).digest() for sample in samples]


def open_source(
    trace: TraceLike, *, name: str = "the trace", step: int | None = None, run: str | None = None
) -> TraceSource:
    """Open a trace for reading by blocks.

    Args:
        name: the name in messages of a trace in memory, or of a list of parts.
        step, run: of a `TraceStore`'s folder; not needed if it has one step, which one run saved.

    Raises:
        StoreError: a file or folder is missing, damaged or has no trace.
        TraceError: an empty list of parts, or another object, such as a reply that was not decoded.
    """
    if isinstance(trace, RoutingTrace):
        return TraceSource(name, Provenance(), trace)
    if not isinstance(trace, (str, os.PathLike)):
        if not isinstance(trace, Sequence) or not trace:
            given = "an empty list of parts" if isinstance(trace, Sequence) else f"a {type(trace).__name__}"
            raise TraceError(
                f"MRR101: {name} is {given}: give a RoutingTrace, the path of one, or a list of such parts."
            )
        parts = [open_source(part, name=f"part {i} of {name}", step=step, run=run) for i, part in enumerate(trace)]
        return _Parts(parts, name)
    path = Path(trace)
    if not path.is_dir():
        return _File(path)
    step, files = _folder(path, step, run)
    # A folder with a single part is read like its file; a merge would read all its layers.
    sources = [_File(file) for file in files]
    source = sources[0] if len(sources) == 1 else _Parts(sources, str(path))
    source.provenance = replace(source.provenance, path=str(path), step=step)
    return source


def _folder(folder: Path, step: int | None, run: str | None) -> tuple[int | None, list[Path]]:
    """Return the step of a `TraceStore` and its files; or None and all files of a folder without steps."""
    store = TraceStore(folder)
    if store.steps():
        parts = store.parts(step, run=run)
        return parts[0].step, [part.path for part in parts]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StoreError(f"MRR501: cannot read {folder}: the folder holds no trace file (*.safetensors).")
    return None, files


def block_rows(*sources: TraceSource) -> int:
    """Return how many rows to read at a time."""
    row_bytes = max(len(source.layer_numbers) * source.topk * (1 + (source.num_experts > 256)) for source in sources)
    return max(1, BLOCK_BYTES // max(1, row_bytes) // _BLOCK_ROWS) * _BLOCK_ROWS
