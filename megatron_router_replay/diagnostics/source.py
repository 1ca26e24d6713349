"""Read traces in memory, in files and in folders by blocks of rows. Files are mapped, so they may be larger than memory.

A folder has the ranks' parts of one step: a `TraceStore`, or trace files that ranks saved side by side. Parts are merged
block by block, by rows and layers, as `merge_traces` does.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Union

import torch
from torch import Tensor

from megatron_router_replay.errors import StoreError, TraceError
from megatron_router_replay.store import TraceStore, merge_traces
from megatron_router_replay.store.atomic import naming
from megatron_router_replay.store.file import map_trace
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trace.merge import of_the_longest

PathLike = Union[str, "os.PathLike[str]"]
TraceLike = RoutingTrace | PathLike | Sequence[RoutingTrace | PathLike]
"""A trace, the path of a trace file or of a folder, or a list of these: the ranks' parts of a batch."""

BLOCK_BYTES = 16 << 20
"""Routes that are read at a time; a pass over a trace needs a few times this memory."""

_BLOCK_ROWS = 1 << 14
_PROMPT_TOKENS = 8  # tokens that two answers to one prompt share at least


class TraceSource:
    """A trace that is read by blocks of rows, from one part or from those of several ranks.

    Args:
        parts: traces in memory, or mapped files.
        name: its name in messages.
        origin: the file or folder that was given, as texts show it.
        files: the trace files that are read.

    Attributes:
        num_tokens, layer_numbers, num_experts, topk, sequence_lengths: as in `RoutingTrace`.
        partners: for each sample of a trace that this one is compared with the sample here that `pair_samples` found, -1:
            none; None: samples are in order.
        matched_by: "tokens" or "number" of the samples, where they were paired; empty: they were not.
        lengths_before: sequence_lengths of this trace before its samples were paired.
    """

    def __init__(self, parts: Sequence[RoutingTrace], name: str, origin: str, files: Sequence[Path] = ()) -> None:
        self.parts, self.name, self.origin, self.files = parts, name, origin, files
        # A stage of dense layers alone has no number of experts.
        with_layers = next((part for part in parts if part.num_layers), parts[0])
        self.num_experts, self.topk = with_layers.num_experts, with_layers.topk
        self.layer_numbers = tuple(sorted({number for part in parts for number in part.layer_numbers}))
        self.num_tokens = max(part.num_tokens for part in parts)
        # Blocks of rows have no samples, so that their merge compares none.
        self.sequence_lengths: tuple[int, ...] | None = of_the_longest("sequence_lengths", parts, self.num_tokens)
        self.partners: tuple[int, ...] | None = None
        self.matched_by, self.lengths_before = "", self.sequence_lengths or ()
        self._rows: Tensor | None = None

    def read(self, start: int, stop: int) -> RoutingTrace:
        """Return rows start..stop-1 on the CPU, without rows after the last one."""
        if self._rows is not None:
            blocks = [_gather(part, self._rows[start:stop]) for part in self.parts]
        else:
            blocks = [part.gather_rows(slice(start, stop)) for part in self.parts]
        if len(blocks) == 1:
            return blocks[0].to("cpu")
        try:
            return merge_traces(blocks, allow_gaps=True).to("cpu")
        except TraceError as error:
            raise TraceError(f"MRR107: cannot merge {self.name}, rows counted from {start} here: {error}") from None

    def samples(self) -> list[bytes] | None:
        """Return the token ids of each sample; None if they are unknown."""
        tokens = torch.full((self.num_tokens,), -1, dtype=torch.int32)
        for part in self.parts:
            if part.token_ids is not None:
                known = tokens[: part.num_tokens]
                torch.maximum(known, part.token_ids.cpu(), out=known)  # -1 is unknown
        if self.sequence_lengths is None or all(part.token_ids is None for part in self.parts):
            return None
        return [sample.numpy().tobytes() for sample in tokens.split_with_sizes(list(self.sequence_lengths))]

    def reorder(self, partners: Sequence[int], lengths: tuple[int, ...]) -> None:
        """Take the samples in the order of another trace's samples.

        Args:
            partners: for each sample of the other trace the sample of this one, -1: none.
            lengths: sequence_lengths of the other trace. Rows without a partner get no route; rows of this trace without a
                partner come last, as one sample.
        """
        assert self.sequence_lengths is not None
        order = torch.full((sum(lengths),), -1, dtype=torch.int64)
        rows = torch.arange(self.num_tokens).split_with_sizes(list(self.sequence_lengths))
        for place, partner in zip(order.split_with_sizes(list(lengths)), partners):
            if partner >= 0:
                common = min(len(place), len(rows[partner]))
                place[:common] = rows[partner][:common]
        left = torch.ones(self.num_tokens, dtype=torch.bool)
        left[order[order >= 0]] = False
        self.partners, self._rows = tuple(partners), torch.cat([order, left.nonzero().flatten()])
        self.sequence_lengths = (*lengths, *([int(left.sum())] if left.any() else []))
        self.num_tokens = len(self._rows)


def _gather(part: RoutingTrace, rows: Tensor) -> RoutingTrace:
    """Return these rows of a part; a row that it does not have, such as -1, has no route, token or weight version."""
    if not part.num_tokens:
        return part
    known = (rows >= 0) & (rows < part.num_tokens)
    block = part.gather_rows(torch.where(known, rows, 0)).to("cpu")  # row 0 is the filler
    tokens, versions = (
        None if values is None else torch.where(known, values, -1) for values in (block.token_ids, block.weight_version)
    )
    return block._with(replay_mask=block.replay_mask & known, token_ids=tokens, weight_version=versions)


def pair_samples(a: TraceSource, b: TraceSource) -> None:
    """Take b's samples in the order of a's, matched by their token ids; equal samples keep their order.

    A sample that has no equal one is compared with one that begins with the same tokens, such as another answer to its
    prompt, or with the sample of its own number if that has none either. Without token ids in both, samples are matched by
    their numbers if some of them are longer or shorter. Without sequence_lengths in both, or if the samples are in order
    already, b stays as it is.
    """
    samples_a, samples_b = a.samples(), b.samples()
    if not samples_a or not samples_b:
        lengths_a, lengths_b = a.sequence_lengths or (), b.sequence_lengths or ()
        # The same lengths in a different order are samples in a different order, which the search for facts finds.
        if len(lengths_a) == len(lengths_b) and sorted(lengths_a) != sorted(lengths_b):
            b.reorder(range(len(lengths_b)), lengths_a)
            b.matched_by = "number"
        return
    if samples_a == samples_b:
        return
    partners = _equal_or_same_prompt(samples_a, samples_b)
    if max(partners) < 0:  # different batches
        return
    taken = set(partners)
    for sample, partner in enumerate(partners):
        if partner < 0 and sample < len(samples_b) and sample not in taken:
            partners[sample] = sample
    assert a.sequence_lengths is not None
    if partners != list(range(len(samples_b))) or a.sequence_lengths != b.sequence_lengths:
        b.reorder(partners, a.sequence_lengths)
        b.matched_by = "tokens"


def _equal_or_same_prompt(samples_a: Sequence[bytes], samples_b: Sequence[bytes]) -> list[int]:
    """Return for each sample of a the equal one of b, else one that begins with the same tokens, else -1."""
    partners = [-1] * len(samples_a)
    for length in (None, _PROMPT_TOKENS * 4):  # int32
        taken, places = set(partners), defaultdict[bytes, deque[int]](deque)
        for sample, tokens in enumerate(samples_b):
            if sample not in taken:
                places[tokens[:length]].append(sample)
        for sample, tokens in enumerate(samples_a):
            key = tokens[:length]
            if partners[sample] >= 0 or not places[key]:
                continue
            # A group of answers to one prompt keeps its order where it can.
            own_number = length is not None and sample in places[key]
            partners[sample] = sample if own_number else places[key][0]
            places[key].remove(partners[sample])
    return partners


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
        return TraceSource([trace], name, "in memory")
    if not isinstance(trace, (str, os.PathLike)):
        if not isinstance(trace, Sequence) or not trace:
            given = "an empty list of parts" if isinstance(trace, Sequence) else f"a {type(trace).__name__}"
            raise TraceError(f"MRR101: {name} is {given}: give a RoutingTrace, its path, or a list of such parts.")
        opened = [open_source(part, name=f"part {i} of {name}", step=step, run=run) for i, part in enumerate(trace)]
        files = [file for source in opened for file in source.files]
        return TraceSource([part for source in opened for part in source.parts], name, f"{len(opened)} parts", files)
    path = Path(trace)
    origin, files = str(path), [path]
    if path.is_dir():
        store, steps = TraceStore(path), TraceStore(path).steps()
        if not steps and path.name.startswith("step_"):  # perhaps a step of a store, which several runs may have saved
            store = TraceStore(path.parent)
            steps = [number for number in store.steps() if store.folder(number) == path]
            if steps and step not in (None, *steps):
                raise StoreError(f"MRR505: cannot find step {step} in {path}: it is the folder of step {steps[0]}.")
            step = steps[0] if steps else step
        if steps:
            files = list(store.parts(step, run=run).values())
            origin += f", step {steps[0] if step is None else step}"
        elif not (files := sorted(path.glob("*.safetensors"))):
            raise StoreError(f"MRR501: cannot read {path}: the folder holds no trace file (*.safetensors).")
        origin += f", {len(files)} files" if len(files) > 1 else ""
    parts = []
    for file in files:
        with naming(file, "read"):
            parts.append(map_trace(file))
    return TraceSource(parts, str(path), origin, files)


def block_rows(*sources: TraceSource) -> int:
    """Return how many rows to read at a time."""
    row_bytes = max(len(source.layer_numbers) * source.topk * (1 + (source.num_experts > 256)) for source in sources)
    return max(1, BLOCK_BYTES // max(1, row_bytes) // _BLOCK_ROWS) * _BLOCK_ROWS
