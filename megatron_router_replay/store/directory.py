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
import operator
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from megatron_router_replay.errors import StoreError, TraceError
from megatron_router_replay.merge import merge_traces
from megatron_router_replay.store.atomic import naming, new_file, sync
from megatron_router_replay.store.file import read_trace, write_trace
from megatron_router_replay.store.part import UNKNOWN_SAVE, Runs, SavedBy, StoredPart, distributed_rank
from megatron_router_replay.store.reader import Reader
from megatron_router_replay.trace import RoutingTrace

_STEP = re.compile(r"step_([0-9]{9,19})")
_PART = re.compile(r"rank_([0-9]{5,19})_part_([0-9]{5,19})\.safetensors")
_MAX_NUMBER = (1 << 63) - 1
_MAX_RUN_CHARACTERS = 200
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_MAX_ATTEMPTS = 20
"""How often a step is listed anew because a part was replaced between listing and reading it."""


class _ReplacedError(StoreError):
    """A part is not the one that was listed."""


class TraceStore:
    """Traces by (step, rank, part) under one folder; iterating yields every `StoredPart` of every run in that order.

    Args:
        root: the folder; made when the first part is saved. Any number of processes and threads may save at once.
        run: a name for the run that saves, the same in all its processes and another after it was resumed, for example a
            job's id with the number of its restarts. Not needed under torch.distributed, nor where the processes of a run
            are started together.

    Raises:
        StoreError: the name of the run is empty or longer than 200 characters.
    """

    def __init__(self, root: str | os.PathLike[str], *, run: str | None = None) -> None:
        if run is not None and not (isinstance(run, str) and 0 < len(run) <= _MAX_RUN_CHARACTERS):
            raise StoreError(f"a run's name must be a text of 1 to {_MAX_RUN_CHARACTERS} characters, got {run!r:.80}.")
        self.root = Path(root)
        self.run = run

    def __iter__(self) -> Iterator[StoredPart]:
        for step in self.steps():
            yield from self._all_parts(step)

    def save(self, trace: RoutingTrace, *, step: int, rank: int | None = None, part: int | None = None) -> Path:
        """Save a part and return its path; it is in the store when this returns, or not at all.

        Args:
            step, rank, part: from 0, any integer of 63 bits.
            rank: by default this process's rank in torch.distributed where that is initialised, else 0.
            part: by default the next one of this step and rank, whoever else saves at the same time. One that exists is
                replaced, as a resumed run needs; it stays readable until the new one is complete.

        Raises:
            StoreError: a number is out of range, or the folder cannot be written; what was there before is unchanged.
        """
        step = _as_number("step", step)
        rank = distributed_rank()[0] if rank is None else _as_number("rank", rank)
        number = None if part is None else _as_number("part", part)
        folder = self._folder(step)
        with naming(folder, "save to"):
            folder.mkdir(parents=True, exist_ok=True)
            sync(folder.parent)  # a folder's own name is kept by its parent
            with new_file(folder) as temporary:
                write_trace(trace, temporary, saved_by=SavedBy.now(step=step, rank=rank, run=self.run))
                sync(temporary)
                # The number is taken when the file is complete: until then nobody can see that a part is missing.
                if number is None:
                    path = _take_next_number(temporary, folder, rank)
                else:
                    path = folder / _part_name(rank, number)
                    os.replace(temporary, path)
            sync(folder)
        return path

    def steps(self) -> list[int]:
        """Return the steps that have a part, in order."""
        if not self.root.is_dir():
            return []
        with naming(self.root, "list"):
            numbers = [int(match[1]) for path in self.root.iterdir() if (match := _STEP.fullmatch(path.name))]
            # A name that is not as this package writes it would be another folder than the one that is looked into.
            return sorted(number for number in set(numbers) if _part_numbers(self._folder(number)))

    def parts(self, step: int, *, run: str | None = None) -> list[StoredPart]:
        """Return what all ranks of one run saved in a step, ordered by rank and part.

        Args:
            run: default: the run that started last.

        Raises:
            StoreError: the store has no such step or run; a file is damaged or was saved as another step or rank; it cannot
                be told which parts are of one run, or the latest run lacks ranks that an earlier one had.
        """
        step = _as_number("step", step)
        runs = self._runs(step, run)
        runs.check(step)
        return runs.latest

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
        with naming(part.path, "load"):
            reader = Reader.open(part.path)
        if (reader.header.saved_by or UNKNOWN_SAVE) != part.saved_by or reader.header.num_tokens != part.num_tokens:
            raise _ReplacedError(f"cannot load {part.path}: it was replaced since it was listed. List the step again.")
        with naming(part.path, "load"):
            trace = read_trace(reader, layer_numbers=layer_numbers, rows=rows)
        return trace.to(device)

    def load_step(
        self, step: int, *, allow_gaps: bool = False, run: str | None = None, device: torch.device | str = "cpu"
    ) -> RoutingTrace:
        """Return one trace of all ranks' parts of a step, all of one run; see `merge_traces`.

        Args:
            allow_gaps: as for `merge_traces`; also load what the latest run saved, if an earlier one saved more ranks.
            run: the run to load. Default: the one that started last.

        Raises:
            StoreError: the store has no such step or run; a file is damaged; it cannot be told which parts are of one run,
                or the latest run has not saved what an earlier one had.
            TraceError: the parts contradict each other, or rows are missing. Names ranks and parts.
        """
        step = _as_number("step", step)
        for _ in range(_MAX_ATTEMPTS):
            runs = self._runs(step, run)
            if not (allow_gaps and runs.certain):
                runs.check(step)
            try:
                traces = [self.load(part, device=device) for part in runs.latest]
            except _ReplacedError:
                # Parts of the old and the new save must not be merged: list, and tell the runs apart, once more.
                continue
            return _merge_step(step, runs, traces, allow_gaps=allow_gaps)
        raise StoreError(f"cannot load step {step} of {self.root}: its parts are being replaced all the time.")

    def prune(self, *, keep_last: int | None = None, before: int | None = None) -> list[int]:
        """Remove old steps and return them, in order; also what a crash left of an earlier prune or save in them.

        Args:
            keep_last: keep this many of the steps that were saved last, whatever their numbers: a run that was resumed at
                step 100 after one that had come to step 200 keeps its own.
            before: remove steps below this one.

        Raises:
            StoreError: not exactly one of the two is given, a file is damaged or cannot be removed.
        """
        if (keep_last is None) == (before is None) or (keep_last or 0) < 0:
            raise StoreError(f"cannot prune {self.root}: give one of keep_last={keep_last} (>= 0) and before={before}.")
        if not self.root.is_dir():
            return []
        if before is not None:
            removed = [step for step in self.steps() if step < before]
        else:
            ordered = sorted((self._last_saved_ns(step), step) for step in self.steps())
            removed = sorted(step for _, step in ordered[: max(0, len(ordered) - (keep_last or 0))])
        with naming(self.root, "prune"):
            for step in removed:
                # Renamed first, so that no reader finds half a step. Another process may be pruning, too.
                with suppress(FileNotFoundError):
                    self._folder(step).rename(self.root / f".pruned_{secrets.token_hex(8)}")
            sync(self.root)
            for path in self.root.glob(".pruned_*"):
                with suppress(FileNotFoundError):
                    shutil.rmtree(path)
        return removed

    def _runs(self, step: int, run: str | None) -> Runs:
        """Tell the runs of a step apart, or take the parts of one run alone."""
        parts = [part for part in self._all_parts(step) if run is None or part.saved_by.run == run]
        if not parts:
            of_run = "" if run is None else f" of run {run!r}"
            raise StoreError(f"cannot load step {step} of {self.root}: it has no part{of_run}.")
        return Runs.of(parts)

    def _all_parts(self, step: int) -> list[StoredPart]:
        folder = self._folder(step)
        with naming(folder, "list"):
            numbers = _part_numbers(folder, must_exist=True)
        found = (_stored_part(folder, step, rank, part) for rank, part in numbers)
        return sorted(part for part in found if part is not None)

    def _last_saved_ns(self, step: int) -> int:
        return max((part.saved_by.saved_ns for part in self._all_parts(step)), default=0)

    def _folder(self, step: int) -> Path:
        return self.root / f"step_{step:09d}"


def _merge_step(step: int, runs: Runs, traces: list[RoutingTrace], *, allow_gaps: bool) -> RoutingTrace:
    names = [f"rank {part.rank} part {part.part}" for part in runs.latest]
    try:
        return merge_traces(traces, allow_gaps=allow_gaps, names=names)
    except TraceError as error:
        absent = runs.absent_ranks()
        hint = f" Ranks {absent[:16]} of this run saved nothing in this step." if absent else ""
        raise TraceError(f"cannot merge step {step}: {error}{hint}") from None


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
                    f"this file system has no hard links ({error}): give each part a number, part=..."
                ) from None
            raise
        return path


def _stored_part(folder: Path, step: int, rank: int, part: int) -> StoredPart | None:
    """Return what a file says, or None if it has been pruned since it was listed."""
    path = folder / _part_name(rank, part)
    with naming(path, "list"):
        try:
            header = Reader.open(path).header
        except FileNotFoundError:
            return None
        saved_by = header.saved_by or UNKNOWN_SAVE
        if header.saved_by is not None and (saved_by.step, saved_by.rank) != (step, rank):
            raise StoreError(f"it was saved as step {saved_by.step}, rank {saved_by.rank}. Was it copied from there?")
    return StoredPart(
        step=step,
        rank=rank,
        part=part,
        num_tokens=header.num_tokens,
        layer_numbers=header.layer_numbers,
        path=path,
        saved_by=saved_by,
    )


def _part_numbers(folder: Path, *, must_exist: bool = False) -> list[tuple[int, int]]:
    """Return (rank, part) of each part in a step's folder, in no order; none if there is no folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        if must_exist:
            raise
        return []
    numbers = [(name, int(match[1]), int(match[2])) for name in names if (match := _PART.fullmatch(name))]
    # More zeros in front than this package writes: a file that it would look for under another name.
    return [(rank, part) for name, rank, part in numbers if name == _part_name(rank, part)]


def _part_name(rank: int, part: int) -> str:
    return f"rank_{rank:05d}_part_{part:05d}.safetensors"


def _as_number(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise StoreError(f"{name} must be an integer, got {value!r:.80}.") from None
    if not 0 <= number <= _MAX_NUMBER:
        raise StoreError(f"{name}={number} must lie in 0..{_MAX_NUMBER}.")
    return number
