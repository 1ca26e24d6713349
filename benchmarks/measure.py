"""Time alternatives side by side in one process: taken in turns, medians, ratios."""

import statistics
import time
from collections.abc import Callable, Mapping


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
