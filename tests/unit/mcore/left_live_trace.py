"""A trace of eight tokens of which some rows are left live by choice, and what the live router would choose, by hand."""

from contextlib import contextmanager

import torch

import megatron_router_replay as mrr
from tests.unit.mcore.tiny_chunk import EXPERTS, TOPK, as_map, random_routes

AT = [0, 4, 1, 5, 2, 6, 3, 7]  # the row of each position of a router, s-major
VERSIONS = [1, 1, 2, 3, 3, 3, 3, 3]
KEEP = [True, True, True, True, True, False, True, True]
CHOICES = [2, 2, 0, 0, 0, 1, 0, 0]  # rows 0 and 1 are two behind, row 5 is not kept
NO_ROUTE = 7


def whole(**changes):
    values = {"weight_version": VERSIONS, "replay_mask": torch.arange(8) != NO_ROUTE}
    return mrr.RoutingTrace(
        topk_indices=random_routes(8), layer_numbers=(1, 2, 3), num_experts=EXPERTS, **(values | changes)
    )


def chosen(**changes):
    return whole(**changes).keep(KEEP).limit_age(1, trainer_version=3, stale="live")


@contextmanager
def by_hand(chunk):
    """Yield {layer number: live maps of its calls}: the two largest of the logits of what enters the router."""
    maps = {router.layer_number: [] for router in chunk.routers}

    def hook(router, args):
        logits = args[0].detach().flatten(0, 1) @ router.weight.detach().t()
        maps[router.layer_number].append(as_map(logits.topk(TOPK, dim=1).indices))

    handles = [router.register_forward_pre_hook(hook) for router in chunk.routers]
    try:
        yield maps
    finally:
        for handle in handles:
            handle.remove()
