"""What `freeze_recompute` spares a recompute of sparse attention, on a CPU with Megatron-Core's unfused DSA.

PYTHONPATH=build/megatron-core/0.19.2 .venv/bin/python -W ignore -m benchmarks.indexers
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

import megatron_router_replay as mrr
from benchmarks.measure import environment, peak_bytes, ratio, rounds, table
from megatron_router_replay.testing import ParallelSizes
from tests.support.tiny_dsa import build_tiny_dsa, dsa_config
from tests.support.workers import GlooWorkers

LAYOUT = ParallelSizes()
LENGTHS, TOPK, LAYERS = (1024, 2048, 4096), 256, 2
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class Trainer:
    """A model whose indexers have 16 heads of 64, and its one micro-batch."""

    def __init__(self, length: int) -> None:
        LAYOUT.initialize()
        fields = {"num_layers": LAYERS, "dsa_indexer_topk": TOPK, "dsa_indexer_n_heads": 16, "dsa_indexer_head_dim": 64}
        self.model = build_tiny_dsa(dsa_config(LAYOUT, **fields, **FULL))
        position_ids = torch.arange(length)[None]
        self.given: dict[str, Any] = {
            "input_ids": position_ids % 320,
            "labels": position_ids % 320,
            "position_ids": position_ids,
            "attention_mask": None,
        }
        self.loss = torch.zeros(())

    def forward(self) -> None:
        """Run the forward, whose backward is timed."""
        self.model.zero_grad(set_to_none=True)
        self.loss = self.model(**self.given).mean()

    def backward(self) -> None:
        self.loss.backward()


def time_backwards(length: int, repeats: int = 7) -> dict[str, list[float]]:
    """Return processor seconds of backwards with their recomputes, live and frozen."""
    trainer = Trainer(length)
    session: list[Any] = []

    def prepare(frozen: bool) -> None:
        session.append(mrr.freeze_recompute(trainer.model) if frozen else nullcontext())
        trainer.forward()

    def timed() -> None:
        trainer.backward()
        if (opened := session.pop()) and hasattr(opened, "close"):
            opened.close()

    both = {"live": False, "frozen": True}
    steps = {name: partial(prepare, frozen) for name, frozen in both.items()}
    return rounds(dict.fromkeys(both, timed), repeats=repeats, warm_up=1, prepare=steps, clock=time.process_time)


def peak(length: int, frozen: bool) -> int:
    """Run in a fresh process: its peak memory in bytes over two steps."""
    trainer = Trainer(length)
    with mrr.freeze_recompute(trainer.model) if frozen else nullcontext():
        for _ in range(2):
            trainer.forward()
            trainer.backward()
    return peak_bytes()


def main() -> None:
    """Print the table."""
    print(environment() + "\n")
    rows = []
    for length in LENGTHS:
        with GlooWorkers(1) as workers:
            (seconds,) = workers.run(time_backwards, length, timeout_s=600.0)
        peaks = []
        for frozen in (False, True):
            with GlooWorkers(1) as workers:
                peaks += workers.run(peak, length, frozen, timeout_s=600.0)
        live = sorted(seconds["live"])[len(seconds["live"]) // 2]
        kept = LAYERS * length * TOPK * 2
        rows.append([length, f"{live * 1e3:.0f}", ratio(seconds, "frozen", "live"), f"{kept / 1e6:.1f}"])
        rows[-1] += [f"{peaks[0] / 1e6:.0f}", f"{(peaks[1] - peaks[0]) / 1e6:+.0f}"]
    head = [
        "tokens",
        "backward with recompute, live, ms",
        "frozen / live",
        "positions on tapes, MB",
        "peak MB, live",
        "frozen, more",
    ]
    print(table(head, rows))


if __name__ == "__main__":
    main()
