"""Decode, assemble, send and receive a batch, leg by leg."""

from __future__ import annotations

import base64
import io
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.transport.common import (
    MESSAGE,
    MODEL,
    NUM_EXPERTS,
    NUM_LAYERS,
    ROW_BYTES,
    SAMPLE,
    STAGES,
    TOPK,
    as_trace,
    distinct_routes,
    table,
)
from benchmarks.transport.exchange import ROUNDS, exchange
from benchmarks.transport.others import others
from megatron_router_replay import RoutingTrace, engines, ids
from megatron_router_replay.engines import checks, payload
from megatron_router_replay.transport import ParallelLayout, Part, TraceMemory, TraceRows, decode_responses, plan_routes
from megatron_router_replay.transport.rows import Memory


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
        "check for repeated experts": lambda: each_block(ids.has_repeats),
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
