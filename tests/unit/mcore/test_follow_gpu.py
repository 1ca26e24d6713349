"""Rows found by tokens on a GPU made of software: no wait, no race, and the segments that the CPU finds."""

import logging
import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.mcore.batches import follow
from megatron_router_replay.mcore.batches.index import PrefixIndex
from megatron_router_replay.mcore.batches.locate import locate
from megatron_router_replay.mcore.batches.segments import Segments
from tests.support.soft_gpu import SoftGpu, to_gpu
from tests.support.workers import GlooWorkers
from tests.unit.mcore.tiny_chunk import EXPERTS, Chunk, random_routes, watched, wrong_replays

SAMPLES = [[5, 6, 7, 8], [5, 6, 9], [4, 4, 4, 1, 2]]
ROWS = {
    "padded": [[0, 1, 2, 3, -1, -1], [-1, 7, 8, 9, 10, 11], [4, 5, 6, -1, -1, -1]],
    "packed": [[4, 5, 6, -1, -1, 0, 1, 2, 3, 7, 8, 9, 10, 11, -1, -1, -1, -1]],
}
PACKED = torch.tensor([0, 5, 9, 14])
MOST = {"padded": 160, "packed": 115}
"""Launches of a followed micro-batch beyond one whose rows are queued by hand: the segments, their samples, their rows."""


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


def replayed(kind: str, budget: int = follow.DEVICE_BYTES, foreign: bool = False) -> dict[str, Any]:
    """Run three micro-batches by tokens, then by hand; return waits, launches, wrong decisions, warnings, the error."""
    found: dict[str, Any] = {"error": "", "warnings": [], "waits": [], "pageable": []}
    rows, trace = torch.tensor(ROWS[kind]), a_trace()
    assert trace.token_ids is not None
    ids = torch.where(rows >= 0, trace.token_ids[rows.clamp(min=0)].long(), 0)
    if foreign:
        ids[0, 2] = 3
    handler = logging.Handler()
    handler.emit = lambda record: found["warnings"].append(record.getMessage())  # type: ignore[method-assign]
    follow._LOG.addHandler(handler)
    with SoftGpu() as gpu, mock.patch.object(follow, "DEVICE_BYTES", budget):
        chunk: Any = to_gpu(Chunk())
        on_gpu, options, launches = ids.to("cuda"), {}, {}
        if kind == "packed":
            options = {"packed_seq_params": SimpleNamespace(cu_seqlens_q=PACKED.to("cuda"))}
        # A watcher of routers waits: the device's operations are counted without it.
        for way in ("followed", "by hand", "watched"):
            with watched(chunk) if way == "watched" else nullcontext({}) as seen:
                session = mrr.replay(chunk, trace.to("cuda") if way == "by hand" else trace, min_agreement=0)
                for number in range(3):
                    with gpu.logged() as log:
                        if way == "by hand":
                            at = rows.to("cuda")
                            session.microbatch(at, chunk, token_ids=on_gpu, padding=at < 0)
                        chunk(on_gpu, number, **options)
                    launches[way] = log.kernels
                    if way == "followed":
                        found["waits"].append(len(log.waits))
                        found["pageable"].append(len(log.pageable))
            try:
                session.close()
            except mrr.RouterReplayError as error:
                return found | {"error": str(error)}
    report = session.report
    found["rows"] = (report.rows_replayed, report.rows_padding, report.rows_live)
    found["wrong"] = wrong_replays({at: [each.cpu() for each in maps] for at, maps in seen.items()}, trace, rows)
    found["launches"] = launches["followed"] - launches["by hand"]
    found["races"] = sorted(set(gpu.races))
    return found


@pytest.mark.parametrize("kind", ROWS)
def test_following_on_a_gpu_waits_for_nothing(gpu_worker: GlooWorkers, kind: str) -> None:
    (found,) = gpu_worker.run(replayed, kind)
    assert found["error"] == ""
    assert (found["wrong"], found["rows"]) == (0, (36, 18, 0))
    # The first micro-batch copies the trace and its index, once a trace.
    assert (found["waits"][1:], found["pageable"][1:], found["races"]) == ([0, 0], [0, 0], [])
    assert found["launches"] <= MOST[kind], found["launches"]
    assert found["warnings"] == []


def test_a_trace_beyond_the_budget_waits_once_a_micro_batch_and_logs_it_once(gpu_worker: GlooWorkers) -> None:
    (found,) = gpu_worker.run(replayed, "padded", 100)
    assert (found["error"], found["wrong"], found["rows"]) == ("", 0, (36, 18, 0))
    assert found["waits"][1:] == [1, 1]
    (warning,) = found["warnings"]  # of two sessions
    assert "stay on the CPU" in warning


def test_tokens_of_no_sample_raise_when_the_session_is_left(gpu_worker: GlooWorkers) -> None:
    (found,) = gpu_worker.run(replayed, "padded", follow.DEVICE_BYTES, True)
    assert r"micro-batch 0, input_ids[0, 2], sequence 0: its first 2 tokens are those of sample 0" in found["error"]
    assert r"token 7 at position 2, but it has token 3 there" in found["error"]


def differences(seed: int, num_batches: int) -> list[Any]:
    """Locate random batches on the CPU and on the GPU; return those that differ."""
    rng, different = random.Random(seed), []
    with SoftGpu():
        for number in range(num_batches):
            samples = [[rng.randint(0, 3) for _ in range(rng.randint(1, 6))] for _ in range(rng.randint(1, 5))]
            segments = [list(rng.choice(samples))[: rng.randint(1, 6)] for _ in range(8)]
            segments = [s + [rng.randint(0, 3)] * rng.choice([0, 0, 1, 2]) for s in segments]
            length = max(map(len, segments)) + rng.randint(0, 1)
            left = rng.random() < 0.5
            rows = [[0] * (length - len(s)) + s if left else s + [0] * (length - len(s)) for s in segments]
            tokens = torch.tensor(rows).flatten()
            index = PrefixIndex(torch.tensor([t for s in samples for t in s]), [len(s) for s in samples])
            padding = ([0], None, [0, 1])[number % 3]
            answers = []
            for device in ("cpu", "cuda"):
                where = torch.device(device)
                segments = Segments.of((8, length), device=where)
                located = locate(index.to(where), tokens.to(where), segments, padding_token_ids=padding)
                first = segments.start + located.start
                found, is_padding = segments.rows(first, located.count, located.row, located.extra)
                is_padding = torch.zeros_like(found, dtype=torch.bool) if is_padding is None else is_padding
                facts = [
                    (s.is_explained, s.other_starts, s.padding, s.num_ends > s.is_whole)
                    for s in located.segments()[:-1]
                ]
                lines = found.view(8, -1).tolist(), is_padding.view(8, -1).tolist()
                # Of a segment that raises, nothing but this counts.
                answers.append([(f, *each) if f[0] else 0 for f, *each in zip(facts, *lines)])
            if answers[0] != answers[1]:
                different.append((samples, rows, padding, answers))
    return different


def test_random_batches_are_located_alike_on_the_cpu_and_on_a_gpu(gpu_worker: GlooWorkers) -> None:
    ((different),) = gpu_worker.run(differences, 5, 20)
    assert different == []
