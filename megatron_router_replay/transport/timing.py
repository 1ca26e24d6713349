"""How long each leg of the way from engine to router takes, so that the leg to fix is visible from either side."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Leg = Literal["collect", "decode", "assemble", "partition", "send", "receive", "wait"]
Side = Literal["rollout", "training"]
LegTime = tuple[float, int]
"""Seconds and bytes of a leg."""

_SIDES: dict[Side, Side] = {"rollout": "training", "training": "rollout"}
_DOING: dict[str, str] = {
    "collect": "collecting from the engines",
    "decode": "decoding",
    "assemble": "assembling the batch",
    "partition": "partitioning",
    "send": "sending",
    "receive": "receiving",
    "wait": "waiting",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LegReport:
    """What was counted up to one moment.

    Args:
        line: for a person: how long this side waited, and which leg to fix, here or on the other side.
        numbers: `<side>_<leg>_s` for every leg, `_gb_per_s` for those with bytes, of both sides.
    """

    line: str
    numbers: Mapping[str, float]

    def metrics(self, prefix: str = "router_replay/transport/") -> dict[str, float]:
        """Return the numbers for a training logger, keys under `prefix`."""
        return {prefix + name: value for name, value in self.numbers.items()}

    def to_dict(self) -> dict[str, float | str]:
        """Return plain values."""
        return {"line": self.line, **self.numbers}

    def __str__(self) -> str:
        return self.line


class LegTimes:
    """Wall-clock seconds and bytes of each leg; threads that work on the same leg at once count once.

    Args:
        side: which side of the transport this process is.

    The other side's numbers arrive with every transfer, so both sides can name the leg to fix.
    """

    def __init__(self, side: Side) -> None:
        self.side: Side = side
        self._lock = threading.Lock()
        self._times: dict[str, LegTime] = {}
        self._since: dict[str, tuple[int, float]] = {}  # leg -> how many threads are in it, since when
        self._unreported: dict[str, LegTime] = {}  # to the other side
        self._peer: dict[str, LegTime] = {}

    @contextmanager
    def measure(self, name: Leg, nbytes: int = 0) -> Iterator[None]:
        """Count the time of this block, also if it raises."""
        with self._lock:
            threads, since = self._since.get(name, (0, time.perf_counter()))
            self._since[name] = (threads + 1, since)
        try:
            yield
        finally:
            with self._lock:
                threads, since = self._since[name]
                # The leg goes on from the first thread that enters it to the last that leaves.
                if threads > 1:
                    self._since[name] = (threads - 1, since)
                else:
                    del self._since[name]
                    self._add(name, time.perf_counter() - since, 0)
                self._add(name, 0.0, nbytes)

    def add(self, name: str, seconds: float, nbytes: int = 0) -> None:
        """Count time that was measured elsewhere, such as by a rollout actor."""
        with self._lock:
            self._add(name, seconds, nbytes)

    def take_unreported(self) -> dict[str, LegTime]:
        """Return what came since this was called last, for the other side."""
        with self._lock:
            unreported, self._unreported = self._unreported, {}
        return {name: values for name, values in unreported.items() if values[0] or values[1]}

    def add_peer(self, leg_times: Mapping[str, LegTime]) -> None:
        """Add what the other side reported."""
        with self._lock:
            for name, (seconds, nbytes) in leg_times.items():
                _add(self._peer, name, seconds, nbytes)

    def reset(self) -> None:
        """Start again from zero, for numbers of one step; what the other side was not told yet it will be told."""
        with self._lock:
            self._times, self._peer = {}, {}

    def metrics(self, prefix: str = "router_replay/transport/") -> dict[str, float]:
        """Return `<side>_<leg>_s` for every leg, `_gb_per_s` for those with bytes, of both sides, for a training logger."""
        return self.report().metrics(prefix)

    def report(self) -> LegReport:
        """Return what was counted so far, for good: later times do not change it."""
        numbers: dict[str, float] = {}
        own, peer = self._copies()
        for side, leg_times in ((self.side, own), (_SIDES[self.side], peer)):
            for name, (seconds, nbytes) in leg_times.items():
                numbers[f"{side}_{name}_s"] = seconds
                if nbytes and seconds:
                    numbers[f"{side}_{name}_gb_per_s"] = nbytes / seconds / 1e9
        return LegReport(line=self.line(), numbers=numbers)

    def line(self) -> str:
        """Return one line for a person: how long this side waited, and which leg to fix, here or on the other side."""
        own, other = self._copies()
        waited = own.pop("wait", (0.0, 0))[0]
        busy = max(own, key=lambda name: own[name][0], default=None)
        if busy is not None and own[busy][0] >= waited:
            return f"routes: {self.side} spent {_spent(self.side, busy, own[busy])}, waited {waited:.1f} s"
        # This side waits: what the other one was busy with is the leg to fix, not what it waited for itself.
        other_side = _SIDES[self.side]
        other.pop("wait", None)
        slowest = max(other, key=lambda name: other[name][0], default=None)
        text = f"routes: {self.side} waited {waited:.1f} s"
        if slowest is None or other[slowest][0] < 0.1 * waited:
            missing = "generating" if self.side == "training" else "not asking for routes yet"
            return f"{text}: {other_side} side {missing}"
        return f"{text}: {other_side} side {_spent(other_side, slowest, other[slowest])}"

    def _copies(self) -> tuple[dict[str, LegTime], dict[str, LegTime]]:
        """Return what this side and the other one took until now; other threads go on counting."""
        with self._lock:
            return dict(self._times), dict(self._peer)

    def _add(self, name: str, seconds: float, nbytes: int) -> None:
        """Count on this side; the lock is held."""
        for times in (self._times, self._unreported):
            _add(times, name, seconds, nbytes)


def _add(times: dict[str, LegTime], name: str, seconds: float, nbytes: int) -> None:
    before = times.get(name, (0.0, 0))
    times[name] = (before[0] + seconds, before[1] + nbytes)


def longest(reports: Iterable[Mapping[str, LegTime]]) -> dict[str, LegTime]:
    """Return each leg's longest time over ranks that worked at the same time."""
    result: dict[str, LegTime] = {}
    for report in reports:
        for name, (seconds, nbytes) in report.items():
            result[name] = max(result.get(name, (0.0, 0)), (seconds, nbytes))
    return result


def _spent(side: Side, name: str, leg_time: LegTime) -> str:
    seconds, nbytes = leg_time
    rate = f", {nbytes / seconds / 1e9:.2f} GB/s" if nbytes and seconds else ""
    return f"{_DOING.get(name, name)} ({seconds:.1f} s{rate})"
