"""Measure time and memory of `diff_traces`, and the time to read its two files.

python -m benchmarks.diff [MB of routes in each trace, default 1000]

Every comparison must read both files block by block and check their checksums and ids. Reads and diffs alternate in a process
of their own, so its peak memory is theirs. CPU time is printed too, because other programs may use the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import megatron_router_replay as mrr
from benchmarks.measure import peak_bytes, table
from megatron_router_replay.diagnostics.source import block_rows, open_source

LAYERS, TOPK, EXPERTS, SAMPLE = 48, 8, 128, 4096
DIFFERENT = (0.0, 0.05)
"""Share of decisions in which the second trace names another expert."""


def make_trace(megabytes: int, different: float) -> mrr.RoutingTrace:
    """Return routes of distinct ids: the same eight samples again and again, with a share of their decisions changed."""
    num_samples = megabytes * 1_000_000 // (LAYERS * TOPK * SAMPLE)
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(EXPERTS, (8, SAMPLE, LAYERS, 1), generator=generator)
    samples = ((first + 11 * torch.arange(TOPK)) % EXPERTS).to(torch.uint8)
    flipped = torch.rand(8, SAMPLE, LAYERS, generator=generator) < different
    other = ((first[..., 0] + 5) % EXPERTS).to(torch.uint8)  # 5 is no multiple of 11: not among the row's own
    samples[..., -1] = torch.where(flipped, other, samples[..., -1])
    return mrr.RoutingTrace.from_checked(
        topk_indices=torch.cat([samples[i % 8] for i in range(num_samples)]),
        replay_mask=torch.ones(num_samples * SAMPLE, dtype=torch.bool),
        layer_numbers=tuple(range(4, 4 + LAYERS)),
        num_experts=EXPERTS,
        sequence_lengths=(SAMPLE,) * num_samples,
    )


def read_both(a: str, b: str) -> None:
    """Read two files as a diff does, without comparing."""
    one, other = open_source(a), open_source(b)
    size = block_rows(one, other)
    for start in range(0, one.num_tokens, size):
        one.read(start, start + size)
        other.read(start, start + size)


def diff_both(a: str, b: str) -> None:
    """Diff two files."""
    mrr.diff_traces(a, b)


def measure(a: str, b: str, repeats: int) -> dict[str, float]:
    """Return the best seconds of a read and of a diff, and this process's memory in MB."""
    before = peak_bytes()
    best: dict[str, tuple[float, float]] = {}
    ways: dict[str, Callable[[str, str], None]] = {"read": read_both, "diff": diff_both}
    for _ in range(repeats):
        for name, way in ways.items():
            wall, cpu = time.perf_counter(), time.process_time()
            way(a, b)
            spent = (time.perf_counter() - wall, time.process_time() - cpu)
            best[name] = min(best.get(name, spent), spent)
    seconds = {f"{name}_{kind}": value for name, pair in best.items() for kind, value in zip(("wall", "cpu"), pair)}
    return seconds | {"imports_mb": before / 1e6, "peak_mb": peak_bytes() / 1e6}


def main(megabytes: int = 1000) -> str:
    """Return the results as a table in Markdown."""
    head = [
        "decisions that differ",
        "read both (wall / CPU s)",
        "diff (wall / CPU s)",
        "diff / read (CPU)",
        "MB/s",
        "peak MB",
    ]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        a, b = Path(folder, "a.safetensors"), Path(folder, "b.safetensors")
        mrr.save_trace(make_trace(megabytes, 0.0), a)
        for different in DIFFERENT:
            mrr.save_trace(make_trace(megabytes, different), b)
            child = [sys.executable, "-m", "benchmarks.diff", "--measure", str(a), str(b)]
            found = json.loads(subprocess.run(child, capture_output=True, text=True, check=True).stdout)
            rate = (a.stat().st_size + b.stat().st_size) / 1e6 / found["diff_wall"]
            seconds = [f"{found[f'{name}_wall']:.1f} / {found[f'{name}_cpu']:.1f}" for name in ("read", "diff")]
            memory = f"{found['peak_mb']:.0f} ({found['imports_mb']:.0f} of it imports)"
            rows.append(
                [f"{different:.0%}", *seconds, f"{found['diff_cpu'] / found['read_cpu']:.2f}", f"{rate:.0f}", memory]
            )
    what = (
        f"Two trace files of {megabytes:,} MB of routes each ({LAYERS} layers, top-{TOPK} of {EXPERTS}); one run each."
    )
    return f"{what}\n\n{table(head, rows)}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[3], repeats=1)))
    else:
        print(main(*map(int, sys.argv[1:2])))
