"""Who leaves frees the other side within seconds, who disagrees is told by numbers, and a name can be used again at once."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megatron_router_replay import RoutingTrace
from megatron_router_replay.transport import (
    DistributedReceiver,
    DistributedSender,
    ParallelLayout,
    TransportError,
    open_store,
)
from megatron_router_replay.transport.threads import run_in_thread
from tests.functional.transport.leaving import leave, raises_promptly
from tests.functional.transport.processes import LAYERS, LIMITS, ONE, check_sum, make_trace

PROMPTLY_S = 15.0
"""Far below every timeout in LIMITS."""


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def store() -> Any:
    return open_store("127.0.0.1", is_server=True)


_in_thread = partial(run_in_thread, name="test")


def _receiver(store: Any, layout: ParallelLayout = ONE, rank: int = 0) -> DistributedReceiver:
    return DistributedReceiver(store, layout, layout.place_of(rank), **LIMITS)


_raises_promptly = partial(raises_promptly, within=PROMPTLY_S)


@pytest.mark.parametrize("how", ["cleanly", "by exception"])
def test_a_receiver_that_leaves_before_its_first_batch_frees_a_sender_that_waits(store: Any, how: str) -> None:
    receiver = _receiver(store)
    sender = DistributedSender(store, ONE, **LIMITS)
    sender.send(make_trace(400))
    time.sleep(0.5)
    leave(receiver, how)
    why = "KeyError: 'the optimizer is gone'" if how == "by exception" else "it was closed"
    _raises_promptly(sender.join, rf"the other side left before it was met: training side, dp0/pp0/cp0/tp0.*{why}")
    sender.close()


@pytest.mark.parametrize("how", ["cleanly", "by exception"])
def test_a_receiver_that_left_before_the_sender_began_frees_it_too(store: Any, how: str) -> None:
    leave(_receiver(store), how)
    sender = DistributedSender(store, ONE, **LIMITS)
    sender.send(make_trace(400))
    _raises_promptly(sender.join, "the other side left before it was met: training side, dp0/pp0/cp0/tp0")
    sender.close()


@pytest.mark.parametrize("how", ["cleanly", "by exception"])
def test_a_receiver_that_leaves_after_its_first_batch_frees_its_sender(store: Any, how: str) -> None:
    trace = make_trace(400)
    receiver = _receiver(store)
    sender = DistributedSender(store, ONE, **LIMITS)
    sender.send(trace)
    assert check_sum(receiver.receive().topk_indices) == check_sum(trace.topk_indices)
    sender.send(trace)
    time.sleep(0.5)
    leave(receiver, how)
    why = "optimizer" if how == "by exception" else "died or closed"
    _raises_promptly(sender.join, rf"step 1, to dp0/pp0/cp0/tp0: waiting for the training side's request.*{why}")
    sender.close()


def test_a_sender_that_leaves_before_it_met_a_receiver_frees_it(store: Any) -> None:
    receiving = _in_thread(_receiver(store).receive)
    time.sleep(0.5)
    with pytest.raises(KeyError), DistributedSender(store, ONE, **LIMITS):
        raise KeyError("the engine is gone")
    _raises_promptly(lambda: receiving.result(60), "the other side left before it was met: rollout side: KeyError")


def _round(store: Any, seed: int, *, receiver_first: bool) -> None:
    trace = make_trace(400, seed=seed)

    def receive() -> int:
        with _receiver(store) as receiver:
            return check_sum(receiver.receive().topk_indices)

    receiving = _in_thread(receive) if receiver_first else None
    with DistributedSender(store, ONE, **LIMITS) as sender:
        if receiver_first:
            time.sleep(0.3)
        sender.send(trace)
        receiving = receiving or _in_thread(receive)
        sender.join()
    assert receiving.result(PROMPTLY_S) == check_sum(trace.topk_indices)


def test_a_name_can_be_used_again_at_once(store: Any) -> None:
    for seed in range(4):
        _round(store, seed, receiver_first=seed % 2 == 0)


@pytest.mark.parametrize("receiver_first", [True, False])
def test_a_name_can_be_used_again_at_once_after_a_failure(store: Any, receiver_first: bool) -> None:
    # A receiver that met nobody, then a sender that met nobody, then one that fails in the middle of its work.
    leave(_receiver(store), "by exception")
    _round(store, 1, receiver_first=receiver_first)
    with pytest.raises(KeyError), DistributedSender(store, ONE, **LIMITS):
        raise KeyError("the engine is gone")
    _round(store, 2, receiver_first=receiver_first)
    receiver, sender = _receiver(store), DistributedSender(store, ONE, **LIMITS)
    sender.send(make_trace(400))
    receiver.receive()
    receiver.fail(RuntimeError("out of memory"))
    sender.send(make_trace(400))
    _raises_promptly(sender.join, "out of memory")
    receiver.close()
    sender.close()
    _round(store, 3, receiver_first=receiver_first)


def _layout(**sizes: int) -> ParallelLayout:
    return ParallelLayout(stage_layers=(LAYERS,), **sizes)


@pytest.mark.parametrize(
    ("rollout", "training", "rank", "said"),
    [
        ({"dp_size": 2}, {"dp_size": 1}, 0, "rollout side has dp_size=2; the training side has dp_size=1"),
        ({"dp_size": 1}, {"dp_size": 2}, 0, "rollout side has dp_size=1; the training side has dp_size=2"),
        ({"dp_size": 1}, {"dp_size": 2}, 1, "rollout side has dp_size=1; the training side has dp_size=2"),
        ({"cp_size": 2}, {"cp_size": 1}, 0, "rollout side has cp_size=2; the training side has cp_size=1"),
        ({"cp_size": 1}, {"cp_size": 4}, 3, "rollout side has cp_size=1; the training side has cp_size=4"),
        ({"tp_size": 1}, {"tp_size": 2}, 1, "rollout side has tp_size=1; the training side has tp_size=2"),
        (
            {"dp_size": 2, "cp_size": 2},
            {},
            0,
            "rollout side has dp_size=2, cp_size=2; the training side has dp_size=1, cp_size=1",
        ),
    ],
)
def test_sides_with_other_layouts_both_raise_and_name_the_numbers(
    store: Any, rollout: dict[str, int], training: dict[str, int], rank: int, said: str
) -> None:
    sender = DistributedSender(store, _layout(**rollout), **LIMITS)
    receiver = _receiver(store, _layout(**training), rank)
    sender.send(make_trace(400))
    receiving = _in_thread(receiver.receive)
    _raises_promptly(sender.join, f"the two sides disagree: the {said}")
    _raises_promptly(lambda: receiving.result(PROMPTLY_S), f"the two sides disagree: the {said}")
    receiver.close()
    sender.close()


def test_an_announcement_of_a_sender_that_died_is_not_believed_when_another_comes(store: Any) -> None:
    DistributedSender(store, _layout(dp_size=2), **LIMITS)  # never closed: as if it had been killed
    _round(store, 5, receiver_first=True)


def test_two_receivers_for_one_place_are_told(store: Any) -> None:
    first = _in_thread(_receiver(store).receive)
    time.sleep(0.3)
    second = _receiver(store)
    receiving = _in_thread(second.receive)
    _raises_promptly(lambda: first.result(60), "another process took this place under the same name")
    with DistributedSender(store, ONE, **LIMITS) as sender:
        sender.send(make_trace(400))
    assert receiving.result(60).num_tokens == 400


def test_slow_receivers_do_not_starve_the_others(store: Any) -> None:
    layout = _layout(dp_size=4)
    trace = make_trace(4000)
    released = threading.Event()
    slow = [_receiver(store, layout, rank) for rank in range(3)]

    def consume(start: int, part: RoutingTrace) -> None:
        assert released.wait(60)

    # Three receivers keep their first bucket for as long as they like; the fourth must get all of its own meanwhile.
    streaming = [_in_thread(lambda receiver=receiver: receiver.stream(consume)) for receiver in slow]
    sender = DistributedSender(store, layout, bucket_bytes=3300, num_buffers=2, **LIMITS)
    plan = sender.send(trace)
    time.sleep(3)
    with _receiver(store, layout, 3) as fast:
        began = time.monotonic()
        received = _in_thread(fast.receive).result(PROMPTLY_S)
        assert time.monotonic() - began < PROMPTLY_S
    assert not any(future.done() for future in streaming)
    rows = torch.cat([torch.arange(a, b) for a, b in plan.part(layout.place_of(3)).runs.tolist()])
    assert torch.equal(received.topk_indices, trace.topk_indices[rows])
    released.set()
    for future in streaming:
        future.result(60)
    sender.join()
    for endpoint in (*slow, sender):
        endpoint.close()


def test_a_slow_receiver_holds_no_buffer_while_it_works(store: Any) -> None:
    released, began = threading.Event(), threading.Event()

    def consume(start: int, part: RoutingTrace) -> None:
        began.set()
        assert released.wait(60)

    receiver = _receiver(store)
    streaming = _in_thread(lambda: receiver.stream(consume))
    sender = DistributedSender(store, ONE, bucket_bytes=3300, num_buffers=2, **LIMITS)
    sender.send(make_trace(4000))
    assert began.wait(60)
    deadline = time.monotonic() + PROMPTLY_S
    while sender._staging._free.qsize() < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sender._staging._free.qsize() == 2
    released.set()
    streaming.result(60)
    sender.join()
    receiver.close()
    sender.close()


@pytest.fixture
def listening() -> Callable[[str, int], bool]:
    def connects(host: str, port: int) -> bool:
        try:
            with socket.create_connection((host, port), timeout=5):
                return True
        except OSError:
            return False

    with socket.create_server(("127.0.0.2", 0)) as other:
        if not connects("127.0.0.2", other.getsockname()[1]):
            pytest.skip("this machine has no second loopback address")
    return connects


def test_the_store_listens_on_the_address_asked_for_alone(listening: Callable[[str, int], bool]) -> None:
    store = open_store("127.0.0.1", is_server=True)
    assert listening("127.0.0.1", store.port)
    assert not listening("127.0.0.2", store.port)
    everywhere = open_store("0.0.0.0", is_server=True)
    assert listening("127.0.0.2", everywhere.port)
    client = open_store("127.0.0.1", store.port, is_server=False)
    client.set("key", "value")
    assert store.get("key") == b"value"


def test_a_store_that_cannot_listen_says_so() -> None:
    store = open_store("127.0.0.1", is_server=True)
    with pytest.raises(TransportError, match=f"cannot serve a store on 127.0.0.1:{store.port}: .*in use"):
        open_store("127.0.0.1", store.port, is_server=True)
    with pytest.raises(TransportError, match=r"cannot serve a store on 192\.0\.2\.1:0"):  # an address of documentation
        open_store("192.0.2.1", is_server=True)
