"""moe_router_fusion=True: sessions make Megatron-Core's routing function ask, and the last that is over gives it back."""

import gc

import pytest

import megatron_router_replay as mrr
from tests.unit.mcore.tiny_chunk import (
    ROWS,
    Chunk,
    disturb,
    flips,
    num_recomputed,
    random_trace,
    reentrant,
    tokens,
    watched,
)


def function():
    from megatron.core.transformer.moe import router

    return router.topk_routing_with_score_function


@pytest.fixture
def chunk():
    chunk = Chunk()
    chunk.config.moe_router_fusion = True
    chunk.around = reentrant
    return chunk


def replayed(chunk, session):
    session.microbatch(ROWS)
    return chunk(tokens()).square().sum()


def test_the_function_stays_as_long_as_a_recompute_may_come_and_goes_with_the_last(chunk):
    megatrons = function()
    with watched(chunk) as seen:
        session = mrr.replay(chunk, random_trace(8))
        losses = [replayed(chunk, session) for _ in range(2)]
        disturb(chunk)
        session.close()
        assert function() is not megatrons
        for loss in losses:
            loss.backward()
    assert (num_recomputed(seen), flips(seen)) == (3 * 3, 0)
    # Both have been recomputed, so the first that is freed ends it; the second must not end it once more.
    del loss
    while losses:
        losses.pop()
        gc.collect()
        assert function() is megatrons
    for _ in range(2):
        with mrr.replay(chunk, random_trace(8), verify=True) as session:
            assert function() is not megatrons
            replayed(chunk, session).backward()
        assert (session.report.decisions_wrong, session.report.decisions_verified) == (0, 48)
        gc.collect()
        assert function() is megatrons


def test_a_session_inside_another_does_not_give_the_function_back_before_the_outer_is_over(chunk):
    megatrons = function()
    with mrr.freeze_recompute(chunk, verify=True) as freeze:
        with mrr.record(chunk, verify=True) as recording:
            replayed(chunk, recording).backward()
        gc.collect()
        chunk(tokens()).sum().backward()
    assert (recording.report.decisions_verified, freeze.report.decisions_verified) == (48, 48)
    gc.collect()
    assert function() is megatrons


def test_another_function_that_was_put_there_meanwhile_stays_and_calls_on(chunk):
    from megatron.core.transformer.moe import router

    megatrons, calls = function(), []
    session = mrr.replay(chunk, random_trace(8), verify=True)
    ours = function()

    def theirs(*args, **kwargs):
        calls.append(kwargs["fused"])
        return ours(*args, **kwargs)

    router.topk_routing_with_score_function = theirs
    try:
        replayed(chunk, session).backward()
        session.close()
        gc.collect()
        assert function() is theirs
        chunk.config.moe_router_fusion = False
        chunk(tokens())  # live, through both
    finally:
        router.topk_routing_with_score_function = megatrons
    assert calls == [True] * 6 + [False] * 3
    assert session.report.decisions_wrong == 0
