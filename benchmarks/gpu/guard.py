"""Parts run in a process of their own, which another one watches: a part that hangs, raises or dies ends alone.

The process runs one part after another, so that models are made once. If a part hangs or breaks the device, the process is
ended with all that it started, and a new one begins with the next part.
"""

from __future__ import annotations

import gc
import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from benchmarks.gpu.report import Part, Row, in_words

START_S = 300.0
"""To import torch and Megatron-Core and to make process groups; seconds on a machine that does nothing else."""


class LostError(Exception):
    """The process that runs parts is of no more use; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How the benchmark is run; see `__main__`."""

    device: str
    quick: bool
    plant: tuple[str, ...]
    limit_s: float | None
    part_limit_s: float | None


def guarded(parts: Sequence[Part], options: Options) -> Iterator[str | tuple[str, Row]]:
    """Yield the environment, in words, and (part, row) as they come; parts that ended early have a row that says so."""
    left, told = list(parts), False
    over = time.monotonic() + (options.limit_s or 1e9)
    while left and time.monotonic() < over:
        with _Worker(left, options) as worker:
            try:
                environment = worker.receive(time.monotonic() + START_S)
                if not told:
                    yield environment
                    told = True
                while left and time.monotonic() < over:
                    # What is made of software takes more time, and none of a GPU.
                    limit_s = options.part_limit_s or left[0].limit_s * (1 if options.device == "cuda" else 6)
                    ends = min(over, time.monotonic() + limit_s)
                    while (message := worker.receive(ends)) is not None:
                        yield left[0].name, message
                    left.pop(0)
            except LostError as lost:
                yield left.pop(0).name, Row(case="", wrong=str(lost))
    yield from ((part.name, Row(case="", verdict="left out: the time is over")) for part in left)


class _Worker:
    """A process that runs parts, in a process group of its own."""

    def __init__(self, parts: Sequence[Part], options: Options) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, [part.name for part in parts], options))
        self._process.start()
        theirs.close()

    def receive(self, until: float) -> Any:
        """Return the next message.

        Args:
            until: of time.monotonic.

        Raises:
            LostError: none came, or the process has ended.
        """
        began = time.monotonic()
        if not self._pipe.poll(max(0.0, until - began)):
            raise LostError(f"no answer in {until - began:.0f} s")
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(20.0)
            raise LostError(f"the process ended with exit code {self._process.exitcode}") from None

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.join(0 if error[0] else 20.0)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # with the ranks that it started
        except (ProcessLookupError, PermissionError):
            self._process.kill()
        self._process.join()


def _work(pipe: Any, names: Sequence[str], options: Options) -> None:
    """Run parts by name, and send what they yield."""
    os.setpgid(0, 0)
    from benchmarks.gpu.bench import Bench, on_device
    from benchmarks.gpu.parts import PARTS

    with on_device(options.device):
        bench = Bench(options.device, quick=options.quick, plant=options.plant)
        pipe.send(bench.environment())
        for part in PARTS:
            if part.name not in names:
                continue
            try:
                bench.fail_in(PARTS.index(part) + 1)
                for row in part.run(bench):
                    pipe.send(row)
            except Exception as error:
                traceback.print_exc()
                pipe.send(Row(case="", wrong=in_words(error)))
                traceback.clear_frames(error.__traceback__)  # they hold tensors
            gc.collect()
            if not bench.recovers():
                return
            pipe.send(None)
