"""What replay costs on a GPU: one router's routing and a small GPT's step, correctness first. About 5 minutes on one GPU.

    python benchmarks/gpu.py                        one Markdown report on stdout; saved as raw/gpu.md, part of RESULTS.md
    python benchmarks/gpu.py --device cpu --quick   the same code on a CPU and small shapes, as its test runs it

Needs torch, triton, megatron-core and this package, nothing else; Transformer Engine is used where Megatron-Core finds it.
Times of routers are the device's: the GPU sleeps while the host launches, so that events see kernels, not launches. What the
host needs to launch them is measured apart. Exit code 1: something was not correct, or waited for the device.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

if __name__ == "__main__":
    # Run as a script, python looks in this folder, not in the one with the package.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist

from benchmarks.gpu_routers import ROUTERS, Shape, check_shape, check_syncs, peak_memory, time_shape
from benchmarks.gpu_steps import time_steps
from benchmarks.measure import table
from megatron_router_replay.testing import ParallelSizes, megatron_on_cpu, reset_megatron_state

SHAPE_HEAD = ("tokens", "experts, topk", "logits")


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Be the only rank, with Megatron-Core's parallel state; on a CPU with Megatron-Core made to run there."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
        try:
            with megatron_on_cpu() if device.type == "cpu" else nullcontext():
                from megatron.core.transformer.moe import moe_utils

                if not hasattr(moe_utils, "te_general_gemm"):
                    moe_utils.te_general_gemm = None  # read by 0.16.1's router even where its import failed
                ParallelSizes().initialize()
                yield
                reset_megatron_state()
        finally:
            dist.destroy_process_group()


def environment(device: torch.device) -> str:
    """Return one line: date, device, versions."""
    import megatron.core

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    return (
        f"{datetime.date.today()}, {name}, CUDA {torch.version.cuda}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, triton {triton_version}, megatron-core {megatron.core.__version__}"
    )


def list_of(title: str, problems: Sequence[str]) -> str:
    """Return what a check found, one line a problem."""
    return f"{title}: " + ("all passed" if not problems else "".join(f"\n- {problem}" for problem in problems))


def report(device: torch.device, *, quick: bool) -> tuple[str, bool]:
    """Return (the report as Markdown, whether everything was correct)."""
    on_gpu = device.type == "cuda"
    sizes = (64,) if quick else (4096, 16384)
    shapes = [Shape(*what, device) for what in itertools.product(sizes, ROUTERS, (torch.float32, torch.bfloat16))]
    wrong = [problem for shape in shapes for problem in check_shape(shape)]
    # Whether the host waits does not depend on the number of tokens.
    small = [shape for shape in shapes if shape.num_tokens == sizes[0]]
    waits = [problem for shape in small for problem in check_syncs(shape)] if on_gpu else []
    routing = routing_tables(shapes, repeats=1 if quick else 20)
    memory = [memory_table([shape for shape in shapes if shape.num_tokens == sizes[-1]])] if on_gpu else []
    steps, wrong_steps = steps_table(device, quick=quick)
    wrong += wrong_steps
    parts = [
        environment(device),
        list_of("Correct against Megatron-Core's replay and a float64 formula", wrong),
        list_of("No host sync", waits) if on_gpu else "No host sync: not checked on a CPU",
        *routing,
        *memory,
        steps,
    ]
    return "\n\n".join(parts), not wrong and not waits


def routing_tables(shapes: Sequence[Shape], *, repeats: int) -> tuple[str, str]:
    """Return how long every way to route takes on the device, and what the host needs to launch it."""
    times: list[list[str]] = []
    hosts: list[list[str]] = []
    for shape, backward in itertools.product(shapes, (False, True)):
        of_device, of_host = time_shape(shape, backward=backward, repeats=repeats)
        live = of_device.pop("live")
        what = [*shape.name(), "both" if backward else "forward"]
        times.append([*what, f"{live:.3f}", *(f"{ms / live:.2f}" for ms in of_device.values())])
        # Launching takes the host as long whatever the number of tokens and their dtype.
        if shape.num_tokens == shapes[0].num_tokens and shape.dtype is torch.bfloat16:
            hosts.append([*what, *(f"{ms:.3f}" for ms in of_host.values())])
    where = "device" if shapes[0].device.type == "cuda" else "CPU"
    head = [*SHAPE_HEAD, "pass"]
    return (
        f"Routing, {where} time: live in ms, the others as ratios to live\n\n"
        + table([*head, "live ms", *of_device], times),
        "Routing, ms of the host to launch it\n\n" + table([*head, *of_host], hosts),
    )


def memory_table(shapes: Sequence[Shape]) -> str:
    """Return what forward and backward of every way to route take of the GPU's memory at their peak."""
    peaks = [peak_memory(shape) for shape in shapes]
    rows = [[*shape.name(), *(f"{mib:.1f}" for mib in peak.values())] for shape, peak in zip(shapes, peaks)]
    return "Routing, forward and backward, peak MiB\n\n" + table([*SHAPE_HEAD, *peaks[0]], rows)


def steps_table(device: torch.device, *, quick: bool) -> tuple[str, list[str]]:
    """Return how long a GPT's step takes, and what is wrong with it."""
    rows: list[list[str]] = []
    wrong: list[str] = []
    for recompute in (False, True):
        times, problems = time_steps(device, quick=quick, recompute=recompute)
        wrong += problems
        off = times.pop("off")
        rows.append(["full" if recompute else "none", f"{off:.1f}", *(f"{ms / off:.3f}" for ms in times.values())])
    title = "GPT of 4 MoE layers, 4 micro-batches: ms without a session, the others as ratios to it"
    return f"{title}\n\n" + table(["recompute", "off ms", *times], rows), wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="small shapes and few rounds; times mean nothing")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "benchmarks/gpu.py: no CUDA GPU is available; --device cpu --quick runs the same code on a CPU.",
            file=sys.stderr,
        )
        return 2
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    with one_rank(device):
        text, correct = report(device, quick=options.quick)
    print(text)
    return 0 if correct else 1


if __name__ == "__main__":
    sys.exit(main())
