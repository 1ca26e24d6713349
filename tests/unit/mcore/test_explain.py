"""explain says what a session would do with each router, and with whose code."""

import dataclasses

import pytest
import torch

import megatron_router_replay as mrr
from tests.unit.mcore.tiny_chunk import Chunk, random_trace, tokens


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
    # Fused and unfused routers in one model: all get their routes.
    with mrr.replay(chunk, random_trace(8), verify=True) as session:
        session.microbatch(torch.arange(8).view(2, 4))
        chunk(tokens()).sum().backward()
    assert (session.report.decisions_wrong, session.report.decisions_verified) == (0, 24)
