"""A step of a GPT in every mode: bf16, with Transformer Engine and grouped GEMM if they are installed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

import megatron_router_replay as mrr
from benchmarks.gpu.report import Row, in_words
from megatron_router_replay.testing import ParallelSizes
from tests.support.tiny_gpt import tiny_gpt_config

if TYPE_CHECKING:
    from benchmarks.gpu.bench import Asked, Bench

NUM = 2
"""Micro-batches of a step."""
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {"recompute_granularity": None},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
BASE = "no session"

Queue = Callable[[int], object]
"""Called with the number of a micro-batch right before its forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to run a step.

    Args:
        opened: yields the function that gives a micro-batch.
        fused: Megatron-Core's fused router is on.
        exact: "trace": every decision is the trace's; "forward": every recomputed decision is its forward's; "": no promise.
        waits: that are known, a micro-batch: one for the ids, one for rows that are on the GPU.
    """

    opened: Callable[[], AbstractContextManager[Queue]]
    fused: bool = False
    exact: str = "trace"
    waits: int = 0


def build_model(bench: Bench, layers: int) -> Any:
    """Return a GPT in bf16 on the device, as Megatron-LM builds and wraps one; a tiny one on the software GPU."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.module import Float16Module

    if bench.on_gpu:
        shape = {
            "hidden_size": 2048, "num_attention_heads": 16, "num_query_groups": 4, "kv_channels": 128,
            "ffn_hidden_size": 4096, "moe_ffn_hidden_size": 1024, "num_moe_experts": 64, "moe_router_topk": 8,
        }  # fmt: skip
    else:
        shape = {"num_moe_experts": 4, "moe_router_topk": 2}
    own = {
        "num_layers": layers, "bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16,
        "use_cpu_initialization": False, "deterministic_mode": False, "moe_grouped_gemm": bench.has_te,
    }  # fmt: skip
    config = tiny_gpt_config(ParallelSizes(), **{**shape, **own})
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=bench.has_te, normalization=config.normalization)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=32768 if bench.on_gpu else 320,
        max_sequence_length=4096,
        position_embedding_type="rope",
    )
    return Float16Module(config, model.to(bench.device) if bench.on_gpu else bench.place(model))


class Step:
    """A model, its micro-batches, and a trace with nearly the routes that the model would choose."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.layers = 2 if not bench.on_gpu else 8 if bench.quick else 12  # 12: 5 B parameters, bf16
        sequence = 4096 if bench.on_gpu else 16
        self.model = build_model(self.bench, self.layers)
        self.config = self.model.config
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(300, (NUM, 1, sequence), generator=generator)
        self.rows = torch.arange(tokens.numel()).view(tokens.shape)
        self.tokens, self.rows_on_gpu = self.bench.up(tokens), self.bench.up(self.rows)
        self.positions = self.bench.up(torch.arange(sequence).unsqueeze(0))
        self.trace = self._nearly_own()
        self.routes = self.trace.topk_indices.view(*self.rows.shape, self.layers, self.config.moe_router_topk)

    def _nearly_own(self) -> mrr.RoutingTrace:
        """Return the model's own routes with one expert exchanged in every second row, as an engine's differ a little."""
        with torch.no_grad(), mrr.record(self.model) as recording:
            for number in range(NUM):
                recording.microbatch(self.rows[number], self.model)
                self.forward(number)
        own = recording.trace()
        routes = own.topk_indices.long()
        chosen = torch.zeros(*routes.shape[:2], own.num_experts, dtype=torch.bool).scatter_(2, routes, True)
        routes[::2, :, 0] = torch.rand(chosen.shape).masked_fill(chosen, -1.0).argmax(2)[::2]
        return mrr.RoutingTrace(
            topk_indices=routes,
            layer_numbers=own.layer_numbers,
            num_experts=own.num_experts,
            token_ids=own.token_ids,
            sequence_lengths=[self.rows.shape[-1]] * NUM,
        )

    @property
    def routers(self) -> list[Any]:
        from megatron.core.transformer.moe.router import TopKRouter

        return [module for module in self.model.modules() if isinstance(module, TopKRouter)]

    # ---- a step
    def forward(self, number: int) -> Tensor:
        """Return the loss of one micro-batch."""
        tokens = self.tokens[number]
        loss: Tensor = self.model(tokens, self.positions, None, labels=tokens).mean()
        return loss

    def run(self, queue: Queue = lambda number: None) -> None:
        """Run a step without its optimizer."""
        self.model.zero_grad(set_to_none=True)
        for number in range(NUM):
            queue(number)
            self.forward(number).backward()

    @contextmanager
    def set(self, **fields: Any) -> Iterator[None]:
        """Change the model's settings, which Megatron-Core reads in each forward, for a while."""
        with ExitStack() as stack:
            for name, value in fields.items():
                stack.enter_context(mock.patch.object(self.config, name, value))
            yield

    # ---- the ways
    def ways(self) -> dict[str, Way]:
        """Return every way to run a step; the first is the base of all ratios."""
        model, trace = self.model, self._planted_trace()
        on_gpu = {"token_ids": self.tokens, "padding": torch.zeros_like(self.tokens, dtype=torch.bool)}

        def rows(session: Any, number: int) -> None:
            self._plant()
            session.microbatch(self.rows[number], model)

        def gpu_rows(session: Any, number: int) -> None:
            session.microbatch(self.rows_on_gpu[number], model, **{name: each[number] for name, each in on_gpu.items()})

        def session(
            opened: Callable[[], Any], queue: Callable[[Any, int], object] = lambda *_: None, **options: Any
        ) -> Way:
            @contextmanager
            def entered() -> Iterator[Queue]:
                with opened() as its_session:
                    yield partial(queue, its_session)

            return Way(opened=entered, **options)

        # The fault is for the benchmark to find, not for the session.
        replay = partial(mrr.replay, model, trace, min_agreement=0.0 if "layer" in self.bench.plant else 0.25)
        ways = {
            BASE: Way(opened=self._no_session, exact=""),
            "no session, fused router": Way(opened=self._no_session, exact="", fused=True),
            "Megatron-Core's replay": Way(opened=self._megatron_replay),
            "replay, rows": session(replay, rows, waits=1),
            "replay, rows, fused router": session(replay, rows, fused=True, waits=1),
            "replay, rows on the GPU": session(replay, gpu_rows, waits=2),
            "replay, tokens": session(partial(replay, padding_token_ids=[]), waits=1),
            "record, tokens": session(partial(mrr.record, model, padding_token_ids=[]), exact="forward", waits=1),
            "record": session(partial(mrr.record, model), rows, exact="forward", waits=1),
            "freeze": session(partial(mrr.freeze_recompute, model), exact="forward"),
            "drop-in": Way(opened=self._drop_in),
        }
        names = [name for name, way in ways.items() if self.bench.has_te or not way.fused]
        return {name: ways[name] for name in (names if not self.bench.plant else (BASE, "replay, rows"))}

    @contextmanager
    def _no_session(self) -> Iterator[Queue]:
        yield lambda number: None

    def _layers_of(self, number: int) -> tuple[Tensor, ...]:
        """Return the routes of a micro-batch of one sequence, one [num_tokens, topk] int64 a router."""
        return self.routes[number, 0].long().unbind(1)

    @contextmanager
    def _megatron_replay(self) -> Iterator[Queue]:
        """Megatron-Core's own class, its targets on the device beforehand, its recomputes announced."""
        from megatron.core.transformer.moe import router_replay as upstream

        targets = [[self.bench.up(layer) for layer in self._layers_of(number)] for number in range(NUM)]

        def announce(router: Any, args: Any) -> None:
            recomputes = torch._C._current_graph_task_id() != -1
            action = "REPLAY_BACKWARD" if recomputes else "REPLAY_FORWARD"
            router.router_replay.set_router_replay_action(getattr(upstream.RouterReplayAction, action))

        with self._driven(upstream.RouterReplay, targets):
            handles = [router.register_forward_pre_hook(announce) for router in self.routers]
            try:
                yield partial(self._set_targets, targets)
            finally:
                for handle in handles:
                    handle.remove()

    @contextmanager
    def _drop_in(self) -> Iterator[Queue]:
        """Our class in the place of Megatron-Core's, with targets on the host."""
        from megatron_router_replay.mcore import RouterReplay, RouterReplayAction

        targets = [self._layers_of(number) for number in range(NUM)]

        def queue(number: int) -> None:
            self._set_targets(targets, number)
            for router in self.routers:
                router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

        with self._driven(RouterReplay, targets):
            yield queue

    def _set_targets(self, targets: Any, number: int) -> None:
        for router, target in zip(self.routers, targets[number]):
            router.router_replay.clear_indices()
            router.router_replay.set_target_indices(target)

    @contextmanager
    def _driven(self, driver: Any, targets: Any) -> Iterator[None]:
        for router in self.routers:
            router.router_replay = driver()
        try:
            yield
        finally:
            for router in self.routers:
                router.router_replay.clear_router_replay_action()
                router.router_replay = None
            driver.clear_global_router_replay_instances()

    # ---- planted faults
    def _planted_trace(self) -> mrr.RoutingTrace:
        trace = self.trace
        if "layer" not in self.bench.plant:
            return trace
        return mrr.RoutingTrace(
            topk_indices=trace.topk_indices.flip(1),
            layer_numbers=trace.layer_numbers,
            num_experts=trace.num_experts,
            token_ids=trace.token_ids,
        )

    def _plant(self) -> None:
        if "wait" in self.bench.plant:
            self.positions.sum().item()
        if "pageable" in self.bench.plant:
            torch.ones(4).to(self.bench.device, non_blocking=True)

    # ---- measurements
    def rows_of(self, recompute: str) -> Iterator[Row]:
        """Yield a row for each way."""
        ways = self.ways()
        with self.set(**RECOMPUTE[recompute]):
            base = self.bench.asked(partial(self._opened, ways[BASE]))
            for name, way in ways.items():
                try:
                    with self.set(moe_router_fusion=way.fused):
                        yield self._row(name, way, base, ways[BASE], recomputes=recompute != "none")
                except Exception as error:
                    yield Row(case=name, wrong=in_words(error))
                    if not self.bench.recovers():
                        raise

    def _row(self, name: str, way: Way, base: Asked, base_way: Way, *, recomputes: bool) -> Row:
        problems = self.problems(way, recomputes=recomputes) if way.exact else []
        asked = self.bench.asked(partial(self._opened, way))
        if (more := asked.waits - base.waits) > NUM * way.waits:
            problems.append(f"{more} waits more than without a session")
        if (more := asked.pageable - base.pageable) > 0:
            problems.append(f"{more} pageable uploads more than without a session")
        if len(asked.ours) > NUM * way.waits:
            problems += sorted(set(asked.ours))
        problems += sorted(set(asked.races))
        ms = ratio = None
        if self.bench.on_gpu or name == BASE:
            ms, ratio = self._time({name: way} if name == BASE else {BASE: base_way, name: way})
        held, peak = self._memory(way)
        return Row(
            case=name, verdict="exact" if way.exact else "-", wrong="; ".join(problems), ms=ms, ratio=ratio,
            operations=asked.operations, waits=asked.waits, pageable=asked.pageable, held=held, peak=peak,
        )  # fmt: skip

    @contextmanager
    def _opened(self, way: Way) -> Iterator[Callable[[], None]]:
        with way.opened() as queue:
            yield partial(self.run, queue)

    def _time(self, ways: Mapping[str, Way]) -> tuple[float, float]:
        """Return a way's ms and the ratio to the first way, with its session opened and left."""

        def whole(way: Way) -> None:
            with self.set(moe_router_fusion=way.fused), self._opened(way) as run:
                run()

        times = self.bench.times({name: partial(whole, way) for name, way in ways.items()})
        first, *_, last = [times[name] for name in (next(iter(ways)), *ways)]
        return last, last / first

    def _memory(self, way: Way) -> tuple[float, float]:
        self.model.zero_grad(set_to_none=True)
        with way.opened() as queue:
            queue(0)
            held = self.bench.memory(partial(self.forward, 0))
            queue(1)
            self.forward(1)
        return held

    def problems(self, way: Way, *, recomputes: bool) -> list[str]:
        """Run a step and return which decisions were not as promised."""
        maps: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        current = 0

        def look(router: Any, args: Any, output: Any) -> None:
            maps[current, router.layer_number].append(output[1].detach().cpu())

        handles = [router.register_forward_hook(look) for router in self.routers]
        try:
            with way.opened() as queue:

                def numbered(number: int) -> None:
                    nonlocal current
                    current = number
                    queue(number)

                self.run(numbered)
        finally:
            for handle in handles:
                handle.remove()
        times = 2 if recomputes else 1
        missing = sum(len(maps[number, layer]) != times for number in range(NUM) for layer in range(1, self.layers + 1))
        wrong = 0
        for (number, layer), seen in maps.items():
            expected = (
                as_map(self.routes[number, 0, :, layer - 1], seen[0].shape[1]) if way.exact == "trace" else seen[0]
            )
            wrong += sum(wrong_rows(each, expected) for each in seen)
        found = [f"{missing} layers did not run {times} times a micro-batch"] if missing else []
        return found + ([f"{wrong} decisions are not those of the {way.exact}"] if wrong else [])


def as_map(routes: Tensor, num_experts: int) -> Tensor:
    """Return routes [num_tokens, topk] as a routing map [num_tokens, num_experts]."""
    return torch.zeros(routes.shape[0], num_experts, dtype=torch.bool).scatter_(1, routes.long(), True)


def wrong_rows(one: Tensor, other: Tensor) -> int:
    """Return in how many rows two routing maps differ."""
    return int((one.cpu() != other.cpu()).any(dim=1).sum())
