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
from megatron_router_replay.transport import (
    DistributedSender,
    LegTimes,
    ParallelLayout,
    TraceFormat,
    TraceRows,
    TransportPlan,
    open_store,
    plan_routes,
)

HOST = "127.0.0.1"

SenderOf = Callable[[ParallelLayout, str, LegTimes], Any]
"""(layout of training, name of the transport, where to count) -> a sender."""


class DistributedSenders:
    """Makes senders over torch.distributed that meet the receivers at a store.

    Args:
        port: of the store on this machine.
    """

    def __init__(self, port: int) -> None:
        self.port = port

    def __call__(self, layout: ParallelLayout, name: str, times: LegTimes) -> DistributedSender:
        return DistributedSender(open_store(HOST, self.port, is_server=False), layout, name=name, times=times)


def ray_sender(layout: ParallelLayout, name: str, times: LegTimes) -> Any:
    """Return a sender over Ray's object store."""
    from megatron_router_replay.transport.ray import RaySender

    return RaySender(layout, name=name, times=times)


class RolloutWorker:
    """One rollout worker.

    Args:
        number: of this worker, from 0.
        layout: of training.
        make_engine: makes this worker's engine, or its client of a server.
        sender_of: makes its sender.
    """

    def __init__(
        self,
        settings: Settings,
        number: int,
        layout: ParallelLayout,
        make_engine: Callable[[Settings], Engine],
        sender_of: SenderOf,
    ) -> None:
        torch.set_num_threads(1)
        self.settings, self.number = settings, number
        self.engine = make_engine(settings)
        self.sender = sender_of(layout, transport_name(number), self.engine.times)
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
        rows = TraceRows(self.traces)
        plan = plan_of_share(self.settings, self.number, rows.sequence_lengths, self.sender.layout, rows.format)
        self.sender.send(self.traces, plan=plan)
        self.traces = []

    def close(self) -> None:
        """Wait until every training rank has its routes, then end."""
        self.sender.join()
        self.sender.close()
        self.engine.close()


def transport_name(worker: int) -> str:
    """Return the name under which a worker and the training ranks meet."""
    return f"routes-{worker}"


def plan_of_share(
    settings: Settings, worker: int, lengths: Sequence[int], layout: ParallelLayout, format: TraceFormat
) -> TransportPlan:
    """Return who gets what of a worker's samples; the worker and the training ranks compute it, the transport compares.

    Args:
        lengths: tokens of each of the worker's samples.
    """
    share = settings.samples_of(worker)
    partition = [
        [sample - share.start for sample in samples if sample in share]
        for samples in settings.partition(layout.dp_size)
    ]
    return plan_routes(lengths, layout=layout, format=format, partition=partition)


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
