"""A rollout worker: it rolls out its share, decodes what the engine returned and sends every training rank its routes.

It runs in a process of its own (`python -m examples.grpo.worker`, started by `routes.DistributedRollouts`) or as a Ray actor.
The manager tells it what to do and gets texts, log-probs and rewards back; routes go straight to the training ranks.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from examples.grpo.rollout import Engine, Text, TransformersEngine, roll_out
from examples.grpo.settings import Settings
from examples.grpo.task import EOS
from megatron_router_replay import RoutingTrace
from megatron_router_replay.transport import ParallelLayout, Place, RouteGroup, TransportTimes, open_store

HOST = "127.0.0.1"

Connect = Callable[[Settings, int, ParallelLayout, TransportTimes], Any]
"""(settings, number of the worker, layout of training, where to count) -> what sends its routes."""


class DistributedRoutes:
    """Connects a worker to the training ranks over torch.distributed.

    Args:
        port: of the store on this machine where they meet.
    """

    def __init__(self, port: int) -> None:
        self.port = port

    def __call__(self, settings: Settings, number: int, layout: ParallelLayout, times: TransportTimes) -> RouteGroup:
        store = open_store(HOST, self.port, is_server=False)
        return RouteGroup(store, layout, sender=number, num_senders=settings.rollout_workers, times=times)


class RayRoutes:
    """Puts a worker's routes into Ray's object store and keeps the references until the next batch."""

    def __init__(self, settings: Settings, number: int, layout: ParallelLayout, times: TransportTimes) -> None:
        self.share, self.layout, self.times = settings.samples_of(number), layout, times
        self.refs: dict[Place, Any] = {}

    def send(self, traces: Sequence[RoutingTrace], *, partition: Sequence[Sequence[int]]) -> None:
        """Put every training rank's part; `partition` numbers the samples of all workers."""
        from megatron_router_replay.transport.ray import put_parts

        share = self.share
        own = [[sample - share.start for sample in samples if sample in share] for samples in partition]
        self.refs = put_parts(traces, layout=self.layout, partition=own, times=self.times)

    def join(self) -> None:
        """Nothing to wait for: Ray holds the routes while a rank needs them."""

    def close(self) -> None:
        """Let go of the routes."""
        self.refs = {}


class RolloutWorker:
    """One rollout worker.

    Args:
        number: of this worker, from 0.
        layout: of training.
        make_engine: makes this worker's engine, or its client of a server.
        connect: makes what sends its routes.
    """

    def __init__(
        self,
        settings: Settings,
        number: int,
        layout: ParallelLayout,
        make_engine: Callable[[Settings], Engine],
        connect: Connect,
    ) -> None:
        torch.set_num_threads(1)
        self.settings, self.number = settings, number
        self.engine = make_engine(settings)
        self.routes = connect(settings, number, layout, self.engine.times)
        self.traces: list[RoutingTrace] = []

    def load_weights(self, weights: Any) -> None:
        """Give the engine new weights, or its client the address of a server that has them."""
        self.engine.load_weights(weights)

    def generate(self, step: int) -> list[Text]:
        """Roll out and decode; keep the routes, return the rest.

        Raises:
            PayloadError: routes are missing, damaged, or not of these tokens.
        """
        samples = roll_out(self.settings, self.engine, step, worker=self.number)
        self.traces = [sample.trace for sample in samples]
        return [sample.text for sample in samples]

    def send(self) -> None:
        """Send the routes of the last rollout in the background."""
        self.routes.send(self.traces, partition=self.settings.partition(self.routes.layout.dp_size))
        self.traces = []

    def part(self, place: Place) -> Any:
        """Return Ray's reference to the routes that a training rank gets of this worker's samples."""
        return self.routes.refs[place]

    def close(self) -> None:
        """Wait until every training rank has its routes, then end."""
        self.routes.join()
        self.routes.close()
        self.engine.close()


def make_worker_engine(settings: Settings) -> Engine:
    """Return a worker's own engine, or a client of the one vLLM server."""
    if settings.engine == "vllm":
        from examples.grpo.vllm_engine import VllmClient

        return VllmClient(settings.out / "engine", eos_token_id=EOS)
    return TransformersEngine(settings.out / "initial", eos_token_id=EOS, experts=settings.experts)


class WorkerProcess:
    """A RolloutWorker in a process of its own, which ends with this one.

    Args:
        arguments: of RolloutWorker.
    """

    def __init__(self, *arguments: Any) -> None:
        self._pipe, theirs = Pipe()
        root = Path(__file__).resolve().parents[2]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "examples.grpo.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])},
        )
        theirs.close()
        self._pipe.send_bytes(pickle.dumps(arguments))

    def start(self, method: str, *arguments: Any) -> None:
        """Have the worker call a method of its own."""
        self._pipe.send_bytes(pickle.dumps((method, arguments)))

    def result(self) -> Any:
        """Return what the method returned.

        Raises:
            ChildProcessError: the worker died; its last words are on stderr.
            Exception: what the method raised.
        """
        try:
            ok, value = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError):
            raise ChildProcessError(f"a rollout worker died (exit code {self.process.wait()}).") from None
        if not ok:
            raise value
        return value

    def kill(self) -> None:
        """End the process."""
        self._pipe.close()
        self.process.kill()
        self.process.wait()


def serve(pipe: Connection) -> None:
    """Be the worker that the manager at the other end of the pipe wants, until it is gone."""
    worker = RolloutWorker(*pickle.loads(pipe.recv_bytes()))
    while True:
        try:
            method, arguments = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return
        try:
            reply = True, getattr(worker, method)(*arguments)
        except Exception as error:
            reply = False, error
        pipe.send_bytes(pickle.dumps(reply))


if __name__ == "__main__":
    # Under its own name, not __main__'s: what is pickled here and there is of the same module.
    from examples.grpo import worker

    worker.serve(Connection(int(sys.argv[1])))
    os._exit(0)  # the manager is gone: nobody waits for what may still be on its way
