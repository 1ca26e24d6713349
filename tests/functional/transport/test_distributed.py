"""The conformance cases over torch.distributed: training ranks are processes of a gloo world that knows nothing of it."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.testing import GlooWorkers
from megatron_router_replay.transport import ParallelLayout
from megatron_router_replay.transport.distributed import DistributedReceiver, DistributedSender, open_store
from tests.functional.transport.conformance import CASES, STEPS, Case, check_delivery, tensors_of

LIMITS = {"timeout": timedelta(seconds=20), "ready_timeout": timedelta(seconds=60)}


def _receive(port: int, layout: ParallelLayout, mode: str) -> list[dict[str, Tensor]]:
    rank = dist.get_rank()
    if rank >= layout.world_size:
        return []
    store = open_store("127.0.0.1", port, is_server=False)
    received = []
    with DistributedReceiver(store, layout, layout.place_of(rank), **LIMITS) as receiver:
        for _ in range(STEPS):
            if mode == "stream":
                parts: list[dict[str, Tensor]] = []
                receiver.stream(lambda start, trace, parts=parts: parts.append(tensors_of(trace)))
                received.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
                continue
            if mode == "post":
                receiver.post()
            received.append(tensors_of(receiver.receive()))
    assert dist.get_world_size() == 4, "training's own group is as it was"
    return received


def deliver_over(workers: GlooWorkers, case: Case, *, mode: str = "receive") -> list[list[dict[str, Tensor]]]:
    store = open_store("127.0.0.1", is_server=True)
    # A few rows a bucket, and fewer buffers than receivers.
    with DistributedSender(store, case.layout, bucket_bytes=100, num_buffers=2, **LIMITS) as sender:
        first = case.traces(0)
        plan = sender.send(first if case.num_traces > 1 else first[0], partition=case.partition, cp_rows=case.cp_rows())
        assert plan.nbytes == sum(
            value.nbytes for place in case.layout.receivers() for value in case.expected(0, place).values()
        ), "the plan predicts the bytes"

        results: list[list[dict[str, Tensor]]] = []
        thread = threading.Thread(target=lambda: results.extend(workers.run(_receive, store.port, case.layout, mode)))
        thread.start()
        for step in range(1, STEPS):
            sender.send(case.traces(step), partition=case.partition, cp_rows=case.cp_rows())
        sender.join()
        thread.join()
    return results[: case.layout.world_size]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_its_slice(workers_4: GlooWorkers, name: str) -> None:
    check_delivery(lambda case: deliver_over(workers_4, case), CASES[name])


@pytest.mark.parametrize("mode", ["post", "stream"])
def test_every_rank_gets_its_slice_in_other_ways(workers_4: GlooWorkers, mode: str) -> None:
    check_delivery(lambda case: deliver_over(workers_4, case, mode=mode), CASES["tp2 pp2"])
