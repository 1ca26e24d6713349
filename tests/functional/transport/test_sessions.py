"""What a transport delivers in a real replay session: leg times in its report, and rows loaded one micro-batch ahead."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from functools import partial
from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.mcore.targets import build_targets
from megatron_router_replay.testing import GlooWorkers, ParallelSizes, gradients
from megatron_router_replay.testing.schedule import default_forward_step
from megatron_router_replay.transport import (
    DistributedReceiver,
    DistributedSender,
    LegTimes,
    decode_responses,
    open_store,
    prefetch,
    prefetch_batches,
)
from megatron_router_replay.transport import ParallelLayout as RoutesLayout
from tests.functional.mcore.cases import Case, build, moe_routers, random_routes, run, same
from tests.functional.transport.processes import LIMITS

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASE = Case(layout=ParallelSizes(), config=FULL)
LAYERS = (1, 2, 3, 4)
DECODING_S = 1.5


def _routes() -> torch.Tensor:
    return random_routes(CASE.num_tokens, len(LAYERS), 2, 8)


def _trace(**options: Any) -> mrr.RoutingTrace:
    return mrr.RoutingTrace(topk_indices=_routes(), layer_numbers=LAYERS, num_experts=8, **options)


def _receive_and_replay(port: int) -> dict[str, Any]:
    """Two steps on the training side; leg times are those of the second."""
    store = open_store("127.0.0.1", port, is_server=False)
    layout = RoutesLayout(stage_layers=(LAYERS,))
    _, chunks, microbatches = build(CASE)
    with DistributedReceiver(store, layout, layout.place_of(0), **LIMITS) as receiver:
        for _ in range(2):
            receiver.times.reset()
            trace = receiver.receive()
            with mrr.replay(chunks, trace, leg_times=receiver.times) as session:
                run(chunks, CASE, microbatches, session)
    with mrr.replay(chunks, trace) as without:
        run(chunks, CASE, microbatches, without)
    return {
        "metrics": session.report.metrics("r/"),
        "text": str(session.report),
        "dict": session.report.to_dict(),
        "without": without.report.to_dict(),
    }


def test_the_report_of_a_session_names_the_leg_that_training_waited_for(workers_1: GlooWorkers) -> None:
    results: list[Any] = []
    store = open_store("127.0.0.1", is_server=True)
    times = LegTimes("rollout")

    def slow_decode(rows: Any) -> mrr.RoutingTrace:
        time.sleep(DECODING_S)
        return mrr.RoutingTrace(topk_indices=rows, layer_numbers=LAYERS, num_experts=8)

    training = threading.Thread(target=lambda: results.extend(workers_1.run(_receive_and_replay, store.port)))
    training.start()
    with DistributedSender(store, RoutesLayout(stage_layers=(LAYERS,)), times=times, **LIMITS) as sender:
        sender.send(_trace())
        sender.join()
        sender.send(decode_responses([_routes()], slow_decode, times=times))
        sender.join()
        training.join(120)
    (result,) = results
    metrics = result["metrics"]
    assert metrics["r/transport/rollout_decode_s"] >= DECODING_S
    assert metrics["r/transport/training_wait_s"] > 0
    rows_bytes = CASE.num_tokens * (len(LAYERS) * 2 + 1)
    received = metrics["r/transport/training_receive_gb_per_s"] * metrics["r/transport/training_receive_s"] * 1e9
    assert received == pytest.approx(rows_bytes), "of the second step alone"
    assert metrics["r/rows_replayed"] == CASE.num_tokens
    line = result["text"].splitlines()[-1]
    assert line.startswith("  routes: training waited "), result["text"]
    assert "s: rollout side decoding (" in line
    assert result["dict"]["leg_times"]["line"] == line.strip()
    assert "leg_times" not in result["without"]


def _prefetched(case: Case, token_ids: bool) -> dict[str, Any]:
    """A step with rows, and one with what was prefetched of them."""
    _, chunks, microbatches = build(case)
    tokens = torch.cat([microbatch["tokens"].reshape(-1) for microbatch in microbatches])
    mask = torch.arange(case.num_tokens) % 5 != 3
    trace = _trace(replay_mask=mask, token_ids=tokens if token_ids else None)
    for microbatch in microbatches:
        microbatch["routing_rows"][0, -1] = -1
    microbatches[2]["routing_rows"].fill_(-1)  # a micro-batch without a row at all
    with mrr.replay(chunks, trace, verify=True) as session:
        plain = run(chunks, case, microbatches, session)

    seen: list[weakref.ref[torch.Tensor]] = []

    def queue(microbatch: dict[str, Any], model: Any) -> None:
        routes = microbatch["routing_rows"]
        seen.append(weakref.ref(routes.trace.topk_indices))
        prefetching.microbatch(routes, model, token_ids=microbatch["tokens"] if token_ids else None)

    with mrr.replay(chunks, trace, verify=True) as prefetching:
        layers = [[router.layer_number for router in moe_routers([chunk])] for chunk in chunks]
        iterators = [prefetch_batches(trace, microbatches, layer_numbers=numbers) for numbers in layers]
        for chunk in chunks:
            chunk.zero_grad(set_to_none=True)
        losses = get_forward_backward(case, chunks, iterators, partial(default_forward_step, before_forward=queue))
        loaded = losses, gradients(chunks)
        gc.collect()
        alive = sum(ref() is not None for ref in seen)
    return {
        "same": same(plain, loaded),
        "reports": prefetching.report == session.report,
        "wrong": prefetching.report.decisions_wrong,
        "verified": prefetching.report.decisions_verified > 0,
        "alive after the step": alive,
        "prefetched": len(seen),
    }


def get_forward_backward(case: Case, chunks: list[Any], iterators: list[Any], forward_step: Any) -> list[Any]:
    """Run Megatron's schedule over data iterators, which it never asks for more than its micro-batches."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    several = len(chunks) > 1
    return list(
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if several else iterators[0],
            model=chunks if several else chunks[0],
            num_microbatches=case.num_microbatches,
            seq_length=case.sequence_length,
            micro_batch_size=case.batch_size,
            decoder_seq_length=case.sequence_length,
            forward_only=False,
        )
    )


@pytest.mark.parametrize("token_ids", [False, True])
def test_prefetched_rows_replay_as_rows_do_and_nothing_is_retained(workers_1: GlooWorkers, token_ids: bool) -> None:
    assert workers_1.run(_prefetched, CASE, token_ids) == [
        {
            "same": True,
            "reports": True,
            "wrong": 0,
            "verified": True,
            "alive after the step": 0,
            "prefetched": 4,
        }
    ]


def test_every_virtual_stage_prefetches_its_own_layers(workers_2: GlooWorkers) -> None:
    case = Case(layout=ParallelSizes(pp_size=2, vp_size=2), config=FULL)
    for result in workers_2.run(_prefetched, case, False):
        assert result == {
            "same": True,
            "reports": True,
            "wrong": 0,
            "verified": True,
            "alive after the step": 0,
            "prefetched": 8,
        }


def _refused() -> list[str]:
    _, chunks, microbatches = build(CASE)
    trace, other = _trace(), _trace()
    rows = [microbatch["routing_rows"] for microbatch in microbatches]
    texts = []
    session = mrr.replay(chunks, trace)
    for wrong in (prefetch(other, rows), prefetch(trace, rows, layer_numbers=(1, 2))):
        try:
            session.microbatch(next(wrong), chunks[0])
        except mrr.RouterReplayError as error:
            texts.append(str(error))
    with contextlib.suppress(mrr.RouterReplayError):
        session.close()
    return texts


def test_rows_of_another_trace_or_without_a_layer_are_refused(workers_1: GlooWorkers) -> None:
    (texts,) = workers_1.run(_refused)
    assert len(texts) == 2
    assert "prefetched from another trace" in texts[0]
    assert "no layer_number 3" in texts[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_prefetched_rows_give_a_gpu_what_rows_on_the_cpu_do() -> None:
    trace = _trace(replay_mask=torch.arange(CASE.num_tokens) % 5 != 3)
    rows = torch.arange(CASE.num_tokens).view(CASE.num_microbatches, CASE.batch_size, CASE.sequence_length)
    for part, routes in zip(rows, prefetch(trace, rows, device="cuda")):
        expected, targets = (
            build_targets(of, its_rows.reshape(-1), torch.zeros_like(its_rows).reshape(-1), device=torch.device("cuda"))
            for of, its_rows in ((trace, part), (routes.trace, routes.routing_rows))
        )
        assert torch.equal(torch.stack(targets.layers), torch.stack(expected.layers))
        assert targets.counts.tolist() == expected.counts.tolist()
        assert targets.live is not None
        assert expected.live is not None
        assert torch.equal(targets.live.nonzero()[:, 0], expected.live), "a mask where no host sync is allowed"
