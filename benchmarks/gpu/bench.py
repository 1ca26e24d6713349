"""The device: what a program asks of it, what it holds there, and how long it takes; a real GPU or one made of software."""

from __future__ import annotations

import datetime
import logging
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.testing import ParallelSizes

if TYPE_CHECKING:
    from benchmarks.gpu.step import Step

SLEEP_CYCLES = 20_000_000
"""About 10 ms."""
_SPAN = "the program that is counted"
_WAITS = ("Synchronize", "HostAlloc", "HostRegister", "cudaFree")
"""Calls of CUDA in which the host waits for the device, or which wait until it is idle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a program asked of the device.

    Args:
        operations: launches of kernels and graphs.
        waits: of the host for the device.
        pageable: uploads from memory that is not page-locked.
        ours: waits and pageable uploads in lines of this library, as far as the device can tell.
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
        plant: faults that the benchmark must find: see `__main__`.
    """

    def __init__(self, kind: str, *, quick: bool, plant: tuple[str, ...] = ()) -> None:
        self.kind, self.quick, self.plant = kind, quick, plant
        self.on_gpu = kind == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device())

    @cached_property
    def step(self) -> Step:
        """The model and its micro-batches, made once."""
        from benchmarks.gpu.step import Step

        return Step(self)

    @cached_property
    def transformer_engine(self) -> Any:
        """`transformer_engine.pytorch`, or the reason, a str, why there is none."""
        try:
            import transformer_engine.pytorch as te
        except (ImportError, OSError) as error:
            return f"left out: no Transformer Engine ({error})"
        return te

    @property
    def has_te(self) -> bool:
        return not isinstance(self.transformer_engine, str)

    @property
    def te_version(self) -> str:
        """Its version, "" without it."""
        return str(sys.modules["transformer_engine"].__version__) if self.has_te else ""

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
        te = f", Transformer Engine {self.te_version}" if self.has_te else ", no Transformer Engine"
        return (
            f"{datetime.date.today()}, {name}, CUDA {torch.version.cuda}, torch {torch.__version__}, Megatron-Core "
            f"{megatron.core.__version__}{te}, megatron-router-replay {mrr.__version__}, Python {platform.python_version()}"
            f"{', --quick' if self.quick else ''}."
        )

    def fail_in(self, part: int) -> None:
        """Do what `--plant exception` and `--plant hang` say of this part, counted from 1."""
        if part == 2 and "exception" in self.plant:
            raise RuntimeError("a planted exception")
        if part == 3 and "hang" in self.plant:
            time.sleep(3600)

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
        """Count what a program asks of the device.

        Args:
            opened: yields the program; what is done around it is not counted.
        """
        if not self.on_gpu:
            return self._logged(opened)
        with opened() as run:  # what a first run compiles and allocates
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
        # Outside of it stand the profiler's own synchronisations, and ours around it.
        inside = [each.name for each in events if span.start <= each.time_range.start <= span.end]
        uploads = [each.name for each in events if "HtoD" in each.name]  # they run later than they were asked for
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
        """Return MiB that a forward allocates and holds until its backward, and at the peak of both."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = forward()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        return held / 2**20, (torch.cuda.max_memory_allocated() - before) / 2**20

    def times(
        self, ways: Mapping[str, Callable[[], object]], *, prepare: Mapping[str, Callable[[], object]] | None = None,
        repeats: int = 7, sleep: bool = False,
    ) -> tuple[dict[str, float], dict[str, float]]:  # fmt: skip
        """Return medians of (the device's ms, the host's ms) by way, in turns.

        Args:
            prepare: way -> what runs before it, not timed.
            sleep: let the GPU sleep until the host has launched everything, so that events see kernels and no launches.
        """
        repeats = 1 if not self.on_gpu else 3 if self.quick else repeats
        warm_up = 2 if self.on_gpu else 0
        device_ms: dict[str, list[float]] = {way: [] for way in ways}
        host_ms: dict[str, list[float]] = {way: [] for way in ways}
        for repeat in range(warm_up + repeats):
            for way in list(ways) if repeat % 2 else reversed(list(ways)):
                (prepare or {}).get(way, lambda: None)()
                torch.cuda.synchronize()
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                if sleep:
                    torch.cuda._sleep(SLEEP_CYCLES)
                began = time.perf_counter()
                first.record()
                ways[way]()
                host = (time.perf_counter() - began) * 1000
                last.record()
                last.synchronize()
                if repeat >= warm_up:
                    device_ms[way].append(first.elapsed_time(last))
                    host_ms[way].append(host)
        medians = ({way: statistics.median(each) for way, each in times.items()} for times in (device_ms, host_ms))
        return next(medians), next(medians)


@contextmanager
def on_device(
    kind: str, rank: int = 0, sizes: ParallelSizes | None = None, folder: str | None = None
) -> Iterator[None]:
    """Be one rank, with Megatron-Core's parallel state.

    Args:
        kind: "cuda" or "soft".
        rank: of the `sizes.world_size` that meet in `folder`.
    """
    from tests.support.megatron_state import reset_megatron_state

    sizes = sizes or ParallelSizes()
    with ExitStack() as stack:
        folder = folder or stack.enter_context(tempfile.TemporaryDirectory())
        store = dist.FileStore(f"{folder}/store", sizes.world_size)
        has_own_gpu = kind == "cuda" and torch.cuda.device_count() >= sizes.world_size
        if kind == "cuda":
            torch.cuda.set_device(rank if has_own_gpu else 0)
        # Two ranks of NCCL cannot share a GPU; gloo copies through the host.
        dist.init_process_group("nccl" if has_own_gpu else "gloo", store=store, rank=rank, world_size=sizes.world_size)
        stack.callback(dist.destroy_process_group)
        if kind == "soft":
            from tests.support.soft_gpu import SoftGpu

            stack.enter_context(SoftGpu())
        from megatron.core.transformer.moe import moe_utils

        logging.getLogger("megatron").setLevel(logging.ERROR)
        if not hasattr(moe_utils, "te_general_gemm"):
            moe_utils.te_general_gemm = None  # read by 0.16.1's router even where its import failed
        torch.manual_seed(0)
        sizes.initialize()
        stack.callback(reset_megatron_state)
        yield
