"""The parts of the benchmark, most important first; each yields rows on a `Bench`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import megatron_router_replay as mrr
from benchmarks.gpu.bench import SLEEP_CYCLES, Bench
from benchmarks.gpu.ranks import ranks
from benchmarks.gpu.report import Part, Row, in_words
from benchmarks.gpu.step import RECOMPUTE, as_map, wrong_rows
from benchmarks.router import SIGMOID, Routers, random_routes
from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.testing.tiny_gpt import tiny_gpt_config

FP8_INSIDE = (2, 19)
"""The first Transformer Engine whose checkpoint can recompute a function that enters FP8 itself (their #3284)."""
SIZES = {"128, 8": {}, "256, 8, sigmoid in groups": SIGMOID, "512, 10": {}}

replay = partial(mrr.replay, min_agreement=0)
"""Of random routes, which no router would choose."""


def config(topk: int = 8, experts: int = 128, **fields: Any) -> Any:
    """Return a TransformerConfig of routers."""
    own = {"num_moe_experts": experts, "moe_router_topk": topk, "deterministic_mode": False}
    return tiny_gpt_config(ParallelSizes(), **{**own, **fields})


def refused(case: str, run: Callable[[], object], otherwise: str) -> Row:
    """Return a row of what must raise one of our errors."""
    try:
        run()
    except mrr.RouterReplayError as error:
        return Row(case=case, verdict=f"refused, {str(error)[:6]}")
    except Exception as error:
        return Row(case=case, wrong=in_words(error))
    return Row(case=case, wrong=otherwise)


class TwoRouters:
    """Two routers under a replay, and a trace of what they use for 64 tokens."""

    def __init__(self, bench: Bench) -> None:
        self.model = bench.place(Routers(config(num_layers=2), 2))
        self.routes, self.rows = random_routes(64, 2, 8, 128), torch.arange(64)
        self.trace = mrr.RoutingTrace(topk_indices=self.routes, layer_numbers=[1, 2], num_experts=128)
        self.logits = bench.up(torch.randn(64, 128)).requires_grad_()
        self.maps: list[tuple[int, Tensor]] = []
        for router in self.model.routers:
            router.register_forward_hook(lambda router, _, out: self.maps.append((router.layer_number, out[1].clone())))

    def run(self, case: str, around: Callable[..., Any], *, runs: int, inside: Any = None) -> Row:
        """Replay a step, and return whether the routers of all its forwards and recomputes used the trace.

        Args:
            around: calls a function with the logits, as a checkpoint does.
            runs: of each router.
            inside: runs before the routers, on the logits.
        """

        def routed(logits: Tensor) -> Tensor:
            # Squared inside: a non-reentrant recompute ends where the last tensor that the backward needs is there.
            return torch.stack(self.model(logits if inside is None else inside(logits))).square()

        with replay(self.model, self.trace) as session:
            session.microbatch(self.rows)
            around(routed, self.logits).sum().backward()
        wrong = sum(wrong_rows(one, as_map(self.routes[:, layer - 1], 128)) for layer, one in self.maps)
        found = len(self.maps)
        bad = f"{found} maps, not {2 * runs}; {wrong} wrong rows" if (found, wrong) != (2 * runs, 0) else ""
        return Row(case=case, wrong=bad)


def checkpoints(bench: Bench) -> Iterator[Row]:
    """Replay in checkpoints of torch and of Transformer Engine, with FP8 around them and inside."""
    for kind in (True, False):
        yield TwoRouters(bench).run(f"torch, reentrant {kind}", partial(checkpoint, use_reentrant=kind), runs=2)
    te = bench.transformer_engine
    if not bench.has_te:
        yield Row(case="Transformer Engine's, FP8 around and inside", verdict=te)
        return
    linear = te.Linear(128, 128, device=bench.device)
    for kind in (True, False):
        yield TwoRouters(bench).run(
            f"Transformer Engine, reentrant {kind}", partial(te.checkpoint, use_reentrant=kind), runs=2, inside=linear
        )
    autocast = getattr(te, "autocast", None) or te.fp8_autocast  # it got another name
    try:
        with autocast(enabled=True):
            pass
    except (AssertionError, RuntimeError) as error:  # how it says that this GPU has none
        yield Row(case="FP8", verdict=f"left out: {in_words(error)}")
        return
    for kind in (True, False):
        with_fp8 = te.Linear(128, 128, device=bench.device)

        def around(function: Any, logits: Tensor, kind: bool = kind) -> Any:
            with autocast(enabled=True):
                return te.checkpoint(function, logits, use_reentrant=kind)

        def inside(logits: Tensor, linear: Any = with_fp8) -> Any:
            with autocast(enabled=True):
                return linear(logits)

        yield TwoRouters(bench).run(f"FP8 around the checkpoint, reentrant {kind}", around, runs=2, inside=with_fp8)
        case = f"FP8 inside the checkpoint, reentrant {kind}"
        if tuple(int(number) for number in bench.te_version.split(".")[:2]) < FP8_INSIDE:
            yield Row(case=case, verdict="left out: before 2.19, Transformer Engine's own recompute raises KeyError")
        else:
            yield TwoRouters(bench).run(case, partial(te.checkpoint, use_reentrant=kind), runs=2, inside=inside)


def graphs(bench: Bench) -> Iterator[Row]:
    """A CUDA graph repeats what it captured: routers and sessions in one are refused, everything else may be in one."""
    yield Row(case="a graph of what stands around the routers", wrong=_graph_around(bench))
    one = TwoRouters(bench)
    torch.cuda.synchronize()
    session = replay(one.model, one.trace)

    def captured(run: Callable[[], object]) -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            run()

    yield refused(
        "a graph that captures a session's stream: microbatch()", lambda: captured(lambda: session.microbatch(one.rows)),
        "a micro-batch was queued in a capture",
    )  # fmt: skip
    session.close(verify=False)
    with_rows = replay(one.model, one.trace)
    with_rows.microbatch(one.rows)
    yield refused("a graph of a router", lambda: captured(lambda: one.model(one.logits)), "a router was captured")
    with_rows.close(verify=False)


def _graph_around(bench: Bench) -> str:
    before, after = (bench.place(torch.nn.Linear(128, 128)) for _ in range(2))
    sample = bench.up(torch.randn(64, 128)).requires_grad_()
    before, after = torch.cuda.make_graphed_callables((before, after), ((sample,), (sample.detach().requires_grad_(),)))
    for _ in range(2):  # the second run is a replay of the graphs
        one = TwoRouters(bench)
        row = one.run("", lambda function, logits: after(function(before(logits)).sum(0)), runs=1)
        if row.wrong:
            return row.wrong
    return ""


def compiled(bench: Bench) -> Iterator[Row]:
    """Routers in compiled code are replayed."""
    backend = "inductor" if bench.on_gpu else "eager"
    yield TwoRouters(bench).run(
        f"torch.compile, {backend}", lambda function, logits: torch.compile(function, backend=backend)(logits), runs=1
    )
    torch.compiler.reset()


def columns(bench: Bench) -> Iterator[Row]:
    """A replay of the router's own choices is bit-identical to the router, also in the order of columns."""
    for scores in ("softmax", "sigmoid"):
        routers = bench.place(Routers(config(4, 16, moe_router_score_function=scores), 1))
        logits, grad = (bench.up(torch.randn(64, 16)) for _ in range(2))
        rows = torch.arange(64)

        def step(around: Any, routers: Any = routers, logits: Tensor = logits, grad: Tensor = grad) -> list[Tensor]:
            mine = logits.clone().requires_grad_()
            probs = around(lambda x: routers(x)[0], mine)
            probs.backward(grad)
            return [probs.detach(), mine.grad]

        for name, around in (
            ("no recompute", lambda function, x: function(x)),
            ("a reentrant checkpoint", partial(checkpoint, use_reentrant=True)),
            ("a non-reentrant checkpoint", partial(checkpoint, use_reentrant=False)),
        ):
            without = step(around)
            with mrr.record(routers) as recording:
                recording.microbatch(rows)
                recorded = step(around)
            with mrr.replay(routers, recording.trace()) as session:
                session.microbatch(rows)
                replayed = step(around)
            same = [all(torch.equal(one, other) for one, other in zip(without, each)) for each in (recorded, replayed)]
            yield Row(
                case=f"top-4, {scores}, {name}",
                wrong="" if all(same) else f"bit-identical under record: {same[0]}, under replay: {same[1]}",
            )


def dispatchers(bench: Bench) -> Iterator[Row]:
    """Between the router and its experts: FP8 padding of the map, and dispatchers with a top-k of their own."""
    from megatron.core.transformer.moe import token_dispatcher

    step = bench.step
    for name in ("replay, rows", "record"):
        # To 16, the alignment of FP8: a model in bf16 has none, and newer versions divide by it.
        aligned = mock.patch.object(token_dispatcher, "get_align_size_for_quantization", return_value=16)
        with step.set(moe_router_padding_for_quantization=True), aligned:
            problems = step.problems(step.ways()[name], recomputes=False)
        yield Row(case=f"FP8 padding, {name}", wrong="; ".join(problems))
    # Its map is a top-k of the probabilities: one that is 0 may be exchanged for an expert that was not chosen.
    manager = token_dispatcher._DeepepManager.__new__(token_dispatcher._DeepepManager)
    manager.router_topk, manager.num_experts, manager.capacity_factor = 2, 16, None
    flex = config(2, 16, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")
    routes = random_routes(64, 1, 2, 16)
    trace = mrr.RoutingTrace(topk_indices=routes, layer_numbers=[1], num_experts=16)

    def dispatched(spread: float) -> int:
        model = bench.place(Routers(flex, 1))
        seen: list[Tensor] = []
        model.routers[0].register_forward_hook(lambda router, _, out: seen.extend(out))
        with replay(model, trace) as session:
            session.microbatch(torch.arange(64))
            model(bench.up(torch.randn(64, 16) * spread))
        probs, routing_map = seen
        manager.setup_metadata(routing_map, probs)
        return wrong_rows(as_map(manager.token_indices.cpu(), 16), routing_map)

    exchanged = dispatched(1.0)
    yield Row(case="DeepEP's top-k of probabilities", wrong=f"{exchanged} of 64 decisions" if exchanged else "")
    yield refused("the same, some of them 0", lambda: dispatched(400.0), "experts were exchanged")


def routers(bench: Bench) -> Iterator[Row]:
    """One router, forward and backward, as ratios to live."""
    from megatron.core.transformer.moe import router_replay as upstream

    for num_tokens, (name, options) in itertools.product((8192, 65536) if bench.on_gpu else (64,), SIZES.items()):
        experts, topk = map(int, name.split(",")[:2])
        fields = config(topk, experts, **options)
        logits, grad = (bench.up(torch.randn(num_tokens, experts)) for _ in range(2))
        routes, rows = random_routes(num_tokens, 1, topk, experts), torch.arange(num_tokens)
        trace = mrr.RoutingTrace(topk_indices=routes, layer_numbers=[1], num_experts=experts)

        def made(fields: Any = fields) -> Any:
            return bench.place(Routers(fields, 1))

        def run(model: Any, logits: Tensor = logits, grad: Tensor = grad) -> None:
            (probs,) = model(logits.detach().requires_grad_())
            probs.backward(grad)

        models = {"live": made(), "Megatron-Core's replay": made(), "replay": made(), "record": made()}
        driver = models["Megatron-Core's replay"].routers[0].router_replay = upstream.RouterReplay()
        driver.set_target_indices(bench.up(routes[:, 0]))
        driver.set_router_replay_action(upstream.RouterReplayAction.REPLAY_FORWARD)
        if bench.has_te:
            models["live, fused router"] = made(config(topk, experts, moe_router_fusion=True, **options))
        with ExitStack() as sessions:
            opened = {
                "replay": sessions.enter_context(replay(models["replay"], trace)),
                "record": sessions.enter_context(mrr.record(models["record"])),
            }
            prepare = {each: partial(session.microbatch, rows) for each, session in opened.items()}
            times, _ = bench.times(
                {each: partial(run, model) for each, model in models.items()}, prepare=prepare, repeats=15, sleep=True
            )
        driver.clear_global_router_replay_instances()
        for each, ms in times.items():
            yield Row(case=f"{num_tokens} tokens, {name}: {each}", verdict="-", ms=ms, ratio=ms / times["live"])


def queueing(bench: Bench) -> Iterator[Row]:
    """`microbatch()` on the host: beside a bare gather of its rows, and while the device is busy."""
    layers, num_tokens = (48, 32768) if bench.on_gpu else (4, 64)
    trace = mrr.RoutingTrace(
        topk_indices=torch.rand(num_tokens, 128).topk(8).indices.unsqueeze(1).expand(-1, layers, -1),
        layer_numbers=range(1, layers + 1),
        num_experts=128,
    )
    model, order = bench.place(Routers(config(num_layers=layers), layers)), torch.randperm(num_tokens)
    staged = torch.empty(trace.topk_indices.shape, dtype=torch.uint8).pin_memory()
    sessions = [replay(model, trace)]

    def again() -> None:
        sessions.pop().close(verify=False)
        sessions.append(replay(model, trace))

    def queue() -> None:
        sessions[0].microbatch(order)

    _, host = bench.times(
        {"gather": partial(torch.index_select, trace.topk_indices, 0, order, out=staged), "microbatch": queue},
        prepare={"microbatch": again},
    )
    what = f"{layers} layers, {num_tokens} tokens: "
    yield Row(case=f"{what}a bare gather into page-locked memory, host", verdict="-", ms=host["gather"], ratio=1.0)
    ratio = host["microbatch"] / host["gather"]
    yield Row(case=f"{what}microbatch(), host", verdict="-", ms=host["microbatch"], ratio=ratio)
    sleeps = SLEEP_CYCLES / 2e6
    for case, first in (("its memory is known", False), ("the first, whose cudaHostAlloc waits", True)):
        if first:
            again()
            torch._C._host_emptyCache()
        _, host = bench.times({"microbatch": queue}, prepare={} if first else {"microbatch": again}, sleep=True)
        waited = bench.on_gpu and not first and host["microbatch"] > sleeps
        yield Row(
            case=f"microbatch() behind {sleeps:.0f} ms of work, host: {case}", verdict="-" if first else "exact",
            ms=host["microbatch"], wrong="the host waited for the device" if waited else "",
        )  # fmt: skip
    sessions[0].close(verify=False)
    torch.cuda._sleep(10 * SLEEP_CYCLES)
    problems = bench.step.problems(bench.step.ways()["replay, prefetched"], recomputes=False)
    yield Row(case="rows prefetched under a stream that sleeps", wrong="; ".join(problems))


def flips(bench: Bench) -> Iterator[Row]:
    """How many decisions a live recompute would flip, for which freeze exists; 0 where kernels are deterministic."""
    step = bench.step
    with step.set(**RECOMPUTE["full"]), mrr.freeze_recompute(step.model, ask_every_layer=True) as session:
        for _ in range(5 if bench.on_gpu else 1):
            step.run()
    found, of = sum(session.report.flips_of_layer.values()), session.report.decisions["recomputed"]
    yield Row(case=f"live recomputes: {found} of {of} decisions would flip", verdict="-")


def gpt_step(recompute: str) -> Callable[[Bench], Iterator[Row]]:
    """Return a part: a step of a GPT in every mode."""
    return lambda bench: bench.step.rows_of(recompute)


PARTS: tuple[Part, ...] = (
    Part(name="step", measures="a training step of a GPT in every mode", run=gpt_step("none"), limit_s=200),
    Part(name="step, full recompute", measures="the same", run=gpt_step("full"), limit_s=150),
    Part(name="checkpoints", measures="replay in checkpoints, and FP8", run=checkpoints, limit_s=60),
    Part(name="dispatchers", measures="FP8 padding, and a top-k behind the router", run=dispatchers, limit_s=60),
    Part(name="columns", measures="whether a replay of own choices is bit-identical", run=columns, limit_s=60),
    Part(name="graphs", measures="CUDA graphs", run=graphs, limit_s=60),
    Part(name="two ranks", measures="expert parallelism, with every dispatcher", run=ranks, limit_s=90),
    Part(name="router", measures="one router alone", run=routers, limit_s=90),
    Part(name="queueing", measures="microbatch() on the host, and behind a busy device", run=queueing, limit_s=60),
    Part(name="torch.compile", measures="routers in compiled code", run=compiled, limit_s=90),
    Part(name="flips", measures="what a live recompute would flip", run=flips, limit_s=60),
)
