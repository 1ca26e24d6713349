"""Keep traces in a folder by step, run and rank.

    <root>/step_000000012/job-17.rank_00003.safetensors        a trace file, as `save_trace` writes it

Names say everything, so there is no index that could disagree with the files. Each process writes only its own rank's file,
in one step, so ranks need no lock. A job that is resumed takes a new name of a run: a step is never read as a mixture.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_router_replay.checks import as_integer, shown
from megatron_router_replay.errors import StoreError, TraceError, listed
from megatron_router_replay.store.atomic import as_path, naming
from megatron_router_replay.store.file import Reader, load_trace, save_trace
from megatron_router_replay.trace.merge import merge_traces
from megatron_router_replay.trace.routing_trace import RoutingTrace

_STEP = re.compile(r"step_([0-9]{9,})")
_PART = re.compile(r"(.+)\.rank_([0-9]{5,})\.safetensors")
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_WITHDRAWN = {
    "load": "load_trace(part.path)",
    "prune": "shutil.rmtree(store.folder(step)) for each of store.steps() that shall go",
}


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class StoredPart:
    """The file of one rank in a step.

    Args:
        step, run, rank, path: of the file.
        num_tokens, layer_numbers: of its trace.
    """

    step: int
    run: str
    rank: int
    path: Path
    num_tokens: int
    layer_numbers: tuple[int, ...]


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

    def __getattr__(self, name: str) -> Any:
        if name in _WITHDRAWN:
            raise AttributeError(f"TraceStore.{name} is gone in 0.3: {_WITHDRAWN[name]}")
        raise AttributeError(f"'TraceStore' object has no attribute {name!r}")

    def save(self, trace: RoutingTrace, *, step: int, rank: int | None = None, part: None = None) -> Path:
        """Save the trace of a rank and return its path. A trace that this run saved for the same step and rank is replaced.

        Args:
            step: 0 or more.
            rank: by default this process's rank in torch.distributed if that is initialised, else 0.
            part: withdrawn.

        Raises:
            StoreError: the store has no `run`, a number is negative, or the file cannot be written.
        """
        if part is not None:
            raise StoreError(
                "MRR505: part= is gone in 0.3, a rank has one trace a step: merge_traces joins its parts first."
            )
        if self.run is None:
            raise StoreError("MRR505: a store that saves needs the name of its run: TraceStore(root, run='job-17').")
        folder = self.folder(step)
        number = _number("rank", _distributed_rank() if rank is None else rank)
        with naming(folder, "make"):
            folder.mkdir(parents=True, exist_ok=True)
        return save_trace(trace, folder / _file_name(self.run, number))

    def folder(self, step: int) -> Path:
        """Return the folder of a step, whether there is one or not."""
        return self.root / f"step_{_number('step', step):09d}"

    def steps(self) -> list[int]:
        """Return the steps that have a file, in order."""
        if not self.root.is_dir():
            return []
        with naming(self.root, "list"):
            numbers = {int(match[1]) for path in self.root.iterdir() if (match := _STEP.fullmatch(path.name))}
            return sorted(number for number in numbers if self._files(number))

    def runs(self, step: int) -> list[str]:
        """Return the names of the runs that saved a step, in order."""
        return sorted({run for run, _, _ in self._files(step)})

    def parts(self, step: int | None = None, *, run: str | None = None) -> list[StoredPart]:
        """Return the files that the ranks of one run saved in a step, by rank.

        Args:
            step: default: the only one.
            run: the name of the run. Default: the store's own, else the only one that saved the step.

        Raises:
            StoreError: there is no such step or run; several, and none is named; a file is damaged.
        """
        steps = self.steps()
        step = steps[0] if step is None and len(steps) == 1 else step
        if step is None or (step := _number("step", step)) not in steps:
            attempt = "one step" if step is None else f"step {step}"
            raise StoreError(f"MRR505: cannot find {attempt} of {self.root}: it has steps [{listed(steps)}].")
        runs = self.runs(step)
        run = run or self.run or (runs[0] if len(runs) == 1 else None)
        if run not in runs:
            attempt = "one run" if run is None else f"run {run!r}"
            raise StoreError(
                f"MRR505: cannot find {attempt} in step {step} of {self.root}: runs [{listed(runs)}] saved it. Name one, "
                "run=...: a run that was stopped may not have saved the step to its end."
            )
        parts = []
        for rank, path in sorted((rank, path) for name, rank, path in self._files(step) if name == run):
            with naming(path, "read"):
                header = Reader(path).header
            tokens, layers = header.num_tokens, header.layer_numbers
            parts.append(StoredPart(step=step, run=run, rank=rank, path=path, num_tokens=tokens, layer_numbers=layers))
        return parts

    def load_step(
        self, step: int, *, allow_gaps: bool = False, run: str | None = None, device: torch.device | str = "cpu"
    ) -> RoutingTrace:
        """Return a step's trace, joined from the parts of all ranks of one run.

        `merge_traces` joins them.

        Args:
            allow_gaps: as for `merge_traces`.
            run: as for `parts`.

        Raises:
            StoreError: as `parts`, and as `load_trace`.
            TraceError: the parts contradict each other, or rows are missing. Names the ranks.
        """
        parts = self.parts(step, run=run)
        traces = [load_trace(part.path, device=device) for part in parts]
        try:
            return merge_traces(traces, allow_gaps=allow_gaps, names=[f"rank {part.rank}" for part in parts])
        except TraceError as error:
            raise TraceError(f"MRR107: cannot merge step {step} of run {parts[0].run!r}: {error}") from None

    def _files(self, step: int) -> list[tuple[str, int, Path]]:
        """Return run, rank and path of each file of a step, in no order; files of other names are left out."""
        folder = self.folder(step)
        matches = [(path, _PART.fullmatch(path.name)) for path in (folder.iterdir() if folder.is_dir() else ())]
        files = [(match[1], int(match[2]), path) for path, match in matches if match]
        return [(run, rank, path) for run, rank, path in files if path.name == _file_name(run, rank)]


def _file_name(run: str, rank: int) -> str:
    return f"{run}.rank_{rank:05d}.safetensors"


def _number(name: str, value: Any) -> int:
    return as_integer(name, value, least=0, error=StoreError)


def _distributed_rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
