"""Two ranks of expert parallelism: over NCCL where two GPUs are, else two processes that share one GPU, over gloo."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, on_device
from benchmarks.gpu.report import Row
from megatron_router_replay.testing import ParallelSizes

SIZES = ParallelSizes(ep_size=2)
DISPATCHERS: dict[str, dict[str, Any]] = {
    "alltoall": {"moe_token_dispatcher_type": "alltoall"},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "flex, DeepEP": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"},
    "flex, HybridEP": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
}


def ranks(bench: Bench) -> Iterator[Row]:
    """Replay and record on two ranks, each its own tokens, with each dispatcher."""
    own = bench.on_gpu and torch.cuda.device_count() >= SIZES.world_size
    how = "NCCL" if own else "gloo, one GPU plays both"
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(SIZES.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(theirs, rank, bench.kind, bench.quick, folder), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            for dispatcher in DISPATCHERS:
                said = [pipe.recv() for pipe in pipes]
                for name in said[0]:
                    wrong = [f"rank {rank}: {each[name]}" for rank, each in enumerate(said) if each.get(name)]
                    left_out = [each for each in wrong if "left out" in each]
                    yield Row(
                        case=f"{how}, {dispatcher}, {name}",
                        verdict=left_out[0].split(": ", 1)[1] if left_out else "exact",
                        wrong="" if left_out else "; ".join(wrong),
                    )
        except EOFError:
            yield Row(case=how, wrong="a rank died; its error is above")
        for process in processes:
            process.join(10.0)
            process.kill()


def _rank(pipe: Any, rank: int, kind: str, quick: bool, folder: str) -> None:
    """Send, for each dispatcher, mode -> what is wrong."""
    from benchmarks.gpu.step import Step

    with on_device(kind, rank, SIZES, folder):
        bench = Bench(kind, quick=quick)
        for fields in DISPATCHERS.values():
            try:
                step = Step(bench, (2,), sizes=SIZES, small=True, moe_router_dtype="fp32", **fields)
            except (ImportError, AssertionError, ValueError, TypeError) as error:
                # Its package is not there, or this Megatron-Core does not know the setting: on both ranks alike.
                pipe.send({"": f"left out: {str(error).splitlines()[0]}"})
                continue
            except Exception:
                traceback.print_exc()
                raise
            ways = step.ways()
            pipe.send(
                {name: "; ".join(step.problems(ways[name], recomputes=False)) for name in ("replay, rows", "record")}
            )
