import cProfile
import pstats

import torch

import megatron_router_replay as mrr
from benchmarks.breakdown import entries, own_parts


def test_each_second_of_the_package_is_counted_once():
    routes = torch.rand(3000, 4, 16).argsort(dim=2)[:, :, :4]
    profile = cProfile.Profile()
    trace = profile.runcall(mrr.RoutingTrace, topk_indices=routes, layer_numbers=[1, 2, 3, 4], num_experts=16)
    stats = pstats.Stats(profile).stats
    parts, found = own_parts(stats), entries(stats)
    assert trace.num_tokens == 3000
    total = sum(seconds for _, seconds in parts.values())
    assert abs(total - sum(seconds for _, seconds in found.values())) < 1e-3 * total
    assert any(name.startswith("trace.") for name in found)
