"""How fast a trace is saved and loaded, with all checks, beside safetensors, which has none; in turns in one process."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.measure import rounded, table
from megatron_router_replay import RoutingTrace, load_trace, save_trace

TITLE = "Store: a trace to a file and back"
LAYERS, EXPERTS, TOPK = 48, 128, 8


def measure(tokens: int = 800_000, repeats: int = 9) -> dict[str, Any]:
    """Return the bytes of the ids and the seconds of each repeat, by what was done."""
    torch.set_num_threads(os.cpu_count() or 1)
    routes = torch.rand(min(tokens, 4096) * LAYERS, EXPERTS).topk(TOPK).indices.to(torch.uint8).view(-1, LAYERS, TOPK)
    ids = routes[torch.randint(0, len(routes), (tokens,))]
    trace = RoutingTrace(topk_indices=ids, layer_numbers=range(1, LAYERS + 1), num_experts=EXPERTS)
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        ours, theirs = Path(folder, "ours.safetensors"), Path(folder, "theirs.safetensors")

        def save_theirs() -> None:
            save_file({"ids": ids}, theirs)
            _sync(theirs)  # as ours is

        def load_theirs() -> None:
            load_file(theirs)["ids"].clone()  # which alone reads what is mapped

        steps: dict[str, Callable[[], Any]] = {
            "save": lambda: save_trace(trace, ours),
            "save, safetensors": save_theirs,
            "load": lambda: load_trace(ours),
            "load, safetensors": load_theirs,
            "load, cold": lambda: load_trace(ours),
            "load, cold, safetensors": load_theirs,
        }
        for _ in range(repeats):
            for name, step in steps.items():
                if "cold" in name:
                    _sync(ours, forget=True)
                    _sync(theirs, forget=True)
                start = time.perf_counter()
                step()
                seconds.setdefault(name, []).append(rounded(time.perf_counter() - start))
    return {"bytes": ids.numel(), "threads": torch.get_num_threads(), "seconds": seconds}


def _sync(path: Path, *, forget: bool = False) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if forget:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def render(raw: dict[str, Any]) -> str:
    """Return the table."""
    rows = []
    for name, seconds in raw["seconds"].items():
        rates = sorted(raw["bytes"] / each / 1e9 for each in seconds)
        rows.append([name, f"{statistics.median(rates):.2f}", f"{rates[0]:.2f} to {rates[-1]:.2f}"])
    head = (
        f"{raw['bytes'] / 1e9:.2f} GB of ids, {LAYERS} layers, top-{TOPK} of {EXPERTS}, {raw['threads']} threads. A save "
        "ends when the disk has the bytes. safetensors writes one tensor, without checksums and checks of ids.\n\n"
    )
    return head + table(["what", "GB a second, median", "range"], rows)
