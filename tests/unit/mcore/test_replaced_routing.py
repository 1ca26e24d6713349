"""Routers that somebody else has changed in place: a session on them would replay routes that nobody dispatches by."""

import types

import pytest

import megatron_router_replay as mrr
from megatron_router_replay.errors import UnsupportedRouterError
from tests.unit.mcore.tiny_chunk import Chunk, random_trace


def starts():
    trace = random_trace(8)
    return (lambda chunk: mrr.replay(chunk, trace), mrr.record, mrr.freeze_recompute)


@pytest.mark.parametrize("name", ["routing", "forward"])
def test_a_method_that_was_put_on_the_router_itself_is_refused(name):
    chunk = Chunk()
    router = chunk.layers[1].router
    original = getattr(router, name)
    setattr(router, name, types.MethodType(lambda self, *args, **kwargs: original(*args, **kwargs), router))
    for start in starts():
        with pytest.raises(UnsupportedRouterError, match=rf"layer 2 .*TopKRouter\.{name} was replaced on this module"):
            start(chunk)
    assert "was replaced" in mrr.explain(chunk)[1].reason
    delattr(router, name)
    mrr.record(chunk).close()


def test_slimes_deepep_bridge_which_dispatches_by_a_topk_of_its_own_is_refused():
    """What its register_ordered_topk_capture leaves on a router: hooks that note the router, and this mark."""
    chunk = Chunk()
    chunk.layers[0].router._slime_ordered_topk_capture_registered = True
    for start in starts():
        with pytest.raises(UnsupportedRouterError, match=r"layer 1 .*slime's DeepEP alignment bridge"):
            start(chunk)
