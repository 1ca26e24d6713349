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
from megatron_router_replay.transport import ParallelLayout, Place, TransportTimes, collective, open_store
from megatron_router_replay.transport.gather import TraceRows
from tests.functional.transport.conformance import CASES, STEPS, Case, check_delivery, tensors_of
from tests.functional.transport.processes import attempts, check_sum, in_threads, join, make_trace, receive


def deliver(case: Case, *, in_buckets: bool = False, make_group: bool = False) -> list[list[dict[str, Tensor]]]:
    store = open_store("127.0.0.1", is_server=True)
    places = case.layout.places()

    def join_as(rank: int, **member: Any) -> Any:
        options = {"num_senders": case.num_traces} | member
        if make_group:
            mine, size = dist.PrefixStore("mine", store.clone()), case.num_traces + len(places)
            options["group"] = dist.ProcessGroupGloo(mine, rank, size, timedelta(minutes=1))
        return join(store.port, case.layout, **options)

    def train(rank: int) -> list[dict[str, Tensor]]:
        received = []
        with join_as(case.num_traces + rank, place=places[rank]) as group:
            for _ in range(STEPS):
                if not in_buckets:
                    received.append(tensors_of(group.receive()))
                    continue
                parts: dict[int, dict[str, Tensor]] = {}
                group.stream(lambda start, trace, parts=parts: parts.update({start: tensors_of(trace)}))
                ordered = [parts[start] for start in sorted(parts)]
                received.append({name: torch.cat([part[name] for part in ordered]) for name in ordered[0]})
        return received

    def roll_out(number: int) -> None:
        with join_as(number, sender=number) as group:
            for step in range(STEPS):
                group.send([case.traces(step)[number]], partition=case.partition)

    ranks = [partial(train, rank) for rank in range(len(places))]
    received = in_threads(*ranks, *(partial(roll_out, number) for number in range(case.num_traces)))[: len(ranks)]
    deadline = time.monotonic() + 20
    while any(thread.name.startswith("routes") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "closing leaves no thread"
        time.sleep(0.05)
    return received


@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_its_slice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "_BUCKET_BYTES", 100)
    check_delivery(deliver, CASES[name])


@pytest.mark.parametrize(
    ("name", "bucket_bytes", "options"),
    [
        ("cp2 tp2 pp2", 100, {"in_buckets": True}),
        ("dp3, three workers", 100, {"in_buckets": True}),
        ("dp2 pp2", 1, {}),  # smaller than a row
        ("dp2 pp2", 1 << 20, {}),  # larger than all
        ("cp2 tp2 pp2", 100, {"make_group": True}),
    ],
)
def test_buckets_of_any_size_and_a_group_of_the_caller_give_the_same(
    name: str, bucket_bytes: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "_BUCKET_BYTES", bucket_bytes)
    check_delivery(partial(deliver, **options), CASES[name])


def test_a_sender_stages_four_buckets_whatever_the_payload(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "_BUCKET_BYTES", 100_000)
    staged: set[tuple[int, int]] = set()

    class Watched(TraceRows):
        def fill(self, runs: Any, layer_numbers: Any, memory: Any) -> None:
            storage = memory["topk_indices"].untyped_storage()
            staged.add((storage.data_ptr(), storage.nbytes()))
            super().fill(runs, layer_numbers, memory)

    layout = ParallelLayout(stage_layers=((1, 2), (3, 4)), dp_size=3)

    def roll_out() -> None:
        with join(port, layout, sender=0) as group:
            group.send(Watched([make_trace()]))

    in_threads(roll_out, *(partial(receive, port, layout, rank) for rank in range(6)))
    assert len(staged) == 4
    assert {size for _, size in staged} == {100_000}


def test_a_consumer_that_changes_its_bucket_raises_on_all_ranks(port: int) -> None:
    """The next rank of its copies is sent the same memory."""
    layout = ParallelLayout(stage_layers=((1, 2, 3, 4),), tp_size=2)

    def change(start: int, trace: RoutingTrace) -> None:
        trace.topk_indices.clamp_(max=7)

    def train(tp_rank: int) -> None:
        with join(port, layout, place=Place(tp_rank=tp_rank)) as group:
            group.stream(lambda *_: None) if tp_rank else group.stream(change)

    def roll_out() -> None:
        with join(port, layout, sender=0) as group:
            group.send(make_trace(1000))

    for text in attempts(partial(train, 0), partial(train, 1), roll_out):
        assert "topk_indices of the trace was changed in place" in text


def test_a_slow_consumer_gets_every_row_through_two_buckets_of_memory(port: int) -> None:
    rows, memory = [], []

    def consume(start: int, trace: RoutingTrace) -> None:
        time.sleep(0.1)
        rows.append(trace.topk_indices.clone())
        memory.append(trace.topk_indices.untyped_storage())

    def train() -> None:
        with join(port, place=Place()) as group:
            group.stream(consume)

    def roll_out() -> None:
        with join(port, sender=0) as group:
            group.send(make_trace())

    in_threads(train, roll_out)
    assert torch.equal(torch.cat(rows), make_trace().topk_indices)
    assert len(memory) == 13  # 400,000 rows of 33 bytes, 31,775 in a bucket; 32 of the bytes are ids
    assert len({each.data_ptr() for each in memory}) == 2
    assert {each.nbytes() for each in memory} == {31_775 * 32}


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
            return sums, line, group.times.metrics()

    def roll_out() -> list[bool]:
        seen, times = [], TransportTimes("rollout")
        with join(port, sender=0, times=times) as group:
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
    assert metrics["router_replay/transport/rollout_decode_s"] >= 0.4
    assert metrics["router_replay/transport/training_wait_s"] >= 0.3
    assert metrics["router_replay/transport/rollout_wait_s"] > 0.5, "it comes with the next batch"


@pytest.mark.parametrize("sizes", [(2, 1, 2, 2), (2, 2, 2, 3), (1, 4, 1, 2)])
def test_places_are_megatrons(sizes: tuple[int, int, int, int]) -> None:
    pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
    from megatron.core.parallel_state import RankGenerator

    tp, cp, dp, pp = sizes
    generator = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    groups = [generator.get_ranks(name) for name in ("dp", "pp", "cp", "tp")]
    stages = tuple((number,) for number in range(1, pp + 1))
    layout = ParallelLayout(stage_layers=stages, dp_size=dp, cp_size=cp, tp_size=tp)
    assert len(layout.places()) == generator.world_size
    for rank in range(generator.world_size):
        place = tuple(next(group.index(rank) for group in of_kind if rank in group) for of_kind in groups)
        assert tuple(layout.place_of(rank)) == place
