"""What the parts share: limits, processes, rates and tables."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from benchmarks import measure

LIMITS: dict[str, Any] = {"timeout": timedelta(minutes=5), "ready_timeout": timedelta(minutes=30)}
SPAWN = multiprocessing.get_context("spawn")
Row = tuple[str, str]


def gb_per_s(nbytes: float, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f} GB/s"


def children(function: Callable[..., None], *args: Any, ranks: int = 2) -> tuple[list[Any], Any]:
    """Start `ranks` processes of function(rank, queue, *args)."""
    queue = SPAWN.Queue()
    started = [SPAWN.Process(target=run_child, args=(function, rank, queue, args)) for rank in range(ranks)]
    for process in started:
        process.start()
    return started, queue


def run_child(function: Callable[..., None], rank: int, queue: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    function(rank, queue, *args)


def table(rows: Sequence[Row]) -> str:
    return measure.table(["what", "measured"], rows)
