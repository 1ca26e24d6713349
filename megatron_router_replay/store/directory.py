"""Keep traces in a folder by step, run and rank.

    <root>/step_000000012/job-17.rank_00003.safetensors        a trace file, without the rows that the rank does not know

Names say everything, so there is no index that could disagree with the files. Each process writes only its own rank's file,
in one step, so ranks need no lock. A job that is resumed takes a new name of a run: a step is never read as a mixture.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from megatron_router_replay.checks import as_integer, shown
from megatron_router_replay.errors import StoreError, TraceError, listed
from megatron_router_replay.store.atomic import as_path, naming
from megatron_router_replay.store.file import load_trace, save_part
from megatron_router_replay.trace.merge import merge_traces
from megatron_router_replay.trace.routing_trace import RoutingTrace

_STEP = re.compile(r"step_([0-9]+)")
_PART = re.compile(r"(.+)\.rank_([0-9]+)\.safetensors")
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class TraceStore:
    """Traces by step, run and rank under one folder.

    Args:
        root: the folder; made when the first trace is saved.
        run: the name of this run, the same in all its processes and a new one after a restart, for example a job's id with
            the number of its restarts: letters, digits, `_`, `.` and `-`. To read a folder that one run saved, it may be
            left out.
    """

    def __init__(self, root: str | os.PathLike[str], *, run: str | None = None) -> None:
        self.root = as_path(root)
        self.run = run
        if run is not None and not (isinstance(run, str) and _RUN.fullmatch(run)):
            raise StoreError(
                f"MRR505: run={shown(run)} must be 1 to 100 letters, digits, '_', '.' or '-', as in "
                "TraceStore(root, run='job-17'): it is a part of file names."
            )

    def save(self, trace: RoutingTrace, *, step: int, rank: int | None = None) -> Path:
        """Save the trace of a rank and return its path. A trace that this run saved for the same step and rank is replaced.

        Under sequence, context or data parallelism, a rank's recording has all rows of the batch and knows a part of them:
        the file has these, with their numbers.

        Args:
            step: 0 or more.
            rank: by default this process's rank in torch.distributed if that is initialised, else 0.

        Raises:
            StoreError: the store has no `run`, a number is negative, or the file cannot be written.
        """
        if self.run is None:
            raise StoreError("MRR505: a store that saves needs the name of its run: TraceStore(root, run='job-17').")
        if rank is None:
            initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
            rank = torch.distributed.get_rank() if initialized else 0
        path = self._path(step, self.run, rank)
        with naming(path.parent, "make"):
            path.parent.mkdir(parents=True, exist_ok=True)
        return save_part(trace, path)

    def folder(self, step: int) -> Path:
        """Return the folder of a step, whether there is one or not."""
        return self.root / f"step_{_number('step', step):09d}"

    def files(self) -> dict[int, dict[str, dict[int, Path]]]:
        """Return step -> run -> rank -> path of all trace files. Files of other names are left out."""
        files: dict[int, dict[str, dict[int, Path]]] = {}
        with naming(self.root, "list"):
            folders = [path for path in self.root.iterdir() if path.is_dir()] if self.root.is_dir() else []
            for step, folder in [(int(match[1]), path) for path in folders if (match := _STEP.fullmatch(path.name))]:
                for path in folder.iterdir():
                    match = _PART.fullmatch(path.name)
                    # Not a number with more zeros than `save` writes: that would be another file of this rank.
                    if match and path == self._path(step, match[1], int(match[2])):
                        files.setdefault(step, {}).setdefault(match[1], {})[int(match[2])] = path
        return files

    def steps(self) -> list[int]:
        """Return the steps that have a file, in order."""
        return sorted(self.files())

    def runs(self, step: int) -> list[str]:
        """Return the names of the runs that saved a step, in order."""
        return sorted(self.files().get(_number("step", step), {}))

    def parts(self, step: int | None = None, *, run: str | None = None) -> dict[int, Path]:
        """Return rank -> path of the files that one run saved in a step, in order.

        Args:
            step: default: the only one.
            run: the name of the run. Default: the store's own, else the only one that saved the step.

        Raises:
            StoreError: there is no such step or run; several, and none is named.
        """
        files = self.files()
        if step is None and len(files) == 1:
            (step,) = files
        if step is None or _number("step", step) not in files:
            attempt = "one step" if step is None else f"step {step}"
            raise StoreError(f"MRR505: cannot find {attempt} of {self.root}: it has steps [{listed(sorted(files))}].")
        runs = files[_number("step", step)]
        run = run or self.run or (next(iter(runs)) if len(runs) == 1 else None)
        if run not in runs:
            attempt = "one run" if run is None else f"run {run!r}"
            raise StoreError(
                f"MRR505: cannot find {attempt} in step {step} of {self.root}: runs [{listed(sorted(runs))}] saved it. Name "
                "one, run=...: a run that was stopped may not have saved the step to its end."
            )
        return dict(sorted(runs[run].items()))

    def load_step(
        self, step: int, *, allow_gaps: bool = False, run: str | None = None, device: torch.device | str = "cpu"
    ) -> RoutingTrace:
        """Return a step's trace, joined by `merge_traces` from the parts of a run.

        Args:
            allow_gaps: as for `merge_traces`.
            run: as for `parts`.

        Raises:
            StoreError: as `parts`, and as `load_trace`.
            TraceError: the parts contradict each other, or rows are missing. Names the ranks.
        """
        parts = self.parts(step, run=run)
        traces = [load_trace(path, device=device) for path in parts.values()]
        try:
            return merge_traces(traces, allow_gaps=allow_gaps, names=[f"rank {rank}" for rank in parts])
        except TraceError as error:
            raise TraceError(f"MRR107: cannot merge step {step} of {self.root}: {error}") from None

    def _path(self, step: int, run: str, rank: int) -> Path:
        return self.folder(step) / f"{run}.rank_{_number('rank', rank):05d}.safetensors"


def _number(name: str, value: Any) -> int:
    return as_integer(name, value, least=0, error=StoreError)
