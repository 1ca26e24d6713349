"""The conformance cases and the faults over Ray's object store; training ranks and rollout workers are Ray actors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from megatron_router_replay import RoutingTrace
from megatron_router_replay.transport import ParallelLayout, Place, TraceFormat, TransportError, plan_routes
from tests.functional.transport.conformance import CASES, STEPS, Case, check_delivery, tensors_of

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'megatron-router-replay[ray]'")

LIMITS = {"timeout": timedelta(seconds=30), "ready_timeout": timedelta(seconds=60)}
SHORT = {"timeout": timedelta(seconds=10), "ready_timeout": timedelta(seconds=1)}
NAMES = iter(range(10_000))


class Rank:
    """A training rank."""

    def begin(self, layout: ParallelLayout, place: Place, name: str, limits: dict[str, Any]) -> None:
        from megatron_router_replay.transport.ray import RayReceiver

        self.receiver = RayReceiver(layout, place, name=name, **limits)

    def receive(self, plan: Any = None) -> dict[str, torch.Tensor]:
        trace = self.receiver.receive(plan)
        self.looks_into_the_store = not trace.topk_indices.numpy().flags.owndata
        return tensors_of(trace)

    def times(self) -> dict[str, float]:
        return self.receiver.times.metrics("")


class Worker:
    """A rollout worker: it decodes and puts; or a whole rollout side that can be killed."""

    def put(self, trace: RoutingTrace) -> Any:
        from megatron_router_replay.transport import LegTimes
        from megatron_router_replay.transport.ray import put_trace

        times = LegTimes("rollout")
        times.add("decode", 0.25, trace.topk_indices.nbytes)
        return put_trace(trace, times=times)

    def open(self, layout: ParallelLayout, name: str) -> None:
        from megatron_router_replay.transport.ray import RaySender

        self.sender = RaySender(layout, name=name, **LIMITS)

    def send(self, trace: RoutingTrace) -> None:
        self.sender.send(trace)


@pytest.fixture(scope="module")
def actors() -> Iterator[dict[str, list[Any]]]:
    ray.init(num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
    try:
        yield {
            "ranks": [ray.remote(Rank).options(num_cpus=0).remote() for _ in range(4)],
            "workers": [ray.remote(Worker).options(num_cpus=0).remote() for _ in range(2)],
        }
    finally:
        ray.shutdown()


def _begin(
    actors: dict[str, list[Any]], layout: ParallelLayout, limits: dict[str, Any] = LIMITS
) -> tuple[str, list[Any]]:
    name = f"routes-{next(NAMES)}"
    ranks = actors["ranks"][: layout.world_size]
    ray.get([rank.begin.remote(layout, layout.place_of(i), name, limits) for i, rank in enumerate(ranks)])
    return name, ranks


@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_its_slice(actors: dict[str, list[Any]], name: str) -> None:
    from megatron_router_replay.transport.ray import RaySender

    def deliver(case: Case) -> list[list[dict[str, torch.Tensor]]]:
        name, ranks = _begin(actors, case.layout)
        with RaySender(case.layout, name=name, **LIMITS) as sender:
            replies = []
            for step in range(STEPS):
                items: list[Any] = case.traces(step)
                if case.num_traces > 1:
                    items = ray.get([actors["workers"][i % 2].put.remote(trace) for i, trace in enumerate(items)])
                sender.send(items, partition=case.partition, cp_rows=case.cp_rows())
                replies.append(ray.get([rank.receive.remote() for rank in ranks]))
        return [[reply[rank] for reply in replies] for rank in range(len(ranks))]

    check_delivery(deliver, CASES[name])


def test_the_time_that_workers_spent_decoding_reaches_the_training_side(actors: dict[str, list[Any]]) -> None:
    from megatron_router_replay.transport.ray import RaySender

    case = CASES["one rank"]
    name, (rank,) = _begin(actors, case.layout)
    with RaySender(case.layout, name=name, **LIMITS) as sender:
        sender.send(ray.get(actors["workers"][0].put.remote(case.traces(0)[0])))
        ray.get(rank.receive.remote())
    assert ray.get(rank.times.remote())["rollout_decode_s"] == 0.25


def test_memory_is_free_again_when_the_trace_is_gone(actors: dict[str, list[Any]]) -> None:
    from megatron_router_replay.transport.ray import RayReceiver, RaySender

    layout = ParallelLayout(stage_layers=((1,),))
    trace = RoutingTrace(topk_indices=torch.arange(8).repeat(1_000_000, 1, 1), layer_numbers=(1,), num_experts=8)
    name = f"routes-{next(NAMES)}"
    with RaySender(layout, name=name, **LIMITS) as sender:
        receiver = RayReceiver(layout, Place(), name=name, **LIMITS)
        for _ in range(60):  # 540 MB through a store of 200 MB
            sender.send(trace)
            received = receiver.receive()
            assert received.num_tokens == 1_000_000
        assert torch.equal(received.topk_indices, trace.topk_indices)


def test_sides_that_disagree_both_raise_and_name_both(actors: dict[str, list[Any]]) -> None:
    from megatron_router_replay.transport.ray import RaySender

    case = CASES["dp2"]
    name, ranks = _begin(actors, case.layout)
    trace = case.traces(0)[0]
    other = plan_routes((33,), layout=case.layout, format=TraceFormat.of(trace))
    sender = RaySender(case.layout, name=name, **LIMITS)
    sender.send(trace)
    with pytest.raises(
        TransportError, match=r"dp0/pp0/cp0/tp0 expects num_rows=33, the rollout side sends num_rows=27"
    ):
        ray.get(ranks[0].receive.remote(other))
    with pytest.raises(TransportError, match="expects num_rows=33"):
        ray.get(ranks[1].receive.remote())
    with pytest.raises(TransportError, match=r"step 0.*expects num_rows=33"):
        sender.join()


def test_a_rank_that_never_comes_is_an_error_that_names_it(actors: dict[str, list[Any]]) -> None:
    from megatron_router_replay.transport.ray import RaySender

    case = CASES["dp2"]
    name, ranks = _begin(actors, case.layout)
    sender = RaySender(case.layout, name=name, timeout=timedelta(seconds=10), ready_timeout=timedelta(seconds=1))
    sender.send(case.traces(0))
    ray.get(ranks[0].receive.remote())
    with pytest.raises(TransportError, match="dp1/pp0/cp0/tp0 did not fetch their routes within 11 s"):
        sender.join()


def test_a_receiver_without_a_sender_is_an_error(actors: dict[str, list[Any]]) -> None:
    _, (rank,) = _begin(actors, CASES["one rank"].layout, SHORT)
    with pytest.raises(TransportError, match="there is no sender"):
        ray.get(rank.receive.remote())


def test_a_rollout_side_that_dies_makes_the_receiver_raise(actors: dict[str, list[Any]]) -> None:
    case = CASES["one rank"]
    name, (rank,) = _begin(actors, case.layout)
    doomed = ray.remote(Worker).options(num_cpus=0).remote()
    ray.get(doomed.open.remote(case.layout, name))
    waiting = rank.receive.remote()
    time.sleep(1)
    ray.kill(doomed)
    began = time.monotonic()
    with pytest.raises(TransportError, match=r"training side, step 0, dp0/pp0/cp0/tp0: .* the rollout side is gone"):
        ray.get(waiting)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("when", ["before its routes are there", "after"])
def test_a_training_rank_that_dies_is_noticed_at_once(actors: dict[str, list[Any]], when: str) -> None:
    from megatron_router_replay.transport.ray import RaySender

    case = CASES["dp2"]
    name = f"routes-{next(NAMES)}"
    ranks = [actors["ranks"][0], ray.remote(Rank).options(num_cpus=0).remote()]
    ray.get([rank.begin.remote(case.layout, case.layout.place_of(i), name, LIMITS) for i, rank in enumerate(ranks)])
    sender = RaySender(case.layout, name=name, **LIMITS)
    sender.send(case.traces(0))
    ray.get([rank.receive.remote() for rank in ranks])
    sender.join()
    if when == "after":
        sender.send(case.traces(1))
    time.sleep(1)
    ray.kill(ranks[1])
    began = time.monotonic()
    if when != "after":
        sender.send(case.traces(1))
    with pytest.raises(TransportError, match="training side, dp1/pp0/cp0/tp0: its actor died"):
        sender.join()
    assert time.monotonic() - began < 20, "far below the timeouts of a minute and more"
    with pytest.raises(TransportError, match="dp1/pp0/cp0/tp0: its actor died"):
        ray.get(ranks[0].receive.remote())


def test_a_second_send_waits_for_the_first(actors: dict[str, list[Any]]) -> None:
    from megatron_router_replay.transport.ray import RaySender

    case = CASES["one rank"]
    name, (rank,) = _begin(actors, case.layout)
    with RaySender(case.layout, name=name, **LIMITS) as sender:
        sender.send(case.traces(0))
        first: list[Any] = []
        began = time.monotonic()
        threading.Timer(2.0, lambda: first.append(rank.receive.remote())).start()
        sender.send(case.traces(1))
        assert time.monotonic() - began > 2.0, "the second send waited for the first to be received"
        assert torch.equal(ray.get(first[0])["topk_indices"], case.expected(0, Place())["topk_indices"])
        second = ray.get(rank.receive.remote())
    assert torch.equal(second["topk_indices"], case.expected(1, Place())["topk_indices"])
