"""What goes wrong on the way ends in an error on both sides that says where, or in a wait that is right; never in a hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_router_replay import RoutingTrace
from megatron_router_replay.transport import (
    DistributedReceiver,
    DistributedSender,
    ParallelLayout,
    TraceFormat,
    TransportError,
    open_store,
    plan_routes,
)
from tests.functional.transport.processes import (
    BUCKET,
    LAYERS,
    LIMITS,
    ONE,
    SHORT,
    Child,
    DyingRows,
    check_sum,
    children,
    make_trace,
    receive,
    send_and_die,
)

PROMPTLY_S = 15.0
"""Far below every timeout in LIMITS but the one for messages, and generous on a busy machine."""


@pytest.fixture(autouse=True)
def _loopback() -> Iterator[None]:
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    if os.path.exists("/sys/class/net/lo"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    yield
    if before is None:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = before


def _sender(store: Any, layout: ParallelLayout = ONE, limits: dict[str, Any] = LIMITS) -> DistributedSender:
    return DistributedSender(store, layout, bucket_bytes=BUCKET, **limits)


@pytest.mark.parametrize("when", ["second bucket", "connected"])
def test_a_receiver_that_dies_makes_the_sender_raise(when: str) -> None:
    trace = make_trace()
    store = open_store("127.0.0.1", is_server=True)
    child = Child(receive, store.port, ONE, 0, {"die": when})
    sender = _sender(store)
    with children(child):
        sender.send(trace)
        assert child.wait_for("started") is None
        assert child.died_by() == signal.SIGKILL
        began = time.monotonic()
        with pytest.raises(TransportError, match=r"to dp0/pp0/cp0/tp0: .* of 13,200,000 bytes.*died or closed"):
            sender.join()
        assert time.monotonic() - began < PROMPTLY_S
        with pytest.raises(TransportError, match="failed before"):
            sender.send(trace)


def test_a_receiver_that_dies_leaves_the_others_their_rows() -> None:
    layout = ParallelLayout(stage_layers=(LAYERS,), dp_size=2)
    trace = make_trace()
    store = open_store("127.0.0.1", is_server=True)
    dying, living = (
        Child(receive, store.port, layout, 0, {"die": "second bucket"}),
        Child(receive, store.port, layout, 1, {}),
    )
    sender = _sender(store, layout)
    with children(dying, living):
        plan = sender.send(trace)
        living.wait_for("started")
        rows = torch.cat([torch.arange(a, b) for a, b in plan.part(layout.place_of(1)).runs.tolist()])
        assert living.result() == [check_sum(trace.topk_indices[rows])]
        with pytest.raises(TransportError, match="dp0/pp0"):
            sender.join()


def test_a_sender_that_dies_in_the_middle_of_a_bucket_makes_every_rank_raise() -> None:
    layout = ParallelLayout(stage_layers=(LAYERS,), tp_size=2)
    store = open_store("127.0.0.1", is_server=True)
    # One bucket on the wire, the second never comes; tp1 hears of it through tp0.
    child = Child(send_and_die, store.port, layout, 8 << 20)
    ranks = [Child(receive, store.port, layout, rank, {}) for rank in range(2)]
    with children(child, *ranks):
        for rank in ranks:
            rank.wait_for("started")
        assert child.died_by() == signal.SIGKILL
        texts = [rank.result(PROMPTLY_S) for rank in ranks]
    assert all("TransportError: training side, step 0, dp0/pp0/cp0/tp" in text for text in texts), texts
    assert all("receiving" in text and "of 13,200,000 bytes" in text for text in texts), texts
    assert "died or closed the connection" in texts[0]
    assert "the other side failed: training side, step 0, dp0/pp0/cp0/tp0" in texts[1]


def test_a_rank_of_the_tp_group_that_dies_makes_the_sender_raise() -> None:
    layout = ParallelLayout(stage_layers=(LAYERS,), tp_size=2)
    store = open_store("127.0.0.1", is_server=True)
    first, second = (
        Child(receive, store.port, layout, 0, {}),
        Child(receive, store.port, layout, 1, {"die": "second bucket"}),
    )
    sender = _sender(store, layout)
    with children(first, second):
        sender.send(make_trace())
        with pytest.raises(TransportError, match="the other side failed: training side, step 0, dp0/pp0/cp0/tp0"):
            sender.join()
        first.wait_for("started")
        assert "died or closed the connection" in first.result(PROMPTLY_S)


def test_an_error_in_the_senders_rows_reaches_the_receiver() -> None:
    store = open_store("127.0.0.1", is_server=True)
    child = Child(receive, store.port, ONE, 0, {})
    rows = DyingRows([make_trace()])
    rows.how = "raise"
    sender = _sender(store)
    with children(child):
        sender.send(rows)
        with pytest.raises(TransportError, match="ValueError: the rows are gone"):
            sender.join()
        child.wait_for("started")
        assert "the other side failed: rollout side, step 0" in (text := child.result(PROMPTLY_S))
        assert "ValueError: the rows are gone" in text


def test_an_error_in_the_receiver_reaches_the_sender() -> None:
    store = open_store("127.0.0.1", is_server=True)
    child = Child(receive, store.port, ONE, 0, {"raise": "second bucket"})
    sender = _sender(store)
    with children(child):
        sender.send(make_trace())
        with pytest.raises(TransportError, match=r"the other side failed: training side.*ZeroDivisionError"):
            sender.join()


def test_an_error_while_decoding_reaches_a_receiver_that_waits() -> None:
    trace = make_trace(400)
    store = open_store("127.0.0.1", is_server=True)
    child = Child(receive, store.port, ONE, 0, {"steps": 2})
    with children(child):
        with pytest.raises(RuntimeError, match="the engine is gone"):
            _send_once_and_fail(store, trace)
        child.wait_for("started")
        assert "rollout side: RuntimeError: the engine is gone" in child.result(PROMPTLY_S)


def _send_once_and_fail(store: Any, trace: RoutingTrace) -> None:
    with _sender(store) as sender:
        sender.send(trace)
        sender.join()
        raise RuntimeError("the engine is gone")


def test_sides_that_disagree_on_sizes_both_raise_and_name_both() -> None:
    trace = make_trace()
    other = plan_routes((400_001,), layout=ONE, format=TraceFormat.of(trace))
    store = open_store("127.0.0.1", is_server=True)
    child = Child(receive, store.port, ONE, 0, {"plan": other})
    sender = _sender(store)
    with children(child):
        sender.send(trace)
        with pytest.raises(TransportError, match=r"num_rows=400001, the rollout side sends num_rows=400000"):
            sender.join()
        child.wait_for("started")
        assert "num_rows=400001, the rollout side sends num_rows=400000" in child.result(PROMPTLY_S)


def test_sides_that_disagree_on_the_layers_of_a_stage_both_raise() -> None:
    store = open_store("127.0.0.1", is_server=True)
    child = Child(receive, store.port, ParallelLayout(stage_layers=((1, 2, 3, 5),)), 0, {})
    sender = _sender(store)
    with children(child):
        sender.send(make_trace())
        with pytest.raises(
            TransportError,
            match=r"rollout side has stage_layers=\[\[1, 2, 3, 4\]\]; the training side has .*\[\[1, 2, 3, 5\]\]",
        ):
            sender.join()
        child.wait_for("started")
        assert "the training side has stage_layers=[[1, 2, 3, 5]]" in child.result(PROMPTLY_S)


def test_send_returns_at_once_and_a_slow_receiver_still_gets_every_row() -> None:
    trace = make_trace()
    store = open_store("127.0.0.1", is_server=True)
    child = Child(receive, store.port, ONE, 0, {"waits_for": "it was sent", "slow": 0.1})
    sender = _sender(store)
    with children(child):
        sender.send(trace)  # nobody listens before the word of the next lines
        time.sleep(2)
        open_store("127.0.0.1", store.port, is_server=False).set("it was sent", "")
        sender.join()
        child.wait_for("started")
        assert child.result() == [check_sum(trace.topk_indices)]
    assert sender.times.metrics("")["rollout_wait_s"] > 0.5


def test_a_second_send_waits_for_the_first_and_rows_do_not_mix() -> None:
    traces = [make_trace(seed=seed) for seed in range(3)]
    store = open_store("127.0.0.1", is_server=True)
    child = Child(receive, store.port, ONE, 0, {"waits_for": "word", "steps": 3})
    words = open_store("127.0.0.1", store.port, is_server=False)
    given = threading.Event()

    def give_the_word() -> None:
        given.set()
        words.set("word", "")

    sender = _sender(store)
    with children(child):
        child.wait_for("started")
        sender.send(traces[0])
        threading.Timer(1.0, give_the_word).start()
        sender.send(traces[1])
        assert given.is_set(), "the second send waited for the first to be received"
        sender.send(traces[2])
        sender.join()
        assert child.result() == [check_sum(trace.topk_indices) for trace in traces]


def test_a_receiver_that_never_comes_is_an_error_and_so_is_a_sender() -> None:
    store = open_store("127.0.0.1", is_server=True)
    sender = _sender(store, limits=SHORT)
    sender.send(make_trace(400))
    began = time.monotonic()
    with pytest.raises(TransportError, match=r"cannot connect routes/dp0/pp0/cp0/tp0: nothing came .* within 2 s"):
        sender.join()
    receiver = DistributedReceiver(store, ONE, ONE.place_of(0), name="another", **SHORT)
    with pytest.raises(TransportError, match=r"cannot connect another/dp0/pp0/cp0/tp0: nothing came .* within 2 s"):
        receiver.receive()
    assert time.monotonic() - began < 2 * PROMPTLY_S


def test_a_receiver_that_stops_asking_runs_out_of_the_senders_time() -> None:
    trace = make_trace(400)
    store = open_store("127.0.0.1", is_server=True)
    child = Child(receive, store.port, ONE, 0, {"steps": 1, "limits": SHORT})
    sender = _sender(store, limits=SHORT)
    with children(child):
        child.wait_for("started")
        sender.send(trace)
        assert child.result() == [check_sum(trace.topk_indices)]
        sender.join()
        sender.send(trace)
        with pytest.raises(TransportError, match=r"step 1.*waiting for the training side's request"):
            sender.join()


def _wait_until_gone(names: set[str]) -> None:
    deadline = time.monotonic() + PROMPTLY_S
    while (left := names & {thread.name for thread in threading.enumerate()}) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == set()


def test_close_ends_a_send_that_waits_for_a_receiver_and_tells_one_that_comes_late() -> None:
    store = open_store("127.0.0.1", is_server=True)
    sender = _sender(store)
    sender.send(make_trace(400))
    sender.close()
    with pytest.raises(TransportError):
        sender.send(make_trace(400))
    _wait_until_gone({"routes-dp0/pp0/cp0/tp0"})
    late = DistributedReceiver(store, ONE, ONE.place_of(0), **LIMITS)
    began = time.monotonic()
    with pytest.raises(
        TransportError, match="the other side left before it was met: rollout side: TransportError: it was closed"
    ):
        late.receive()
    assert time.monotonic() - began < PROMPTLY_S


def test_close_ends_a_posted_receive_and_tells_a_sender_that_comes_late() -> None:
    store = open_store("127.0.0.1", is_server=True)
    receiver = DistributedReceiver(store, ONE, ONE.place_of(0), **LIMITS)
    receiver.post()
    deadline = time.monotonic() + PROMPTLY_S
    while not store.check(["routes/dp0/pp0/cp0/tp0/here/1"]):
        assert time.monotonic() < deadline, "the posted receive did not come to the store"
        time.sleep(0.05)
    receiver.close()
    with pytest.raises(TransportError, match="it was closed"):
        receiver.receive()
    _wait_until_gone({"routes-receive"})
    sender = _sender(store)
    sender.send(make_trace(400))
    began = time.monotonic()
    with pytest.raises(
        TransportError, match=r"the other side left before it was met: training side, dp0/pp0/cp0/tp0.*it was closed"
    ):
        sender.join()
    assert time.monotonic() - began < PROMPTLY_S


_FORGETFUL = """
from megatron_router_replay.transport import DistributedReceiver, DistributedSender, open_store
from tests.functional.transport.processes import LIMITS, ONE, make_trace

store = open_store("127.0.0.1", is_server=True)
sender = DistributedSender(store, ONE, **LIMITS)
receiver = DistributedReceiver(store, ONE, ONE.place_of(0), **LIMITS)
sender.send(make_trace(400))
print(len(receiver.receive()))
sender.join()
"""


_ALONE = """
import sys, time
from datetime import timedelta
from megatron_router_replay.transport import DistributedSender, open_store
from tests.functional.transport.processes import ONE, make_trace

class SlowToGo:
    def __del__(self):
        time.sleep(5)  # in the interpreter's shutdown, where a thread that comes back from C++ aborts the process

sys.slow_to_go = SlowToGo()
store = open_store("127.0.0.1", is_server=True)
sender = DistributedSender(store, ONE, ready_timeout=timedelta(seconds=2))
sender.send(make_trace(400))
"""


_PROGRAMS = {"not closed": _FORGETFUL, "closed": _FORGETFUL + "sender.close(); receiver.close()", "alone": _ALONE}


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Interpreters that run one program each, at the same time: they wait more than they work."""
    root = Path(__file__).parents[3]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = {
        name: subprocess.Popen([sys.executable, "-c", code], cwd=root, **pipes) for name, code in _PROGRAMS.items()
    }
    yield processes
    for process in processes.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize(("name", "printed"), [("not closed", "400\n"), ("closed", "400\n"), ("alone", "")])
def test_a_process_ends_in_peace_closed_or_not_and_while_a_send_waits(
    programs: dict[str, subprocess.Popen[str]], name: str, printed: str
) -> None:
    output, errors = programs[name].communicate(timeout=120)
    assert (programs[name].returncode, output) == (0, printed), errors
