"""A trace small enough to be written out: three tokens, two MoE layers (2 and 4), top-2 of 4 experts."""

from megatron_router_replay import RoutingTrace

ROUTES = [[[0, 1], [2, 3]], [[3, 0], [1, 2]], [[2, 1], [0, 3]]]


def make(routes=ROUTES, **options):
    return RoutingTrace(topk_indices=routes, **{"layer_numbers": (2, 4), "num_experts": 4} | options)
