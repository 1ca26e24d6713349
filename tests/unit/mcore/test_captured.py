"""A session's routers refuse to become part of a graph that runs again without Python."""

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError
from tests.unit.mcore.tiny_chunk import HIDDEN, Chunk, random_trace, tokens

HIDDEN_STATE = torch.ones(4, 2, HIDDEN)


@pytest.mark.parametrize("kind", ["freeze", "replay"])
def test_a_router_that_is_traced_is_refused(kind):
    chunk = Chunk()
    router = chunk.routers[0]
    trace = torch.fx.experimental.proxy_tensor.make_fx(lambda hidden: router(hidden)[0])
    session = mrr.freeze_recompute(chunk) if kind == "freeze" else mrr.replay(chunk, random_trace(8))
    if kind == "replay":
        session.microbatch(torch.arange(8).view(2, 4))
    with pytest.raises(ReplayStateError, match=r"layer 1 .*is captured into a graph"):
        trace(HIDDEN_STATE)
    mrr.close_sessions(chunk)


def test_compiled_autograd_in_which_a_recompute_cannot_be_told_is_refused_while_a_session_runs(monkeypatch):
    import torch._dynamo.compiled_autograd as compiled_autograd

    chunk = Chunk()
    monkeypatch.setattr(compiled_autograd, "in_compiled_autograd_region", True)
    with pytest.raises(ReplayStateError, match="under compiled autograd"), mrr.freeze_recompute(chunk):
        chunk(tokens())
    chunk(tokens())
