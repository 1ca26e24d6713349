"""Experts of b under other ids, or named in another order."""

import torch

from tests.unit.diagnostics.planted.noisy_pair import Pair
from tests.unit.diagnostics.planted.registry import Named, fault


@fault("expert ids permuted in every layer")
def _(pair: Pair) -> Named:
    order = torch.randperm(pair.shape.num_experts, generator=torch.Generator().manual_seed(3))
    pair.b = order[pair.b]
    return Named("names", layers=(), words="by other ids")


@fault("expert ids permuted in one layer")
def _(pair: Pair) -> Named:
    order = torch.randperm(pair.shape.num_experts, generator=torch.Generator().manual_seed(3))
    pair.b[:, 7] = order[pair.b[:, 7]]
    return Named("names", layers=(9,), words="by other ids")


@fault("expert ids permuted in two samples")
def _(pair: Pair) -> Named:
    first, stop = pair.starts[3], pair.starts[5]
    order = torch.randperm(pair.shape.num_experts, generator=torch.Generator().manual_seed(3))
    pair.b[first:stop] = order[pair.b[first:stop]]
    return Named("names", rows=(first, stop - 1), samples=(3, 4), words="by other ids")


@fault("two experts exchanged in one layer")
def _(pair: Pair) -> Named:
    layer = pair.b[:, 7].clone()
    one, other = layer.flatten().bincount(minlength=pair.shape.num_experts).topk(4).indices[[1, 3]].tolist()
    pair.b[:, 7] = torch.where(layer == one, other, torch.where(layer == other, one, layer))
    return Named("names", layers=(9,), words=f"{one} as {other}")


@fault("expert ids with an offset in every layer")
def _(pair: Pair) -> Named:
    pair.b = (pair.b + 8) % pair.shape.num_experts
    return Named("names", layers=(), words="by its id plus 8 (modulo 32)")


@fault("expert ids off by one in one layer")
def _(pair: Pair) -> Named:
    pair.b[:, 0] = (pair.b[:, 0] + 1) % pair.shape.num_experts
    return Named("names", layers=(2,), words="by its id plus 1 (modulo 32)")


@fault("experts of a decision in another order")
def _(pair: Pair) -> Named:
    pair.b = pair.b.flip(2)
    return Named("expert_order", layers=(), words="list their experts in another order")


@fault("experts of one layer in another order")
def _(pair: Pair) -> Named:
    pair.b[:, 4] = pair.b[:, 4].sort(dim=1).values
    return Named("expert_order", layers=(6,), words="in layer 6.")
