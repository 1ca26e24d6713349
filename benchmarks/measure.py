"""Helpers of all parts: timing alternatives in turns, ratios with their spread, Markdown tables, the machine's name."""

from __future__ import annotations

import ctypes
import datetime
import gc
import math
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from random import Random

Seconds = dict[str, list[float]]
"""Alternative -> seconds of each round; entry i of all alternatives was measured in the same round."""


@dataclass(frozen=True)
class Ratio:
    """Ratio of two alternatives: the median of the ratios within each round, and its 95% confidence interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def rounds(
    alternatives: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    warm_up: int = 10,
    prepare: Mapping[str, Callable[[], object]] | None = None,
    clock: Callable[[], float] = time.thread_time,
) -> Seconds:
    """Run all alternatives once a round, in an order drawn anew for each, and return their seconds.

    Args:
        alternatives: name -> the function that is timed.
        repeats: rounds that count; `warm_up` more come first, until the allocator has all the pages it will need.
        prepare: name -> a function that runs right before it, not timed.
        clock: processor time of this thread, which on a quiet machine is the time, and on a busy one leaves out other
            programs; a function that waits for other processes needs time.perf_counter.
    """
    seconds: Seconds = {name: [] for name in alternatives}
    names = list(alternatives)
    order = Random(0)  # the same on every rank
    for repeat in range(warm_up + repeats):
        order.shuffle(names)
        for name in names:
            if prepare and name in prepare:
                prepare[name]()
            start = clock()
            alternatives[name]()
            spent = clock() - start
            if repeat >= warm_up:
                seconds[name].append(rounded(spent))
    return seconds


def rounded(seconds: float) -> float:
    """Return four digits, which is more than a clock means and keeps the samples small."""
    return float(f"{seconds:.4g}")


def ratio(seconds: Mapping[str, Sequence[float]], name: str, base: str) -> Ratio:
    """Return name / base. Ratios within a round, because what slows a machine down slows the whole round down."""
    of_rounds = sorted(one / other for one, other in zip(seconds[name], seconds[base], strict=True))
    outside = outside_interval(len(of_rounds))
    return Ratio(statistics.median(of_rounds), of_rounds[outside], of_rounds[-1 - outside])


def outside_interval(samples: int) -> int:
    """Return how many of the smallest samples, and of the largest, lie outside the median's 95% confidence interval.

    The number of samples below the true median is binomial, whatever their distribution. Fewer than six samples are too few
    for 95%: the interval is their range.
    """
    below = 0.5**samples  # the chance that at most `outside` samples lie below the median
    outside = 0
    while below <= 0.025:
        outside += 1
        below += math.comb(samples, outside) * 0.5**samples
    return max(0, outside - 1)


def verdict(what: str, found: Ratio, limit: float) -> str:
    """Return one line: a target, the measured ratio, met or not, and if that is more than noise."""
    met = "met" if found.median <= limit else "not met"
    noise = ", within the noise" if found.low <= limit < found.high else ""
    return f"- {what} <= {limit:.2f}: {met}{noise}, {found}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def environment() -> str:
    """Return one line: date, processor, versions, and how busy the machine is."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "numpy", "megatron-core"))
    return (
        f"{datetime.date.today()}, {cpu}, {os.cpu_count()} cores, no GPU, Python {platform.python_version()}, "
        f"{versions}; load average at the start {load}"
    )


def peak_above(function: Callable[[], object]) -> int:
    """Return the bytes of memory that a call takes at most, its result included, above what the process has.

    The kernel counts pages, so memory of numpy, of torch and of any other library counts; Linux only. Of three calls, the
    least counts, because other threads of the process take pages, too.
    """
    return min(_peak_above(function) for _ in range(3))


def _peak_above(function: Callable[[], object]) -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the process keeps would be used again, and not be counted
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    before = _resident("VmRSS")
    result = function()
    peak = _resident("VmHWM")
    del result
    return peak - before


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def peak_bytes() -> int:
    """Return this process's peak resident memory; on Linux of this program alone, without what its parent had."""
    status = Path("/proc/self/status")
    if status.exists():
        return _resident("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
