"""Rows that were loaded one micro-batch ahead, in Megatron's schedules: the same as rows, and nothing is retained."""

import gc
import weakref
from functools import partial
from typing import Any

import torch

import megatron_router_replay as mrr
from megatron_router_replay.mcore.prefetching import prefetch_batches
from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.testing.schedule import default_forward_step
from tests.functional.mcore.cases import FULL, Case, build, moe_routers, random_trace, run, same
from tests.support.gradients import gradients


def prefetched(case: Case, token_ids: bool) -> None:
    """A step with rows, and one with what was prefetched of them."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    _, chunks, microbatches = build(case)
    tokens = torch.cat([microbatch["tokens"].reshape(-1) for microbatch in microbatches])
    mask = torch.arange(case.num_tokens) % 5 != 3
    trace = random_trace(case, replay_mask=mask, token_ids=tokens if token_ids else None)
    for microbatch in microbatches:
        microbatch["routing_rows"][0, -1] = -1
    microbatches[2]["routing_rows"].fill_(-1)  # a micro-batch without a row at all
    with mrr.replay(chunks, trace, verify=True) as session:
        plain = run(chunks, case, microbatches, session)

    seen: list[weakref.ref[torch.Tensor]] = []

    def queue(microbatch: dict[str, Any], model: Any) -> None:
        routes = microbatch["routing_rows"]
        seen.append(weakref.ref(routes.topk_indices))
        prefetching.microbatch(routes, model, token_ids=microbatch["tokens"] if token_ids else None)

    with mrr.replay(chunks, trace, verify=True) as prefetching:
        # Iterators that the schedule never asks for more than its micro-batches, each with the layers of its chunk.
        layers = [[router.layer_number for router in moe_routers([chunk])] for chunk in chunks]
        iterators = [prefetch_batches(trace, microbatches, layer_numbers=numbers) for numbers in layers]
        for chunk in chunks:
            chunk.zero_grad(set_to_none=True)
        several = len(chunks) > 1
        losses = get_forward_backward_func()(
            forward_step_func=partial(default_forward_step, before_forward=queue),
            data_iterator=iterators if several else iterators[0],
            model=chunks if several else chunks[0],
            num_microbatches=case.num_microbatches,
            seq_length=case.sequence_length,
            micro_batch_size=case.batch_size,
            decoder_seq_length=case.sequence_length,
            forward_only=False,
        )
        assert same(plain, (losses, gradients(chunks)))
        gc.collect()
        assert [ref() for ref in seen] == [None] * case.num_microbatches * len(chunks)
    assert prefetching.report == session.report
    assert (session.report.decisions["wrong"], session.report.decisions["verified"] > 0) == (0, True)


def test_prefetched_rows_replay_as_rows_do_and_nothing_is_retained(megatron):
    prefetched(Case(config=FULL), True)


def test_every_virtual_stage_prefetches_its_own_layers(on_ranks):
    on_ranks(2, prefetched, Case(layout=ParallelSizes(pp_size=2, vp_size=2), config=FULL), False)
