"""explain says what a session would do with each router, and with whose code."""

import dataclasses

import pytest

import megatron_router_replay as mrr
from tests.unit.mcore.tiny_chunk import Chunk, random_trace


@pytest.fixture
def chunk():
    return Chunk()


def test_it_says_whose_routing_function_runs(chunk):
    before = mrr.explain(chunk)
    assert [router.unfused for router in before] == [False, False, False]
    assert str(before[1]).endswith("layers.1.router: replayed")
    router = chunk.layers[1].router
    router.config = dataclasses.replace(router.config)  # of this router alone
    router.config.moe_router_fusion = True
    explanation = mrr.explain(chunk)
    assert explanation.replayable
    assert [router.unfused for router in explanation] == [False, True, False]
    assert str(explanation[1]).endswith(
        "layers.1.router: replayed, by Megatron-Core's unfused routing function (moe_router_fusion=True)"
    )
    with mrr.replay(chunk, random_trace()) as session:
        session._detach()  # only whether it begins
