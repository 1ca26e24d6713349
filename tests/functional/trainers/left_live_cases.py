"""A partial rollout on a real GPTModel, some tokens live by choice; the oracle reads what enters and leaves routers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.trace import stale_rows
from tests.functional.mcore.cases import as_map, moe_routers, watched
from tests.functional.trainers.cases import (
    EXPERTS,
    LENGTHS,
    MOE,
    TOPK,
    TRAINERS,
    Place,
    laid_out,
    microbatches,
    routes_by_token,
    samples_of,
    sealed,
    set_up,
    step,
    tokens_of_router,
)

TRAINER_VERSION = 7
NOT_KEPT = 4
"""Position in each sample of the token whose route is left out."""


def versions(length: int) -> Tensor:
    """A sample that was interrupted twice: three tokens of version 5, three of 6, then 7."""
    return torch.tensor([5, 5, 5, 6, 6, 6] + [7] * length)[:length]


def partial_rollout(trainer: str, layout: ParallelSizes, options: dict[str, Any], choose: bool = False) -> Any:
    """One training step with max_age=1 and a mask, by token, in the trainer's container."""
    place = set_up(layout, **options)
    batch = TRAINERS[trainer](place)
    ids, _ = samples_of(place)
    stale = [stale_rows(versions(length), max_age=1, trainer_version=TRAINER_VERSION) for length in LENGTHS]
    left_out = [(mask | (torch.arange(len(mask)) == NOT_KEPT)).byte() for mask in stale]
    batches = microbatches(place, batch, routes=sealed(place, batch), stale=laid_out(batch, left_out, fill=0))
    routed = torch.tensor(sorted(routes_by_token(place)))
    for made in batches:
        made["words"] = {"trained": torch.isin(made["tokens"], routed)}
    # By token id, from the samples alone.
    replayed = {
        int(token)
        for of_sample in ids
        for j, token in enumerate(of_sample[:-1])
        if versions(len(of_sample))[j] >= TRAINER_VERSION - 1 and j != NOT_KEPT
    }
    live: dict[int, list[Tensor]] = defaultdict(list)

    def choose_live(router: Any, args: tuple[Tensor, ...]) -> None:
        if torch._C._current_graph_task_id() == -1:
            logits = router.gating(args[0]).detach().flatten(0, 1)
            live[router.layer_number].append(as_map(logits.topk(TOPK, dim=1).indices, EXPERTS))

    handles = [router.register_forward_pre_hook(choose_live) for router in moe_routers(place.chunks)]
    chosen = routes_of_an_even_expert if choose else None
    with (
        watched(place.chunks) as seen,
        mrr.replay(place.chunks, verify=True, choose=chosen, min_agreement=0) as session,
    ):
        step(place, batches)
    for handle in handles:
        handle.remove()
    report = session.report.reduce()
    return {
        "decisions": _decisions(place, batches, seen, live, replayed),
        "flips": sum(
            int((again != first).sum())
            for layer, of_layer in seen["recompute"].items()
            for first, again in zip(seen["forward"][layer], of_layer, strict=True)
        ),
        "recomputes": sum(map(len, seen["recompute"].values())),
        "rows": (
            report.rows_replayed,
            report.rows_live,
            report.rows_left_out,
        ),
        "left live": report.decisions.get("left_live"),
        "asked": report.decisions.get("asked"),
        "wrong": report.decisions["wrong"],
    }


def routes_of_an_even_expert(layer_number: int, routes: Tensor, own: Tensor, scores: Tensor) -> Tensor:
    """Replay what names an even expert first, in the first layer with experts everything."""
    return (routes[:, 0] % 2 == 0) | (layer_number == MOE[0])


def _decisions(place: Place, batches: Any, seen: Any, live: Any, replayed: set[int]) -> dict[str, int]:
    """Count decisions of the forwards by what they hold."""
    counts = {"replayed": 0, "live": 0, "replayed wrong": 0, "live wrong": 0, "live as the route": 0}
    route_of = routes_by_token(place)
    for layer, of_layer in seen["forward"].items():
        for batch, routing_map, chosen in zip(batches, of_layer, live[layer], strict=True):
            for token, used, of_router in zip(tokens_of_router(place, batch["tokens"]).tolist(), routing_map, chosen):
                if not token:
                    continue
                route = as_map(route_of[token][layer - 1][None], EXPERTS)[0] if token in route_of else None
                if token in replayed:
                    counts["replayed"] += 1
                    counts["replayed wrong"] += not torch.equal(used, route)
                else:
                    counts["live"] += 1
                    counts["live wrong"] += not torch.equal(used, of_router)
                    counts["live as the route"] += route is not None and torch.equal(used, route)
    return counts
