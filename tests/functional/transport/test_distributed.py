"""The conformance cases over torch.distributed: training ranks are processes of a gloo world that knows nothing of it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.testing import GlooWorkers
from megatron_router_replay.transport import ParallelLayout
from megatron_router_replay.transport.distributed import DistributedReceiver, DistributedSender, open_store
from tests.functional.transport.conformance import CASES, STEPS, Case, check_delivery, tensors_of
from tests.functional.transport.processes import LIMITS, ONE, Child, check_sum, children, make_trace, receive


def _receive(port: int, layout: ParallelLayout, mode: str) -> list[dict[str, Tensor]]:
    rank = dist.get_rank()
    if rank >= layout.world_size:
        return []
    store = open_store("127.0.0.1", port, is_server=False)
    received = []
    reuse = {"reuse_memory": mode == "reuse_memory"}
    with DistributedReceiver(store, layout, layout.place_of(rank), **LIMITS, **reuse) as receiver:
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
        buffers = [sender._staging.take(block=False) for _ in range(3)]
        assert buffers[2] is None
        largest = max(100, plan.format.row_bytes(4))
        assert all(buffer is not None and buffer.nbytes <= largest for buffer in buffers[:2]), "staging is bounded"
    return results[: case.layout.world_size]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_its_slice(workers_4: GlooWorkers, name: str) -> None:
    check_delivery(lambda case: deliver_over(workers_4, case), CASES[name])


def test_closing_leaves_no_thread_behind(workers_4: GlooWorkers) -> None:
    before = set(threading.enumerate())  # other tests' links that nobody closed
    check_delivery(lambda case: deliver_over(workers_4, case), CASES["dp2 pp2"])
    deadline = time.monotonic() + 20

    def ours() -> list[str]:
        return [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("routes")]

    while ours() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ours() == []


@pytest.mark.parametrize("mode", ["post", "stream", "reuse_memory"])
def test_every_rank_gets_its_slice_in_other_ways(workers_4: GlooWorkers, mode: str) -> None:
    check_delivery(lambda case: deliver_over(workers_4, case, mode=mode), CASES["tp2 pp2"])


def _place_in_megatron(rank: int, world_size: int, tp: int, cp: int, dp: int, pp: int) -> tuple[int, ...]:
    from megatron.core.parallel_state import RankGenerator

    generator = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    assert generator.world_size == world_size
    groups = [generator.get_ranks(name) for name in ("dp", "pp", "cp", "tp")]
    return tuple(next(group.index(rank) for group in of_kind if rank in group) for of_kind in groups)


@pytest.mark.parametrize("sizes", [(1, 1, 2, 2), (2, 1, 2, 2), (2, 2, 2, 3), (1, 4, 1, 2)])
def test_places_are_megatrons(sizes: tuple[int, int, int, int]) -> None:
    tp, cp, dp, pp = sizes
    stages = tuple((number,) for number in range(1, pp + 1))
    layout = ParallelLayout(stage_layers=stages, dp_size=dp, cp_size=cp, tp_size=tp)
    for rank in range(layout.world_size):
        assert tuple(layout.place_of(rank)) == _place_in_megatron(rank, layout.world_size, *sizes)


def test_the_package_is_usable_without_ray_and_megatron() -> None:
    code = "import sys, megatron_router_replay.transport; print(sorted({'ray', 'megatron', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two CUDA GPUs")
def test_routes_over_nccl() -> None:
    trace = make_trace()
    store = open_store("127.0.0.1", is_server=True)
    nccl = {"backend": "nccl", "device": "cuda:1"}
    child = Child(receive, store.port, ONE, 0, {"steps": 2, "transport": nccl})
    sender = DistributedSender(store, ONE, backend="nccl", device="cuda:0", **LIMITS)
    with children(child):
        child.wait_for("started")
        sender.send(trace)
        sender.send(trace)
        sender.join()
        assert child.result() == [check_sum(trace.topk_indices)] * 2
