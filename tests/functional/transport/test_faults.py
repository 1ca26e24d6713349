"""What ends one process of a transport ends the waits of all, within seconds and with its words; nobody hangs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_router_replay import RoutingTrace
from megatron_router_replay.transport import ParallelLayout, Place, RouteGroup, TransportError, open_store
from tests.functional.transport.processes import (
    LAYERS,
    ONE,
    Child,
    attempts,
    children,
    die,
    in_threads,
    interrupt,
    join,
    make_trace,
    receive,
    refuse,
    send,
    send_small,
    wait_then_interrupt,
)

PROMPTLY_S = 40.0
"""Far below every timeout in LIMITS, and generous on a busy machine."""
DP2 = ParallelLayout(stage_layers=(LAYERS,), dp_size=2)
TP2_DP2 = ParallelLayout(stage_layers=(LAYERS,), tp_size=2, dp_size=2)
SHORT = {"timeout": timedelta(seconds=2), "ready_timeout": timedelta(seconds=2)}
ERROR = "TransportError: MRR603:"
THE_RANK = f"training rank {Place()}"
CLOSED = "rollout process 0 closed the transport."


def results_of(doomed: int, *started: Child) -> list[str]:
    """Return what all but the doomed child say, which dies first; all say it within seconds of each other."""
    with children(*started):
        assert started[doomed].died_by() == signal.SIGKILL
        return [child.result(PROMPTLY_S) for number, child in enumerate(started) if number != doomed]


@contextmanager
def sender_that_fails(port: int, layout: ParallelLayout) -> Iterator[RouteGroup]:
    """Be the rollout process of a transport that breaks; its block ends without a word."""
    with join(port, layout, sender=0) as group:
        yield group
        group._error = None


@pytest.mark.parametrize(
    ("doomed", "member"),
    [(0, "rollout process 0"), (1, THE_RANK), (2, f"training rank {Place(tp_rank=1)}")],
    ids=["the sender", "a rank that passes on", "a rank that is passed on to"],
)
def test_a_process_killed_in_the_middle_of_a_batch_is_told_to_all(port: int, doomed: int, member: str) -> None:
    sender = Child(send, port, TP2_DP2, action=die if doomed == 0 else None)
    ranks = [Child(receive, port, TP2_DP2, i, at_second_bucket=die if doomed == 1 + i else None) for i in range(4)]
    results = results_of(doomed, sender, *ranks)
    assert len(set(results)) == 1, "the same words everywhere"
    assert results[0].startswith("TransportError: ")
    assert f"lost {member}, which died or closed the connection" in results[0]


def test_a_rank_that_is_killed_between_idle_ones_is_told_to_one_that_waits(port: int) -> None:
    """In the ring of processes both neighbours of the dead one are busy elsewhere."""
    layout = ParallelLayout(stage_layers=(LAYERS,), dp_size=3)
    deeds = ({}, {"before": partial(time.sleep, 90)}, {"before": die})
    ranks = [Child(receive, port, layout, rank, **deed) for rank, deed in enumerate(deeds)]
    with children(*ranks), sender_that_fails(port, layout) as group:
        assert ranks[2].died_by() == signal.SIGKILL
        assert "lost training rank dp2/pp0/cp0/tp0, which died or closed" in ranks[0].result(PROMPTLY_S)
        with pytest.raises(TransportError, match="which died or closed the connection"):
            send_small(group)
        with pytest.raises(TransportError, match="this transport is over"):
            group.send(make_trace(400))


def serve_and_die(port: int) -> None:
    """Be the rollout process that serves the store, and die while the ranks wait."""
    store = open_store("127.0.0.1", port, is_server=True)
    with join(store.port, sender=0):
        time.sleep(2)
        die()


def test_the_process_that_serves_the_store_may_be_the_one_that_is_killed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    results = results_of(0, Child(serve_and_die, number), Child(receive, number))
    assert results == [f"{ERROR} {THE_RANK} lost rollout process 0, which died or closed the connection."]


@pytest.mark.parametrize(
    ("failing", "member"),
    [(0, "rollout process 0"), (3, "training rank dp1/pp0/cp0/tp0")],
    ids=["of a source", "of a consumer"],
)
def test_an_error_stays_what_it_is_and_is_told_to_all(port: int, failing: int, member: str) -> None:
    ranks = [
        partial(receive, port, TP2_DP2, i, at_second_bucket=refuse if failing == 1 + i else None) for i in range(4)
    ]
    results = attempts(partial(send, port, TP2_DP2, action=refuse if failing == 0 else None), *ranks)
    assert results.pop(failing) == "ValueError: no room for these rows"
    assert results == [f"{ERROR} {member}: ValueError: no room for these rows"] * 4


@pytest.mark.parametrize("what", [{"before": wait_then_interrupt}, {"at_second_bucket": interrupt}])
def test_ctrl_c_in_receive_or_a_consumer_stays_what_it_is_and_is_told(port: int, what: dict[str, Any]) -> None:
    ranks = [Child(receive, port, DP2, 0, **what), Child(receive, port, DP2, 1)]
    with children(*ranks), sender_that_fails(port, DP2) as group:
        if "before" not in what:
            group.send(make_trace())
        assert ranks[0].result(PROMPTLY_S) == "KeyboardInterrupt: "
        assert f"{ERROR} {THE_RANK}: KeyboardInterrupt" in ranks[1].result(PROMPTLY_S)
        with pytest.raises(TransportError, match=f"{THE_RANK}: KeyboardInterrupt"):
            send_small(group)


def test_who_asks_again_after_a_failure_gets_the_words_of_the_first_one(port: int) -> None:
    def twice(act: Callable[[RouteGroup], Any], **member: Any) -> list[Any]:
        group = join(port, **member)
        return attempts(partial(act, group)) + attempts(partial(act, group))

    sender, rank = in_threads(
        partial(twice, send_small, sender=0),
        partial(twice, lambda group: group.stream(lambda start, trace: refuse()), place=Place()),
    )
    told = f"{THE_RANK}: ValueError: no room for these rows"
    assert sender == [f"{ERROR} {told}", f"{ERROR} this transport is over: {told}"]
    assert rank == ["ValueError: no room for these rows", f"{ERROR} this transport is over: no room for these rows"]


@pytest.mark.parametrize(
    ("error", "says", "is_told"),
    [
        (RuntimeError("gone"), "RuntimeError: gone", "rollout process 0: RuntimeError: gone"),
        (None, f"{ERROR} this transport is over: {CLOSED}", CLOSED),  # it sends no more, either
    ],
    ids=["raises", "closes"],
)
def test_a_sender_that_leaves_ends_the_wait_of_a_rank_with_its_words(
    port: int, error: Exception | None, says: str, is_told: str
) -> None:
    def send_and_leave() -> None:
        with join(port, sender=0) as group:
            send_small(group)
            if error is not None:
                raise error
        group.send(make_trace(400))

    assert attempts(send_and_leave, partial(receive, port, steps=2)) == [says, f"{ERROR} {is_told}"]


def test_different_layouts_are_refused_in_all_processes(port: int) -> None:
    different = ParallelLayout(stage_layers=((1, 2, 3, 5),), dp_size=2)
    for text in attempts(partial(send, port, DP2), partial(receive, port, DP2), partial(receive, port, different, 1)):
        assert text.startswith("TransportError: ")
        assert '"stage_layers": [[1, 2, 3, 4]]' in text
        assert '"stage_layers": [[1, 2, 3, 5]]' in text


def test_senders_that_disagree_make_all_raise(port: int) -> None:
    def send_routes_of_more_experts() -> None:
        trace = make_trace(4)
        with join(port, sender=0, num_senders=2) as group:
            group.send(type(trace)(topk_indices=trace.topk_indices, layer_numbers=LAYERS, num_experts=300))

    two = {"num_senders": 2}
    results = attempts(send_routes_of_more_experts, partial(send, port, sender=1, **two), partial(receive, port, **two))
    assert all("rollout process 1 sends format={'layer_numbers'" in text for text in results), results


def test_a_process_that_never_comes_is_an_error_that_counts(port: int) -> None:
    with pytest.raises(TransportError, match="rollout process 0 cannot begin: 1 of 2 processes came within 2 s"):
        join(port, sender=0, **SHORT)
    with pytest.raises(TransportError, match="rollout process 0 cannot begin"):
        join(port, place=Place(), **SHORT)


def test_a_rank_that_does_not_ask_any_more_runs_out_of_time(port: int) -> None:
    over = threading.Event()

    def send_alone() -> None:
        group = join(port, sender=0)
        group._ready_timeout = timedelta(seconds=2)  # from here on: a busy machine has time to begin
        try:
            send_small(group)
        finally:
            over.set()

    sender, rank = attempts(send_alone, partial(receive, port, before=over.wait))
    assert sender == rank == f"{ERROR} rollout process 0 waited 2 s for a process."


@pytest.mark.parametrize(
    ("hanging", "hears", "waits_for"),
    [
        ("rollout process 0", 1, "rollout process 0"),
        (THE_RANK, 0, THE_RANK),
        ("a rank that has the whole batch", 0, "a process"),
    ],
)
def test_a_peer_that_hangs_in_a_batch_is_noticed_within_timeout(
    port: int, hanging: str, hears: int, waits_for: str
) -> None:
    limits = {"timeout": timedelta(seconds=4)}  # ready_timeout is minutes
    over = threading.Event()

    def told(act: Callable[[], Any]) -> Any:
        try:
            return act()
        finally:
            over.set()

    def hang(*unused: object) -> None:
        over.wait(100)

    def send_a_bucket() -> None:
        with join(port, sender=0, **limits) as group:
            send_small(group)

    def hang_in_it() -> None:
        with join(port, place=Place(), **limits) as group:
            group.stream(hang)

    sender: Callable[[], Any] = partial(send, port, action=hang if hears else None, **limits)
    rank: Callable[[], Any] = partial(receive, port, at_second_bucket=hang if hanging == THE_RANK else None, **limits)
    if waits_for == "a process":
        sender, rank = send_a_bucket, hang_in_it
    began = time.monotonic()
    results = attempts(*(partial(told, act) for act in (sender, rank)))
    assert results[hears].endswith(f" waited 4 s for {waits_for}.")
    assert time.monotonic() - began < PROMPTLY_S


def test_who_has_all_of_a_batch_waits_for_others_whose_buckets_still_move(port: int) -> None:
    limits = {"timeout": timedelta(seconds=4), "bucket_bytes": 33 * 100}
    trace = make_trace(800)

    def slowly(start: int, rows: RoutingTrace) -> None:
        time.sleep(1)

    def send_it() -> None:
        with join(port, DP2, sender=0, **limits) as group:
            group.send(trace, partition=[[0], [1, 2, 3]])  # two buckets, and six

    def take(place: Place) -> None:
        with join(port, DP2, place=place, **limits) as group:
            if place.dp_rank:
                group.stream(slowly)
            else:
                group.receive()

    assert attempts(send_it, *(partial(take, Place(dp_rank=rank)) for rank in range(2))) == [None] * 3


def test_a_name_is_used_once(port: int) -> None:
    in_threads(partial(send, port), partial(receive, port))
    with pytest.raises(TransportError, match="one too many: this name was used before, take a new one"):
        join(port, sender=0)


def test_an_address_of_another_machine_is_refused_with_advice(port: int) -> None:
    advice = r"cannot connect from 192\.0\.2\.1: .* each process gives its own host"
    with children(Child(receive, port)), pytest.raises(TransportError, match=advice):
        join(port, sender=0, host="192.0.2.1")


def listening_addresses() -> set[str]:
    """Return the addresses on which this process accepts connections, as Linux writes them."""
    files = Path("/proc/self/fd").iterdir()
    open_files = {os.readlink(file) for file in files if file.exists()}
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    sockets = [line.split() for table in tables for line in table]
    return {line[1].split(":")[0] for line in sockets if line[3] == "0A" and f"socket:[{line[9]}]" in open_files}


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads Linux' list of sockets")
def test_only_the_loopback_interface_listens_unless_asked() -> None:
    before = listening_addresses()
    store = open_store("127.0.0.1", is_server=True)
    with children(Child(receive, store.port)), join(store.port, sender=0) as group:
        assert listening_addresses() - before <= {"0100007F"}
        assert "0100007F" in listening_addresses()
        group.send(make_trace(400))


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(TransportError, match=f"cannot serve a store on 127.0.0.1:{number}: .*in use"):
            open_store("127.0.0.1", number, is_server=True)


@pytest.mark.parametrize("who", [{}, {"sender": 0, "place": Place()}, {"sender": 1}, {"place": Place(dp_rank=1)}])
def test_a_member_is_a_sender_or_a_place_of_the_layout(who: dict[str, Any]) -> None:
    with pytest.raises(TransportError, match="sender"):
        RouteGroup(None, ONE, **who)


def test_a_sender_does_not_receive_and_a_rank_does_not_send(port: int) -> None:
    def receive_as_sender() -> None:
        join(port, sender=0).receive()

    def send_as_rank() -> None:
        join(port, place=Place()).send(make_trace(4))

    for text in attempts(receive_as_sender, send_as_rank):
        assert "rollout process 0 sends: it does not receive" in text or "is a training rank: it receives" in text


_FORGETFUL = """
from megatron_router_replay.transport import Place, open_store
from tests.functional.transport.processes import in_threads, join, make_trace

port = (store := open_store("127.0.0.1", is_server=True)).port
sender, receiver = in_threads(lambda: join(port, sender=0), lambda: join(port, place=Place()))
sender.send(make_trace(400))
print(len(receiver.receive()))
sender.join()
"""
_WAITS = """
import sys, time

class SlowToGo:
    def __del__(self):
        time.sleep(3)  # in the interpreter's shutdown, where a thread that comes back from C++ aborts the process

sys.slow_to_go = SlowToGo()
sender.send(make_trace(400))
"""
_PROGRAMS = {"not closed": _FORGETFUL, "a send waits": _FORGETFUL + _WAITS}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_a_process_ends_in_peace(name: str) -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAMS[name]], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "400\n"), done.stderr
