"""A training step in every mode of this library on a GPU: exactness, launches, waits, memory, time; at most ten minutes.

    python -m benchmarks.gpu                           the table goes to raw/gpu.md, after each row
    python -m benchmarks.gpu --quick                   two minutes: fewer layers, fewer rounds
    python -m benchmarks.gpu --device soft             on a GPU made of software: counts, and no times
    python -m benchmarks.gpu --plant wait              a planted fault is found: exit code 1

Needs torch, megatron-core and this checkout; Transformer Engine is used if it is installed. The exit code is 1 if a promise
was broken or a part failed; the last line says which.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.guard import PARTS, Options, guarded
from benchmarks.gpu.report import SAVED, text

PLANTS = {
    "wait": "the host reads a value before each micro-batch",
    "pageable": "an upload from pageable memory before each micro-batch",
    "layer": "replay gets the routes of the layers in the opposite order",
    "exception": "the last part raises",
    "hang": "the first part hangs",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "soft"])
    parser.add_argument("--quick", action="store_true", help="two minutes in place of ten")
    parser.add_argument("--out", type=Path, help=f"the report; of a real GPU, {SAVED.name} by default")
    faults = "; ".join(f"{name}: {what}" for name, what in PLANTS.items())
    parser.add_argument("--plant", nargs="+", choices=PLANTS, default=[], help=f"faults that must be found. {faults}")
    parser.add_argument("--limit-s", type=float, help="of each part, in place of its own")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.gpu: no CUDA GPU is available; --device soft runs the same code on a CPU.", file=sys.stderr)
        return 2
    limit_s = None if options.device == "soft" else 120.0 if options.quick else 600.0
    run = Options(
        device=options.device,
        quick=options.quick,
        plant=tuple(options.plant),
        limit_s=limit_s,
        part_limit_s=options.limit_s,
    )
    out = options.out or (SAVED if options.device == "cuda" else None)
    environment, rows, wrong = "", [], []
    for message in guarded(list(PARTS), run):
        if isinstance(message, str):
            environment = message
            print(environment, flush=True)
        else:
            part, row = message
            rows.append((part, row))
            print(" | ".join(row.cells(part)), flush=True)
            if row.wrong:
                wrong.append(f"{part}{', ' * bool(row.case)}{row.case}: {row.wrong}")
        if out is not None:
            out.write_text(text(environment, rows, wrong))
    print(text(environment, rows, wrong).splitlines()[-1])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
