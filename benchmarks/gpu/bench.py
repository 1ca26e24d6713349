"""One device, a GPU or one made of software: counts, memory and times of a program on it."""

from __future__ import annotations

import datetime
import logging
import platform
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.testing import ParallelSizes

_SPAN = "the program that is counted"
_WAITS = ("Synchronize", "HostAlloc", "HostRegister", "cudaFree")
"""Calls of CUDA in which the host waits for the device, or which wait until it is idle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Calls of a program to the device.

    Args:
        operations: launches of kernels and graphs.
        waits: of the host for the device.
        pageable: uploads from memory that is not page-locked.
        ours: waits and pageable uploads in lines of this library, as far as they can be located.
        races: accesses that nothing orders; the software GPU alone sees them.
    """

    operations: int
    waits: int
    pageable: int
    ours: list[str]
    races: list[str]


class Bench:
    """One device of this process.

    Args:
        kind: "cuda" or "soft".
        quick: fewer layers and rounds.
        plant: faults that the benchmark must find, names of PLANTS in `__main__`.
    """

    def __init__(self, kind: str, *, quick: bool, plant: tuple[str, ...] = ()) -> None:
        self.kind, self.quick, self.plant = kind, quick, plant
        self.on_gpu = kind == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device())
        with suppress(ImportError, OSError):  # OSError: its libraries do not fit this machine
            import transformer_engine.pytorch  # noqa: F401
        self.has_te = "transformer_engine.pytorch" in sys.modules

    def up(self, values: Tensor) -> Tensor:
        return values.to(self.device)

    def place(self, module: Any) -> Any:
        """Move a module to the device."""
        if self.on_gpu:
            return module.to(self.device)
        from tests.support.soft_gpu import to_gpu

        return to_gpu(module)

    def environment(self) -> str:
        """Return date, hardware and versions."""
        import megatron.core

        import megatron_router_replay as mrr

        name = torch.cuda.get_device_name(self.device) if self.on_gpu else "a GPU made of software: times mean nothing"
        te = f"Transformer Engine {version('transformer-engine')}" if self.has_te else "no Transformer Engine"
        return (
            f"{datetime.date.today()}, {name}, CUDA {torch.version.cuda}, torch {torch.__version__}, Megatron-Core "
            f"{megatron.core.__version__}, {te}, megatron-router-replay {mrr.__version__}, Python {platform.python_version()}"
            f"{', --quick' if self.quick else ''}."
        )

    def recovers(self) -> bool:
        """Give memory back, and return whether the device still works; a CUDA error ends it for this process."""
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
        return True

    # ---- counts
    def asked(self, opened: Callable[[], AbstractContextManager[Callable[[], object]]]) -> Asked:
        """Count a program's calls to the device.

        Args:
            opened: yields the program; only the program itself is counted.
        """
        if not self.on_gpu:
            return self._logged(opened)
        with opened() as run:  # a first run compiles and allocates
            run()
        return self._profiled(opened)

    def _logged(self, opened: Callable[[], AbstractContextManager[Callable[[], object]]]) -> Asked:
        from tests.support.soft_gpu import in_use

        gpu: Any = in_use()
        gpu.races.clear()
        with opened() as run, gpu.logged() as log:
            run()
        in_ours = [op for op in log.ops if op.ours and (op.kind == "wait" or (op.kind == "h2d" and op.pageable))]
        ours = [f"{op.name} at {op.where}" for op in in_ours]
        return Asked(
            operations=log.kernels, waits=len(log.waits), pageable=len(log.pageable), ours=ours, races=list(gpu.races)
        )

    def _profiled(self, opened: Callable[[], AbstractContextManager[Callable[[], object]]]) -> Asked:
        from torch.profiler import ProfilerActivity, profile, record_function

        with opened() as run, profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            torch.cuda.synchronize()
            with record_function(_SPAN):
                run()
            torch.cuda.synchronize()
        events: list[Any] = list(profiler.events())
        span = next(each.time_range for each in events if each.name == _SPAN and "CPU" in str(each.device_type))
        # Outside of the span are the profiler's own synchronisations, and those around it.
        inside = [each.name for each in events if span.start <= each.time_range.start <= span.end]
        uploads = [each.name for each in events if "HtoD" in each.name]  # they run after the span, asynchronously
        with opened() as run, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # not "error": Megatron-Core's dispatcher may wait
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        calls = [name for name in inside if name.startswith("cu")]
        return Asked(
            operations=sum("Launch" in name for name in calls),
            waits=sum(name == "cudaMemcpy" or any(part in name for part in _WAITS) for name in calls),
            pageable=sum("Pageable" in name for name in uploads),
            ours=[f"waits at {w.filename}:{w.lineno}" for w in warned if "megatron_router_replay/" in w.filename],
            races=[],
        )

    # ---- memory and time
    def memory(self, forward: Callable[[], Tensor]) -> tuple[float, float]:
        """Return MiB that a forward allocates and keeps until its backward, and at the peak of both."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = forward()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        return held / 2**20, (torch.cuda.max_memory_allocated() - before) / 2**20

    def times(self, ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Return the median of the device's ms by way; the ways run in turns."""
        repeats = 1 if not self.on_gpu else 3 if self.quick else 7
        warm_up = 2 if self.on_gpu else 0
        device_ms: dict[str, list[float]] = {way: [] for way in ways}
        for repeat in range(warm_up + repeats):
            for way in list(ways) if repeat % 2 else reversed(list(ways)):
                torch.cuda.synchronize()
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                ways[way]()
                last.record()
                last.synchronize()
                if repeat >= warm_up:
                    device_ms[way].append(first.elapsed_time(last))
        return {way: statistics.median(each) for way, each in device_ms.items()}


@contextmanager
def on_device(kind: str) -> Iterator[None]:
    """Be the only rank, with Megatron-Core's parallel state.

    Args:
        kind: "cuda" or "soft".
    """
    from tests.support.megatron_state import reset_megatron_state

    with ExitStack() as stack:
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        if kind == "soft":
            from tests.support.soft_gpu import SoftGpu

            stack.enter_context(SoftGpu())
        from megatron.core.transformer.moe import moe_utils

        logging.getLogger("megatron").setLevel(logging.ERROR)
        if not hasattr(moe_utils, "te_general_gemm"):
            moe_utils.te_general_gemm = None  # read by 0.16.1's router even where its import failed
        torch.manual_seed(0)
        ParallelSizes().initialize()
        stack.callback(reset_megatron_state)
        yield
