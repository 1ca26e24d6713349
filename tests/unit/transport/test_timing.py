"""What training waited for is visible on the training side."""

from __future__ import annotations

import pytest

from megatron_router_replay.transport import TransportTimes


def line_of(**seconds: float) -> str:
    times = TransportTimes("training")
    times.add(seconds)
    return times.line()


def test_training_names_what_it_waited_for_on_the_rollout_side() -> None:
    line = line_of(training_wait=3.1, rollout_decode=2.8, rollout_send=0.2, rollout_wait=9.0)
    assert line == "routes: training waited 3.1 s, received 0.0 s: rollout side decoding (2.8 s)"


def test_training_that_waited_for_generation_is_not_told_to_fix_the_transport() -> None:
    line = line_of(training_wait=60.0, training_receive=0.5, rollout_decode=0.2, rollout_wait=50.0)
    assert line == "routes: training waited 60.0 s, received 0.5 s: rollout side generating"


def test_metrics_have_the_seconds_of_both_sides() -> None:
    times = TransportTimes("training")
    with times.measure("receive"):
        times.add({"rollout_send": 2.0})
        times.add({"rollout_send": 0.5})
    metrics = times.metrics("t/")
    assert metrics.keys() == {"t/rollout_send_s", "t/training_receive_s"}
    assert metrics["t/rollout_send_s"] == 2.5


def test_what_is_taken_is_counted_once() -> None:
    times = TransportTimes("rollout")
    times.add({"rollout_decode": 1.0})
    assert times.take() == {"rollout_decode": 1.0}
    assert times.take() == {}
    assert times.metrics() == {}


def test_what_raises_is_counted() -> None:
    times = TransportTimes("rollout")
    with pytest.raises(ValueError, match="no"), times.measure("decode"):
        raise ValueError("no")
    assert times.metrics("")["rollout_decode_s"] > 0
