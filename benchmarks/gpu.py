"""What replay asks of a GPU and costs there, most important first; at most ten minutes on one GPU.

    python benchmarks/gpu.py                          each part is printed, and saved in raw/gpu.md, as it ends
    python benchmarks/gpu.py --device cpu --quick     the same code on a CPU, as its test runs it
    python benchmarks/gpu.py --device soft --quick    "modes" and "checkpoints" on a GPU made of software: counts and no times

Needs torch, megatron-core and this checkout. Exit code 1: something was not exact, or made the host wait for the device.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Run as a script, python looks in this folder, not in the one with the package.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_router_replay as mrr
from benchmarks.measure import table
from benchmarks.router import SIGMOID, Routers, random_routes
from benchmarks.step import FULL
from megatron_router_replay.mcore.batches.prefetch import prefetch
from megatron_router_replay.testing import (
    ParallelSizes,
    build_tiny_gpt,
    megatron_on_cpu,
    random_microbatches,
    tiny_gpt_config,
)
from tests.support.megatron_state import reset_megatron_state

SAVED = Path(__file__).parent / "raw" / "gpu.md"
LIMIT_S = 570
SLEEP_CYCLES = 20_000_000  # about 10 ms
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": FULL,
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
ROUTERS: dict[str, dict[str, Any]] = {"128, 8": {}, "256, 8, sigmoid in groups": SIGMOID, "512, 10": {}}


class Bench:
    """The device, and what was found wrong on it.

    Args:
        kind: "cuda", "cpu" or "soft".
        quick: small shapes and one round; times mean nothing.
    """

    def __init__(self, kind: str, *, quick: bool) -> None:
        self.kind, self.quick = kind, quick
        self.device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", 0)
        self.on_gpu = kind == "cuda"
        self.wrong: list[str] = []

    def up(self, values: Tensor) -> Tensor:
        return values.to(self.device)

    def place(self, module: Any) -> Any:
        if self.kind == "soft":
            from tests.support.soft_gpu import to_gpu

            return to_gpu(module)
        return module.to(self.device)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def times(
        self, ways: Mapping[str, Callable[[], object]], *, prepare: Mapping[str, Callable[[], object]] | None = None,
        repeats: int = 15, sleep: bool = False,
    ) -> tuple[dict[str, float], dict[str, float]]:  # fmt: skip
        """Return medians of (the device's ms, the host's ms) by way, in turns.

        Args:
            sleep: let the GPU sleep until the host has launched everything, so that events see kernels and no launches.
        """
        repeats = 1 if self.quick else repeats
        device_ms: dict[str, list[float]] = {way: [] for way in ways}
        host_ms: dict[str, list[float]] = {way: [] for way in ways}
        for repeat in range(repeats + min(3, repeats)):
            for way in list(ways) if repeat % 2 else reversed(list(ways)):
                (prepare or {}).get(way, lambda: None)()
                self.synchronize()
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.on_gpu else []
                if self.on_gpu and sleep:
                    torch.cuda._sleep(SLEEP_CYCLES)
                began = time.perf_counter()
                for event in events[:1]:
                    event.record()
                ways[way]()
                host = on_device = (time.perf_counter() - began) * 1000
                for event in events[1:]:
                    event.record()
                    event.synchronize()
                    on_device = events[0].elapsed_time(event)
                if repeat >= min(3, repeats):
                    device_ms[way].append(on_device)
                    host_ms[way].append(host)
        return _medians(device_ms), _medians(host_ms)


def _medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in samples.items()}


class Step:
    """A GPT, its micro-batches, a trace of other routes than its own, and every way to run a step of it."""

    def __init__(self, bench: Bench, *, layers: int, recompute: str) -> None:
        self.bench, self.num = bench, 2
        sequence, hidden, self.experts = (16, 64, 8) if bench.quick else (2048, 1024, 64)
        fields = {"num_layers": layers, "hidden_size": hidden, "moe_ffn_hidden_size": hidden // 2}
        layout = ParallelSizes()
        config = tiny_gpt_config(
            layout, num_moe_experts=self.experts, deterministic_mode=False, **fields, **RECOMPUTE[recompute]
        )
        self.model = bench.place(*build_tiny_gpt(config, layout))
        batches = random_microbatches(self.num, batch_size=1, sequence_length=sequence)
        self.batches = [{name: bench.up(value) for name, value in batch.items()} for batch in batches]
        self.rows = torch.arange(self.num * sequence).view(self.num, 1, sequence)
        self.trace = mrr.RoutingTrace(
            topk_indices=random_routes(self.rows.numel(), layers, 2, self.experts),
            layer_numbers=range(1, layers + 1),
            num_experts=self.experts,
            token_ids=torch.cat([batch["tokens"].flatten() for batch in batches]),
        )
        self.routes = self.trace.topk_indices.view(*self.rows.shape, layers, 2)
        self.on_device = [bench.up(rows) for rows in self.rows], self.trace.to(bench.device)

    def run(self, queue: Callable[[int], object] = lambda number: None) -> None:
        self.model.zero_grad(set_to_none=True)
        for number, batch in enumerate(self.batches):
            queue(number)
            names = {"input_ids": batch["tokens"], "position_ids": batch["position_ids"], "labels": batch["labels"]}
            self.model(**names, attention_mask=None).mean().backward()

    def ways(self) -> dict[str, Callable[[], Any]]:
        """Return a context manager for each way; it yields what queues micro-batch `number`."""
        model, trace = self.model, self.trace
        rows, on_gpu = self.on_device

        @contextmanager
        def session(
            opened: Any, queue: Callable[[Any, int], object] | None = None
        ) -> Iterator[Callable[[int], object]]:
            with opened as its_session:
                yield partial(queue, its_session) if queue is not None else lambda number: None

        def by_rows(session: Any, number: int) -> None:
            session.microbatch(self.rows[number], model)

        def ahead() -> Any:
            taken = prefetch(trace, self.rows.unbind(0), device=self.bench.device)
            return session(mrr.replay(model, trace), lambda its, number: its.microbatch(next(taken), model))

        def fed(its: Any, number: int) -> None:
            mrr.microbatch(model, routes=self.routes[number], trust_layout=True)

        return {
            "off": lambda: nullcontext(lambda number: None),
            "Megatron's replay": self.megatron,
            "replay": lambda: session(mrr.replay(model, trace), by_rows),
            "prefetched": ahead,
            "trace on the GPU": lambda: session(
                mrr.replay(model, on_gpu, min_replayed=1.0), lambda its, number: its.microbatch(rows[number], model)
            ),
            "fed": lambda: session(mrr.replay(model), fed),
            "verify": lambda: session(mrr.replay(model, trace, verify=True), by_rows),
            "record": lambda: session(mrr.record(model), by_rows),
            "freeze": lambda: session(mrr.freeze_recompute(model)),
        }

    @contextmanager
    def megatron(self) -> Iterator[Callable[[int], object]]:
        """Megatron-Core's own replay, its targets on the device beforehand."""
        from megatron.core.transformer.moe import router_replay as theirs

        actions, routers = theirs.RouterReplayAction, self.routers
        targets = [self.bench.up(routes[0].long()).unbind(1) for routes in self.routes]

        def announce(router: Any, args: Any) -> None:
            recomputes = torch._C._current_graph_task_id() != -1
            router.router_replay.set_router_replay_action(
                actions.REPLAY_BACKWARD if recomputes else actions.REPLAY_FORWARD
            )

        def queue(number: int) -> None:
            for router, target in zip(routers, targets[number]):
                router.router_replay.clear_indices()
                router.router_replay.set_target_indices(target)

        handles = [router.register_forward_pre_hook(announce) for router in routers]
        for router in routers:
            router.router_replay = theirs.RouterReplay()
        yield queue
        for router, handle in zip(routers, handles):
            router.router_replay = None
            handle.remove()

    @property
    def routers(self) -> list[Any]:
        from megatron.core.transformer.moe.router import TopKRouter

        return [module for module in self.model.modules() if isinstance(module, TopKRouter)]

    def wrong(self, way: str) -> int:
        """Run a step, and return how many decisions were not the trace's, in forwards and recomputes."""
        seen: list[tuple[int, int, Tensor]] = []
        current = 0
        handles = [
            router.register_forward_hook(lambda router, args, out: seen.append((current, router.layer_number, out[1])))
            for router in self.routers
        ]
        with self.ways()[way]() as queue:

            def numbered(number: int) -> None:
                nonlocal current
                current = number
                queue(number)

            self.run(numbered)
        for handle in handles:
            handle.remove()
        wrong = sum(
            _wrong_rows(routing_map, self.routes[number][0, :, layer - 1]) for number, layer, routing_map in seen
        )
        return wrong if seen else -1


def _wrong_rows(routing_map: Tensor, routes: Tensor) -> int:
    """Return how many rows of a routing map are not the routes [num_tokens, topk]."""
    expected = torch.zeros(routing_map.shape, dtype=torch.bool).scatter_(1, routes.long(), True)
    return int((expected != routing_map.cpu()).any(dim=1).sum())


def copies(bench: Bench) -> str:
    """(1) Whether an upload makes the host wait behind a long kernel."""
    size = 1 << (10 if bench.quick else 24)
    pageable = torch.zeros(size, dtype=torch.uint8)
    ways = {"pageable": pageable} | ({"page-locked": pageable.pin_memory()} if bench.on_gpu else {})
    _, host = bench.times(
        {way: lambda values=values: values.to(bench.device, non_blocking=True) for way, values in ways.items()},
        sleep=True,
    )
    return table(["memory", f"ms of the host, {size >> 20} MiB"], [[way, f"{ms:.3f}"] for way, ms in host.items()])


def modes(bench: Bench) -> str:
    """(2) What one step of a GPT asks of the device in every mode, with full recompute and without."""
    rows = []
    for recompute in ("none", "full"):
        step = Step(bench, layers=4, recompute=recompute)
        for way, opened in step.ways().items():
            if way not in ("off", "record", "freeze"):
                wrong = step.wrong(way)
                bench.wrong += [f"{way}, recompute {recompute}: {wrong} decisions are not the trace's"] if wrong else []
            asked, waits = _asked(bench, step, opened)
            bench.wrong += [f"{way}, recompute {recompute}: {each}" for each in waits]
            rows.append([recompute, way, *asked])
    return table(["recompute", "session", "kernels", "copies up", "copies down", "waits"], rows)


def _asked(bench: Bench, step: Step, opened: Callable[[], Any]) -> tuple[list[object], list[str]]:
    """Return (kernels, copies up and down, waits of a step between opening and leaving the session, waits of ours)."""
    if bench.kind == "soft":
        from tests.support.soft_gpu import in_use

        gpu: Any = in_use()
        with opened() as queue, gpu.logged() as log:
            step.run(queue)
        ours = [
            f"{op.kind} {op.name} at {op.where}" for op in log.ops if op.ours and (op.kind == "wait" or op.pageable)
        ]
        return [log.kernels, len(log.of("h2d")), len(log.of("d2h")), len(log.waits)], ours + gpu.races
    if not bench.on_gpu:
        with opened() as queue:
            step.run(queue)
        return ["-"] * 4, []
    with opened() as queue:  # what the first step compiles and allocates
        step.run(queue)
    with opened() as queue, torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        step.run(queue)
    counted = {event.key: event.count for event in profile.key_averages()}
    numbers = [
        sum(count for name, count in counted.items() if part in name)
        for part in ("LaunchKernel", "HtoD", "DtoH", "Synchronize")
    ]
    with opened() as queue, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # not "error": Megatron-Core's dispatcher may wait
        step.run(queue)
        torch.cuda.set_sync_debug_mode("default")
    ours = [f"waits at {each.filename}:{each.lineno}" for each in warned if "router_replay/mcore" in each.filename]
    return list(numbers), ours


def routers(bench: Bench) -> str:
    """(3) One router, forward and backward: live in ms of the device, the others as ratios to it."""
    rows = []
    sizes = (64,) if bench.quick else (8192, 32768, 131072)
    for num_tokens, (router, options) in itertools.product(sizes, ROUTERS.items()):
        times, host = _time_router(bench, num_tokens, router, options)
        live, launched = times.pop("live"), host["live"]
        ratios = [f"{ms / live:.2f}" for ms in times.values()]
        rows.append([num_tokens, router, f"{live:.3f}", *ratios, f"{host['replay'] / launched:.2f}"])
    return table(["tokens", "experts, topk", "live ms", *times, "replay, host to launch"], rows)


def _time_router(
    bench: Bench, num_tokens: int, router: str, options: dict[str, Any]
) -> tuple[dict[str, float], dict[str, float]]:
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe import router_replay as theirs

    experts, topk = map(int, router.split(",")[:2])
    fields = {"num_moe_experts": experts, "moe_router_topk": topk, "deterministic_mode": False, **options}
    logits, grad = (bench.up(torch.randn(num_tokens, experts)) for _ in range(2))
    routes, rows = random_routes(num_tokens, 1, topk, experts), torch.arange(num_tokens)
    trace = mrr.RoutingTrace(topk_indices=routes, layer_numbers=[1], num_experts=experts)
    some_live = trace.keep(rows % 1024 != 0)

    def model(**more: Any) -> Any:
        return Routers(tiny_gpt_config(ParallelSizes(), **fields, **more), 1).to(bench.device)

    def run(model: Any) -> None:
        (probs,) = model(logits.detach().requires_grad_())
        probs.backward(grad)

    def driven(action: str) -> Any:
        built = model()
        own = built.routers[0].router_replay = theirs.RouterReplay()
        own.set_target_indices(bench.up(routes[:, 0]))
        own.set_router_replay_action(getattr(theirs.RouterReplayAction, action))
        return built

    models = {"live": model(), "Megatron's replay": driven("REPLAY_FORWARD"), "Megatron's record": driven("RECORD")}
    if bench.on_gpu and getattr(moe_utils, "fused_topk_with_score_function", None) is not None:
        models["TE's fused"] = model(moe_router_fusion=True)
    prepare: dict[str, Callable[[], object]] = {}
    with ExitStack() as sessions, torch.compiler.set_stance("force_eager"):
        for name, opened in (
            ("replay", lambda built: mrr.replay(built, trace)),
            ("some rows live", lambda built: mrr.replay(built, some_live)),
            ("verify", lambda built: mrr.replay(built, trace, verify=True)),
            ("record", mrr.record),
        ):
            models[name] = model()
            session = sessions.enter_context(opened(models[name]))
            prepare[name] = partial(session.microbatch, rows)
        return bench.times({name: partial(run, each) for name, each in models.items()}, prepare=prepare, sleep=True)


def queueing(bench: Bench) -> str:
    """(4) `microbatch()` against a bare gather of its rows into page-locked memory: ms of the host."""
    rows = []
    sizes = [(4, 64)] if bench.quick else [(4, 32768), (48, 32768), (94, 131072)]
    for layers, num_tokens in sizes:
        trace = mrr.RoutingTrace(
            topk_indices=torch.rand(num_tokens, 128).topk(8).indices.unsqueeze(1).expand(-1, layers, -1),
            layer_numbers=range(1, layers + 1),
            num_experts=128,
        )
        config = tiny_gpt_config(
            ParallelSizes(), num_layers=layers, num_moe_experts=128, moe_router_topk=8, deterministic_mode=False
        )
        model, order = Routers(config, layers).to(bench.device), torch.randperm(num_tokens)
        staged = torch.empty(trace.topk_indices.shape, dtype=torch.uint8, pin_memory=bench.on_gpu)
        sessions = [mrr.replay(model, trace)]

        def again(sessions: list[Any] = sessions, model: Any = model, trace: Any = trace) -> None:
            sessions.pop().close(verify=False)
            sessions.append(mrr.replay(model, trace))

        _, host = bench.times(
            {
                "gather": partial(torch.index_select, trace.topk_indices, 0, order, out=staged),
                "microbatch": lambda sessions=sessions, order=order: sessions[0].microbatch(order),
            },
            prepare={"microbatch": again},
        )
        sessions[0].close(verify=False)
        rows.append([layers, num_tokens, *(f"{ms:.2f}" for ms in host.values())])
    return table(["layers", "tokens", "bare gather", "microbatch()"], rows)


def steps(bench: Bench) -> str:
    """(5) and (6) Steps of a 12-layer GPT: ms and held memory without a session, the others beside it."""
    rows = []
    for recompute in RECOMPUTE:
        step = Step(bench, layers=2 if bench.quick else 12, recompute=recompute)

        def whole(opened: Callable[[], Any], step: Step = step) -> None:
            with opened() as queue:
                step.run(queue)

        ways = {way: partial(whole, opened) for way, opened in step.ways().items()}
        times, _ = bench.times(ways, repeats=7)
        off = times["off"]
        for way, ms in times.items():
            memory = _peak(way, ways) if bench.on_gpu else "-"
            rows.append([recompute, way, f"{ms:.1f}", f"{ms / off:.3f}", memory])
    return table(["recompute", "session", "ms", "to off", "peak MiB"], rows)


def _peak(way: str, ways: Mapping[str, Callable[[], object]]) -> str:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ways[way]()
    torch.cuda.synchronize()
    return f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f}"


def recompute_flips(bench: Bench) -> str:
    """(7) Decisions that a live recompute would flip, which is why freeze exists; 0 where kernels are deterministic."""
    step = Step(bench, layers=4, recompute="full")
    with mrr.freeze_recompute(step.model, count_flips=True) as session:
        for _ in range(1 if bench.quick else 10):
            step.run()
    flips = session.report.flips_of_layer
    return f"{sum(flips.values())} of {session.report.decisions['recomputed']} recomputed decisions, by layer {flips}"


def prefetching(bench: Bench) -> str:
    """(8) Prefetched rows under a stream that sleeps: right, and the host does not wait."""
    step = Step(bench, layers=4, recompute="none")
    if bench.on_gpu:
        torch.cuda._sleep(10 * SLEEP_CYCLES)
    wrong = step.wrong("prefetched")
    bench.wrong += [f"prefetched under a sleeping stream: {wrong} decisions are not the trace's"] if wrong else []
    return f"{wrong} wrong decisions"


class _RoutersOfTrace:
    """Two routers, and a trace that says what they use for 64 tokens."""

    def __init__(self, bench: Bench) -> None:
        fields = {"num_layers": 2, "num_moe_experts": 128, "moe_router_topk": 8, "deterministic_mode": False}
        self.model = bench.place(Routers(tiny_gpt_config(ParallelSizes(), **fields), 2))
        self.routes, self.rows = random_routes(64, 2, 8, 128), torch.arange(64)
        self.trace = mrr.RoutingTrace(topk_indices=self.routes, layer_numbers=[1, 2], num_experts=128)
        self.logits = bench.up(torch.randn(64, 128)).requires_grad_()

    def run(self, checkpoint: Callable[..., Tensor], before: Callable[[Tensor], Tensor]) -> tuple[int, int]:
        """Replay in a checkpoint; return how many routing maps left the routers, and their rows that are not the trace's."""
        seen: list[tuple[int, Tensor]] = []
        for router in self.model.routers:
            router.register_forward_hook(lambda router, args, out: seen.append((router.layer_number, out[1])))
        with mrr.replay(self.model, self.trace) as session:
            session.microbatch(self.rows)
            # Squared inside: a non-reentrant recompute ends where the last tensor that the backward needs is there.
            checkpoint(lambda logits: torch.stack(self.model(before(logits))).square(), self.logits).sum().backward()
        return len(seen), sum(_wrong_rows(routing_map, self.routes[:, layer - 1]) for layer, routing_map in seen)


def checkpoints(bench: Bench) -> str:
    """(9) Replay in checkpoints of torch and, where they are, of Transformer Engine, with FP8 too."""
    from torch.utils.checkpoint import checkpoint

    torch_kinds = {f"torch, reentrant {kind}": partial(checkpoint, use_reentrant=kind) for kind in (True, False)}
    runs = {name: partial(_RoutersOfTrace(bench).run, kind, lambda x: x) for name, kind in torch_kinds.items()}
    left_out = []
    try:
        import transformer_engine.pytorch as te
    except (ImportError, OSError) as error:
        left_out = [f"Left out: Transformer Engine and FP8, {error}."]
    else:
        linear = te.Linear(128, 128, device=bench.device)
        for kind in (True, False):
            its_checkpoint = partial(te.checkpoint, use_reentrant=kind)
            runs[f"Transformer Engine, reentrant {kind}"] = partial(_RoutersOfTrace(bench).run, its_checkpoint, linear)
        try:
            with te.fp8_autocast(enabled=True):
                pass
        except AssertionError as error:  # how it says that this GPU has none
            left_out = [f"Left out: FP8, {error}."]
        else:

            def in_fp8(logits: Tensor) -> Tensor:
                with te.fp8_autocast(enabled=True):
                    return linear(logits)

            runs["the same, FP8"] = partial(_RoutersOfTrace(bench).run, its_checkpoint, in_fp8)
    rows = []
    for name, run in runs.items():
        num_maps, wrong = run()
        rows.append([name, num_maps, wrong])
        bench.wrong += [f"{name}: {num_maps} maps, {wrong} wrong rows"] if (num_maps, wrong) != (4, 0) else []
    return "\n\n".join([table(["checkpoint", "maps of 2 forwards, 2 recomputes", "wrong rows"], rows), *left_out])


def graphs(bench: Bench) -> str:
    """(10) A CUDA graph would repeat the routes of its capture: a router in one is refused."""
    if not bench.on_gpu:
        return "Left out: a CUDA graph needs a GPU."
    routers = _RoutersOfTrace(bench)
    session = mrr.replay(routers.model, routers.trace)
    session.microbatch(routers.rows)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            routers.model(routers.logits)
        said = "it was captured"
        bench.wrong.append("a router under a session was captured into a CUDA graph")
    except mrr.RouterReplayError as error:
        said = str(error)
    session.close(verify=False)
    return said


PARTS = (copies, modes, routers, queueing, steps, recompute_flips, prefetching, checkpoints, graphs)
PARTS_OF_SOFTWARE = (modes, checkpoints)


@contextmanager
def one_rank(kind: str) -> Iterator[None]:
    """Be the only rank, with Megatron-Core's parallel state; on a CPU with Megatron-Core made to run there."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        if kind == "cpu":
            stack.enter_context(megatron_on_cpu())
        if kind == "soft":
            from tests.support.soft_gpu import SoftGpu

            stack.enter_context(SoftGpu())
        from megatron.core.transformer.moe import moe_utils

        if not hasattr(moe_utils, "te_general_gemm"):
            moe_utils.te_general_gemm = None  # read by 0.16.1's router even where its import failed
        ParallelSizes().initialize()
        stack.callback(reset_megatron_state)
        yield


def environment(bench: Bench) -> str:
    """Return one line: device and versions."""
    import megatron.core

    name = torch.cuda.get_device_name(bench.device) if bench.on_gpu else f"no GPU ({bench.kind}), {platform.machine()}"
    return f"{name}, CUDA {torch.version.cuda}, torch {torch.__version__}, megatron-core {megatron.core.__version__}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu", "soft"])
    parser.add_argument("--quick", action="store_true", help="small shapes and few rounds; times mean nothing")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "benchmarks/gpu.py: no CUDA GPU is available; --device cpu --quick runs the same code on a CPU.",
            file=sys.stderr,
        )
        return 2
    torch.manual_seed(0)
    began = time.monotonic()
    bench = Bench(options.device, quick=options.quick)
    with one_rank(options.device):
        said = [environment(bench)]
        for part in PARTS_OF_SOFTWARE if options.device == "soft" else PARTS:
            title = (part.__doc__ or "").splitlines()[0]
            text = "Left out: ten minutes are over." if time.monotonic() - began > LIMIT_S else part(bench)
            said.append(f"### {title}\n\n{text}")
            print(said[-1], flush=True)
            if bench.on_gpu:
                SAVED.write_text("\n\n".join(said) + "\n")
    said.append("Exact, and no wait of ours: " + ("all of it" if not bench.wrong else "\n- ".join(["", *bench.wrong])))
    print(said[-1])
    if bench.on_gpu:
        SAVED.write_text("\n\n".join(said) + "\n")
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
