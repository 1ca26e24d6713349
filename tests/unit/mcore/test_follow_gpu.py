"""Rows found by tokens on a GPU made of software: one wait a forward, no race, and the rows of the tokens."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.mcore.core.streams import to_device
from tests.support.soft_gpu import SoftGpu, to_gpu
from tests.support.workers import GlooWorkers
from tests.unit.mcore.tiny_chunk import EXPERTS, Chunk, random_routes, watched, wrong_replays
from tests.unit.mcore.tiny_vlm import TinyVLM, packed

SAMPLES = [[5, 6, 7, 8], [5, 6, 9], [4, 4, 4, 1, 2]]
ROWS = {
    "padded": [[0, 1, 2, 3, -1, -1], [-1, 7, 8, 9, 10, 11], [4, 5, 6, -1, -1, -1]],
    "packed": [[4, 5, 6, -1, -1, 0, 1, 2, 3, 7, 8, 9, 10, 11, -1, -1, -1, -1]],
}
PACKED = torch.tensor([0, 5, 9, 14])


class Uploads(Chunk):
    """Takes ids on the host, and brings them to its device without a wait."""

    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(to_device(input_ids, self.embedding.device), *args, **kwargs)


def a_trace() -> mrr.RoutingTrace:
    routes = random_routes(12, 3, 3)
    routes[4:6] = routes[:2]
    return mrr.RoutingTrace.from_samples(
        [torch.tensor(sample) for sample in SAMPLES],
        list(routes.split([len(sample) for sample in SAMPLES])),
        num_experts=EXPERTS,
        layer_numbers=[1, 2, 3],
        last_token="routed",
    )


def replayed(kind: str, ids_on: str, trace_on: str, recorded: bool = False) -> dict[str, Any]:
    """Run three micro-batches by tokens; return waits, pageable copies, wrong decisions, counts, races."""
    rows, trace = torch.tensor(ROWS[kind]), a_trace()
    assert trace.token_ids is not None
    ids = torch.where(rows >= 0, trace.token_ids[rows.clamp(min=0)].long(), 0)
    found: dict[str, Any] = {"waits": [], "pageable": []}
    with SoftGpu() as gpu:
        chunk: Any = to_gpu(Uploads())
        on_gpu, options = ids.to("cuda"), {}
        if kind == "packed":
            options = {"packed_seq_params": SimpleNamespace(cu_seqlens_q=PACKED.to("cuda"))}
        start = partial(mrr.record, padding_token_ids=[0])
        if not recorded:
            start = partial(mrr.replay, trace=trace.to(trace_on), min_agreement=0, padding_token_ids=[0])
        # A watcher of routers waits: the device's operations are counted without it.
        for way in ("counted", "watched"):
            with watched(chunk) if way == "watched" else nullcontext({}) as seen, start(chunk) as session:
                for number in range(3):
                    with gpu.logged() as log:
                        chunk(on_gpu if ids_on == "cuda" else ids, number, **options)
                    if way == "counted":
                        found["waits"].append(len(log.waits))
                        found["pageable"].append(len(log.pageable))
            report = session.report
        if recorded:
            trace = session.trace()
            found["samples"] = trace.sequence_lengths
        found["races"] = sorted(set(gpu.races))
    found["rows"] = (report.rows_replayed, report.rows_padding, report.rows_live)
    maps = {at: [each.cpu() for each in maps] for at, maps in seen.items()}
    found["wrong"] = None if recorded else wrong_replays(maps, trace, rows)
    return found


@pytest.mark.parametrize("trace_on", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ROWS)
def test_a_forward_with_ids_on_a_gpu_waits_once(gpu_worker: GlooWorkers, kind: str, trace_on: str) -> None:
    (found,) = gpu_worker.run(replayed, kind, "cuda", trace_on)
    assert (found["wrong"], found["rows"]) == (0, (36, 18, 0))
    # The first micro-batch reads a trace that is on the GPU, once a trace.
    assert (found["waits"][1:], found["pageable"][1:], found["races"]) == ([1, 1], [0, 0], [])
    assert trace_on == "cuda" or (found["waits"][0], found["pageable"][0]) == (1, 0)


def test_a_forward_with_ids_on_the_host_waits_for_nothing(gpu_worker: GlooWorkers) -> None:
    (found,) = gpu_worker.run(replayed, "padded", "cpu", "cpu")
    assert (found["wrong"], found["rows"], found["waits"], found["races"]) == (0, (36, 18, 0), [0, 0, 0], [])


@pytest.mark.parametrize("ids_on", ["cpu", "cuda"])
def test_a_recording_waits_for_the_ids_alone(gpu_worker: GlooWorkers, ids_on: str) -> None:
    (found,) = gpu_worker.run(replayed, "padded", ids_on, "cpu", True)
    assert (found["waits"], found["races"]) == ([1, 1, 1] if ids_on == "cuda" else [0, 0, 0], [])
    assert found["samples"] == (4, 5, 3) * 3


def waits_of_a_wrapper(packs: bool, gives_ids: bool) -> tuple[list[int], list[int], list[str], int]:
    """Waits of each forward of a multimodal model without a session and with one, races, and rows that were replayed."""
    rows, trace = torch.tensor(ROWS["padded"]), a_trace()
    assert trace.token_ids is not None
    ids = torch.where(rows >= 0, trace.token_ids[rows.clamp(min=0)].long(), 0)
    with SoftGpu() as gpu:
        model: Any = to_gpu(TinyVLM(gives_ids=gives_ids))
        inputs: dict[str, Any] = {"attention_mask": (rows >= 0).long().to("cuda")}
        if packs:
            inputs["packed_seq_params"] = packed(0, *(rows >= 0).sum(1).cumsum(0).tolist())
            inputs["packed_seq_params"].cu_seqlens_q = inputs["packed_seq_params"].cu_seqlens_q.to("cuda")
        on_gpu = ids.to("cuda")

        def waits() -> list[int]:
            counts = []
            for number in range(3):
                with gpu.logged() as log:
                    model(on_gpu, number, **inputs)
                counts.append(len(log.waits))
            return counts

        live = waits()
        with mrr.replay(model, trace, min_agreement=0) as session:
            replayed = waits()
        races = sorted(set(gpu.races))
    return live, replayed, races, session.report.rows_replayed


@pytest.mark.parametrize(("packs", "gives_ids"), [(False, False), (True, False), (True, True)])
def test_a_wrapper_waits_once_more_than_without_a_session(
    gpu_worker: GlooWorkers, packs: bool, gives_ids: bool
) -> None:
    ((live, replayed, races, rows),) = gpu_worker.run(waits_of_a_wrapper, packs, gives_ids)
    assert (replayed, races, rows) == ([count + 1 for count in live], [], 36)
