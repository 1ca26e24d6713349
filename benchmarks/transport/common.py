"""What the parts share: the size of the batch, its routes, processes, rates and tables."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from megatron_router_replay import RoutingTrace, engines
from megatron_router_replay.transport.sender import BUCKET_BYTES

LIMITS = {"timeout": timedelta(minutes=5), "ready_timeout": timedelta(minutes=30)}
NUM_LAYERS, TOPK, NUM_EXPERTS, SAMPLE = 48, 8, 128, 4096
MODEL = engines.ModelRoutingInfo(
    num_layers=NUM_LAYERS,
    moe_layer_numbers=tuple(range(1, NUM_LAYERS + 1)),
    num_experts=NUM_EXPERTS,
    topk=TOPK,
)
STAGES = (tuple(range(1, 25)), tuple(range(25, 49)))
ROW_BYTES = 24 * TOPK
"""Of a stage's layers; the mask takes one more."""
MESSAGE = BUCKET_BYTES // ROW_BYTES * ROW_BYTES
SPAWN = multiprocessing.get_context("spawn")
Row = tuple[str, str]


def gb_per_s(nbytes: float, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f} GB/s"


def timed(function: Callable[[], Any], *, repeat: int = 3) -> float:
    """The median of a few runs, after one that nobody counts."""
    function()
    seconds = []
    for _ in range(repeat):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def distinct_routes(num_tokens: int, num_layers: int, *, seed: int) -> np.ndarray:
    """Random routes without repeats: [num_tokens, num_layers, TOPK] uint8."""
    scores = np.random.default_rng(seed).random((num_tokens * num_layers, NUM_EXPERTS), dtype=np.float32)
    ids = np.argpartition(scores, TOPK, axis=1)[:, :TOPK].astype(np.uint8)
    return ids.reshape(num_tokens, num_layers, TOPK)


def as_trace(array: np.ndarray) -> RoutingTrace:
    return RoutingTrace.from_checked(
        topk_indices=torch.from_numpy(array),
        layer_numbers=MODEL.moe_layer_numbers,
        num_experts=NUM_EXPERTS,
        replay_mask=torch.ones(len(array), dtype=torch.bool),
        sequence_lengths=(len(array),),
    )


def children(function: Callable[..., None], *args: Any, ranks: int = 2) -> tuple[list[Any], Any]:
    """Start `ranks` processes of function(rank, queue, *args)."""
    queue = SPAWN.Queue()
    started = [SPAWN.Process(target=run_child, args=(function, rank, queue, args)) for rank in range(ranks)]
    for process in started:
        process.start()
    return started, queue


def run_child(function: Callable[..., None], rank: int, queue: Any, args: tuple[Any, ...]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    function(rank, queue, *args)


def table(rows: Sequence[Sequence[str]], *, head: bool = False) -> str:
    lines = [list(row) for row in rows] if head else [["what", "measured"], *[list(row) for row in rows]]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
