"""How many Python functions of ours one call of a router runs: each costs every layer of every micro-batch."""

import sys
from pathlib import Path

import pytest

import megatron_router_replay as mrr
from tests.unit.mcore.tiny_chunk import STARTS, Chunk, forward, plain, reentrant

PACKAGE = str(Path(mrr.__file__).parent)
MOST = {  # as measured; before it was halved, a replay took 36, 39 and 26
    ("replay", "plain"): 20,
    ("replay", "forward"): 23,
    ("replay", "recompute"): 17,
    ("freeze", "plain"): 12,
    ("freeze", "forward"): 21,
    ("freeze", "recompute"): 15,
}


def calls_of_the_second_layer(kind, around):
    """The numbers of our functions that its forward, and its recompute, called in the second micro-batch."""
    chunk, counts = Chunk(), []
    chunk.around = around
    route = chunk.layers[1].forward

    def counted(hidden):
        calls = []
        sys.setprofile(
            lambda frame, event, arg: (
                event == "call"
                and frame.f_code.co_filename.startswith(PACKAGE)
                and calls.append(frame.f_code.co_qualname)
            )
        )
        try:
            return route(hidden)
        finally:
            sys.setprofile(None)
            counts.append(len(calls))

    chunk.layers[1].forward = counted
    session = STARTS[kind](chunk)
    for number in range(2):
        forward(chunk, session, number).backward()
    session.close()
    return counts[len(counts) // 2 :]


@pytest.mark.parametrize("kind", ["replay", "freeze"])
def test_a_routers_call_runs_no_more_functions_of_ours_than_measured(kind):
    (in_plain,) = calls_of_the_second_layer(kind, plain)
    in_forward, in_recompute = calls_of_the_second_layer(kind, reentrant)
    assert 0 < in_plain <= MOST[kind, "plain"]
    assert 0 < in_forward <= MOST[kind, "forward"]
    assert 0 < in_recompute <= MOST[kind, "recompute"]
