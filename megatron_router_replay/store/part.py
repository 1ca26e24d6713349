"""Who saved a part of a store, in which run and when; which parts of a step belong to one run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_router_replay.errors import StoreError, TraceError, listed
from megatron_router_replay.header import as_integer


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class SavedBy:
    """What a part's file says of the save that wrote it.

    Args:
        step, rank: as which it was saved; a copy under another name is refused.
        run: the caller's name for the run, or None.
        process_start_ns: when the saving process started, nanoseconds since 1970.
        saved_ns: when it was saved.
        world_size: ranks of torch.distributed where it was initialised, else None.
    """

    step: int
    rank: int
    run: str | None
    process_start_ns: int
    saved_ns: int
    world_size: int | None

    @classmethod
    def now(cls, *, step: int, rank: int, run: str | None) -> SavedBy:
        """Return what a save by this process says."""
        return cls(
            step=step,
            rank=rank,
            run=run,
            process_start_ns=PROCESS_START_NS,
            saved_ns=time.time_ns(),
            world_size=distributed_rank()[1],
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SavedBy:
        """Return what `to_json` described.

        Raises:
            TraceError: an entry is missing or of another type.
        """
        run, world_size = values.get("run"), values.get("world_size")
        if run is not None and type(run) is not str:
            raise TraceError(f"run is {str(run)[:40]!r}, not a string.")
        return cls(
            **{name: as_integer(name, values.get(name)) for name in ("step", "rank", "process_start_ns", "saved_ns")},
            run=run,
            world_size=None if world_size is None else as_integer("world_size", world_size),
        )


UNKNOWN_SAVE = SavedBy(step=-1, rank=-1, run=None, process_start_ns=0, saved_ns=0, world_size=None)
"""Of a part that version 0.1 saved: older than any other."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class StoredPart:
    """One part that a store holds."""

    step: int
    rank: int
    part: int
    num_tokens: int
    layer_numbers: tuple[int, ...]
    path: Path
    saved_by: SavedBy = UNKNOWN_SAVE


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """The parts of a step, told apart by run.

    Args:
        latest: those of the run that started last.
        earlier: all others.
        certain: False if `earlier` may also be parts of the same run, of processes that had ended before others started.
    """

    latest: list[StoredPart]
    earlier: list[StoredPart]
    certain: bool

    @classmethod
    def of(cls, parts: Sequence[StoredPart]) -> Runs:
        """Tell the parts of a step apart.

        Runs with a name are told apart by it. Of those without one, a part is of an earlier run if it had been saved before
        the process started that saved the newest, or by a process that ran at that time. Under torch.distributed that is
        certain: all ranks have started before any can save.
        """
        newest = max((part.saved_by for part in parts), key=lambda saved: (saved.process_start_ns, saved.saved_ns))
        # What is older says when the run before still ran: a process of that time belongs to it, however late it saved.
        older = [p.saved_by.saved_ns for p in parts if p.saved_by.saved_ns < newest.process_start_ns]
        last_of_older = max(older, default=-1)
        latest: list[StoredPart] = []
        earlier: list[StoredPart] = []
        for part in parts:
            if newest.run is None:
                same = part.saved_by.run is None and part.saved_by.process_start_ns > last_of_older
            else:
                same = part.saved_by.run == newest.run
            (latest if same else earlier).append(part)
        certain = not earlier or newest.run is not None or newest.world_size is not None
        return cls(latest=latest, earlier=earlier, certain=certain)

    @property
    def world_size(self) -> int:
        """Ranks of the latest run, 0 where it did not say."""
        return max((part.saved_by.world_size or 0 for part in self.latest), default=0)

    def check(self, step: int) -> None:
        """Raise StoreError unless the latest run can be told from the earlier ones and has saved what they had."""
        if not self.certain:
            earlier, latest = ([f"rank {p.rank} part {p.part}" for p in parts] for parts in (self.earlier, self.latest))
            raise StoreError(
                f"cannot load step {step}: its parts may be of two runs. {listed(earlier)} had been saved before the "
                f"process started that saved {listed(latest)}. Give all processes of a run the same "
                "TraceStore(root, run=...), or prune the step and save it anew."
            )
        # A run that was resumed on fewer ranks has nothing to save for the others.
        expected = {part.rank for part in self.earlier if not self.world_size or part.rank < self.world_size}
        missing = sorted(expected - {part.rank for part in self.latest})
        if missing:
            raise StoreError(
                f"cannot load step {step}: the latest run has not saved the parts of ranks {listed(missing)}, which an "
                "earlier run had saved. Has it saved the step to its end? allow_gaps=True loads what it saved, run=... the "
                "parts of a run with a name."
            )

    def absent_ranks(self) -> list[int]:
        """Return the ranks of torch.distributed that saved nothing in the latest run."""
        return sorted(set(range(self.world_size)) - {part.rank for part in self.latest})


def distributed_rank() -> tuple[int, int | None]:
    """Return this process's rank and the world size of torch.distributed where it is initialised, else 0 and None."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, None


def _process_start_ns() -> int:
    """Return when this process started, in nanoseconds since 1970; without /proc, when this module was loaded."""
    now = time.time_ns()
    try:
        # The 22nd field of stat, counted behind the command's name, which may hold spaces: ticks since the system started.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        since_boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        return now - (since_boot_ns - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return now


PROCESS_START_NS = _process_start_ns()
"""A forked process keeps its parent's: it belongs to the same run, however late it was forked."""
