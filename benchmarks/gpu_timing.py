"""Times of alternatives on a GPU: the device's own, beside what the host needs to launch them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

SLEEP_CYCLES = 20_000_000  # about 10 ms, longer than any alternative takes to launch


def time_rounds(
    functions: Mapping[str, Callable[[], object]],
    *,
    prepare: Mapping[str, Callable[[], object]],
    repeats: int,
    device: torch.device,
    hide_launches: bool,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return medians of (the device's ms, the host's ms) by name; rounds alternate their order. On a CPU both are the same.

    Args:
        hide_launches: let the GPU sleep until the host has launched everything; only for what waits for nothing.
    """
    on_gpu, warm_up = device.type == "cuda", min(3, repeats)
    of_device: dict[str, list[float]] = {name: [] for name in functions}
    of_host: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(warm_up + repeats):
        for name in list(functions) if repeat % 2 else reversed(list(functions)):
            prepare.get(name, lambda: None)()
            if on_gpu:
                torch.cuda.synchronize()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                if hide_launches:
                    torch.cuda._sleep(SLEEP_CYCLES)
                start.record()
            began = time.perf_counter()
            functions[name]()
            host = device_ms = (time.perf_counter() - began) * 1000
            if on_gpu:
                end.record()
                end.synchronize()
                device_ms = start.elapsed_time(end)
            if repeat >= warm_up:
                of_device[name].append(device_ms)
                of_host[name].append(host)
    return medians(of_device), medians(of_host)


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in samples.items()}
