"""Over Ray, too: who leaves frees the sender, who disagrees is told by numbers, and a name can be used again at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from megatron_router_replay.transport import ParallelLayout, TransportError
from megatron_router_replay.transport.threads import run_in_thread
from tests.functional.transport.leaving import leave, raises_promptly
from tests.functional.transport.processes import LAYERS, ONE, check_sum, make_trace

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'megatron-router-replay[ray]'")

LIMITS = {"timeout": timedelta(seconds=60), "ready_timeout": timedelta(seconds=120)}
"""An actor may take long to start on a busy machine."""
PROMPTLY_S = 40.0
"""Far below every timeout in LIMITS."""


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    ray.init(num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def _receiver(name: str, layout: ParallelLayout = ONE, rank: int = 0) -> Any:
    from megatron_router_replay.transport.ray import RayReceiver

    return RayReceiver(layout, layout.place_of(rank), name=name, **LIMITS)


def _sender(name: str, layout: ParallelLayout = ONE) -> Any:
    from megatron_router_replay.transport.ray import RaySender

    return RaySender(layout, name=name, **LIMITS)


_in_thread = partial(run_in_thread, name="test")


_raises_promptly = partial(raises_promptly, within=PROMPTLY_S)


@pytest.mark.parametrize("how", ["cleanly", "by exception"])
@pytest.mark.parametrize("batches", [0, 1])
def test_a_receiver_that_leaves_frees_its_sender(name: str, how: str, batches: int) -> None:
    trace = make_trace(400)
    sender, receiver = _sender(name), _receiver(name)
    for _ in range(batches):
        sender.send(trace)
        assert check_sum(receiver.receive().topk_indices) == check_sum(trace.topk_indices)
    sender.send(trace)
    time.sleep(0.5)
    leave(receiver, how)
    why = "optimizer" if how == "by exception" else "left before it fetched its routes: .*it was closed"
    _raises_promptly(sender.join, rf"step {batches}.*training side, dp0/pp0/cp0/tp0.*{why}|{why}")
    sender.close()


def test_a_receiver_that_left_earlier_frees_the_sender_of_the_next_batch(name: str) -> None:
    trace = make_trace(400)
    sender, receiver = _sender(name), _receiver(name)
    sender.send(trace)
    receiver.receive()
    sender.join()
    leave(receiver, "cleanly")
    time.sleep(4)
    sender.send(trace)
    _raises_promptly(sender.join, "step 1.*left before it fetched its routes: training side, dp0/pp0/cp0/tp0")
    sender.close()


def test_a_rank_that_leaves_when_it_has_its_part_disturbs_no_other(name: str) -> None:
    layout = ParallelLayout(stage_layers=(LAYERS,), tp_size=2)
    trace = make_trace(400)
    with _sender(name, layout) as sender:
        sender.send(trace)
        with _receiver(name, layout, 0) as first:
            first.receive()
        time.sleep(4)
        with _receiver(name, layout, 1) as second:
            assert check_sum(second.receive().topk_indices) == check_sum(trace.topk_indices)


def test_a_name_can_be_used_again_at_once(name: str) -> None:
    for seed in range(4):
        trace = make_trace(400, seed=seed)

        def receive() -> int:
            with _receiver(name) as receiver:
                return check_sum(receiver.receive().topk_indices)

        receiving = _in_thread(receive) if seed % 2 else None
        with _sender(name) as sender:
            sender.send(trace)
            receiving = receiving or _in_thread(receive)
            sender.join()
        assert receiving.result(PROMPTLY_S) == check_sum(trace.topk_indices)


def test_a_name_that_another_sender_has_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_router_replay.transport.ray_calls._NAME_FREE_S", 1.0)
    with _sender(name), pytest.raises(TransportError, match=f"cannot send as '{name}'"):
        _sender(name)


@pytest.mark.parametrize(
    ("rollout", "training", "rank", "said"),
    [
        ({"dp_size": 2}, {"dp_size": 1}, 0, "rollout side has dp_size=2; the training side has dp_size=1"),
        ({"dp_size": 1}, {"dp_size": 2}, 1, "rollout side has dp_size=1; the training side has dp_size=2"),
        ({"cp_size": 2}, {"cp_size": 1}, 0, "rollout side has cp_size=2; the training side has cp_size=1"),
        ({"tp_size": 1}, {"tp_size": 2}, 0, "rollout side has tp_size=1; the training side has tp_size=2"),
    ],
)
def test_sides_with_other_layouts_both_raise_and_name_the_numbers(
    name: str, rollout: dict[str, int], training: dict[str, int], rank: int, said: str
) -> None:
    sender = _sender(name, ParallelLayout(stage_layers=(LAYERS,), **rollout))
    receiver = _receiver(name, ParallelLayout(stage_layers=(LAYERS,), **training), rank)
    sender.send(make_trace(400))
    receiving = _in_thread(receiver.receive)
    _raises_promptly(sender.join, f"the two sides disagree: the {said}")
    _raises_promptly(lambda: receiving.result(PROMPTLY_S), f"the two sides disagree: the {said}")
    receiver.close()
    sender.close()


def test_waiting_receivers_do_not_hold_up_a_closing_sender(name: str) -> None:
    sender = _sender(name)
    receiving = _in_thread(_receiver(name).receive)
    time.sleep(1)
    threading.Timer(0.1, sender.close).start()
    _raises_promptly(lambda: receiving.result(60), "the rollout side is gone, or closed the transport")
