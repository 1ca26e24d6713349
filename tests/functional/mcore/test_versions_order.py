"""Bit for bit at top-4: sessions have the column order of the run that they imitate, whatever order a version's top-k has.

From Megatron-Core 0.18 on the top-k is sorted only where gradients are on: a forward that is checkpointed has other columns
than its recompute: equal sets, but sums in another order.
"""

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.mcore import seam
from tests.functional.mcore.cases import FULL, MOE, Case, build, run, same
from tests.unit.mcore.tiny_chunk import AROUND, EXPERTS, SCORES, Chunk, plain, reentrant

pytestmark = pytest.mark.version


@pytest.mark.parametrize("recompute", [{}, MOE, FULL], ids=["none", "moe", "full"])
def test_a_session_is_bit_identical_to_the_run_without_it(recompute, megatron):
    case = Case(config=recompute | {"moe_router_topk": 4})
    _, chunks, microbatches = build(case)
    plain = run(chunks, case, microbatches)
    with mrr.freeze_recompute(chunks):
        assert same(plain, run(chunks, case, microbatches))
    with mrr.record(chunks) as recording:
        assert same(plain, run(chunks, case, microbatches, recording))
    trace = recording.trace()
    for kept in (trace, trace.keep(torch.arange(case.num_tokens) % 2 == 0)):  # every second row is routed live
        with mrr.replay(chunks, kept) as session:
            assert same(plain, run(chunks, case, microbatches, session))


def _run(chunk, around, queue=lambda: None):
    """Return what a forward and its backward give, to the bit."""
    chunk.around = around
    chunk.zero_grad()
    queue()
    logits = chunk(TOKENS, 0)
    logits.square().sum().backward()
    return [logits.detach(), *(parameter.grad.clone() for parameter in chunk.parameters())]


TOKENS = torch.arange(64).view(4, 16) % 32


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
def test_every_way_of_scoring_is_bit_identical_to_the_run_without_a_session(scores, around):
    """Also where columns are not put in order, because no sum depends on it or they are in order already."""
    chunk = Chunk(moe_router_topk=5, **scores)
    without = _run(chunk, around)
    with mrr.freeze_recompute(chunk):
        assert all(map(torch.equal, without, _run(chunk, around)))
    rows = torch.arange(64).view(4, 16)
    with mrr.record(chunk) as recording:
        assert all(map(torch.equal, without, _run(chunk, around, lambda: recording.microbatch(rows, chunk))))
    trace = recording.trace()
    for kept in (trace, trace.keep(torch.arange(64) % 2 == 0)):
        with mrr.replay(chunk, kept) as session:
            assert all(map(torch.equal, without, _run(chunk, around, lambda: session.microbatch(rows, chunk))))


@pytest.mark.skipif(not seam.TOPK_ORDER_FOLLOWS_GRAD, reason="before 0.18 the live top-k is always sorted")
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
def test_what_was_recorded_without_gradients_is_put_in_the_order_of_a_run_with_them(scores):
    chunk = Chunk(moe_router_topk=5, **scores)
    rows = torch.arange(64).view(4, 16)
    with mrr.record(chunk) as recording:
        _run(chunk, reentrant, lambda: recording.microbatch(rows, chunk))
    with mrr.replay(chunk, recording.trace()) as session:
        replayed = _run(chunk, plain, lambda: session.microbatch(rows, chunk))
    assert all(map(torch.equal, _run(chunk, plain), replayed))
    assert EXPERTS > 5, "else every column order would be a choice of all"
