"""One micro-batch's rows -> what the routers replay; the path that never waits for a GPU gives the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.mcore.batches.queue import Microbatch
from megatron_router_replay.mcore.batches.upload import KeptLayer, LayerRoutes
from tests.unit.mcore.tiny_chunk import Chunk, as_map, random_routes, random_trace, tokens, watched


def queued(trace, rows, **options):
    """The micro-batch as its routers get it, [s, b] as in `rows` transposed, and its rows as routers see them."""
    chunk = Chunk()
    session = mrr.replay(chunk, trace, min_replayed=0)
    try:
        session.microbatch(rows, **options)
        return chunk, session._microbatches.chunks[0].queue._waiting[0]
    finally:
        session.close(verify=False)


def counts(microbatch):
    return tuple(int(microbatch.counts[name]) for name in ("rows", "live", "padding"))


def test_each_layer_is_widened_with_its_block_in_the_forward_and_the_recompute():
    compact = random_routes(6, 40).to(torch.uint8)  # two whole blocks of 16 layers, and half of one
    routes = LayerRoutes(compact)
    kept = [KeptLayer(routes, layer) for layer in range(40)]
    assert {(each.shape, each.dtype) for each in kept} == {((6, 2), torch.uint8)}
    for layer in (17, 3, 39, *(other for other in range(40) if other not in (17, 3, 39))):
        wide = routes.layer(layer)
        assert (wide.dtype, torch.equal(wide, compact[:, layer].long())) == (torch.int64, True)
    assert routes._blocks == {}, "every layer was asked for, and no widened block is kept"
    for layer in reversed(range(40)):
        assert torch.equal(kept[layer].to(torch.int64), compact[:, layer].long())
        assert len(routes._blocks) == (layer not in (0, 16, 32))


def test_each_position_gets_its_rows_routes_and_says_whether_it_is_live():
    trace = random_trace(4, replay_mask=torch.tensor([True, False, True, True]))
    rows = torch.tensor([[3, -1, 0], [1, -1, -1]])  # s-major: 3 1, -1 -1, 0 -1
    _, with_padding = queued(trace, rows, padding=rows < 0)
    assert torch.equal(with_padding.routes.topk_indices[[0, 4]], trace.topk_indices[[3, 0]])
    assert (with_padding.live_positions.tolist(), counts(with_padding)) == ([1, 2, 3, 5], (6, 1, 3))
    _, without = queued(trace, rows)
    assert (without.live_positions.tolist(), counts(without)) == ([1, 2, 3, 5], (6, 4, 0))
    _, all_known = queued(trace, torch.tensor([[0, 2, 3]]))
    assert (all_known.live_positions, counts(all_known)) == (None, (3, 0, 0)), "no live top-k is asked for"


@settings(max_examples=30)
@given(st.lists(st.integers(-1, 9), min_size=2, max_size=12), st.lists(st.booleans(), min_size=10, max_size=10))
def test_live_rows_as_a_mask_choose_what_positions_choose(rows, mask):
    """On a GPU, live rows are a mask, for nobody waits to learn which they are."""
    rows = torch.tensor(rows[: len(rows) // 2 * 2]).view(2, -1)
    trace, chunk = random_trace(10, replay_mask=torch.tensor(mask)), Chunk()
    ids = tokens(*rows.shape)
    with watched(chunk) as seen, mrr.replay(chunk, trace, min_replayed=0) as session:
        for number in range(2):
            session.microbatch(rows)
            waiting = session._microbatches.chunks[0].queue._waiting[0]
            if number and waiting.live_positions is not None:
                waiting.live_mask = torch.zeros(rows.numel(), dtype=torch.bool).index_fill(
                    0, waiting.live_positions, True
                )
                waiting.live_positions = None
            chunk(ids, number)
        session.close(verify=False)  # a replay of nothing would raise
    view = rows.t().reshape(-1)
    routed = (view >= 0) & torch.tensor(mask)[view.clamp(min=0)]
    for layer in (1, 2, 3):
        assert torch.equal(seen[0, layer][0], seen[1, layer][0])
        assert torch.equal(seen[0, layer][0][routed], as_map(trace.layer(layer)[view[routed]]))


def bare(shape, **options):
    return Microbatch(shape=shape, batch_shape=shape[::-1], counts={}, num_routers=1, **options)


def test_a_router_must_see_the_shape_of_its_micro_batch():
    bare((4, 2)).check_shape("here", (4, 2))
    bare((4, 1)).check_shape("here", (4,))
    for expected, shape in (((4, 2), (2, 4)), ((4, 2), (8,)), ((4, 1), (5,)), ((1, 4), (4,))):
        with pytest.raises(ReplayStateError, match=r"here, micro-batch -1: the router routes tokens of \[s, b\]"):
            bare(expected).check_shape("here", shape)
