"""`make bench`: measure, keep the samples in benchmarks/raw/, and write benchmarks/RESULTS.md from them.

python -m benchmarks                 everything, about 40 minutes on two cores
python -m benchmarks router step     these parts; the other sections of RESULTS.md stay
python -m benchmarks --render        nothing is measured: RESULTS.md anew from the samples
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import capture, decode, memory, router, step, store
from benchmarks.measure import environment

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "RESULTS.md"
RAW = FOLDER / "raw"
PARTS: dict[str, Any] = {
    "router": router,
    "step": step,
    "memory": memory,
    "capture": capture,
    "decode": decode,
    "store": store,
}

# The allocator keeps freed memory: fresh pages cost more than the arithmetic, and the first alternative would pay. (Without
# this, ratios of single routers move by a factor of three, mostly in our favour.)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}

NO_GPU = (
    "Empty: nothing was run on a GPU so far. `python -m benchmarks.gpu` on one, then `python -m benchmarks --render`, writes "
    "its report here."
)


def measure(name: str) -> None:
    """Measure a part in this process and keep its samples."""
    where = environment()
    start = time.monotonic()
    raw = PARTS[name].measure()
    kept = {"environment": where, "minutes": round((time.monotonic() - start) / 60, 1), "raw": raw}
    RAW.mkdir(exist_ok=True)
    (RAW / f"{name}.json").write_text(json.dumps(kept, separators=(",", ":")) + "\n")


def results() -> str:
    """Return RESULTS.md of all samples there are."""
    sections = [
        "# Benchmark results",
        "Made by `make bench` from the samples in `raw/`, the seconds of every repeat. Every figure is a ratio of "
        "alternatives that ran in turns in one process, if it has no unit.",
        "`python -m benchmarks.transport` and `.follow` are run separately: [RESULTS_transport.md](RESULTS_transport.md), "
        "[RESULTS_follow.md](RESULTS_follow.md). What needs a trainer or counts operations: "
        "[RESULTS_by_hand.md](RESULTS_by_hand.md).",
    ]
    for name, part in PARTS.items():
        path = RAW / f"{name}.json"
        if path.exists():
            kept = json.loads(path.read_text())
            sections += [f"## {part.TITLE}", f"{kept['environment']}. {kept['minutes']} minutes."]
            sections.append(part.render(kept["raw"]))
    report = RAW / "gpu.md"
    sections += ["## GPU: routing, launches, memory and steps on a CUDA device"]
    sections += [report.read_text().strip() if report.exists() else NO_GPU]
    return "\n\n".join(sections) + "\n"


def main() -> None:
    """Measure each part in a process of its own, then write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n\n")[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}; none: all")
    parser.add_argument("--render", action="store_true", help="only write RESULTS.md from the samples there are")
    parser.add_argument("--measure", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown parts {sorted(unknown)}; there are {', '.join(PARTS)}")
    if args.measure:
        measure(args.measure)
        return
    for name in [] if args.render else args.parts or PARTS:
        print(f"{name} ...", flush=True)
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks", "--measure", name]
        subprocess.run(command, cwd=FOLDER.parent, env=os.environ | ENVIRONMENT, check=True)
        RESULTS.write_text(results())
    RESULTS.write_text(results())
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
