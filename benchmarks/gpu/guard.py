"""Parts run in a child process: a part that hangs, raises or dies ends alone.

The child runs one part after another, so that the model is made once. If a part hangs or breaks the device, the child is
ended with its process group, and a new one begins with the next part.
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

from benchmarks.gpu.report import Row, in_words

PARTS = {"step": 200.0, "step, full recompute": 150.0}
"""Part -> seconds on a GPU after which it is ended, most important first."""

START_S = 300.0
"""To import torch and Megatron-Core and to make process groups; seconds on a machine that does nothing else."""


class LostError(Exception):
    """The child process is of no more use; the message has the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of the command, see `__main__`.

    Args:
        limit_s: of the whole run; None: no limit.
        part_limit_s: of each part, in place of its own.
    """

    device: str
    quick: bool
    plant: tuple[str, ...]
    limit_s: float | None
    part_limit_s: float | None


def guarded(parts: Sequence[str], options: Options) -> Iterator[str | tuple[str, Row]]:
    """Yield the environment, in words, and (part, row) as they come; a part that ended early has a row with the reason."""
    left, environment = list(parts), ""
    over = time.monotonic() + (options.limit_s or 1e9)
    while left and time.monotonic() < over:
        with _Worker(left, options) as worker:
            try:
                received = worker.receive(time.monotonic() + START_S)
                if not environment:
                    environment = received
                    yield environment
                while left and time.monotonic() < over:
                    # The software GPU is slower than a CPU.
                    limit_s = options.part_limit_s or PARTS[left[0]] * (1 if options.device == "cuda" else 6)
                    ends = min(over, time.monotonic() + limit_s)
                    while (message := worker.receive(ends)) is not None:
                        yield left[0], message
                    left.pop(0)
            except LostError as lost:
                yield left.pop(0), Row(case="", wrong=str(lost))
    yield from ((part, Row(case="", verdict="left out: the time is over")) for part in left)


class _Worker:
    """A process that runs parts, in a process group of its own."""

    def __init__(self, parts: Sequence[str], options: Options) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, list(parts), options))
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
            os.killpg(self._process.pid, signal.SIGKILL)  # with the compilers that it started
        except (ProcessLookupError, PermissionError):
            self._process.kill()
        self._process.join()


def _work(pipe: Any, parts: Sequence[str], options: Options) -> None:
    """Run parts by name, and send their rows; None ends a part."""
    os.setpgid(0, 0)
    from benchmarks.gpu.bench import Bench, on_device
    from benchmarks.gpu.step import Step

    with on_device(options.device):
        bench = Bench(options.device, quick=options.quick, plant=options.plant)
        pipe.send(bench.environment())
        step = None
        for part in parts:
            try:
                _fail(part, options.plant)
                step = step or Step(bench)
                for row in step.rows_of("full" if "full" in part else "none"):
                    pipe.send(row)
            except Exception as error:
                traceback.print_exc()
                pipe.send(Row(case="", wrong=in_words(error)))
                traceback.clear_frames(error.__traceback__)  # they keep tensors alive
            gc.collect()
            if not bench.recovers():
                return
            pipe.send(None)


def _fail(part: str, plant: Sequence[str]) -> None:
    """Plant faults: hang in the first part, raise in the last."""
    if part == next(iter(PARTS)) and "hang" in plant:
        time.sleep(3600)
    if part == list(PARTS)[-1] and "exception" in plant:
        raise RuntimeError("a planted exception")
