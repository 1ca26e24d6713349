"""The conformance cases and the faults over Ray's object store; training ranks and rollout workers are Ray actors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import cycle
from typing import Any

import pytest
import torch

from megatron_router_replay import RoutingTrace
from megatron_router_replay.transport import ParallelLayout, Place, TransportError, TransportTimes
from tests.functional.transport.conformance import CASES, STEPS, Case, check_delivery, tensors_of
from tests.functional.transport.processes import LAYERS, make_trace

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")


class Rank:
    """One training rank after another; two of these play all ranks of a layout, for each process takes seconds to start."""

    def train(self, ref: Any) -> dict[str, Any]:
        times = TransportTimes("training")
        trace = ref.get(timedelta(seconds=30), times=times)
        assert not (trace.num_tokens and trace.replay_mask.numpy().flags.owndata), "it looks into the object store"
        seconds = times.metrics()["router_replay/transport/rollout_decode_s"]
        self.seen = seconds, trace.layer_numbers, len(trace.sequence_lengths or ())
        return tensors_of(trace)

    def facts(self) -> Any:
        return self.seen


class Worker:
    """A rollout worker: it decodes and puts."""

    def put(self, traces: list[RoutingTrace], **options: Any) -> dict[Place, Any]:
        from megatron_router_replay.transport.ray import put_parts

        times = TransportTimes("rollout")
        times.add({"rollout_decode": 0.25})
        return put_parts(traces, times=times, **options)


@pytest.fixture(scope="module")
def actors() -> Iterator[dict[str, list[Any]]]:
    ray.init(num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
    try:
        kinds = {"ranks": Rank, "workers": Worker}
        yield {name: [ray.remote(kind).options(num_cpus=0).remote() for _ in range(2)] for name, kind in kinds.items()}
    finally:
        ray.shutdown()


def deliver(actors: dict[str, list[Any]], case: Case) -> list[list[dict[str, torch.Tensor]]]:
    replies = []
    for step in range(STEPS):
        worker = actors["workers"][step % 2]
        refs = ray.get(worker.put.remote(case.traces(step), layout=case.layout, partition=case.partition))
        assert list(refs) == case.layout.places()
        assert all(ref.buffer == refs[place._replace(tp_rank=0, cp_rank=0)].buffer for place, ref in refs.items())
        replies.append(ray.get([rank.train.remote(ref) for rank, ref in zip(cycle(actors["ranks"]), refs.values())]))
    return [[reply[rank] for reply in replies] for rank in range(len(case.layout.places()))]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_its_slice(actors: dict[str, list[Any]], name: str) -> None:
    check_delivery(lambda case: deliver(actors, case), CASES[name])


def test_the_time_that_workers_spent_decoding_reaches_the_training_side(actors: dict[str, list[Any]]) -> None:
    deliver(actors, CASES["dp3, three workers"])
    assert ray.get(actors["ranks"][1].facts.remote()) == (0.25, (2, 3, 5, 6), 2)


def test_memory_is_free_again_when_the_trace_is_gone(actors: dict[str, list[Any]]) -> None:
    from megatron_router_replay.transport.ray import put_parts

    layout = ParallelLayout(stage_layers=((1,),))
    trace = RoutingTrace(topk_indices=torch.arange(8).repeat(1_000_000, 1, 1), layer_numbers=(1,), num_experts=8)
    for _ in range(60):  # 540 MB through a store of 200 MB
        received = put_parts(trace, layout=layout)[Place()].get()
    assert torch.equal(received.topk_indices, trace.topk_indices)


def test_routes_whose_worker_died_are_an_error_that_says_so(actors: dict[str, list[Any]]) -> None:
    doomed = ray.remote(Worker).options(num_cpus=0).remote()
    # Large ones: Ray passes small ones on with the reference itself.
    refs = ray.get(doomed.put.remote([make_trace()], layout=ParallelLayout(stage_layers=(LAYERS,))))
    ray.kill(doomed)
    time.sleep(3)
    with pytest.raises(TransportError, match=r"cannot get 400000 rows of routes: (OwnerDied|ObjectLost)Error"):
        ray.get(actors["ranks"][0].train.remote(refs[Place()]))
