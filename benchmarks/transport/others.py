"""What else a user could do with the batch: pickles, JSON, Ray."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.transport.common import LIMITS, SPAWN, STAGES, Row, as_trace, gb_per_s, run_child, timed
from megatron_router_replay.transport import ParallelLayout


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


def object_relay(arrays: Sequence[Any], dump: Callable[[Any], bytes], load: Callable[[bytes], Any]) -> float:
    """One thread dumps the samples of each of two receivers and sends them through a pipe, one behind the other."""
    pipes = [SPAWN.Pipe() for _ in range(2)]
    processes = [
        SPAWN.Process(target=run_child, args=(_load_messages, rank, None, (pipes[rank][1], load))) for rank in range(2)
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


def _load_messages(rank: int, queue: Any, pipe: Any, load: Callable[[bytes], Any]) -> None:
    while message := pipe.recv_bytes():
        del message  # received; now the same for what it holds
        arrays = load(pipe.recv_bytes())
        batch = torch.from_numpy(np.concatenate([np.asarray(array, np.uint8) for array in arrays]))
        del arrays
        pipe.send(int(batch.shape[0]))


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


def _copy_rate(array: np.ndarray) -> str:
    source = np.concatenate([array] * 64)
    target = np.empty_like(source)
    return gb_per_s(source.nbytes, timed(lambda: np.copyto(target, source)))
