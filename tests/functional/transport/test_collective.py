"""Every place gets its slice, in every way to receive; the processes of a transport are threads of this one."""

from __future__ import annotations

import re
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay import RoutingTrace
from megatron_router_replay.transport import ParallelLayout, Place, RouteGroup, TransportTimes, open_store
from megatron_router_replay.transport.gather import TraceRows
from tests.functional.transport.conformance import CASES, STEPS, Case, check_delivery, tensors_of
from tests.functional.transport.processes import check_sum, in_threads, join, make_trace


def deliver(
    case: Case, *, in_buckets: bool = False, bucket_bytes: int = 100, make_group: bool = False
) -> list[list[dict[str, Tensor]]]:
    store = open_store("127.0.0.1", is_server=True)
    places = case.layout.places()

    def join_as(place: Place | None) -> RouteGroup:
        options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "place": place}
        if make_group:
            mine, rank = dist.PrefixStore("mine", store.clone()), [None, *places].index(place)
            options["group"] = dist.ProcessGroupGloo(mine, rank, 1 + len(places), timedelta(minutes=1))
        return join(store.port, case.layout, **options)

    def train(place: Place) -> list[dict[str, Tensor]]:
        received = []
        with join_as(place) as group:
            for _ in range(STEPS):
                if not in_buckets:
                    received.append(tensors_of(group.receive()))
                    continue
                parts: dict[int, dict[str, Tensor]] = {}
                group.stream(lambda start, trace, parts=parts: parts.update({start: tensors_of(trace)}))
                ordered = [parts[start] for start in sorted(parts)]
                received.append({name: torch.cat([part[name] for part in ordered]) for name in ordered[0]})
        return received

    def roll_out() -> None:
        with join_as(None) as group:
            for step in range(STEPS):
                group.send(case.traces(step), partition=case.partition)

    _, *received = in_threads(roll_out, *(partial(train, place) for place in places))
    deadline = time.monotonic() + 20
    while any(thread.name.startswith("routes") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "closing leaves no thread"
        time.sleep(0.05)
    return received


@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_its_slice(name: str) -> None:
    check_delivery(deliver, CASES[name])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cp2 tp2 pp2", {"in_buckets": True}),
        ("cp2 tp2 pp2", {"make_group": True}),
        ("dp3, three traces", {"bucket_bytes": 1}),  # smaller than a row
        ("dp3, three traces", {"bucket_bytes": 1 << 20}),  # larger than all
    ],
)
def test_buckets_of_any_size_and_a_group_of_the_caller_give_the_same(name: str, options: dict[str, Any]) -> None:
    check_delivery(partial(deliver, **options), CASES[name])


def test_a_batch_takes_four_buckets_of_a_sender_and_two_of_a_slow_consumer(port: int) -> None:
    staged, window, rows = set(), set(), []

    class Watched(TraceRows):
        def fill(self, runs: Any, layer_numbers: Any, memory: Any) -> None:
            storage = memory["topk_indices"].untyped_storage()
            staged.add((storage.data_ptr(), storage.nbytes()))
            super().fill(runs, layer_numbers, memory)

    def consume(start: int, trace: RoutingTrace) -> None:
        time.sleep(0.1)
        rows.append(trace.topk_indices.clone())
        window.add((trace.topk_indices.untyped_storage().data_ptr(), trace.num_tokens))

    def train() -> None:
        with join(port, place=Place()) as group:
            group.stream(consume)

    def roll_out() -> None:
        with join(port) as group:
            group.send(Watched([make_trace()]))

    in_threads(train, roll_out)
    assert torch.equal(torch.cat(rows), make_trace().topk_indices)
    assert len(rows) == 13  # 400,000 rows of 33 bytes, 31,775 in a bucket of 1 << 20
    assert [size for _, size in staged] == [1 << 20] * 4
    assert len({address for address, _ in window}) == 2


def test_send_returns_at_once_the_next_one_waits_and_seconds_reach_training(port: int) -> None:
    traces = [make_trace(seed=seed) for seed in range(3)]
    asked = threading.Event()

    def train() -> tuple[list[int], str, dict[str, float]]:
        with join(port, place=Place()) as group:
            sums = [check_sum(group.receive().topk_indices)]
            line = group.times.line()
            time.sleep(1)
            asked.set()
            sums += [check_sum(group.receive().topk_indices) for _ in traces[1:]]
            return sums, line, group.times.metrics("")

    def roll_out() -> list[bool]:
        seen, times = [], TransportTimes("rollout")
        with join(port, times=times) as group:
            with times.measure("decode"):
                time.sleep(0.5)
            for trace in traces:
                group.send(trace)
                seen.append(asked.is_set())
        return seen

    (sums, line, metrics), seen = in_threads(train, roll_out)
    assert seen == [False, False, True]
    assert sums == [check_sum(trace.topk_indices) for trace in traces]
    assert re.search(r"^routes: training waited .*: rollout side decoding \(\d\.\d s\)$", line)
    assert metrics["rollout_decode_s"] >= 0.4
    assert metrics["training_wait_s"] >= 0.3
    assert metrics["rollout_wait_s"] > 0.5, "it comes with the next batch"


def test_places_are_megatrons() -> None:
    pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
    from megatron.core.parallel_state import RankGenerator

    generator = RankGenerator(tp=2, cp=3, ep=1, dp=4, pp=5, order="tp-cp-ep-dp-pp")
    groups = [generator.get_ranks(name) for name in ("dp", "pp", "cp", "tp")]
    stages = ((1,), (2,), (3,), (4,), (5,))
    layout = ParallelLayout(stage_layers=stages, tp_size=2, cp_size=3, dp_size=4)
    assert len(layout.places()) == generator.world_size
    for rank in range(generator.world_size):
        place = tuple(next(group.index(rank) for group in of_kind if rank in group) for of_kind in groups)
        assert tuple(layout.place_of(rank)) == place
