"""How a rollout's texts and routes come to the training ranks: three ways behind one interface, `Rollouts`.

    local         rank 0 has the engine and gives every rank all samples; each takes its part. For one machine.
    distributed   rollout workers, processes of their own, decode and send over torch.distributed
    ray           the same workers as Ray actors, over Ray's object store

With the last two, rank 0 is only the manager: it passes weights on, and texts, log-probs and rewards back. The workers give
each training rank the routes of its data-parallel samples and its stage's layers.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import torch.distributed as dist
from torch import Tensor

import megatron_router_replay as mrr
from examples.grpo.rollout import Engine, Sample, Text, TransformersEngine, roll_out
from examples.grpo.settings import Settings
from examples.grpo.task import EOS
from examples.grpo.trainer import Trainer
from examples.grpo.worker import (
    HOST,
    Connect,
    DistributedRoutes,
    RayRoutes,
    RolloutWorker,
    WorkerProcess,
    make_worker_engine,
)
from megatron_router_replay.transport import RouteGroup, TransportTimes, open_store

T = TypeVar("T")


class Rollouts(ABC):
    """One rollout after another; every rank has one and calls its methods in the same order.

    Args:
        settings: of the run.
        trainer: this rank's.
    """

    def __init__(self, settings: Settings, trainer: Trainer) -> None:
        self.settings = settings
        self.layout, self.place = trainer.routes_layout, trainer.place
        self.own = settings.partition(self.layout.dp_size)[self.place.dp_rank]
        self.times = TransportTimes("training")

    @abstractmethod
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Give the engines new weights, by Hugging Face names; those of rank 0 count."""

    @abstractmethod
    def generate(self, step: int) -> Sequence[Text]:
        """Return all samples of a step. Their routes are on the way from here on.

        Raises:
            RouterReplayError: the engine's routes are damaged; on every rank, and no routes are on the way.
        """

    @abstractmethod
    def receive(self) -> mrr.RoutingTrace:
        """Return the routes of this rank's samples, `own`, behind one another, and of its stage's layers.

        Raises:
            TransportError: they did not come, or the sides do not agree on what should.
        """

    def line(self) -> str:
        """Return a line on how long this rank waited for the routes of the last step, and for what; "" if it did not."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """End in good order; every rank calls it."""

    @abstractmethod
    def kill(self) -> None:
        """End at once, after an error; the others notice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.kill()


class LocalRollouts(Rollouts):
    """Rank 0 hands all samples over, routes and all.

    Args:
        engine: on rank 0.
    """

    def __init__(self, settings: Settings, trainer: Trainer, engine: Engine | None) -> None:
        super().__init__(settings, trainer)
        self.engine = engine
        self.samples: Sequence[Sample] = ()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        from_first(lambda: self._engine.load_weights(weights))

    def generate(self, step: int) -> Sequence[Text]:
        workers = range(self.settings.rollout_workers)
        self.samples = from_first(
            lambda: [
                sample for worker in workers for sample in roll_out(self.settings, self._engine, step, worker=worker)
            ]
        )
        return self.samples

    def receive(self) -> mrr.RoutingTrace:
        trace = mrr.concat_traces([self.samples[sample].trace for sample in self.own])
        return trace.select_layers(self.layout.stage_layers[self.place.pp_rank])

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    kill = close

    @property
    def _engine(self) -> Engine:
        assert self.engine is not None, "rank 0 has the engine"
        return self.engine


class WorkerRollouts(Rollouts):
    """Rollout workers in processes of their own; rank 0 is their manager.

    Args:
        worker_engine: makes each worker's engine, in its process.
    """

    def __init__(
        self,
        settings: Settings,
        trainer: Trainer,
        worker_engine: Callable[[Settings], Engine] = make_worker_engine,
    ) -> None:
        super().__init__(settings, trainer)
        self.is_manager = dist.get_rank() == 0
        self.worker_engine = worker_engine
        # With vLLM, the manager owns the one server that the workers ask.
        self.server: Any = make_engine(settings) if self.is_manager and settings.engine == "vllm" else None

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        def pass_on() -> None:
            if self.server is None:
                self._call("load_weights", weights)
            else:
                self.server.load_weights(weights)
                self._call("load_weights", self.server.url)

        from_first(pass_on)

    def generate(self, step: int) -> Sequence[Text]:
        self.times.take()
        texts: list[Text] = from_first(lambda: [text for share in self._call("generate", step) for text in share])
        # Only now, when every worker could decode all its responses: of a damaged rollout nothing is sent.
        from_first(lambda: self._call("send"))
        return texts

    def line(self) -> str:
        return self.times.line()

    def close(self) -> None:
        from_first(lambda: self._call("close"))  # every worker waits until its routes have arrived
        self.kill()

    def kill(self) -> None:
        if self.server is not None:
            self.server.close()

    def _worker_arguments(self, connect: Connect) -> list[tuple[Any, ...]]:
        numbers = range(self.settings.rollout_workers)
        return [(self.settings, number, self.layout, self.worker_engine, connect) for number in numbers]

    @abstractmethod
    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all workers at once and return their results; on rank 0."""


class DistributedRollouts(WorkerRollouts):
    """Workers that send over torch.distributed, in a group of their own that training's collectives know nothing of."""

    def __init__(self, settings: Settings, trainer: Trainer, **options: Any) -> None:
        super().__init__(settings, trainer, **options)
        store = open_store(HOST, is_server=True) if self.is_manager else None
        port: int = from_first(lambda: store.port)  # type: ignore[union-attr]
        self.workers: list[WorkerProcess] = []
        if self.is_manager:
            self.workers = [WorkerProcess(*these) for these in self._worker_arguments(DistributedRoutes(port))]
        self.store = store or open_store(HOST, port, is_server=False)
        self.routes = RouteGroup(
            self.store, self.layout, place=self.place, num_senders=settings.rollout_workers, times=self.times
        )

    def receive(self) -> mrr.RoutingTrace:
        return self.routes.receive()

    def kill(self) -> None:
        super().kill()
        self.routes.close()
        for worker in self.workers:
            worker.kill()

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        for worker in self.workers:
            worker.start(method, *arguments)
        return all_results([worker.result for worker in self.workers])


class RayRollouts(WorkerRollouts):
    """Workers that are Ray actors, in a Ray that is started here and ends with the run."""

    def __init__(self, settings: Settings, trainer: Trainer, **options: Any) -> None:
        super().__init__(settings, trainer, **options)
        address, auth_mode = from_first(_start_ray)
        if not self.is_manager:
            if auth_mode is not None:
                os.environ[_RAY_AUTH_MODE] = auth_mode  # Ray reads it when it is imported
            _join_ray(address)
        import ray  # type: ignore[import-not-found, unused-ignore]

        self.ray = ray
        self.actors: list[Any] = []
        names = [f"rollout-{number}" for number in range(settings.rollout_workers)]
        if self.is_manager:
            actor = ray.remote(RolloutWorker)
            self.actors = [
                actor.options(name=name, num_cpus=0).remote(*these)
                for name, these in zip(names, self._worker_arguments(RayRoutes))
            ]
        dist.barrier()  # the actors have their names
        if not self.is_manager:
            self.actors = [ray.get_actor(name) for name in names]

    def receive(self) -> mrr.RoutingTrace:
        with self.times.measure("wait"):
            refs = self.ray.get([actor.part.remote(self.place) for actor in self.actors])
        return mrr.concat_traces([ref.get(times=self.times) for ref in refs])

    def close(self) -> None:
        from_first(lambda: self._call("close"))
        if not self.is_manager:
            self.kill()
        dist.barrier()  # the others have left before Ray ends
        if self.is_manager:
            self.kill()

    def kill(self) -> None:
        super().kill()
        self.ray.shutdown()

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        results = [getattr(actor, method).remote(*arguments) for actor in self.actors]
        return all_results([lambda result=result: self._result(result) for result in results])  # type: ignore[misc]

    def _result(self, result: Any) -> Any:
        try:
            return self.ray.get(result)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None


_RAY_AUTH_MODE = "RAY_AUTH_MODE"
_RAY_OPTIONS: dict[str, Any] = {"namespace": "grpo", "log_to_driver": False, "logging_level": "error"}


def _start_ray() -> tuple[str, str | None]:
    """Start a Ray of this machine; return its address, and how it wants to be logged in to: it sets that for itself."""
    import ray

    # No CPUs to schedule on: the workers ask for none, and Ray starts no idle processes for them.
    context: Any = ray.init("local", num_cpus=0, include_dashboard=False, object_store_memory=200 << 20, **_RAY_OPTIONS)
    return context.address_info["address"], os.environ.get(_RAY_AUTH_MODE)


def _join_ray(address: str) -> None:
    import ray

    ray.init(address, **_RAY_OPTIONS)


def make_rollouts(settings: Settings, trainer: Trainer) -> Rollouts:
    """Return the way of routes that the settings name; every rank calls it."""
    if settings.transport == "local":
        return LocalRollouts(settings, trainer, make_engine(settings) if dist.get_rank() == 0 else None)
    return {"distributed": DistributedRollouts, "ray": RayRollouts}[settings.transport](settings, trainer)


def make_engine(settings: Settings) -> Engine:
    """Return rank 0's engine of the local way."""
    if settings.engine == "vllm":
        from examples.grpo.vllm_engine import VllmEngine

        return VllmEngine(settings.out / "engine", eos_token_id=EOS)
    return TransformersEngine(settings.out / "initial", eos_token_id=EOS, experts=settings.experts)


def all_results(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Return what the calls return; all are made, then the first error is raised."""
    results: list[T] = []
    errors: list[Exception] = []
    for call in calls:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


def from_first(action: Callable[[], T]) -> T:
    """Run `action()` on rank 0 and return its result on every rank; what it raises is raised on every rank."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result
