"""Trainers' batches, sealed and fed, into a real GPTModel; the oracle reads the routing maps that leave its routers.

Every token of the batch has an id of its own, so a router's position says by its input_ids alone which token it holds: the
oracle needs neither seals nor rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.testing.tiny_gpt import build_tiny_gpt, tiny_gpt_config
from megatron_router_replay.trainers import number_batch, pack_rows, recorded_routes
from tests.functional.mcore.cases import as_map, watched
from tests.functional.trainers import packers
from tests.support.gradients import gradients
from tests.support.schedule import masked_mean_loss, run_schedule

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
        where: what says where the tokens are, as `number_batch` takes it.
        lay_out: (values in the tokens' container, samples of the micro-batch) -> what the model gets, and the bounds of
            packed sequences or None.
    """

    tokens: Any
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


def nemo_rl(place: Place) -> Batch:
    """[B, S] padded on the right."""
    ids, _ = samples_of(place)
    lengths = torch.tensor(LENGTHS)
    options = {"multiple": 8, "total": TOTAL, "cp_rank": place.cp_rank, "cp_size": place.layout.cp_size}

    def lay_out(values: Tensor, samples: tuple[int, ...]) -> tuple[Tensor, list[int] | None]:
        return packers.nemo_rl(values[list(samples)], lengths=[LENGTHS[i] for i in samples], **options)

    tokens = torch.stack([packers.pad(part, 20 - len(part)) for part in ids])
    return Batch(tokens=tokens, where={"lengths": lengths}, lay_out=lay_out)


def skyrl(place: Place, *, packs: bool = True) -> Batch:
    """[B, S] padded on the left."""
    ids, _ = samples_of(place)
    tokens, mask = torch.zeros(6, 18, dtype=torch.int64), torch.zeros(6, 18, dtype=torch.int64)
    for i, of_sample in enumerate(ids):
        start = 18 - len(of_sample)
        tokens[i, start:], mask[i, start:] = of_sample, 1

    def lay_out(values: Tensor, samples: tuple[int, ...]) -> tuple[Tensor, list[int] | None]:
        at = list(samples)
        if not packs:
            return packers.skyrl_unpacked(values[at], mask=mask[at], multiple=16), None
        row, bounds = packers.skyrl_packed(
            values[at], mask=mask[at], multiple=8, cp_rank=place.cp_rank, cp_size=place.layout.cp_size
        )
        missing = TOTAL // place.layout.cp_size - row.shape[1]  # for the stages' one shape; SkyRL lets it vary
        return packers.pad(row[0], missing).unsqueeze(0), [*bounds, TOTAL]

    return Batch(tokens=tokens, where={"attention_mask": mask}, lay_out=lay_out)


def slime(place: Place) -> Batch:
    """Lists."""
    ids, _ = samples_of(place)

    def lay_out(values: list[Tensor], samples: tuple[int, ...]) -> tuple[Tensor, list[int] | None]:
        return packers.slime(
            [values[i] for i in samples],
            multiple=TOTAL // place.layout.cp_size,
            cp_rank=place.cp_rank,
            cp_size=place.layout.cp_size,
        )

    return Batch(tokens=ids, where={}, lay_out=lay_out)


def miles_bshd(place: Place) -> Batch:
    """Lists; the batch is stacked, so that positions of several samples alternate in a router."""
    ids, _ = samples_of(place)

    def lay_out(values: list[Tensor], samples: tuple[int, ...]) -> tuple[Tensor, list[int] | None]:
        return packers.miles_bshd(
            [values[i] for i in samples], max_length=16, cp_rank=place.cp_rank, cp_size=place.layout.cp_size
        ), None

    return Batch(tokens=ids, where={}, lay_out=lay_out)


def megatron_lm(place: Place) -> Batch:
    """A plain loop's [b, s] without padding; its routes are R2's. Jagged here, for all samples have one length."""
    generator = torch.Generator().manual_seed(place.seed)
    tokens = (torch.randperm(6 * 16, generator=generator) + 1).view(6, 16)
    nested = torch.nested.as_nested_tensor(list(tokens), layout=torch.jagged)

    def lay_out(values: Tensor, samples: tuple[int, ...]) -> tuple[Tensor, list[int] | None]:
        rows = torch.stack([values.unbind()[i] for i in samples])
        return torch.stack([packers.zigzag(row, place.cp_rank, place.layout.cp_size) for row in rows]), None

    return Batch(tokens=nested, where={}, lay_out=lay_out)


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


def microbatches(place: Place, batch: Batch, *, rows: Any = None, **fed: Any) -> list[dict[str, Any]]:
    """What the model gets, with rows for a recording or what is fed to a replay, through the same layout as the tokens."""
    from megatron.core.packed_seq_params import PackedSeqParams

    made = []
    for samples in MICROBATCHES:
        tokens, bounds = batch.lay_out(batch.tokens, samples)
        packed = None
        if rows is not None:
            packed = pack_rows(lambda values, samples=samples: batch.lay_out(values, samples)[0], rows)
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
                "rows": {} if packed is None else {"routing_rows": packed, "routing_padding": tokens == 0},
                "fed": {name: batch.lay_out(values, samples)[0] for name, values in fed.items()},
            }
        )
    return made


def forward_step(place: Place, data_iterator: Iterator[dict[str, Any]], model: Any) -> Any:
    """A forward step as a trainer's: it feeds what it has. Stages behind the first get no tokens."""
    batch = next(data_iterator)
    if batch["fed"]:
        tokens = batch["tokens"]
        mrr.microbatch(
            model, **batch["fed"], stamped=True, token_ids=tokens, padding=tokens == 0, **batch.get("words", {})
        )
    output = model(
        input_ids=batch["tokens"] if place.first_stage else None,
        position_ids=batch["position_ids"],
        attention_mask=None,
        labels=batch["tokens"],
        packed_seq_params=batch["packed_seq_params"],
        **batch["rows"],
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


def laid_out(batch: Batch, parts: list[Tensor], *, fill: Any) -> Any:
    """Values of each sample in the container of the batch's tokens."""
    if isinstance(batch.tokens, list):
        return parts
    if batch.tokens.is_nested:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    padded = torch.full((*batch.tokens.shape, *parts[0].shape[1:]), fill, dtype=parts[0].dtype)
    padded[batch.tokens > 0] = torch.cat(parts)  # token ids count from 1
    return padded


def sealed(place: Place, batch: Batch) -> Any:
    """The engine's routes of each sample, stamped where the rollout enters, in the container of the tokens."""
    ids, routes = samples_of(place)
    stamped = mrr.stamp_batch(routes, ids, num_experts=EXPERTS, dtype=torch.int16)
    parts = [torch.cat([part, part.new_full((1, *part.shape[1:]), -1)]) for part in stamped]
    return laid_out(batch, parts, fill=-1)


def routes_by_token(place: Place) -> dict[int, Tensor]:
    ids, routes = samples_of(place)
    return {int(token): route for of_sample, part in zip(ids, routes) for token, route in zip(of_sample, part)}


def replayed(trainer: str, layout: ParallelSizes, options: dict[str, Any]) -> dict[str, Any]:
    """R3: an engine's routes in the trainer's container; a training step, off, on and off again."""
    place = set_up(layout, **options)
    batch = TRAINERS[trainer](place)
    batches = microbatches(place, batch, routes=sealed(place, batch))
    with mrr.replay(place.chunks, enabled=False):
        off = step(place, batches)
    with watched(place.chunks) as seen, mrr.replay(place.chunks, verify=True, min_agreement=0) as session:
        step(place, batches)
    with mrr.replay(place.chunks, enabled=False):
        again = step(place, batches)
        with watched(place.chunks) as live:
            step(place, batches, forward_only=True)
    report = session.report.reduce()
    return {
        "wrong": wrong_decisions(place, seen, batches, routes_by_token(place)),
        "live_wrong": wrong_decisions(place, live, batches, routes_by_token(place))["forward"],
        "layers": tuple(seen["forward"]),
        "off_is_off": all(torch.equal(a, b) for a, b in zip(off[0], again[0])),
        "shares": (report.replayed_share, report.decisions["wrong"]),
        "rows": (report.rows_replayed, report.rows_live, report.rows_padding),
    }


def recorded_and_replayed(trainer: str, layout: ParallelSizes, options: dict[str, Any]) -> dict[str, Any]:
    """R2: recorded in a forward-only pass, handed on in the tokens' container, replayed in regrouped micro-batches."""
    place = set_up(layout, **options)
    batch = TRAINERS[trainer](place)
    mrr.attach(place.chunks)
    where = batch.where
    rows = number_batch(batch.tokens, **where)
    batches = microbatches(place, batch, rows=rows)
    with watched(place.chunks) as live, mrr.record(place.chunks) as recording:
        step(place, batches, forward_only=True)
    routes = recorded_routes(recording, like=batch.tokens, **where)
    ids, parts = in_samples(batch, batch.tokens), in_samples(batch, routes)
    stamped = [mrr.stamp(part, of_sample, num_experts=EXPERTS) for part, of_sample in zip(parts, ids)]
    route_of = {
        int(token): torch.cat([torch.zeros(1, TOPK, dtype=torch.uint8), row])
        for token, row in zip(torch.cat(ids), torch.cat(parts))
    }
    again = microbatches(place, batch, routes=laid_out(batch, stamped, fill=255))[::-1]
    with watched(place.chunks) as seen, mrr.replay(place.chunks, verify=True, min_replayed=1.0) as session:
        step(place, again)
    return {
        "live": wrong_decisions(place, live, batches, route_of)["forward"],
        "wrong": wrong_decisions(place, seen, again, route_of),
        "recorded_layers": parts[0].shape[1],
        "live_positions": session.report.rows_live,
    }


def in_samples(batch: Batch, values: Any) -> list[Tensor]:
    """What the container of the tokens holds of each sample."""
    if isinstance(values, list):
        return values
    if values.is_nested:
        return list(values.unbind())
    return [row[tokens > 0] for row, tokens in zip(values, batch.tokens)]
