"""What one rank sends and holds in `recording.gather()` of 16 and 64 ranks: the real code of rank 0, all others played."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.measure import table
from megatron_router_replay import RoutingTrace
from megatron_router_replay.mcore.sessions.gathering import gather_trace
from megatron_router_replay.trace.header import TraceHeader

TITLE = "Gather: bytes of one rank"
LAYERS, EXPERTS, TOPK = 48, 128, 8
RANKS = (16, 64)


def measure(tokens: int = 1 << 20) -> dict[str, Any]:
    """Return bytes by number of ranks; a process each, so that its peak of memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return {str(ranks): pool.apply(gather_as_rank_0, (ranks, tokens)) for ranks in RANKS}


def gather_as_rank_0(ranks: int, tokens: int) -> dict[str, int]:
    """Run `gather_trace` as rank 0 of so many; each recorded an equal part of the rows."""
    own = tokens // ranks
    some = torch.rand(4096, EXPERTS).topk(TOPK).indices.to(torch.uint8)
    routes = some[torch.randint(len(some), (own, LAYERS))]
    part = RoutingTrace(topk_indices=routes, layer_numbers=range(1, LAYERS + 1), num_experts=EXPERTS)
    # The recording as a session leaves it: all rows of the batch, of which this rank has some.
    mask = torch.arange(tokens) < own
    indices = torch.arange(TOPK, dtype=torch.uint8).expand(tokens, LAYERS, TOPK).clone()
    indices[:own] = routes
    recorded = part._with(topk_indices=indices, replay_mask=mask)
    sent, messages = [0] * ranks, [0]

    def all_gather_object(headers: list[Any], value: Any, group: Any = None) -> None:
        headers[:] = [(tokens, TraceHeader.of(part))] * ranks

    def broadcast(message: torch.Tensor, src: int, group: Any = None) -> None:
        sent[src] += message.numel()
        messages[0] = max(messages[0], message.numel())
        if src == 0:
            return
        # Every rank sends the same routes; the numbers of its rows, 4 bytes each, are its own.
        if message.numel() == 4 * own:
            message.copy_(torch.arange(src * own, (src + 1) * own, dtype=torch.int32).view(torch.uint8))
        elif message.numel() == own:
            message.fill_(1)
        else:
            message.copy_(routes.view(-1))

    played = {
        "all_gather_object": all_gather_object,
        "broadcast": broadcast,
        "get_world_size": lambda group=None: ranks,
        "get_rank": lambda group=None: 0,
        "get_backend_config": lambda group=None: "cpu:gloo",
    }
    with mock.patch.multiple(dist, **played):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
        before = _kilobytes("VmRSS")
        whole = gather_trace(recorded, None)
        peak = _kilobytes("VmHWM")
    assert bool(whole.replay_mask.all())
    assert torch.equal(whole.topk_indices[-own:], routes)
    return {
        "tokens": tokens,
        "own_bytes": routes.numel(),
        "sent": sent[0],
        "received": sum(sent[1:]),
        "largest_message": messages[0],
        "whole": whole.topk_indices.numel(),
        "held": (peak - before) * 1024,
    }


def _kilobytes(name: str) -> int:
    """Return what Linux says of this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def render(raw: dict[str, Any]) -> str:
    """Return the table."""
    rows = [
        [
            ranks,
            *(
                f"{of_rank[name] / 1e6:,.1f}"
                for name in ("own_bytes", "sent", "received", "largest_message", "whole", "held")
            ),
        ]
        for ranks, of_rank in raw.items()
    ]
    tokens = next(iter(raw.values()))["tokens"]
    head = (
        f"MB of rank 0, of a batch of {tokens:,} rows, {LAYERS} layers, top-{TOPK} of {EXPERTS}, that all ranks recorded in "
        "equal parts. The other ranks are played in the same process. Held is how far the process grew at its peak, with the "
        "whole that it returns. Sending the recording as it lies would be the whole from every rank.\n\n"
    )
    names = ["ranks", "its routes", "it sends", "it receives", "largest message", "the whole", "held at the peak"]
    return head + table(names, rows)
