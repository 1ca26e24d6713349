"""A process that fails, leaves, dies or stops ends the waits of all, within the time-outs that were given."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_router_replay.transport import ParallelLayout, Place, RouteGroup, TransportError, open_store
from tests.functional.transport.processes import (
    LAYERS,
    ONE,
    Child,
    attempts,
    children,
    die,
    in_threads,
    join,
    make_trace,
    nothing,
    receive,
    refuse,
    send,
    send_small,
    stop,
)

pytestmark = pytest.mark.slow  # most wait for time-outs
TIMEOUT_S = 5
SLACK_S = 30.0
"""For processes that start on a busy machine."""
LIMITS = {"timeout": timedelta(seconds=TIMEOUT_S), "ready_timeout": timedelta(seconds=SLACK_S)}
DP2 = ParallelLayout(stage_layers=(LAYERS,), dp_size=2)
TP2_DP2 = ParallelLayout(stage_layers=(LAYERS,), tp_size=2, dp_size=2)
ERROR = "TransportError: MRR603:"
THE_RANK = f"training rank {Place()}"
CLOSED = "rollout process 0 closed the transport."


MEMBERS = ("rollout process 0", THE_RANK, f"training rank {Place(tp_rank=1)}")


@pytest.mark.parametrize(
    ("doomed", "end"),
    [(0, stop), (1, die), (1, stop), (2, die)],
    ids=["the sender stops", "a rank that passes on dies", "a rank that passes on stops", "the last of a chain dies"],
)
def test_a_process_killed_or_stopped_in_a_batch_ends_all_within_the_timeout(
    port: int, doomed: int, end: Callable[[], None]
) -> None:
    sender = Child(send, port, TP2_DP2, action=end if doomed == 0 else nothing, **LIMITS)
    ranks = [
        Child(receive, port, TP2_DP2, i, at_second_bucket=end if doomed == 1 + i else None, **LIMITS) for i in range(4)
    ]
    started = [sender, *ranks]
    with children(*started):
        began = time.monotonic()
        results = [child.result(SLACK_S + 2 * TIMEOUT_S) for child in started if child is not started[doomed]]
        assert time.monotonic() - began < SLACK_S + 2 * TIMEOUT_S
    assert len(set(results)) == 1, "the same words everywhere"
    assert results[0].startswith(ERROR)
    # Processes that wait for a stopped one, and those that wait for them, run out of time together.
    words = f"lost {MEMBERS[doomed]}: " if end is die else f"(did not move a batch within|waited) {TIMEOUT_S} s"
    assert re.search(words, results[0])


def test_a_rank_that_dies_between_batches_is_named_within_the_ready_timeout(port: int) -> None:
    limits = LIMITS | {"ready_timeout": timedelta(seconds=TIMEOUT_S)}
    ranks = [Child(receive, port, DP2, 0, steps=2, **limits), Child(receive, port, DP2, 1, after=die, **limits)]

    def send_two() -> None:
        with join(port, DP2, sender=0, **limits) as group:
            send_small(group)
            ranks[1].process.join(30)
            assert ranks[1].process.exitcode == -signal.SIGKILL
            send_small(group)

    with children(*ranks):
        text = f"waited {TIMEOUT_S} s for training rank {Place(dp_rank=1)}."
        assert attempts(send_two)[0].endswith(text)
        assert ranks[0].result(SLACK_S).endswith(text)


def test_a_rank_that_dies_between_batches_is_missed_long_before_the_ready_timeout(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_router_replay.transport.group._BEAT_S", 0.2)
    monkeypatch.setattr("megatron_router_replay.transport.group._SILENT_S", SLACK_S)
    limits = LIMITS | {"ready_timeout": timedelta(hours=2)}
    rank = Child(receive, port, ONE, 0, after=die, **limits)

    def send_two() -> None:
        with join(port, sender=0, **limits) as group:
            send_small(group)
            rank.process.join(30)
            monkeypatch.setattr("megatron_router_replay.transport.group._SILENT_S", 1.0)
            send_small(group)

    with children(rank):
        (text,) = attempts(send_two)
    assert text.endswith(f"rollout process 0 waits for {THE_RANK}, which was killed or stopped: no sign for 1 s.")


def test_a_process_that_is_long_in_its_rollout_is_waited_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_router_replay.transport.group._BEAT_S", 0.05)
    monkeypatch.setattr("megatron_router_replay.transport.group._SILENT_S", 1.0)

    def send_late() -> None:
        with join(port, sender=0) as group:
            time.sleep(3)
            send_small(group)

    def wait() -> None:
        with join(port, place=Place()) as group:
            assert group.receive().num_tokens

    assert attempts(send_late, wait) == [None, None]


def test_a_process_that_waits_names_the_one_that_does_not_come(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("megatron_router_replay.transport.group._WAIT_LINE_S", 0.5)
    (text,) = attempts(lambda: join(port, sender=0, ready_timeout=timedelta(seconds=2)))
    assert text.endswith(f"waited 2 s for {THE_RANK}.")
    assert f"rollout process 0 waits for {THE_RANK}, 1 s of ready_timeout=2 s" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "MRR601: sender=None and place=None: a rollout process gives sender=, a training rank place=layout"),
        ({"sender": 0, "place": Place()}, "MRR601: sender=0 and place="),
        ({"sender": 1}, "MRR601: there is no sender=1 of num_senders=1"),
        ({"place": 0}, r"MRR601: there is no place=0 .*place=layout.place_of\(rank\)"),
        ({"sender": 0, "ready_timeout": 60}, "MRR601: .*ready_timeout=60 must be a datetime.timedelta"),
    ],
)
def test_arguments_that_fit_no_process_say_which_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TransportError, match=message):
        RouteGroup(None, ONE, **options)


def test_a_store_that_nobody_serves_is_an_error_with_a_code() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    with pytest.raises(
        TransportError, match=rf"MRR602: no store answers on 127.0.0.1:{number} within 1 s: .*is_server=True"
    ):
        open_store("127.0.0.1", number, is_server=False, timeout=timedelta(seconds=1))


def serve_and_die(port: int) -> None:
    """Be the rollout process that serves the store, and die while the ranks wait."""
    store = open_store("127.0.0.1", port, is_server=True)
    with join(store.port, sender=0, **LIMITS):
        time.sleep(2)
        die()


def test_the_process_that_serves_the_store_may_be_the_one_that_is_killed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    server, rank = Child(serve_and_die, number), Child(receive, number, **LIMITS)
    with children(server, rank):
        assert rank.result(2 * SLACK_S).startswith(f"{ERROR} {THE_RANK} lost the store: ")


@pytest.mark.parametrize(
    ("failing", "member"),
    [(0, "rollout process 0"), (3, "training rank dp1/pp0/cp0/tp0")],
    ids=["of a source", "of a consumer"],
)
def test_an_error_stays_what_it_is_and_is_raised_by_all(port: int, failing: int, member: str) -> None:
    ranks = [
        partial(receive, port, TP2_DP2, i, at_second_bucket=refuse if failing == 1 + i else None) for i in range(4)
    ]
    results = attempts(partial(send, port, TP2_DP2, action=nothing if failing else refuse), *ranks)
    assert results.pop(failing) == "ValueError: no room for these rows"
    assert results == [f"{ERROR} {member}: ValueError: no room for these rows"] * 4


def test_a_second_attempt_after_a_failure_raises_the_words_of_the_first(port: int) -> None:
    def twice(act: Callable[[RouteGroup], Any], **member: Any) -> list[Any]:
        group = join(port, **member)
        return attempts(partial(act, group)) + attempts(partial(act, group))

    sender, rank = in_threads(
        partial(twice, send_small, sender=0),
        partial(twice, lambda group: group.stream(lambda start, trace: refuse()), place=Place()),
    )
    words = f"{ERROR} {THE_RANK}: ValueError: no room for these rows"
    assert sender == [words, words]
    assert rank == ["ValueError: no room for these rows", words]


@pytest.mark.parametrize(
    ("error", "raised", "elsewhere"),
    [
        (RuntimeError("gone"), "RuntimeError: gone", "rollout process 0: RuntimeError: gone"),
        (None, f"{ERROR} {CLOSED}", CLOSED),  # it sends no more, either
    ],
    ids=["raises", "closes"],
)
def test_a_sender_that_leaves_ends_the_wait_of_a_rank_with_its_words(
    port: int, error: Exception | None, raised: str, elsewhere: str
) -> None:
    def send_and_leave() -> None:
        with join(port, sender=0) as group:
            send_small(group)
            if error is not None:
                raise error
        group.send(make_trace(400))

    assert attempts(send_and_leave, partial(receive, port, steps=2)) == [raised, f"{ERROR} {elsewhere}"]


def test_a_process_that_closes_at_once_ends_no_batch_that_has_arrived(port: int) -> None:
    def receive_slowly() -> int:
        with join(port, place=Place()) as group:
            connections: Any = group._connections
            look = connections.raise_if_failed

            def look_slowly() -> None:
                time.sleep(0.5)  # as on a busy machine: the sender leaves in this time
                look()

            connections.raise_if_failed = look_slowly
            return group.receive().num_tokens

    def send_late() -> None:
        with join(port, sender=0) as group:
            time.sleep(1)
            group.send(make_trace(400))

    assert attempts(send_late, receive_slowly) == [None, 400]


def test_processes_that_disagree_all_raise(port: int) -> None:
    different = ParallelLayout(stage_layers=((1, 2, 3, 5),), dp_size=2)
    for text in attempts(partial(send, port, DP2), partial(receive, port, DP2), partial(receive, port, different, 1)):
        assert re.match(r'TransportError: MRR602: .*"stage_layers": \[\[1, 2, 3, [45]\]\].*another process has', text)


def test_senders_of_different_formats_all_raise(port: int) -> None:
    def send_as(sender: int, num_experts: int) -> None:
        with join(port, sender=sender, num_senders=2) as group:
            group.send(make_trace(4, num_experts=num_experts))

    results = attempts(partial(send_as, 0, 300), partial(send_as, 1, 128), partial(receive, port, num_senders=2))
    assert all("rollout process 1 sends format={'layer_numbers'" in text for text in results), results


def test_a_process_that_never_comes_is_named(port: int) -> None:
    with pytest.raises(TransportError, match=f"MRR603: rollout process 0 waited 2 s for {THE_RANK}."):
        join(port, sender=0, ready_timeout=timedelta(seconds=2))


def test_a_process_that_does_not_ask_any_more_is_named(port: int) -> None:
    over = threading.Event()

    def send_alone() -> None:
        group = join(port, sender=0)
        group._ready_timeout = timedelta(seconds=2)  # from here on: a busy machine has time to begin
        try:
            send_small(group)
        finally:
            over.set()

    sender, rank = attempts(send_alone, partial(receive, port, before=over.wait))
    assert sender == rank == f"{ERROR} rollout process 0 waited 2 s for {THE_RANK}."


def test_a_consumer_that_hangs_with_the_whole_batch_ends_all_within_timeout(port: int) -> None:
    limits = {"timeout": timedelta(seconds=4)}  # ready_timeout is minutes
    over = threading.Event()

    def send_a_bucket() -> None:
        try:
            send_small(join(port, sender=0, **limits))
        finally:
            over.set()

    def hang() -> None:
        join(port, place=Place(), **limits).stream(lambda start, trace: over.wait(100))

    began = time.monotonic()
    assert attempts(send_a_bucket, hang) == [f"{ERROR} rollout process 0 waited 4 s for {THE_RANK}."] * 2
    assert time.monotonic() - began < SLACK_S


def test_a_store_has_one_transport(port: int) -> None:
    in_threads(partial(send, port), partial(receive, port))
    with pytest.raises(
        TransportError, match="MRR602: rollout process 0 is one too many: this store had a transport before"
    ):
        join(port, sender=0)


def listening_addresses() -> set[str]:
    """Return the addresses on which this process accepts connections, as Linux writes them."""
    files = Path("/proc/self/fd").iterdir()
    open_files = {os.readlink(file) for file in files if file.exists()}
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    sockets = [line.split() for table in tables for line in table]
    return {line[1] for line in sockets if line[3] == "0A" and f"socket:[{line[9]}]" in open_files}


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads Linux' list of sockets")
def test_a_store_listens_on_the_address_that_is_given_alone() -> None:
    before = listening_addresses()
    store = open_store("127.0.0.1", is_server=True)
    assert listening_addresses() - before == {f"0100007F:{store.port:04X}"}
    with pytest.raises(TransportError, match=f"MRR602: cannot serve a store on 127.0.0.1:{store.port}: .*in use"):
        open_store("127.0.0.1", store.port, is_server=True)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "a rollout process gives sender=, a training rank place="),
        ({"sender": 0, "place": Place()}, "a rollout process gives sender=, a training rank place="),
        ({"sender": 1}, "there is no sender=1 of num_senders=1"),
        ({"place": Place(dp_rank=1)}, r"there is no place=Place\(dp_rank=1, .* give place=layout.place_of"),
    ],
)
def test_options_that_make_no_member_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(TransportError, match=f"MRR601: .*{told}"):
        RouteGroup(None, ONE, **options)


def test_a_sender_does_not_receive_and_a_rank_does_not_send(port: int) -> None:
    sender, rank = in_threads(partial(join, port, sender=0), partial(join, port, place=Place()))
    with pytest.raises(TransportError, match="MRR601: rollout process 0 sends: it does not receive"):
        sender.receive()
    with pytest.raises(TransportError, match="MRR601: rollout process 0 sends"):
        rank.send(make_trace(4))


def test_what_is_no_store_no_layout_and_no_time_is_named(port: int) -> None:
    with pytest.raises(TransportError, match="MRR601: the store must be one of open_store, got str"):
        RouteGroup("127.0.0.1:29400", ONE, sender=0)
    layout: Any = {"dp_size": 1}
    with pytest.raises(TransportError, match="MRR601: the layout must be a ParallelLayout, got dict"):
        RouteGroup(None, layout, sender=0)
    with pytest.raises(TransportError, match=r"MRR601: timeout=30 must be a datetime\.timedelta"):
        open_store("127.0.0.1", port, is_server=False, timeout=30)  # type: ignore[arg-type]


def test_a_process_that_can_start_no_thread_ends_all_and_waits_for_nothing(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, rank = in_threads(partial(join, port, sender=0), partial(join, port, place=Place()))

    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")  # Python's words where the limit of processes is reached

    monkeypatch.setattr("megatron_router_replay.transport.collective.Thread", Refused)
    words = "rollout process 0: RuntimeError: can't start new thread"
    with pytest.raises(RuntimeError, match="can't start new thread"):
        sender.send(make_trace(4))
    joined = threading.Thread(target=sender.join, daemon=True)
    joined.start()
    joined.join(TIMEOUT_S)
    assert not joined.is_alive()  # nothing is sent
    for act in (rank.receive, partial(sender.send, make_trace(4))):
        with pytest.raises(TransportError, match=words):
            act()


@pytest.mark.parametrize("traces", [{"choices": []}, [{"choices": []}]], ids=["a reply", "replies"])
def test_a_reply_is_not_sent(port: int, traces: Any) -> None:
    sender, _ = in_threads(lambda: join(port, sender=0), lambda: join(port, place=Place()))
    with pytest.raises(TransportError, match="MRR601: cannot send a dict: decode a reply first"):
        sender.send(traces)


_NOT_CLOSED = """
import sys, time
from megatron_router_replay.transport import Place, open_store
from tests.functional.transport.processes import in_threads, join, make_trace

class SlowToGo:
    def __del__(self):
        time.sleep(3)  # in the interpreter's shutdown, where a thread that comes back from C++ aborts the process

sys.slow_to_go = SlowToGo()
port = (store := open_store("127.0.0.1", is_server=True)).port
sender, receiver = in_threads(lambda: join(port, sender=0), lambda: join(port, place=Place()))
sender.send(make_trace(400))
print(receiver.receive().num_tokens)
sender.join()
sender.send(make_trace(400))
"""


def test_a_process_ends_in_peace_with_a_transport_open_and_a_send_that_waits() -> None:
    options: dict[str, Any] = {"cwd": Path(__file__).parents[3], "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-c", _NOT_CLOSED], **options)
    assert (done.returncode, done.stdout) == (0, "400\n"), done.stderr
