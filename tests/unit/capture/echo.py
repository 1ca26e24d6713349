"""Routers that return their input as ids, a capturer around them, and routes that name their token."""

import torch
from torch import nn

from megatron_router_replay.capture import Capturer, RouterSite


def echo_site(module=None, *, layer_number=1, num_experts=8, topk=2):
    """Return the site of a router that returns its input as ids."""
    return RouterSite(
        module=nn.Identity() if module is None else module,
        layer_number=layer_number,
        num_experts=num_experts,
        topk=topk,
        select=lambda module, args, output: output,
    )


def make(*, num_layers=2, num_experts=8, topk=2, max_num_tokens=16, **options):
    """Return (capturer, forward): forward(rows [num_tokens, layers, topk]) runs every layer's router."""
    sites = [echo_site(layer_number=i + 1, num_experts=num_experts, topk=topk) for i in range(num_layers)]
    capturer = Capturer(routers=sites, max_num_tokens=max_num_tokens, **options)

    def forward(rows):
        for i, site in enumerate(sites):
            site.module(torch.as_tensor(rows)[:, i])

    return capturer, forward


def rows(*numbers, num_layers=2):
    """Return routes that name their token: [i, i + 1] mod 8 in layer 1, one more in layer 2."""
    return [[[(n + layer) % 8, (n + layer + 1) % 8] for layer in range(num_layers)] for n in numbers]


def routes_of(capturer, name, num_tokens):
    """Finish a request of any tokens and return the routes of those that have one."""
    trace = capturer.finish(name, [9] * num_tokens)
    return trace.topk_indices[trace.replay_mask].tolist()


def host_bytes(capturer):
    """Return the bytes of the requests' host arrays; rows that several share count once."""
    held = {id(rows): rows for each in capturer._requests.values() for rows in (*each.prompt, *each.generation)}
    return sum(rows.nbytes for rows in held.values())
