"""Time alternatives side by side in one process: taken in turns, medians, ratios."""

import resource
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path


def medians(alternatives: Mapping[str, Callable[[], object]], *, repeats: int, warm_up: int = 2) -> dict[str, float]:
    """Return the median seconds of each alternative; rounds alternate their order."""
    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    names = list(alternatives)
    for repeat in range(warm_up + repeats):
        for name in names if repeat % 2 else reversed(names):
            start = time.perf_counter()
            alternatives[name]()
            if repeat >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_bytes() -> int:
    """Return this process's peak resident memory; on Linux of this program alone, without what its parent had."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
