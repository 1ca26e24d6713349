"""GlooWorkers: a pool of processes that run one test case after another as ranks of a gloo process group.

The import of Megatron is paid once: by a fork server that all pools of this process share. What can go wrong in a
distributed test ends here as a `WorkersError`: a rank that raises, dies or waits for ever. A pool that saw one is
killed, and the next run starts another.
"""

import math
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

from megatron_router_replay.errors import RouterReplayError
from tests.support.worker_process import worker_main

# How long the other ranks may go on after one of them failed: time to fail too, and say why.
_GRACE_S = 3.0
_MAX_THREADS = 64
"""Of an idle worker. A case that kept its process groups alive would leave three threads a group, which poll for ever."""

_PRELOAD = "megatron_router_replay.testing.preload"

start_method = "forkserver"
"""Of workers. `tests.mutate` sets it to "fork", because only forks of its own process have its mutant."""

longest_s = math.inf
"""The most seconds of a run. `tests.mutate` lowers it, for ranks that wait for each other use no processor time."""


class WorkersError(RouterReplayError):
    """A function failed on one or more ranks of a GlooWorkers pool; the message has every rank's traceback."""


class GlooWorkers:
    """A pool of `world_size` processes, started on first use and kept until `close`.

    Every run is a case of its own: a fresh gloo process group, no Megatron parallel state or other leftovers, seeds
    set, `torch.set_num_threads(1)`, inside `megatron_on_cpu()`. Workers have the environment variables of the first
    pool's start; they end with this process, also if it is killed.

    Args:
        world_size: number of processes.
        preload: names of further modules that the fork server imports once, before Megatron-Core; if this process has one
            already, without effect.
    """

    def __init__(self, world_size: int, *, preload: Sequence[str] = ()) -> None:
        self.world_size = world_size
        self._preload = [*preload, _PRELOAD]
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._folder: Path | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> list[Any]:
        """Run `fn(*args)` on every rank and return the results by rank.

        Args:
            fn: a function at the top level of a module, which the workers import by name with this process's sys.path.
            args: picklable; tensors are copied.
            timeout_s: for the slowest rank, the start of the pool not counted.

        Returns:
            One result per rank. Tensors are ordinary CPU tensors: copied through a pipe, no shared memory.

        Raises:
            WorkersError: a rank raised or died (the others had a few seconds to report, too), or time ran out (the
                message then has every stack). The pool is gone; the next run starts another.
        """
        job = pickle.dumps((sys.path, fn.__module__, pickle.dumps((fn, args))))
        try:
            if not self._processes or not all(process.is_alive() for process in self._processes):
                self._start()
            for pipe in self._pipes:
                pipe.send_bytes(job)
            replies = self._collect(min(timeout_s, longest_s))
            if len(replies) < self.world_size or not all(ok for ok, _ in replies.values()):
                raise WorkersError(self._describe_failure(fn, replies, timeout_s))
        except BaseException:
            self.close()
            raise
        if max(map(_num_threads, self.process_ids)) > _MAX_THREADS:
            self.close()  # others start in a fraction of a second; these would take the processor from every later case
        return [replies[rank][1] for rank in range(self.world_size)]

    def close(self) -> None:
        """Kill the processes, if any; the next run starts others."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(60.0)  # a killed process is soon gone, but its forkserver may be slow to say so
            process.close()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._pipes, self._folder = [], [], None

    def __enter__(self) -> "GlooWorkers":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def process_ids(self) -> list[int]:
        """The worker processes' ids by rank; empty while there is no pool."""
        return [process.pid for process in self._processes]

    def _start(self) -> None:
        self.close()
        self._folder = Path(tempfile.mkdtemp(prefix="gloo_workers_"))
        context: Any = get_context(start_method)
        # No effect if this process has a fork server already; starting is slower then.
        context.set_forkserver_preload(self._preload)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            job = (theirs, rank, self.world_size, self._folder)
            process = context.Process(target=worker_main, args=job, name=f"gloo-worker-{rank}", daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        if silent := set(range(self.world_size)) - set(self._collect(300.0)):
            raise WorkersError(
                f"cannot start {self.world_size} workers: ranks {sorted(silent)} ended or did not answer within 300 s; "
                "their messages are on stderr."
            )

    def _collect(self, timeout_s: float) -> dict[int, tuple[bool, Any]]:
        """Return the replies by rank: all of them, or what came in time; after a failure the others have a grace."""
        replies: dict[int, tuple[bool, Any]] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            pipe: Any
            for pipe in connection.wait(list(waiting), timeout=left):
                rank = waiting.pop(pipe)
                with suppress(EOFError, ConnectionError):  # a process that ended has closed its end of the pipe
                    replies[rank] = pickle.loads(pipe.recv_bytes())
                if rank not in replies or not replies[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return replies

    def _describe_failure(self, fn: Callable[..., Any], replies: dict[int, tuple[bool, Any]], timeout_s: float) -> str:
        name = f"{fn.__module__}.{fn.__qualname__}"
        parts = [f"{name} failed on {self.world_size} workers (limit {timeout_s:g} s)."]
        stacks = self._dump_stacks([rank for rank in range(self.world_size) if rank not in replies])
        for rank, process in enumerate(self._processes):
            if rank in stacks:
                parts.append(f"rank {rank} was still running, here:\n{stacks[rank]}")
            elif rank in replies:
                ok, result = replies[rank]
                parts.append(f"rank {rank} returned." if ok else f"rank {rank} raised:\n{result}")
            else:
                # Its pipe is closed, so it is dead; on a busy machine its fork server takes seconds to say how it died.
                process.join(20.0)
                parts.append(f"rank {rank} died (exit code {process.exitcode}).")
        return "\n\n".join(parts)

    def _dump_stacks(self, ranks: list[int]) -> dict[int, str]:
        """Let the ranks that are alive write where they are (faulthandler), and return it."""
        assert self._folder is not None
        alive = [rank for rank in ranks if self._processes[rank].is_alive()]
        for rank in alive:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        if alive:
            time.sleep(0.3)
        return {rank: (self._folder / f"stack_{rank}").read_text() for rank in alive}


def _num_threads(process_id: int) -> int:
    """Return how many threads a process has; 0 where the system does not say."""
    try:
        return len(os.listdir(f"/proc/{process_id}/task"))
    except FileNotFoundError:
        return 0
