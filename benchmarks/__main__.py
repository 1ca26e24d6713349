"""`make bench`: run the benchmarks and write benchmarks/RESULTS.md, with date, hardware and versions."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch

from benchmarks import capture, fused, router

RESULTS = Path(__file__).parent / "RESULTS.md"
PARTS = {
    "Router: one layer's selection, ratios to live routing (fp32 logits)": router.main,
    "Fused: probabilities and map of given experts in one pass, not yet used by sessions": fused.main,
    "Capture: generation with and without": capture.main,
}


def environment() -> str:
    """One line: date, processor, versions."""
    import megatron.core

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    return (
        f"{datetime.date.today()}, {cpu}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"megatron-core {megatron.core.__version__}, no GPU"
    )


def main() -> None:
    """Write the results of all parts."""
    sections = ["# Benchmark results", "Made by `make bench`. Every figure is a ratio taken in one process, medians."]
    sections += [
        "`python -m benchmarks.transport` and `python -m benchmarks.diff` take longer and are run by themselves."
    ]
    sections += [environment()]
    for title, part in PARTS.items():
        print(f"{title} ...", flush=True)
        sections += [f"## {title}", part()]
    RESULTS.write_text("\n\n".join(sections) + "\n")
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
