"""What training waited for is visible on the training side."""

from __future__ import annotations

import pytest

from megatron_router_replay.transport import TransportTimes


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        (
            {"training_wait": 3.1, "rollout_decode": 2.8, "rollout_send": 0.2, "rollout_wait": 9.0},
            "routes: training waited 3.1 s, received 0.0 s: rollout side decoding (2.8 s)",
        ),
        (
            {"training_wait": 60.0, "training_receive": 0.5, "rollout_decode": 0.2, "rollout_wait": 50.0},
            "routes: training waited 60.0 s, received 0.5 s: rollout side generating",
        ),
    ],
    ids=["the transport", "generation"],
)
def test_training_names_what_it_waited_for_on_the_rollout_side(seconds: dict[str, float], line: str) -> None:
    times = TransportTimes("training")
    times.add(seconds)
    assert times.line() == line


def test_seconds_of_both_sides_are_added_up_also_of_what_raises_and_taken_once() -> None:
    times = TransportTimes("training")
    times.add({"rollout_send": 2.0})
    times.add({"rollout_send": 0.5})
    with pytest.raises(ValueError, match="no"), times.measure("receive"):
        raise ValueError("no")
    metrics = times.metrics("t/")
    assert metrics.keys() == {"t/rollout_send_s", "t/training_receive_s"}
    assert metrics["t/rollout_send_s"] == 2.5
    assert metrics["t/training_receive_s"] > 0
    assert times.take()["rollout_send"] == 2.5
    assert times.take() == times.metrics() == {}
