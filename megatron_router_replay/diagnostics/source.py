"""Traces in memory, in files and in folders -> blocks of rows, so that no trace has to fit in memory.

A folder holds the parts of one step: a `TraceStore` (its one step, or the one that is asked for) or trace files that
ranks saved side by side. Parts are merged block by block, by rows and layers, as `merge_traces` does.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Union

from megatron_router_replay.errors import StoreError, TraceError
from megatron_router_replay.store import TraceStore, merge_traces
from megatron_router_replay.store.atomic import naming
from megatron_router_replay.store.file import Reader
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trace.header import TraceHeader

PathLike = Union[str, "os.PathLike[str]"]
TraceLike = RoutingTrace | PathLike | Sequence[RoutingTrace | PathLike]
"""A trace, the path of a trace file or of a folder, or a list of these: the ranks' parts of one batch."""

BLOCK_BYTES = 16 << 20
"""Routes that are read at a time; the memory of a pass over a trace is a few times this."""

_BLOCK_ROWS = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where a trace comes from.

    Args:
        path: the file or folder that was given; empty: it was in memory, or a list of parts.
        files: the trace files that were read.
        step: the step of a `TraceStore`, where that is what was given.
        written: when the newest of the files was last written, UTC, "2026-03-01 12:30"; empty: no file.
        weight_versions: of its rows, where known.
    """

    path: str = ""
    files: tuple[str, ...] = ()
    step: int | None = None
    written: str = ""
    weight_versions: tuple[int, ...] = ()


class TraceSource(ABC):
    """A trace whose rows are read on demand.

    Args:
        name: how messages call it.
        provenance: its files; weight versions are known only once its rows were read.
        sizes: what has this source's sizes and samples.

    Attributes:
        num_tokens, layer_numbers, num_experts, topk, sequence_lengths, sample_ids: as in `RoutingTrace`.
    """

    def __init__(self, name: str, provenance: Provenance, sizes: RoutingTrace | TraceHeader | TraceSource) -> None:
        self.name, self.provenance = name, provenance
        self.num_tokens: int = sizes.num_tokens
        self.layer_numbers: tuple[int, ...] = sizes.layer_numbers
        self.num_experts: int = sizes.num_experts
        self.topk: int = sizes.topk
        self.sequence_lengths: tuple[int, ...] | None = sizes.sequence_lengths
        self.sample_ids: tuple[str, ...] | None = sizes.sample_ids

    @abstractmethod
    def read(self, start: int, stop: int, layer_numbers: Sequence[int] | None = None) -> RoutingTrace:
        """Return rows start..stop-1 on the CPU; rows behind the last are left out."""


class _Memory(TraceSource):
    def __init__(self, trace: RoutingTrace, name: str) -> None:
        super().__init__(name, Provenance(), trace)
        self._trace = trace

    def read(self, start: int, stop: int, layer_numbers: Sequence[int] | None = None) -> RoutingTrace:
        rows = self._trace[start:stop].to("cpu")
        return rows if layer_numbers is None else rows.select_layers(layer_numbers)


class _File(TraceSource):
    def __init__(self, path: Path) -> None:
        with naming(path, "read"):
            self._reader = Reader.open(path)
        self._path = path
        written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        provenance = Provenance(path=str(path), files=(str(path),), written=f"{written:%Y-%m-%d %H:%M}")
        super().__init__(str(path), provenance, self._reader.header)

    def read(self, start: int, stop: int, layer_numbers: Sequence[int] | None = None) -> RoutingTrace:
        with naming(self._path, "read"):
            rows = slice(min(start, self.num_tokens), min(stop, self.num_tokens))
            return self._reader.load(layer_numbers=layer_numbers, rows=rows)


class _Parts(TraceSource):
    def __init__(self, parts: Sequence[TraceSource], name: str) -> None:
        # A stage of dense layers alone says nothing of experts.
        with_layers = [part for part in parts if part.layer_numbers] or list(parts)
        longest = max(parts, key=lambda part: (part.num_tokens, part.sequence_lengths is not None))
        provenance = Provenance(
            files=tuple(file for part in parts for file in part.provenance.files),
            written=max(part.provenance.written for part in parts),
        )
        super().__init__(name, provenance, longest)
        self.layer_numbers = tuple(sorted({number for part in parts for number in part.layer_numbers}))
        self.num_experts, self.topk = with_layers[0].num_experts, with_layers[0].topk
        self._parts = parts

    def read(self, start: int, stop: int, layer_numbers: Sequence[int] | None = None) -> RoutingTrace:
        # Every part is read in all its layers: whether a row has a route is known from all of them only.
        pieces = [part.read(start, stop) for part in self._parts]
        try:
            merged = merge_traces(pieces, allow_gaps=True)
        except TraceError as error:
            raise TraceError(f"MRR107: cannot merge {self.name}, rows counted from {start} here: {error}") from None
        return merged if layer_numbers is None else merged.select_layers(layer_numbers)


def open_source(trace: TraceLike, *, name: str = "the trace", step: int | None = None) -> TraceSource:
    """Open a trace for reading by blocks.

    Args:
        name: what messages call a trace in memory, or a list of parts.
        step: which step of a `TraceStore`'s folder; not needed if it has one.

    Raises:
        StoreError: a file or folder is missing, damaged or holds no trace.
        TraceError: an empty list of parts, or something else, such as a reply that was not decoded.
    """
    if isinstance(trace, RoutingTrace):
        return _Memory(trace, name)
    if not isinstance(trace, (str, os.PathLike)):
        if not isinstance(trace, Sequence) or not trace:
            what = "an empty list of parts" if isinstance(trace, Sequence) else f"a {type(trace).__name__}"
            raise TraceError(
                f"MRR101: {name} is {what}: give a RoutingTrace, the path of one, or a list of such parts."
            )
        return _Parts([open_source(part, name=f"part {i} of {name}", step=step) for i, part in enumerate(trace)], name)
    path = Path(trace)
    if not path.is_dir():
        return _File(path)
    step, files = _folder(path, step)
    # A folder of one part keeps the file's own blocks; merging would read every layer of it.
    parts: list[TraceSource] = [_File(part) for part in files]
    source = parts[0] if len(parts) == 1 else _Parts(parts, str(path))
    source.provenance = replace(source.provenance, path=str(path), step=step)
    return source


def _folder(folder: Path, step: int | None) -> tuple[int | None, list[Path]]:
    """Return the step of a `TraceStore` that is meant and its files; or None and all files of a folder without steps."""
    store = TraceStore(folder)
    steps = store.steps()
    if not steps:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise StoreError(f"MRR501: cannot read {folder}: the folder holds no trace file (*.safetensors).")
        return None, files
    if step is None and len(steps) > 1:
        shown = ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")
        raise StoreError(f"MRR505: {folder} holds {len(steps)} steps ({shown}): say which.")
    chosen = steps[0] if step is None else step
    if chosen not in steps:
        raise StoreError(f"MRR505: {folder} has no step {chosen}; it has {steps[0]}..{steps[-1]}.")
    return chosen, [part.path for part in store.parts(chosen)]


def block_rows(*sources: TraceSource) -> int:
    """Return how many rows to read at a time."""
    row_bytes = max(len(source.layer_numbers) * source.topk * (1 + (source.num_experts > 256)) for source in sources)
    return max(1, BLOCK_BYTES // max(1, row_bytes) // _BLOCK_ROWS) * _BLOCK_ROWS
