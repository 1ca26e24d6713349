"""Every place gets its slice, in every way to receive; the processes of a transport are threads of this one."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_router_replay.transport import (
    ParallelLayout,
    Place,
    RouteGroup,
    TransportTimes,
    decode_responses,
    open_store,
)
from megatron_router_replay.transport.gather import TraceRows
from tests.functional.transport.conformance import CASES, STEPS, Case, check_delivery, tensors_of
from tests.functional.transport.processes import LAYERS, Child, check_sum, children, in_threads, make_trace, receive

LIMITS: dict[str, Any] = {"timeout": timedelta(seconds=40), "ready_timeout": timedelta(seconds=60)}
ONE = ParallelLayout(stage_layers=(LAYERS,))


def deliver(case: Case, *, in_buckets: bool = False, bucket_bytes: int = 100) -> list[list[dict[str, Tensor]]]:
    store = open_store("127.0.0.1", is_server=True)
    options = {"num_senders": case.num_traces, "bucket_bytes": bucket_bytes, **LIMITS}

    def train(rank: int) -> list[dict[str, Tensor]]:
        received = []
        with RouteGroup(store, case.layout, place=case.layout.place_of(rank), **options) as group:
            for _ in range(STEPS):
                if in_buckets:
                    parts: dict[int, dict[str, Tensor]] = {}
                    group.stream(lambda start, trace, parts=parts: parts.update({start: tensors_of(trace)}))
                    ordered = [parts[start] for start in sorted(parts)]
                    received.append({name: torch.cat([part[name] for part in ordered]) for name in ordered[0]})
                    continue
                received.append(tensors_of(group.receive()))
        return received

    def roll_out(number: int) -> list[dict[str, Tensor]]:
        with RouteGroup(store, case.layout, sender=number, **options) as group:
            for step in range(STEPS):
                group.send([case.traces(step)[number]], partition=case.partition)
        return []

    ranks = [lambda rank=rank: train(rank) for rank in range(len(case.layout.places()))]
    senders = [lambda number=number: roll_out(number) for number in range(case.num_traces)]
    return in_threads(*ranks, *senders)[: len(case.layout.places())]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_its_slice(name: str) -> None:
    check_delivery(deliver, CASES[name])


def test_every_rank_gets_its_slice_in_buckets() -> None:
    check_delivery(lambda case: deliver(case, in_buckets=True), CASES["tp2 pp2"])
    check_delivery(lambda case: deliver(case, in_buckets=True), CASES["dp3, three workers"])


def test_a_bucket_may_be_smaller_than_a_row_or_larger_than_all() -> None:
    check_delivery(lambda case: deliver(case, bucket_bytes=1), CASES["dp2 pp2"])
    check_delivery(lambda case: deliver(case, bucket_bytes=1 << 20), CASES["dp2 pp2"])


def test_closing_leaves_no_thread_behind() -> None:
    deliver(CASES["dp2 pp2"], in_buckets=True)
    deadline = time.monotonic() + 20
    while (
        left := [thread.name for thread in threading.enumerate() if thread.name.startswith("routes")]
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_a_sender_stages_four_buckets_whatever_the_payload() -> None:
    staged: set[tuple[int, int]] = set()

    class Watched(TraceRows):
        def fill(self, runs: Any, layer_numbers: Any, memory: Any) -> None:
            storage = memory["topk_indices"].untyped_storage()
            staged.add((storage.data_ptr(), storage.nbytes()))
            super().fill(runs, layer_numbers, memory)

    store = open_store("127.0.0.1", is_server=True)
    layout = ParallelLayout(stage_layers=((1, 2), (3, 4)), dp_size=3)
    options = {"bucket_bytes": 100_000, **LIMITS}

    def train(rank: int) -> int:
        with RouteGroup(store, layout, place=layout.place_of(rank), **options) as group:
            return group.receive().num_tokens

    def roll_out() -> None:
        with RouteGroup(store, layout, sender=0, **options) as group:
            group.send(Watched([make_trace()]))

    ranks = [lambda rank=rank: train(rank) for rank in range(6)]
    assert in_threads(roll_out, *ranks)[1:] == [200_000, 100_000, 100_000] * 2
    assert len(staged) == 4
    assert {size for _, size in staged} == {100_000}


def test_a_stream_holds_two_buckets_whatever_the_payload() -> None:
    store, memory = open_store("127.0.0.1", is_server=True), []
    options = {"bucket_bytes": 1 << 20, **LIMITS}

    def train() -> None:
        with RouteGroup(store, ONE, place=Place(), **options) as group:
            group.stream(lambda start, trace: memory.append(trace.topk_indices.untyped_storage()))

    def roll_out() -> None:
        with RouteGroup(store, ONE, sender=0, **options) as group:
            group.send(make_trace())

    in_threads(train, roll_out)
    assert len(memory) == 13  # 400,000 rows of 33 bytes, 31,775 in a bucket; 32 of the bytes are ids
    assert {(each.data_ptr(), each.nbytes()) for each in memory} == {
        (each.data_ptr(), 31_775 * 32) for each in memory[:2]
    }


def test_send_returns_at_once_and_the_next_one_waits_for_it() -> None:
    store = open_store("127.0.0.1", is_server=True)
    traces = [make_trace(seed=seed) for seed in range(3)]
    asked = threading.Event()

    def train() -> list[int]:
        with RouteGroup(store, ONE, place=Place(), **LIMITS) as group:
            time.sleep(2)
            asked.set()
            received = [check_sum(group.receive().topk_indices) for _ in traces]
            assert group.times.metrics("")["rollout_wait_s"] > 1, "it comes with the next batch"
        return received

    def roll_out() -> list[bool]:
        with RouteGroup(store, ONE, sender=0, **LIMITS) as group:
            group.send(traces[0])
            seen = [asked.is_set()]
            for trace in traces[1:]:
                group.send(trace)
                seen.append(asked.is_set())
        return seen

    received, seen = in_threads(train, roll_out)
    assert seen == [False, True, True]
    assert received == [check_sum(trace.topk_indices) for trace in traces]


def test_training_is_told_which_step_of_the_rollout_side_it_waited_for() -> None:
    store = open_store("127.0.0.1", is_server=True)
    trace, times = make_trace(400), TransportTimes("rollout")

    def roll_out() -> None:
        with RouteGroup(store, ONE, sender=0, times=times, **LIMITS) as group:
            group.send(decode_responses([trace], lambda response: (time.sleep(1.5), response)[1], times=times))

    def train() -> tuple[str, dict[str, float]]:
        with RouteGroup(store, ONE, place=Place(), **LIMITS) as group:
            group.receive()
            return group.times.line(), group.times.metrics("")

    _, (line, metrics) = in_threads(roll_out, train)
    assert line.startswith("routes: training waited 1.")
    assert line.endswith("s: rollout side decoding (1.5 s)")
    assert metrics["rollout_decode_s"] >= 1.4
    assert metrics["training_wait_s"] >= 1.4


def _place_in_megatron(rank: int, world_size: int, tp: int, cp: int, dp: int, pp: int) -> tuple[int, ...]:
    from megatron.core.parallel_state import RankGenerator

    generator = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    assert generator.world_size == world_size
    groups = [generator.get_ranks(name) for name in ("dp", "pp", "cp", "tp")]
    return tuple(next(group.index(rank) for group in of_kind if rank in group) for of_kind in groups)


@pytest.mark.parametrize("sizes", [(1, 1, 2, 2), (2, 1, 2, 2), (2, 2, 2, 3), (1, 4, 1, 2)])
def test_places_are_megatrons(sizes: tuple[int, int, int, int]) -> None:
    pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
    tp, cp, dp, pp = sizes
    stages = tuple((number,) for number in range(1, pp + 1))
    layout = ParallelLayout(stage_layers=stages, dp_size=dp, cp_size=cp, tp_size=tp)
    for rank in range(len(layout.places())):
        assert tuple(layout.place_of(rank)) == _place_in_megatron(rank, len(layout.places()), *sizes)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two CUDA GPUs")
def test_routes_over_nccl() -> None:
    trace = make_trace()
    store = open_store("127.0.0.1", is_server=True)
    child = Child(receive, store.port, ONE, 0, steps=2, backend="nccl", device="cuda:1")
    with children(child):
        options = {**LIMITS, "bucket_bytes": 1 << 20}
        with RouteGroup(store, ONE, sender=0, backend="nccl", device="cuda:0", **options) as group:
            group.send(trace)
            group.send(trace)
        assert child.result() == [check_sum(trace.topk_indices)] * 2
