"""Routers that choose what they are told, a capturer around them, and routes that tell their token."""

import numpy as np
import torch
from torch import nn

from megatron_router_replay.capture import RouterSite, create_capturer


class Echo(nn.Module):
    """A router that chooses what it is told."""

    def forward(self, topk_indices):
        return topk_indices


def make(*, num_layers=2, num_experts=8, topk=2, max_num_tokens=16, **options):
    """Return (capturer, forward): forward(rows [num_tokens, layers, topk]) runs every layer's router."""
    layers = [Echo() for _ in range(num_layers)]
    sites = [
        RouterSite(
            module=layer, layer_number=i + 1, num_experts=num_experts, topk=topk, select=lambda m, args, output: output
        )
        for i, layer in enumerate(layers)
    ]
    capturer = create_capturer(routers=sites, max_num_tokens=max_num_tokens, **options)

    def forward(rows):
        for i, layer in enumerate(layers):
            layer(torch.as_tensor(rows)[:, i])

    return capturer, forward


def rows(*numbers, num_layers=2):
    """Return routes that tell their token: [i, i + 1] mod 8 in layer 1, one more in layer 2."""
    return [[[(n + layer) % 8, (n + layer + 1) % 8] for layer in range(num_layers)] for n in numbers]


def routes_of(captured):
    prompt, generation = captured.split()
    return np.concatenate([prompt, generation]).tolist()
