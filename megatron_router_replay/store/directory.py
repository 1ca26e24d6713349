"""A folder of trace files by step, rank and part.

    <root>/step_000000012/rank_00003_part_00000.safetensors        one trace file, see `format.py`; it says who saved it

There is nothing beside these files that could disagree with them: a part is in the store once its file has its name, and the
file is complete by then. Ranks, processes and threads need no lock. A part without a number takes the first one that
nobody has, by a hard link, which fails where the name exists; a part with a number replaces the file of that name in one
step, so that a reader finds the old one or the new one. Every file names the run that saved it, so that a step that a resumed
run saves anew is never read as a mixture of both.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_router_replay.checks import shown
from megatron_router_replay.errors import StoreError, TraceError, listed
from megatron_router_replay.store.atomic import as_path, naming, new_file, sync
from megatron_router_replay.store.file import TraceBytes
from megatron_router_replay.store.format import SavedBy, as_number
from megatron_router_replay.store.reader import Reader
from megatron_router_replay.trace.merge import merge_traces
from megatron_router_replay.trace.routing_trace import RoutingTrace

_STEP = re.compile(r"step_([0-9]{9,19})")
_PART = re.compile(r"rank_([0-9]{5,19})_part_([0-9]{5,19})\.safetensors")
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class StoredPart:
    """One part that a store holds.

    Args:
        run: the name of the run that saved it.
        crc32: of its content: a part that was replaced has another one.
    """

    step: int
    rank: int
    part: int
    run: str
    num_tokens: int
    layer_numbers: tuple[int, ...]
    path: Path
    crc32: int


class TraceStore:
    """Traces by (step, rank, part) under one folder. Iterating yields every `StoredPart` of every run in that order.

    Args:
        root: the folder; made when the first part is saved. Any number of processes and threads may save at once.
        run: a name for the run that saves, the same in all its processes and another after it was resumed, for example a
            job's id with the number of its restarts. Reading needs none.
    """

    def __init__(self, root: str | os.PathLike[str], *, run: str | None = None) -> None:
        self.root = as_path(root)
        self.run = run

    def __iter__(self) -> Iterator[StoredPart]:
        for step in self.steps():
            yield from self._list_parts(step)

    def save(self, trace: RoutingTrace, *, step: int, rank: int | None = None, part: int | None = None) -> Path:
        """Save a part and return its path. It is in the store when this returns, or not at all.

        Args:
            step, rank, part: from 0, any integer of 63 bits.
            rank: by default this process's rank in torch.distributed where that is initialised, else 0.
            part: by default the next one of this step and rank, whoever else saves at the same time. One that exists is
                replaced; it stays readable until the new one is complete.

        Raises:
            StoreError: the store has no name for the run, a number is out of range, or the folder cannot be written; what was
                there before is unchanged.
        """
        # SavedBy refuses a store without a name.
        saved_by = SavedBy(step=step, rank=_distributed_rank() if rank is None else rank, run=self.run or "")
        number = None if part is None else as_number("part", part)
        folder = self._folder(saved_by.step)
        with naming(folder, "save to"):
            content = TraceBytes.of(trace, saved_by=saved_by)
            folder.mkdir(parents=True, exist_ok=True)
            sync(folder.parent)  # a folder's own name is kept by its parent
            with new_file(folder) as temporary:
                content.write_file(temporary)
                sync(temporary)
                # The number is taken when the file is complete: until then nobody can see that a part is missing.
                if number is None:
                    path = _take_next_number(temporary, folder, saved_by.rank)
                else:
                    path = folder / _part_name(saved_by.rank, number)
                    os.replace(temporary, path)
            sync(folder)
        return path

    def steps(self) -> list[int]:
        """Return the steps that have a part, in order."""
        if not self.root.is_dir():
            return []
        with naming(self.root, "list"):
            numbers = {int(match[1]) for path in self.root.iterdir() if (match := _STEP.fullmatch(path.name))}
            # A name that is not as this package writes it would be another folder than the one that is looked into.
            return sorted(number for number in numbers if _part_numbers(self._folder(number)))

    def parts(self, step: int, *, run: str | None = None) -> list[StoredPart]:
        """Return what all ranks of one run saved in a step, ordered by rank and part.

        Args:
            run: the name of the run. Default: the only one that saved in this step.

        Raises:
            StoreError: the store has no such step or run; several runs saved in the step and none is named; a file is damaged
                or was saved as another step or rank.
        """
        step = as_number("step", step)
        parts = self._list_parts(step)
        runs = sorted({part.run for part in parts})
        if not parts:
            there = (
                f"the folder has steps [{listed(self.steps())}]" if self.root.is_dir() else "there is no such folder"
            )
            raise StoreError(f"MRR505: cannot load step {step} of {self.root}: it has no part; {there}.")
        if run is None and len(runs) > 1:
            raise StoreError(
                f"MRR505: cannot load step {step} of {self.root}: runs {listed(runs)} saved it. Name the one that is "
                "meant, run=...: a resumed run may not have saved the step to its end."
            )
        if run is not None and run not in runs:
            raise StoreError(
                f"MRR505: cannot load step {step} of {self.root}: it has no part of run {run!r}, of {listed(runs)}."
            )
        return [part for part in parts if run is None or part.run == run]

    def load(
        self,
        part: StoredPart,
        *,
        layer_numbers: Sequence[int] | None = None,
        rows: slice | None = None,
        device: torch.device | str = "cpu",
    ) -> RoutingTrace:
        """Return one part, or a slice of it, as `load_trace` does.

        Raises:
            StoreError: as `load_trace`; the file was replaced since the part was listed.
        """
        if not isinstance(part, StoredPart):
            raise StoreError(
                f"MRR505: cannot load {shown(part)}: load takes a StoredPart of parts(step); load_step(step) loads a step."
            )
        with naming(part.path, "load"):
            reader = Reader.open(part.path)
            if reader.crc32 != part.crc32:
                raise StoreError("MRR503: it was replaced since it was listed. List the step again.")
            trace = reader.load(layer_numbers=layer_numbers, rows=rows)
        return trace.to(device)

    def load_step(
        self, step: int, *, allow_gaps: bool = False, run: str | None = None, device: torch.device | str = "cpu"
    ) -> RoutingTrace:
        """Return one trace of all ranks' parts of a step. They are all of one run; see `merge_traces`.

        Args:
            allow_gaps: as for `merge_traces`.
            run: as for `parts`.

        Raises:
            StoreError: as `parts`; a part was replaced while the step was loaded.
            TraceError: the parts contradict each other, or rows are missing. Names ranks and parts.
        """
        parts = self.parts(step, run=run)
        traces = [self.load(part, device=device) for part in parts]
        names = [f"rank {part.rank} part {part.part}" for part in parts]
        try:
            return merge_traces(traces, allow_gaps=allow_gaps, names=names)
        except TraceError as error:
            raise TraceError(f"MRR107: cannot merge step {step} of run {parts[0].run!r}: {error}") from None

    def prune(self, *, keep_last: int) -> list[int]:
        """Remove old steps and return them, in order. What a crash left of an earlier prune or save in them goes too.

        Args:
            keep_last: keep this many of the steps that were saved last, whatever their numbers: a run that was resumed at
                step 100 after one that had come to step 200 keeps its own.

        Raises:
            StoreError: keep_last is negative or no integer, or a file cannot be removed.
        """
        kept = as_number("keep_last", keep_last)
        if not self.root.is_dir():
            return []
        with naming(self.root, "prune"):
            ordered = sorted(self.steps(), key=lambda step: (self._last_saved_ns(step), step))
            removed = sorted(ordered[: max(0, len(ordered) - kept)])
            for step in removed:
                # Renamed first, so that no reader finds half a step. Another process may be pruning, too.
                with suppress(FileNotFoundError):
                    self._folder(step).rename(self.root / f".pruned_{secrets.token_hex(8)}")
            sync(self.root)
            for path in self.root.glob(".pruned_*"):
                with suppress(FileNotFoundError):
                    shutil.rmtree(path)
        return removed

    def _list_parts(self, step: int) -> list[StoredPart]:
        folder = self._folder(step)
        listed_parts = (_stored_part(folder, step, rank, part) for rank, part in _part_numbers(folder))
        return sorted(part for part in listed_parts if part is not None)

    def _last_saved_ns(self, step: int) -> int:
        folder, times = self._folder(step), [0]
        for rank, part in _part_numbers(folder):
            with suppress(FileNotFoundError):  # pruned meanwhile
                times.append((folder / _part_name(rank, part)).stat().st_mtime_ns)
        return max(times)

    def _folder(self, step: int) -> Path:
        return self.root / f"step_{step:09d}"


def _take_next_number(temporary: Path, folder: Path, rank: int) -> Path:
    """Give the file the first part number of this rank that nobody has, and return its path."""
    while True:
        taken = [part for of_rank, part in _part_numbers(folder) if of_rank == rank]
        path = folder / _part_name(rank, max(taken, default=-1) + 1)
        try:
            # Unlike a rename, a link fails where the name exists: whoever was faster keeps it.
            os.link(temporary, path)
        except FileExistsError:
            # A network file system may have made the link and lost its answer.
            if not path.exists() or not os.path.samefile(temporary, path):
                continue
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise StoreError(
                    f"MRR501: this file system has no hard links ({error}): give each part a number, part=..."
                ) from None
            raise
        return path


def _stored_part(folder: Path, step: int, rank: int, part: int) -> StoredPart | None:
    """Return what a file says, or None if it has been pruned since it was listed."""
    path = folder / _part_name(rank, part)
    with naming(path, "list"):
        try:
            reader = Reader.open(path)
        except FileNotFoundError:
            return None
        saved_by = reader.header.saved_by
        if saved_by is None or (saved_by.step, saved_by.rank) != (step, rank):
            known = "no part of a store" if saved_by is None else f"step {saved_by.step}, rank {saved_by.rank}"
            raise StoreError(f"MRR503: it was saved as {known}. Was it copied from there?")
    return StoredPart(
        step=step,
        rank=rank,
        part=part,
        run=saved_by.run,
        num_tokens=reader.header.num_tokens,
        layer_numbers=reader.header.layer_numbers,
        path=path,
        crc32=reader.crc32,
    )


def _part_numbers(folder: Path) -> list[tuple[int, int]]:
    """Return (rank, part) of each part in a step's folder, in no order; none if there is no folder."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbers = [(name, int(match[1]), int(match[2])) for name in names if (match := _PART.fullmatch(name))]
    # More zeros in front than this package writes: a file that it would look for under another name.
    return [(rank, part) for name, rank, part in numbers if name == _part_name(rank, part)]


def _part_name(rank: int, part: int) -> str:
    return f"rank_{rank:05d}_part_{part:05d}.safetensors"


def _distributed_rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
