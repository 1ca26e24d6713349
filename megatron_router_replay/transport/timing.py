"""Seconds of each step from engine to router, and the step that training waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

Side = Literal["rollout", "training"]
Activity = Literal["collect", "decode", "send", "receive", "wait"]

_DOING = {
    "rollout_collect": "collecting from the engines",
    "rollout_decode": "decoding",
    "rollout_send": "sending",
}


class TransportTimes:
    """Count the wall-clock seconds of each activity of a process.

    Args:
        side: which side of the transport this process is.

    Every transfer takes the rollout side's seconds along to training, which names the activity that it waited for.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self._lock = threading.Lock()  # a batch is sent in a thread of its own
        self._seconds: dict[str, float] = {}  # by side and activity

    @contextmanager
    def measure(self, activity: Activity) -> Iterator[None]:
        """Count the time of this block, also if it raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add({f"{self._side}_{activity}": time.perf_counter() - began})

    def add(self, seconds: Mapping[str, float]) -> None:
        """Count the seconds of another process, as its `take` returned them."""
        with self._lock:
            for name, value in seconds.items():
                self._seconds[name] = self._seconds.get(name, 0.0) + value

    def take(self) -> dict[str, float]:
        """Return the seconds counted so far, and start again from zero."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return seconds

    def metrics(self) -> dict[str, float]:
        """Return `router_replay/transport/<side>_<activity>_s` for a training logger."""
        with self._lock:
            return {f"router_replay/transport/{name}_s": value for name, value in self._seconds.items()}

    def line(self) -> str:
        """Return a line for a log: seconds of training's wait, and the rollout's activity."""
        with self._lock:
            seconds = {"training_wait": 0.0, "training_receive": 0.0, **dict.fromkeys(_DOING, 0.0), **self._seconds}
        waited = seconds["training_wait"]
        text = f"routes: training waited {waited:.1f} s, received {seconds['training_receive']:.1f} s: rollout side"
        busy = max(_DOING, key=seconds.__getitem__)
        # The rollout side's own waiting, such as for a training step, is not what training waited for.
        return (
            f"{text} {_DOING[busy]} ({seconds[busy]:.1f} s)" if seconds[busy] >= 0.1 * waited else f"{text} generating"
        )
