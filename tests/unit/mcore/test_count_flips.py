"""count_flips: how many decisions a live recompute would have changed, worked out by hand from what enters the routers."""

import threading

import pytest
import torch

import megatron_router_replay as mrr
from tests.unit.mcore.tiny_chunk import (
    TOPK,
    Chunk,
    as_map,
    disturb,
    flips,
    non_reentrant,
    reentrant,
    tokens,
    watched,
)


def live_maps(chunk):
    """{layer number: what the router would choose in each of its calls, by the weights that it has by then}."""
    maps = {router.layer_number: [] for router in chunk.routers}

    def hook(router, args):
        logits = args[0].detach().flatten(0, 1) @ router.weight.detach().t()
        maps[router.layer_number].append(as_map(logits.topk(TOPK, dim=1).indices))

    for router in chunk.routers:
        router.register_forward_pre_hook(hook)
    return maps


@pytest.mark.parametrize("around", [reentrant, non_reentrant])
@pytest.mark.parametrize("threads", [False, True])
def test_flips_are_the_decisions_that_a_live_recompute_would_have_changed(around, threads):
    chunk = Chunk()
    chunk.around = around
    live = live_maps(chunk)
    with watched(chunk) as seen, mrr.freeze_recompute(chunk, count_flips=True) as freeze:
        losses = [chunk(tokens(), number).square().sum() for number in range(3)]
        assert freeze.report.flips_of_layer == {1: 0, 2: 0, 3: 0}
        disturb(chunk)
        if threads:
            running = [threading.Thread(target=loss.backward) for loss in losses]
            for thread in running:
                thread.start()
            for thread in running:
                thread.join()
        else:
            torch.stack(losses).sum().backward()
    assert flips(seen) == 0
    # The three forwards are of the same tokens, so what was live in any recompute of a layer belongs to any of them.
    expected = {
        layer: sum(int((later != maps[0]).any(dim=1).sum()) for later in maps[3:]) for layer, maps in live.items()
    }
    assert all(len(maps) == 6 for maps in live.values())
    assert 0 < min(expected.values())
    report = freeze.report
    assert report.flips_of_layer == expected
    assert (report.recompute_flips, report.decisions_recomputed) == (sum(expected.values()), 3 * 3 * 8)


@pytest.mark.parametrize("around", [reentrant, non_reentrant])
def test_without_a_change_nothing_flips_whatever_the_order_of_the_columns(around):
    # Since Megatron-Core 0.18 a forward without gradients leaves the experts of a row unsorted.
    chunk = Chunk(moe_router_topk=5)
    chunk.around = around
    with mrr.freeze_recompute(chunk, count_flips=True) as freeze:
        chunk(tokens()).sum().backward()
    assert (freeze.report.recompute_flips, freeze.report.decisions_recomputed) == (0, 24)
