"""How fast a trace is saved and loaded with its checks, compared with safetensors; in turns in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.measure import ratio, rounds, table, verdict
from megatron_router_replay import RoutingTrace, load_trace, save_trace

TITLE = "Store: a trace to a file and back"
LAYERS, EXPERTS, TOPK = 48, 128, 8
LIMIT = 1.2


def measure(tokens: int = 800_000, repeats: int = 20) -> dict[str, Any]:
    """Return the bytes of the ids and the seconds of each repeat, by name of the step."""
    torch.set_num_threads(1)  # so that the thread's processor time is all of it
    routes = torch.rand(min(tokens, 4096) * LAYERS, EXPERTS).topk(TOPK).indices.to(torch.uint8).view(-1, LAYERS, TOPK)
    ids = routes[torch.randint(0, len(routes), (tokens,))]
    trace = RoutingTrace(topk_indices=ids, layer_numbers=range(1, LAYERS + 1), num_experts=EXPERTS)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        ours, theirs = Path(folder, "ours.safetensors"), Path(folder, "theirs.safetensors")
        save_trace(trace, ours)
        save_file({"ids": ids}, theirs)
        steps: dict[str, Callable[[], Any]] = {
            "save": lambda: save_trace(trace, ours),
            "save, safetensors": lambda: save_file({"ids": ids}, theirs),
            "load": lambda: load_trace(ours),
            # load_file maps the file; the clone reads it.
            "load, safetensors": lambda: load_file(theirs)["ids"].clone(),
        }
        seconds = rounds(steps, repeats=repeats, warm_up=2)
    return {"bytes": ids.numel(), "seconds": seconds}


def render(raw: dict[str, Any]) -> str:
    """Return the table."""
    seconds = raw["seconds"]
    rows = [[name, f"{raw['bytes'] / min(each) / 1e9:.2f}"] for name, each in seconds.items()]
    targets = [
        verdict(f"{name} / safetensors' own", ratio(seconds, name, f"{name}, safetensors"), LIMIT)
        for name in ("save", "load")
    ]
    head = (
        f"{raw['bytes'] / 1e9:.2f} GB of ids, {LAYERS} layers, top-{TOPK} of {EXPERTS}, one thread, files in the page "
        "cache; processor time. safetensors writes and loads one tensor, without checksums.\n\n"
    )
    return "\n\n".join([head + table(["step", "GB a second, best"], rows), "\n".join(targets)])
