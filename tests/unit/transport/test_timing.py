"""The leg to fix is visible from either side."""

from __future__ import annotations

import threading
import time

import pytest

from megatron_router_replay.transport import LegTimes


def test_training_names_the_leg_on_the_rollout_side_that_it_waited_for() -> None:
    rollout, training = LegTimes("rollout"), LegTimes("training")
    rollout.add("decode", 2.8, 1_400_000_000)
    rollout.add("send", 0.2, 1_400_000_000)
    training.add_peer(rollout.take_unreported())
    training.add("wait", 3.1)
    training.add("receive", 0.3, 1_400_000_000)
    assert training.line() == "routes: training waited 3.1 s: rollout side decoding (2.8 s, 0.50 GB/s)"


def test_training_that_waited_for_generation_is_not_told_to_fix_the_transport() -> None:
    training = LegTimes("training")
    training.add_peer({"decode": (0.2, 100)})
    training.add("wait", 60.0)
    assert training.line() == "routes: training waited 60.0 s: rollout side generating"


def test_rollout_sees_that_training_did_not_ask() -> None:
    rollout = LegTimes("rollout")
    rollout.add("wait", 5.0)
    assert rollout.line() == "routes: rollout waited 5.0 s: training side not asking for routes yet"


def test_a_side_that_did_not_wait_names_its_own_slowest_leg() -> None:
    training = LegTimes("training")
    training.add("wait", 0.1)
    training.add("receive", 2.0, 3_000_000_000)
    assert training.line() == "routes: training spent receiving (2.0 s, 1.50 GB/s), waited 0.1 s"


def test_metrics_have_seconds_and_rates_of_both_sides() -> None:
    times = LegTimes("rollout")
    times.add("send", 2.0, 4_000_000_000)
    times.add_peer({"wait": (1.0, 0)})
    assert times.metrics("t/") == {"t/rollout_send_s": 2.0, "t/rollout_send_gb_per_s": 2.0, "t/training_wait_s": 1.0}


def test_what_is_reported_is_what_came_since_the_last_report() -> None:
    times = LegTimes("rollout")
    times.add("decode", 1.0, 10)
    assert times.take_unreported() == {"decode": (1.0, 10)}
    times.add("decode", 0.5, 5)
    assert times.take_unreported() == {"decode": (0.5, 5)}
    assert times.take_unreported() == {}


def test_a_reset_loses_nothing_that_the_other_side_has_not_heard() -> None:
    times = LegTimes("training")
    times.add("wait", 2.0)
    times.add_peer({"decode": (1.0, 10)})
    times.reset()
    assert times.metrics("") == {}
    times.add("wait", 0.5)
    assert times.metrics("") == {"training_wait_s": 0.5}
    assert times.take_unreported() == {"wait": (2.5, 0)}


def test_a_report_does_not_change_any_more() -> None:
    times = LegTimes("training")
    times.add("wait", 2.0)
    report = times.report()
    times.add("wait", 1.0)
    assert report.to_dict() == {
        "line": "routes: training waited 2.0 s: rollout side generating",
        "training_wait_s": 2.0,
    }
    assert report.metrics("a/") == {"a/training_wait_s": 2.0}


def test_threads_on_one_leg_count_their_wall_time_once() -> None:
    times = LegTimes("rollout")

    def work() -> None:
        with times.measure("decode", 7):
            time.sleep(0.3)

    began = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Added up, eight would be 2.4 s, more than went by.
    assert 0.25 < times.metrics("")["rollout_decode_s"] <= time.perf_counter() - began
    assert times.take_unreported()["decode"][1] == 56


def test_a_leg_that_raises_is_counted() -> None:
    times = LegTimes("rollout")
    with pytest.raises(ValueError, match="no"), times.measure("decode"):
        raise ValueError("no")
    assert times.metrics("")["rollout_decode_s"] > 0
