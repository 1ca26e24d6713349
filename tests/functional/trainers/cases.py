"""Trainers' batches through `trainers/` into a real GPTModel; the oracle reads the routing maps that leave its routers.

Every token of the batch has an id of its own, so a router's position says by its input_ids alone which token it holds: the
oracle needs neither rows nor the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes, build_tiny_gpt, run_schedule, tiny_gpt_config
from megatron_router_replay.testing.schedule import masked_mean_loss
from megatron_router_replay.trainers import BatchRoutes, number_batch, pack_rows, take_routes
from tests.functional.mcore.cases import as_map, watched
from tests.functional.trainers import packers
from tests.support.gradients import gradients

LENGTHS = (7, 12, 5, 16, 9, 3)
MICROBATCHES = ((0, 1), (3, 2), (5, 4))  # as a sampler may regroup them
LAYERS, MOE, EXPERTS, TOPK = 4, (2, 3, 4), 16, 4
TOTAL = 32
"""Positions of a packed row, for all micro-batches alike: pipeline stages send tensors of one shape."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """This rank, and what it has."""

    layout: ParallelSizes
    chunks: list[Any]
    cp_rank: int
    tp_rank: int
    first_stage: bool
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a trainer has of a batch.

    Args:
        tokens: in its container.
        routes: an engine's routed experts, in its container, as it fills them.
        where: what says where the tokens are, as `take_routes` takes it.
        lay_out: (values in the tokens' container, samples of the micro-batch) -> what the model gets, and the bounds of
            packed sequences or None.
    """

    tokens: Any
    routes: Any
    where: dict[str, Any]
    lay_out: Callable[[Any, tuple[int, ...]], tuple[Tensor, list[int] | None]]


def samples_of(place: Place) -> tuple[list[Tensor], list[Tensor]]:
    """Token ids, all different, and an engine's routes: [T] and [T - 1, LAYERS, TOPK] of each sample."""
    generator = torch.Generator().manual_seed(place.seed)
    ids = list((torch.randperm(sum(LENGTHS), generator=generator) + 1).split(LENGTHS))
    routes = []
    for length in LENGTHS:
        part = torch.rand(length - 1, LAYERS, EXPERTS, generator=generator).argsort(dim=2)[:, :, :TOPK]
        part[:, 0] = 0  # the dense layer
        routes.append(part)
    return ids, routes


def pad_right(parts: list[Tensor], size: int) -> Tensor:
    return torch.stack([torch.cat([part, part.new_zeros(size - len(part), *part.shape[1:])]) for part in parts])


def nemo_rl(place: Place) -> Batch:
    """[B, S] padded on the right, int16 routes [B, S, L, k], 0 on padding, experts 0, 1, ... on the last token."""
    ids, routes = samples_of(place)
    dummy = torch.arange(TOPK).expand(1, LAYERS, TOPK)
    lengths = torch.tensor(LENGTHS)
    options = {"multiple": 8, "total": TOTAL, "cp_rank": place.cp_rank, "cp_size": place.layout.cp_size}

    def lay_out(values: Tensor, samples: tuple[int, ...]) -> tuple[Tensor, list[int] | None]:
        return packers.nemo_rl(values[list(samples)], lengths=[LENGTHS[i] for i in samples], **options)

    return Batch(
        tokens=pad_right(ids, 20),
        routes=pad_right([torch.cat([part, dummy]) for part in routes], 20).to(torch.int16),
        where={"lengths": lengths},
        lay_out=lay_out,
    )


def skyrl(place: Place, *, packs: bool = True) -> Batch:
    """[B, S] padded on the left, uint8 routes [B, S, L, k], experts 0, 1, ... wherever there is none."""
    ids, routes = samples_of(place)
    tokens, mask = torch.zeros(6, 18, dtype=torch.int64), torch.zeros(6, 18, dtype=torch.int64)
    experts = torch.arange(TOPK, dtype=torch.uint8).expand(6, 18, LAYERS, TOPK).clone()
    for i, (of_sample, part) in enumerate(zip(ids, routes)):
        start = 18 - len(of_sample)
        tokens[i, start:], mask[i, start:] = of_sample, 1
        experts[i, start : start + len(part)] = part.to(torch.uint8)

    def lay_out(values: Tensor, samples: tuple[int, ...]) -> tuple[Tensor, list[int] | None]:
        at = list(samples)
        if not packs:
            return packers.skyrl_unpacked(values[at], mask=mask[at], multiple=16), None
        row, bounds = packers.skyrl_packed(
            values[at], mask=mask[at], multiple=8, cp_rank=place.cp_rank, cp_size=place.layout.cp_size
        )
        missing = TOTAL // place.layout.cp_size - row.shape[1]  # for the stages' one shape; SkyRL lets it vary
        return torch.nn.functional.pad(row, (0, missing)), [*bounds, TOTAL]

    return Batch(tokens=tokens, routes=experts, where={"attention_mask": mask}, lay_out=lay_out)


def slime(place: Place) -> Batch:
    """Lists; int32 routes of T - 1 rows, as SGLang sends them."""
    ids, routes = samples_of(place)

    def lay_out(values: list[Tensor], samples: tuple[int, ...]) -> tuple[Tensor, list[int] | None]:
        return packers.slime(
            [values[i] for i in samples],
            multiple=TOTAL // place.layout.cp_size,
            cp_rank=place.cp_rank,
            cp_size=place.layout.cp_size,
        )

    return Batch(tokens=ids, routes=[part.int() for part in routes], where={}, lay_out=lay_out)


def miles_bshd(place: Place) -> Batch:
    """Lists, routes in numpy; the batch is stacked, so that positions of several samples alternate in a router."""
    ids, routes = samples_of(place)

    def lay_out(values: list[Tensor], samples: tuple[int, ...]) -> tuple[Tensor, list[int] | None]:
        return packers.miles_bshd(
            [values[i] for i in samples], max_length=16, cp_rank=place.cp_rank, cp_size=place.layout.cp_size
        ), None

    return Batch(tokens=ids, routes=[part.int().numpy() for part in routes], where={}, lay_out=lay_out)


def megatron_lm(place: Place) -> Batch:
    """A plain loop's [b, s] without padding; its routes are R2's. Jagged here, for all samples have one length."""
    generator = torch.Generator().manual_seed(place.seed)
    tokens = (torch.randperm(6 * 16, generator=generator) + 1).view(6, 16)
    nested = torch.nested.as_nested_tensor(list(tokens), layout=torch.jagged)

    def lay_out(values: Tensor, samples: tuple[int, ...]) -> tuple[Tensor, list[int] | None]:
        rows = torch.stack([values.unbind()[i] for i in samples])
        return torch.stack([packers.zigzag(row, place.cp_rank, place.layout.cp_size) for row in rows]), None

    return Batch(tokens=nested, routes=None, where={}, lay_out=lay_out)


TRAINERS: dict[str, Callable[[Place], Batch]] = {
    "nemo_rl": nemo_rl,
    "skyrl": skyrl,
    "skyrl_unpacked": partial(skyrl, packs=False),
    "slime": slime,
    "miles_bshd": miles_bshd,
    "megatron_lm": megatron_lm,
}


def set_up(layout: ParallelSizes, **options: Any) -> Place:
    from megatron.core import parallel_state

    layout.initialize()
    config = tiny_gpt_config(
        layout, num_moe_experts=EXPERTS, moe_router_topk=TOPK, moe_layer_freq=[0, 1, 1, 1], **options
    )
    return Place(
        layout=layout,
        chunks=build_tiny_gpt(config, layout, core_attention="small"),
        cp_rank=parallel_state.get_context_parallel_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        first_stage=parallel_state.is_pipeline_first_stage(ignore_virtual=True),
        seed=parallel_state.get_data_parallel_rank(),
    )


def microbatches(place: Place, batch: Batch, rows: Any) -> list[dict[str, Any]]:
    """What the model gets; rows go through the same layout as the tokens."""
    from megatron.core.packed_seq_params import PackedSeqParams

    made = []
    for samples in MICROBATCHES:
        tokens, bounds = batch.lay_out(batch.tokens, samples)
        laid_out = pack_rows(lambda values, samples=samples: batch.lay_out(values, samples)[0], rows)
        params = None
        if bounds is not None:
            starts = torch.tensor(bounds, dtype=torch.int32)
            longest = int(starts.diff().max())
            params = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=starts,
                cu_seqlens_kv=starts,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            )
        made.append(
            {
                "tokens": tokens,
                "packed_seq_params": params,
                "position_ids": torch.arange(tokens.shape[1]).expand_as(tokens).contiguous(),
                "loss_mask": (tokens > 0).float(),
                "routing_rows": laid_out,
                "routing_padding": tokens == 0,
            }
        )
    return made


def forward_step(place: Place, data_iterator: Iterator[dict[str, Any]], model: Any) -> Any:
    """A forward step that knows of no session. Stages behind the first get no tokens, as trainers do it."""
    batch = next(data_iterator)
    output = model(
        input_ids=batch["tokens"] if place.first_stage else None,
        position_ids=batch["position_ids"],
        attention_mask=None,
        labels=batch["tokens"],
        packed_seq_params=batch["packed_seq_params"],
        routing_rows=batch["routing_rows"],
        routing_padding=batch["routing_padding"],
        routing_trained=batch.get("routing_trained"),
    )
    return output, partial(masked_mean_loss, batch["loss_mask"])


def step(place: Place, batches: list[dict[str, Any]], *, forward_only: bool = False) -> Any:
    losses = run_schedule(
        place.chunks, place.layout, batches, forward_step=partial(forward_step, place), forward_only=forward_only
    )
    return losses, {} if forward_only else gradients(place.chunks)


def tokens_of_router(place: Place, tokens: Tensor) -> Tensor:
    """The token of each position of this rank's routers, by hand: [b, s] is s-major, and tensor-parallel ranks share s."""
    at = tokens.t().reshape(-1)
    return at.chunk(place.layout.tp_size)[place.tp_rank] if place.layout.sequence_parallel else at


def wrong_decisions(
    place: Place, seen: Any, batches: list[dict[str, Any]], route_of: dict[int, Tensor]
) -> dict[str, list[int]]:
    """{phase: [decisions looked at, wrong ones]} against the routes [LAYERS, TOPK] of each token id."""
    result = {}
    for phase, of_phase in seen.items():
        looked, wrong = 0, 0
        for layer, maps in of_phase.items():
            # Several chunks of a stage hold different layers; each layer saw each micro-batch once.
            for batch, routing_map in zip(batches, maps, strict=True):
                ids = tokens_of_router(place, batch["tokens"]).tolist()
                assert len(ids) == len(routing_map)
                for token, chosen in zip(ids, routing_map):
                    if token in route_of:
                        looked += 1
                        wrong += not torch.equal(as_map(route_of[token][layer - 1][None], EXPERTS)[0], chosen)
        result[phase] = [looked, wrong]
    return result


def routes_by_token(place: Place) -> dict[int, Tensor]:
    ids, routes = samples_of(place)
    return {int(token): route for of_sample, part in zip(ids, routes) for token, route in zip(of_sample, part)}


def replayed(trainer: str, layout: ParallelSizes, options: dict[str, Any]) -> dict[str, Any]:
    """R3: an engine's routes in the trainer's container; a training step, off, on and off again."""
    place = set_up(layout, **options)
    batch = TRAINERS[trainer](place)
    mrr.attach(place.chunks)
    routes: BatchRoutes = take_routes(batch.routes, place.chunks, tokens=batch.tokens, **batch.where)
    batches = microbatches(place, batch, routes.rows)
    off = step(place, batches)
    # The routes are drawn at random: the live router cannot agree.
    with watched(place.chunks) as seen, mrr.replay(place.chunks, routes.trace, verify=True, min_agreement=0) as session:
        step(place, batches)
    again = step(place, batches)
    with watched(place.chunks) as live:
        step(place, batches, forward_only=True)
    report = session.report.reduce()
    return {
        "wrong": wrong_decisions(place, seen, batches, routes_by_token(place)),
        "live_wrong": wrong_decisions(place, live, batches, routes_by_token(place))["forward"],
        "layers": routes.trace.layer_numbers,
        "off_is_off": all(torch.equal(a, b) for a, b in zip(off[0], again[0])),
        "shares": (report.replayed_share, report.decisions["wrong"]),
        "rows": (report.rows_replayed, report.rows_live, report.rows_padding),
    }


def recorded_and_replayed(trainer: str, layout: ParallelSizes, options: dict[str, Any]) -> dict[str, Any]:
    """R2: recorded in a forward-only pass, handed on in the tokens' container, replayed in regrouped micro-batches."""
    from megatron_router_replay.trainers import recorded_routes

    place = set_up(layout, **options)
    batch = TRAINERS[trainer](place)
    mrr.attach(place.chunks)
    where = batch.where
    rows = number_batch(batch.tokens, **where)
    batches = microbatches(place, batch, rows)
    with watched(place.chunks) as live, mrr.record(place.chunks) as recording:
        step(place, batches, forward_only=True)
    routes = recorded_routes(recording, like=batch.tokens, **where)
    info = mrr.mcore.routing_info(place.chunks)
    whole = take_routes(routes, info, tokens=batch.tokens, last_row="replayed", **where)
    taken = take_routes(routes, place.chunks, tokens=batch.tokens, last_row="replayed", **where)
    ids = torch.cat(samples_in(batch))
    route_of = {
        int(token): torch.cat([torch.zeros(1, TOPK, dtype=torch.uint8), row])
        for token, row in zip(ids, whole.trace.topk_indices)
    }
    again = microbatches(place, batch, taken.rows)[::-1]
    with (
        watched(place.chunks) as seen,
        mrr.replay(place.chunks, taken.trace, verify=True, min_replayed=1.0) as session,
    ):
        step(place, again)
    return {
        "live": wrong_decisions(place, live, batches, route_of)["forward"],
        "wrong": wrong_decisions(place, seen, again, route_of),
        "whole": (whole.trace.layer_numbers, bool(whole.trace.replay_mask.all()), whole.trace.num_tokens),
        "layers": taken.trace.layer_numbers,
        "live_rows": session.report.rows_live,
    }


def samples_in(batch: Batch) -> list[Tensor]:
    """The tokens of each sample, whatever the container."""
    if isinstance(batch.tokens, list):
        return batch.tokens
    if batch.tokens.is_nested:
        return list(batch.tokens.unbind())
    return [row[row > 0] for row in batch.tokens]
