"""What engines returned -> traces, decoded by several threads, for a rollout side that is one process.

Several rollout actors decode in their own processes instead; see `ray.put_trace`. Either way nothing is joined: senders
take the traces as they are and gather every place's rows from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.transport.timing import LegTimes


def decode_responses(
    responses: Iterable[Any],
    decode: Callable[[Any], RoutingTrace],
    *,
    num_threads: int = 4,
    times: LegTimes | None = None,
) -> list[RoutingTrace]:
    """Return one trace per response, in order; decoding begins while later responses are still on their way.

    Copies and checks, most of the work, run in all threads at once; base64 and parsing JSON do not (see
    benchmarks/RESULTS_transport.md). For more than a few cores decode in the rollout workers' own processes.

    Args:
        responses: consumed one by one; waiting for the next one is the leg "collect".
        decode: such as `functools.partial(engines.vllm.decode, model=config, allocate=memory.take)`, where `memory`, a
            `TraceMemory` made once, spares the kernel clearing new pages for every batch.
        num_threads: that decode.
        times: where "collect" and "decode" are counted.

    Raises:
        PayloadError: as `decode`.
    """
    times = LegTimes("rollout") if times is None else times

    def decode_one(response: Any) -> RoutingTrace:
        with times.measure("decode"):
            trace = decode(response)
        times.add("decode", 0.0, trace.topk_indices.nbytes)
        return trace

    with ThreadPoolExecutor(num_threads, thread_name_prefix="routes-decode") as threads:
        iterator = iter(responses)
        pending = []
        while True:
            with times.measure("collect"):
                response = next(iterator, _END)
            if response is _END:
                break
            pending.append(threads.submit(decode_one, response))
            del response  # else the last one would stay in memory until all are decoded
        return [trace.result() for trace in pending]


_END = object()
