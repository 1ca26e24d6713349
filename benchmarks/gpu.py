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
import statistics
import sys
import tempfile
import time
import traceback
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
from megatron_router_replay.fused import route
from megatron_router_replay.testing import (
    ParallelSizes,
    build_tiny_gpt,
    megatron_on_cpu,
    random_microbatches,
    reset_megatron_state,
    tiny_gpt_config,
)

GROUPS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
}
ROUTERS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "64, 6": (64, 6, {}),
    "128, 8": (128, 8, {}),
    "256, 8, sigmoid, groups, bias": (256, 8, GROUPS),
    "512, 10": (512, 10, {}),
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SLEEP_CYCLES = 20_000_000  # about 10 ms, longer than any alternative takes to launch
LIVE_EVERY = 1024  # rows between two without a route: the last tokens of samples


class OneRouter(torch.nn.Module):
    """Megatron's TopKRouter without a model around it: logits [num_tokens, num_experts] -> (probabilities, map)."""

    def __init__(self, config: Any, device: torch.device) -> None:
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
        from megatron.core.transformer.moe.router import TopKRouter

        super().__init__()
        self.config = config
        self.router = TopKRouter(config, pg_collection=get_default_pg_collection())
        self.router.set_layer_number(1)
        self.router.gating = lambda logits: logits
        self.to(device)
        bias = self.router.expert_bias
        if bias is not None:
            bias.copy_(torch.rand(bias.shape, generator=torch.Generator().manual_seed(3)) / 10)

    # Megatron-Core compiles the function that counts tokens for the expert bias, anew for each router: not what is measured.
    @torch.compiler.set_stance("force_eager")
    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        routed: tuple[Tensor, Tensor] = self.router(logits.unsqueeze(1))
        return routed


class Shape:
    """One router and its inputs: logits and weights of a loss, routes of a trace twice as long, rows of it."""

    def __init__(self, num_tokens: int, router: str, dtype: torch.dtype, device: torch.device) -> None:
        self.num_tokens, self.router, self.dtype, self.device = num_tokens, router, dtype, device
        self.num_experts, self.topk, options = ROUTERS[router]
        fields = {"num_moe_experts": self.num_experts, "moe_router_topk": self.topk, **options}
        self.config = tiny_gpt_config(ParallelSizes(), deterministic_mode=False, **fields)
        generator = torch.Generator().manual_seed(num_tokens)
        size = (num_tokens, self.num_experts)
        self.logits = torch.randn(size, generator=generator).to(device, dtype)
        self.weights = torch.randn(size, generator=generator).to(device, dtype)
        routes = torch.rand(2 * num_tokens, self.num_experts, generator=generator).topk(self.topk, dim=1).indices
        self.rows = torch.randperm(2 * num_tokens, generator=generator)[:num_tokens]
        self.trace = self.new_trace(routes)
        self.trace_with_live_rows = self.new_trace(routes, torch.arange(2 * num_tokens) % LIVE_EVERY != 0)
        self.topk_indices = self.trace.topk_indices[self.rows, 0].to(device)

    def new_trace(self, routes: Tensor, mask: Tensor | None = None) -> mrr.RoutingTrace:
        return mrr.RoutingTrace(
            topk_indices=routes.unsqueeze(1), layer_numbers=[1], num_experts=self.num_experts, replay_mask=mask
        )

    def name(self) -> list[str]:
        return [str(self.num_tokens), self.router, str(self.dtype).removeprefix("torch.")]


class Alternatives:
    """The ways to route one shape, each a function of the logits; sessions are open until the context ends."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.functions: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {}
        self.prepare: dict[str, Callable[[], object]] = {}
        self.sessions: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Alternatives:
        from megatron.core.transformer.moe import router_replay as theirs

        shape = self.shape
        live, megatron = OneRouter(shape.config, shape.device), OneRouter(shape.config, shape.device)
        own = megatron.router.router_replay = theirs.RouterReplay()
        own.set_target_indices(shape.topk_indices.long())
        own.set_router_replay_action(theirs.RouterReplayAction.REPLAY_FORWARD)
        self.functions["live"] = live
        self.functions["Megatron's replay"] = megatron
        self._add("replay", lambda model: mrr.replay(model, shape.trace))
        self._add("replay, live rows", lambda model: mrr.replay(model, shape.trace_with_live_rows))
        self._add("replay, compare_live", lambda model: mrr.replay(model, shape.trace, compare_live=True))
        self._add("record", mrr.record)
        fused = partial(
            route,
            topk_indices=shape.topk_indices,
            score_function=shape.config.moe_router_score_function,
        )
        self.functions["fused.route, torch"] = partial(fused, backend="torch")
        if shape.device.type == "cuda":
            self.functions["fused.route, Triton"] = partial(fused, backend="triton")
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _add(self, name: str, open_session: Callable[[Any], Any]) -> None:
        model = OneRouter(self.shape.config, self.shape.device)
        session = self.sessions[name] = self._stack.enter_context(open_session(model))
        self.functions[name] = model
        self.prepare[name] = lambda: session.microbatch(self.shape.rows)

    def run(self, name: str, *, backward: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return probabilities, map and the gradient of (probabilities * weights).sum()."""
        leaf = self.shape.logits.detach().requires_grad_(backward)
        probs, routing_map = self.functions[name](leaf)
        if backward:
            probs.backward(self.shape.weights)
        return probs.detach(), routing_map, leaf.grad

    def prepared_run(self, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
        self.prepare.get(name, lambda: None)()
        return self.run(name)


def formula(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities, map and gradient of the shape's routes by definition, in float64."""
    logits = shape.logits.double().requires_grad_()
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, shape.topk_indices.long(), True)
    is_sigmoid = shape.config.moe_router_score_function == "sigmoid"
    scores = (1 / (1 + torch.exp(-logits)) if is_sigmoid else torch.exp(logits)) * chosen
    probs = scores / scores.sum(dim=1, keepdim=True)
    probs.backward(shape.weights.double())
    assert logits.grad is not None
    return probs.detach(), chosen, logits.grad


def check_shape(shape: Shape) -> Iterator[str]:
    """Yield what is wrong: maps that are not the trace's, or values far from the float64 formula and Megatron's replay."""
    expected = formula(shape)
    # Each is rounded to its dtype several times on the way.
    limit = 16 * torch.finfo(shape.dtype).eps
    with Alternatives(shape) as alternatives:
        theirs = alternatives.prepared_run("Megatron's replay")
        for name in alternatives.functions:
            probs, routing_map, grad = alternatives.prepared_run(name)
            where = f"{name}, {', '.join(shape.name())}"
            if not bool((routing_map.sum(dim=1) == shape.topk).all()):
                yield f"{where}: a row has not topk experts"
            if name in ("live", "record", "replay, live rows"):
                continue
            if not torch.equal(routing_map, expected[1]):
                yield f"{where}: the map is not the trace's"
            assert grad is not None
            pairs = ((probs, expected[0]), (grad, expected[2]))
            errors = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs]
            if not all(error < limit for error in errors):  # NaN too
                yield f"{where}: {errors} of the largest value from the float64 formula, allowed {limit:.1e}"
            if name == "replay" and not all(torch.equal(a, b) for a, b in zip((probs, routing_map, grad), theirs)):
                yield f"{where}: not the bits of Megatron's replay"
        recording = alternatives.sessions["record"]
        recorded = recording.trace(num_tokens=2 * shape.num_tokens).topk_indices[shape.rows, 0]
        live_map = alternatives.run("live", backward=False)[1].cpu()
        if not bool(live_map.gather(1, recorded.long()).all()):
            yield f"record, {', '.join(shape.name())}: not the live choice"


def check_syncs(shape: Shape) -> Iterator[str]:
    """Yield what makes the host wait for the device: queuing and forward of each session, and targets made on the GPU."""
    from megatron_router_replay.mcore.targets import build_targets

    def on_gpu() -> None:
        trace, rows = shape.trace_with_live_rows.to(shape.device), shape.rows.to(shape.device)
        torch.cuda.synchronize()
        with no_sync():
            build_targets(trace, rows, device=shape.device, with_replayed=True)

    with Alternatives(shape) as alternatives:
        for name in alternatives.functions:
            alternatives.prepared_run(name)

        def under(name: str) -> None:
            torch.cuda.synchronize()
            with no_sync():
                alternatives.prepared_run(name)

        checks = {name: partial(under, name) for name in alternatives.functions} | {"build_targets on the GPU": on_gpu}
        for name, check in checks.items():
            try:
                check()
            except RuntimeError as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                yield f"{name}: {str(error).splitlines()[0]} ({Path(where.filename).name}:{where.lineno})"


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def time_rounds(
    functions: Mapping[str, Callable[[], object]],
    *,
    prepare: Mapping[str, Callable[[], object]],
    repeats: int,
    device: torch.device,
    hide_launches: bool,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return medians of (the device's ms, the host's ms) by name; rounds alternate their order. On a CPU both are the same.

    Args:
        hide_launches: let the GPU sleep until the host has launched everything; only for what waits for nothing.
    """
    on_gpu, warm_up = device.type == "cuda", min(3, repeats)
    of_device: dict[str, list[float]] = {name: [] for name in functions}
    of_host: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(warm_up + repeats):
        for name in list(functions) if repeat % 2 else reversed(list(functions)):
            prepare.get(name, lambda: None)()
            if on_gpu:
                torch.cuda.synchronize()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                if hide_launches:
                    torch.cuda._sleep(SLEEP_CYCLES)
                start.record()
            began = time.perf_counter()
            functions[name]()
            host = device_ms = (time.perf_counter() - began) * 1000
            if on_gpu:
                end.record()
                end.synchronize()
                device_ms = start.elapsed_time(end)
            if repeat >= warm_up:
                of_device[name].append(device_ms)
                of_host[name].append(host)
    return medians(of_device), medians(of_host)


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in samples.items()}


def time_shape(shape: Shape, *, backward: bool, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return medians of every alternative, see `time_rounds`."""
    with Alternatives(shape) as alternatives:
        functions = {name: partial(alternatives.run, name, backward=backward) for name in alternatives.functions}
        return time_rounds(
            functions, prepare=alternatives.prepare, repeats=repeats, device=shape.device, hide_launches=True
        )


def peak_memory(shape: Shape) -> dict[str, float]:
    """Return the MiB of GPU memory that queuing, forward and backward of each alternative take at their peak."""
    peaks = {}
    with Alternatives(shape) as alternatives:
        for name in alternatives.functions:
            alternatives.prepared_run(name)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            alternatives.prepared_run(name)
            torch.cuda.synchronize()
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return peaks


def time_steps(device: torch.device, *, quick: bool, recompute: bool) -> tuple[dict[str, float], list[str]]:
    """Return (ms of a GPT's step by session, what is wrong): 4 micro-batches, forward and backward."""
    sequence, hidden, experts = (16, 64, 8) if quick else (2048, 1024, 16)
    fields = {"hidden_size": hidden, "moe_ffn_hidden_size": hidden // 2, "num_moe_experts": experts}
    layout = ParallelSizes()
    config = tiny_gpt_config(layout, deterministic_mode=False, **fields, **(FULL if recompute else {}))
    (model,) = build_tiny_gpt(config, layout)
    model.to(device)
    microbatches = random_microbatches(4, batch_size=1, sequence_length=sequence)
    rows = torch.arange(4 * sequence).view(4, 1, sequence)
    on_device = [{name: value.to(device) for name, value in batch.items()} for batch in microbatches]

    def step(session: Any = None) -> Tensor:
        model.zero_grad(set_to_none=True)
        losses = []
        for its_rows, batch in zip(rows, on_device):
            if session is not None:
                session.microbatch(its_rows)
            names = {"input_ids": batch["tokens"], "position_ids": batch["position_ids"], "labels": batch["labels"]}
            loss = model(**names, attention_mask=None).mean()
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    def recorded() -> Tensor:
        with mrr.record(model) as session:
            return step(session)

    def replayed() -> Tensor:
        with mrr.replay(model, trace) as session:
            return step(session)

    def frozen() -> Tensor:
        with mrr.freeze_recompute(model):
            return step()

    with mrr.record(model) as recording:
        step(recording)
    trace = recording.trace()
    routes = torch.rand(4 * sequence, trace.num_layers, experts).topk(2, dim=2).indices
    other = mrr.RoutingTrace(topk_indices=routes, layer_numbers=trace.layer_numbers, num_experts=experts)
    with mrr.replay(model, other, verify=True) as session:
        step(session)
    wrong = [] if session.report.decisions_wrong == 0 else [f"GPT: {session.report}"]
    if not session.report.decisions_verified:
        wrong.append("GPT: no decision was verified")
    functions = {"off": step, "record": recorded, "replay": replayed, "freeze_recompute": frozen}
    off, on = step(), replayed()
    if not torch.allclose(off, on, rtol=1e-2):
        wrong.append(f"GPT: losses {on.tolist()} under replay of its own routes, {off.tolist()} without")
    repeats = 1 if quick else 15
    return time_rounds(functions, prepare={}, repeats=repeats, device=device, hide_launches=False)[0], wrong


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


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (head, ["---"] * len(head), *rows))


def list_of(title: str, problems: Sequence[str]) -> str:
    return f"{title}: " + ("all passed" if not problems else "".join(f"\n- {problem}" for problem in problems))


def report(device: torch.device, *, quick: bool) -> tuple[str, bool]:
    """Return (the report as Markdown, whether everything was correct)."""
    on_gpu = device.type == "cuda"
    sizes = (64,) if quick else (4096, 16384)
    dtypes = (torch.float32, torch.bfloat16)
    made = [Shape(*what, device) for what in itertools.product(sizes, ROUTERS, dtypes)]
    wrong = [problem for shape in made for problem in check_shape(shape)]
    smaller = [shape for shape in made if shape.num_tokens == sizes[0]]
    waits = [problem for shape in smaller for problem in check_syncs(shape)] if on_gpu else []

    rows: list[list[object]] = []
    hosts: list[list[object]] = []
    names: list[str] = []
    for shape, backward in itertools.product(made, (False, True)):
        times, host = time_shape(shape, backward=backward, repeats=1 if quick else 20)
        names = list(times)
        what = [*shape.name(), "both" if backward else "forward"]
        live = times["live"]
        rows.append([*what, f"{live:.3f}", *(f"{times[name] / live:.2f}" for name in names[1:])])
        if shape.num_tokens == sizes[0] and shape.dtype is torch.bfloat16:
            hosts.append([*what, *(f"{host[name]:.3f}" for name in names)])
    head = ["tokens", "experts, topk", "logits", "pass"]
    steps = []
    for recompute in (False, True):
        times, of_step = time_steps(device, quick=quick, recompute=recompute)
        wrong += of_step
        ratios = [f"{value / times['off']:.3f}" for name, value in times.items() if name != "off"]
        steps.append(["full" if recompute else "none", f"{times['off']:.1f}", *ratios])
    parts = [
        environment(device),
        list_of("Correct against Megatron-Core's replay and a float64 formula", wrong),
        list_of("No host sync", waits) if on_gpu else "No host sync: not checked on a CPU",
        f"Routing, {'device' if on_gpu else 'CPU'} time: live in ms, the others as ratios to live\n\n"
        + table([*head, "live ms", *names[1:]], rows),
        "Routing, ms of the host to launch it\n\n" + table([*head, *names], hosts),
    ]
    if on_gpu:
        peaks = [(shape, peak_memory(shape)) for shape in made if shape.num_tokens == sizes[-1]]
        memory = [[*shape.name(), *(f"{peak[name]:.1f}" for name in names)] for shape, peak in peaks]
        parts.append("Routing, forward and backward, peak MiB\n\n" + table([*head[:3], *names], memory))
    parts.append(
        "GPT of 4 MoE layers, 4 micro-batches: ms without a session, the others as ratios to it\n\n"
        + table(["recompute", "off ms", "record", "replay", "freeze_recompute"], steps)
    )
    return "\n\n".join(parts), not wrong and not waits


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
