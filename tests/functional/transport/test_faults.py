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
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_router_replay.transport import (
    ParallelLayout,
    Place,
    RouteGroup,
    TransportError,
    open_store,
)
from tests.functional.transport.processes import (
    LAYERS,
    LIMITS,
    Child,
    attempts,
    check_sum,
    children,
    die,
    in_threads,
    interrupt,
    make_trace,
    receive,
    refuse,
    send,
    wait_then_interrupt,
)

PROMPTLY_S = 40.0
"""Far below every timeout in LIMITS, and generous on a busy machine."""
ONE = ParallelLayout(stage_layers=(LAYERS,))
TP2_DP2 = ParallelLayout(stage_layers=(LAYERS,), tp_size=2, dp_size=2)
SHORT = {"timeout": timedelta(seconds=2), "ready_timeout": timedelta(seconds=2)}


@pytest.fixture
def port() -> Iterator[int]:
    store = open_store("127.0.0.1", is_server=True)
    yield store.port
    del store  # it served until here


def results_of(doomed: int, *started: Child) -> list[str]:
    """Return what all but the doomed child say, which dies first; all say it within seconds of each other."""
    with children(*started):
        assert started[doomed].died_by() == signal.SIGKILL
        return [child.result(PROMPTLY_S) for number, child in enumerate(started) if number != doomed]


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_training_rank_that_is_killed_in_the_middle_is_told_to_all(port: int, rank: int) -> None:
    ranks = [Child(receive, port, TP2_DP2, i, at_second_bucket=die if i == rank else None) for i in range(4)]
    results = results_of(1 + rank, Child(send, port, TP2_DP2), *ranks)
    place = TP2_DP2.place_of(rank)
    for text in results:
        assert f"lost training rank {place}, which died or closed the connection" in text, results
        assert text.startswith("TransportError: ")
    assert len(set(results)) == 1, "the same words everywhere"


def test_a_rank_that_is_killed_between_idle_ones_is_told_to_one_that_waits(port: int) -> None:
    """In the ring of processes both neighbours of the dead one are busy elsewhere."""
    layout = ParallelLayout(stage_layers=(LAYERS,), dp_size=3)
    deeds = (None, partial(time.sleep, 90), die)
    ranks = [Child(receive, port, layout, rank, before=deed) for rank, deed in enumerate(deeds)]
    store = open_store("127.0.0.1", port, is_server=False)
    with children(*ranks), RouteGroup(store, layout, sender=0, **LIMITS) as group:
        assert ranks[2].died_by() == signal.SIGKILL
        assert "lost training rank dp2/pp0/cp0/tp0, which died or closed" in ranks[0].result(PROMPTLY_S)
        with pytest.raises(TransportError, match="which died or closed the connection"):
            send_and_join(group)
        with pytest.raises(TransportError, match="this transport is over"):
            group.send(make_trace(400))
        group._error = None  # so that the block ends without a word


def test_a_sender_that_is_killed_in_the_middle_of_a_bucket_is_told_to_all(port: int) -> None:
    sender = Child(send, port, TP2_DP2, action=die)
    results = results_of(0, sender, *(Child(receive, port, TP2_DP2, i) for i in range(4)))
    assert all("lost rollout process 0, which died or closed" in text for text in results), results


def serve_and_die(port: int) -> None:
    """Be the rollout process that serves the store, and die while the ranks wait."""
    store = open_store("127.0.0.1", port, is_server=True)
    with RouteGroup(store, ONE, sender=0, **LIMITS):
        time.sleep(2)
        die()


def test_the_process_that_serves_the_store_may_be_the_one_that_is_killed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    results = results_of(0, Child(serve_and_die, number), Child(receive, number, ONE, 0))
    lost = "training rank dp0/pp0/cp0/tp0 lost rollout process 0, which died or closed the connection."
    assert results == [f"TransportError: MRR603: {lost}"]


def test_an_error_of_a_consumer_stays_what_it_is_and_is_told_to_all(port: int) -> None:
    ranks = [partial(receive, port, TP2_DP2, i, at_second_bucket=refuse if i == 2 else None) for i in range(4)]
    results = attempts(partial(send, port, TP2_DP2), *ranks)
    assert results.pop(3) == "ValueError: no room for these rows"
    assert results == ["TransportError: MRR603: training rank dp1/pp0/cp0/tp0: ValueError: no room for these rows"] * 4


def test_an_error_of_a_source_stays_what_it_is_and_is_told_to_all(port: int) -> None:
    ranks = [partial(receive, port, TP2_DP2, i) for i in range(4)]
    first, *others = attempts(partial(send, port, TP2_DP2, action=refuse), *ranks)
    assert first == "ValueError: no room for these rows"
    assert others == ["TransportError: MRR603: rollout process 0: ValueError: no room for these rows"] * 4


@pytest.mark.parametrize("what", [{"before": wait_then_interrupt}, {"at_second_bucket": interrupt}])
def test_ctrl_c_in_receive_or_a_consumer_stays_what_it_is_and_is_told(port: int, what: dict[str, Any]) -> None:
    layout = ParallelLayout(stage_layers=(LAYERS,), dp_size=2)
    ranks = [Child(receive, port, layout, 0, **what), Child(receive, port, layout, 1)]
    store = open_store("127.0.0.1", port, is_server=False)
    with children(*ranks), RouteGroup(store, layout, sender=0, **LIMITS) as group:
        if "before" not in what:
            group.send(make_trace())
        assert ranks[0].result(PROMPTLY_S) == "KeyboardInterrupt: "
        assert "TransportError: MRR603: training rank dp0/pp0/cp0/tp0: KeyboardInterrupt" in ranks[1].result(PROMPTLY_S)
        with pytest.raises(TransportError, match="training rank dp0/pp0/cp0/tp0: KeyboardInterrupt"):
            send_and_join(group)
        group._error = None  # so that the block ends without a word


def test_who_asks_again_after_a_failure_gets_the_words_of_the_first_one(port: int) -> None:
    def twice(act: Callable[[RouteGroup], Any], **member: Any) -> list[Any]:
        group = RouteGroup(open_store("127.0.0.1", port, is_server=False), ONE, **member, **LIMITS)
        return attempts(partial(act, group)) + attempts(partial(act, group))

    sender, rank = in_threads(
        partial(twice, send_and_join, sender=0),
        partial(twice, lambda group: group.stream(lambda start, trace: refuse()), place=Place()),
    )
    told = "training rank dp0/pp0/cp0/tp0: ValueError: no room for these rows"
    assert sender == [f"TransportError: MRR603: {told}", f"TransportError: MRR603: this transport is over: {told}"]
    over = "TransportError: MRR603: this transport is over: no room for these rows"
    assert rank == ["ValueError: no room for these rows", over]


def send_and_join(group: RouteGroup) -> None:
    """Send a small batch and wait for it."""
    group.send(make_trace(400))
    group.join()


def send_and_fail(port: int) -> None:
    """Be a rollout process that fails after a batch, outside of the transport."""
    with RouteGroup(open_store("127.0.0.1", port, is_server=False), ONE, sender=0, **LIMITS) as group:
        send_and_join(group)
        raise RuntimeError("the engine is gone")


def test_an_error_of_the_rollout_side_reaches_a_rank_that_waits(port: int) -> None:
    sender, rank = attempts(partial(send_and_fail, port), partial(receive, port, ONE, 0, steps=2))
    assert sender == "RuntimeError: the engine is gone"
    assert rank == "TransportError: MRR603: rollout process 0: RuntimeError: the engine is gone"


def test_a_process_that_leaves_ends_the_wait_of_the_others(port: int) -> None:
    def send_once() -> None:
        with RouteGroup(open_store("127.0.0.1", port, is_server=False), ONE, sender=0, **LIMITS) as group:
            group.send(make_trace(400))
        group.send(make_trace(400))

    sender, rank = attempts(send_once, partial(receive, port, ONE, 0, steps=2))
    assert sender == "TransportError: MRR603: this transport is over: rollout process 0 closed the transport."
    assert rank == "TransportError: MRR603: rollout process 0 closed the transport."


def test_other_layouts_are_refused_in_all_processes(port: int) -> None:
    layout = ParallelLayout(stage_layers=(LAYERS,), dp_size=2)
    other = ParallelLayout(stage_layers=((1, 2, 3, 5),), dp_size=2)
    results = attempts(partial(send, port, layout), partial(receive, port, layout, 0), partial(receive, port, other, 1))
    for text in results:
        assert text.startswith("TransportError: ")
        assert '"stage_layers": [[1, 2, 3, 4]]' in text
        assert '"stage_layers": [[1, 2, 3, 5]]' in text


def test_senders_that_disagree_make_all_raise(port: int) -> None:
    senders = [partial(send_wide, port), partial(send, port, ONE, sender=1, num_senders=2)]
    results = attempts(*senders, partial(receive, port, ONE, 0, num_senders=2))
    assert all("rollout process 1 sends format={'layer_numbers'" in text for text in results), results


def send_wide(port: int) -> None:
    """Send routes of more experts than the other sender has."""
    trace = make_trace(4)
    wide = type(trace)(topk_indices=trace.topk_indices, layer_numbers=LAYERS, num_experts=300)
    store = open_store("127.0.0.1", port, is_server=False)
    with RouteGroup(store, ONE, sender=0, num_senders=2, **LIMITS) as group:
        group.send(wide)


def test_a_slow_consumer_gets_every_row(port: int) -> None:
    _, sums = in_threads(partial(send, port, ONE), partial(receive, port, ONE, 0, seconds_a_bucket=0.1))
    assert sums == [check_sum(make_trace().topk_indices)]


def test_a_process_that_never_comes_is_an_error_that_counts(port: int) -> None:
    store = open_store("127.0.0.1", port, is_server=False)
    with pytest.raises(TransportError, match="rollout process 0 cannot begin: 1 of 2 processes came within 2 s"):
        RouteGroup(store, ONE, sender=0, **SHORT)
    with pytest.raises(TransportError, match="rollout process 0 cannot begin"):
        RouteGroup(store, ONE, place=Place(), **SHORT)


def test_a_rank_that_does_not_ask_any_more_runs_out_of_time(port: int) -> None:
    over = threading.Event()

    def send_alone() -> None:
        group = RouteGroup(open_store("127.0.0.1", port, is_server=False), ONE, sender=0, **LIMITS)
        group._ready_timeout = timedelta(seconds=2)  # from here on: a busy machine has time to begin
        try:
            send_and_join(group)
        finally:
            over.set()

    sender, rank = attempts(send_alone, partial(receive, port, ONE, 0, before=over.wait))
    assert sender == rank == "TransportError: MRR603: rollout process 0 waited 2 s for a process."


def test_a_name_is_used_once(port: int) -> None:
    in_threads(partial(send, port, ONE, trace=make_trace(400)), partial(receive, port, ONE, 0))
    with pytest.raises(TransportError, match="one too many: this name was used before, take a new one"):
        RouteGroup(open_store("127.0.0.1", port, is_server=False), ONE, sender=0, **LIMITS)


def test_an_address_of_another_machine_is_refused_with_advice(port: int) -> None:
    child = Child(receive, port, ONE, 0)
    store = open_store("127.0.0.1", port, is_server=False)
    with (
        children(child),
        pytest.raises(TransportError, match=r"cannot connect from 192\.0\.2\.1: .* each process gives its own host"),
    ):
        RouteGroup(store, ONE, sender=0, host="192.0.2.1", **LIMITS)


def listening_addresses() -> set[str]:
    """Return the addresses on which this process accepts connections, as Linux writes them."""
    own = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()
    ]
    return {line[1].split(":")[0] for line in lines[1:] if line[3] == "0A" and f"socket:[{line[9]}]" in own}


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads Linux' list of sockets")
def test_only_the_loopback_interface_listens_unless_asked() -> None:
    before = listening_addresses()
    store = open_store("127.0.0.1", is_server=True)
    child = Child(receive, store.port, ONE, 0)
    with children(child), RouteGroup(store, ONE, sender=0, **LIMITS) as group:
        assert listening_addresses() - before <= {"0100007F"}
        assert "0100007F" in listening_addresses()
        group.send(make_trace(400))


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(TransportError, match=f"cannot serve a store on 127.0.0.1:{number}: .*in use"):
            open_store("127.0.0.1", number, is_server=True)


def test_a_member_is_a_sender_or_a_place_of_the_layout() -> None:
    for who in ({}, {"sender": 0, "place": Place()}, {"sender": 1}, {"place": Place(dp_rank=1)}):
        with pytest.raises(TransportError, match="sender"):
            RouteGroup(None, ONE, **who)


def test_a_sender_does_not_receive_and_a_rank_does_not_send(port: int) -> None:
    def receive_as_sender() -> None:
        RouteGroup(open_store("127.0.0.1", port, is_server=False), ONE, sender=0, **LIMITS).receive()

    def send_as_rank() -> None:
        store = open_store("127.0.0.1", port, is_server=False)
        RouteGroup(store, ONE, place=Place(), **LIMITS).send(make_trace(4))

    for text in attempts(receive_as_sender, send_as_rank):
        assert "rollout process 0 sends: it does not receive" in text or "is a training rank: it receives" in text


_FORGETFUL = """
import threading
from megatron_router_replay.transport import Place, RouteGroup, open_store
from tests.functional.transport.processes import LIMITS, make_trace
from tests.functional.transport.test_faults import ONE

store = open_store("127.0.0.1", is_server=True)
groups = {}
thread = threading.Thread(target=lambda: groups.update(sender=RouteGroup(store, ONE, sender=0, **LIMITS)))
thread.start()
receiver = RouteGroup(store, ONE, place=Place(), **LIMITS)
thread.join()
sender = groups["sender"]
sender.send(make_trace(400))
print(len(receiver.receive()))
sender.join()
"""
_CLOSED = "sender.close()\nreceiver.close()\n"
_WAITS = """
import sys, time

class SlowToGo:
    def __del__(self):
        time.sleep(3)  # in the interpreter's shutdown, where a thread that comes back from C++ aborts the process

sys.slow_to_go = SlowToGo()
sender.send(make_trace(400))
"""
_PROGRAMS = {"not closed": _FORGETFUL, "closed": _FORGETFUL + _CLOSED, "a send waits": _FORGETFUL + _WAITS}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_a_process_ends_in_peace(name: str) -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAMS[name]], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "400\n"), done.stderr
