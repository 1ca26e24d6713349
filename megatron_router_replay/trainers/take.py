"""Routes in a trainer's container -> a trace of this rank's layers, and the rows of the trainer's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from megatron_router_replay.errors import LayoutError
from megatron_router_replay.ids import index_dtype, spread_experts
from megatron_router_replay.layout import number_rows as rows_of_lengths
from megatron_router_replay.left_live import Stale
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trainers.columns import columns_of
from megatron_router_replay.trainers.containers import Container, TokenLayout
from megatron_router_replay.trainers.reader import LastRow, SampleReader
from megatron_router_replay.trainers.samples import check_width, split_routed, split_routes
from megatron_router_replay.trainers.versions import token_versions


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """A batch's routes, and which row is whose.

    Args:
        trace: one row a token, samples behind one another, with this rank's MoE layers; on the CPU.
        rows: the row of each token, int64, in the container and shape of the tokens; -1 on padding and nowhere else.
        num_absent: tokens without a route: filler (-1, or the same ids in every layer), or not in `routed`; last tokens
            do not count.
        num_lost: tokens whose routes name an expert twice: the engine lost them. 0 unless missing="live".
        num_not_kept: tokens whose route `keep` left out.
        num_stale: tokens whose route is older than max_age, of those that are kept; whatever `stale` made of them.
    """

    trace: RoutingTrace
    rows: Container
    num_absent: int
    num_lost: int
    num_not_kept: int = 0
    num_stale: int = 0


def take_routes(
    routed_experts: Any,
    model: Any,
    *,
    tokens: Any = None,
    attention_mask: Any = None,
    lengths: Any = None,
    routed: Any = None,
    last_row: LastRow = "live",
    missing: Literal["raise", "live"] = "raise",
    layer_numbers: Sequence[int] | None = None,
    weight_version: Any = None,
    keep: Any = None,
    stale: Stale | None = None,
    max_age: int | None = None,
    trainer_version: int | None = None,
    allow_constant_layers: bool = False,
) -> Routes:
    """Return the trace of a batch's routes, for `mrr.replay`, and the rows of its tokens.

    Args:
        routed_experts: jagged nested [B, T_i or T_i - 1, layers, topk], padded [B, S, layers, topk], or a list of
            [T_i or T_i - 1, layers, topk]; tensors or numpy, any integer dtype that holds the model's experts. A padded
            one has its rows where a padded batch has its tokens (S or S - 1 positions), and filler on padding: -1, an
            expert twice, or the same ids in every layer. Of samples without padding in front it may have any S.
        model: this rank's model chunks, or a ModelRoutingInfo, which keeps every MoE layer.
        tokens: jagged nested [B, T_i], padded [B, S], or a list of [T_i]. The trace then proves that rows and tokens match
            wherever they meet again. Without it, one of the next two says where they are.
        attention_mask: [B, S], non-zero where a padded batch has tokens.
        lengths: [B], tokens of each sample.
        routed: which tokens have a route, where the container cannot say so: bool like the tokens, or [B], how many first
            ones of each sample. Others are routed live, whatever the container holds there. No loss mask: prompts are
            routed too.
        last_row: what a sample's last row is where it has as many rows as tokens. "live": filler, for an engine has no
            route of the token that it sampled last; a route there raises, for then all rows may be one too late.
            "copied": filler, or a copy of the row before it: scripts around SGLang append one to have a row a token; verl
            (zeros), NeMo-RL and SkyRL (0, 1, ...), slime and miles (T - 1 rows) do not. "replayed": a route, as of a
            recording; every sample must have one. "as_given": either, for samples that were cut after they were generated;
            nothing then tells rows that are shifted.
        missing: a token (but the last) without a route: a row of -1, one that has the same ids in every layer, such as
            0, 1, 2, ..., which trainers use as filler (where no router would choose it in 2 ** 40 tokens), or one that
            names an expert twice, which is lost data. "raise", or "live": the live router decides it, on every rank and in
            every layer, and it is counted.
        layer_numbers: Megatron's layer_number of each entry of the layer axis, 0 for one that is left out unread; None:
            all layers of the model or its MoE layers alone, by their number.
        weight_version: of the weights that chose the routes: an int, one a sample [B], or one a token in the container of the
            tokens, as a partial rollout has them (below 0 where it is not known): of the forward that read the token, which
            chose its route and sampled the next one.
        keep: which routes to replay: bool in the container of the tokens, False on padding. The live router decides the
            others, by choice: a session counts them as `rows_not_kept` and lets them be trained on.
        stale, max_age, trainer_version: what becomes of routes whose weight_version is more than max_age behind
            trainer_version, token by token: "replay", "live" or "raise", as `RoutingTrace.limit_age`. Give all three or none,
            with the same numbers on every rank.
        allow_constant_layers: believe a layer that repeats one route in every row of a sample.

    Returns:
        Routes; the same rows and the same `replay_mask` on every rank.

    Raises:
        LayoutError: containers, shapes or layers do not fit; names the sample.
        PayloadError: rows that no router can have chosen, or that are missing; names the sample and its row.
        TraceError: a route has no weight version, one that is newer than the trainer's, or with stale="raise" one that is
            older than max_age; names the sample and its token.
    """
    if last_row not in get_args(LastRow) or missing not in ("raise", "live"):
        raise LayoutError(f"last_row={last_row!r}, missing={missing!r}: see the docstring for what they may be.")
    _check_age_options(stale, max_age, trainer_version)
    layout = TokenLayout.of(tokens, attention_mask=attention_mask, lengths=lengths)
    samples = split_routes(routed_experts, layout)
    if not samples:
        raise LayoutError("routed_experts hold no sample: there is nothing to replay in an empty batch.")
    info, columns = columns_of(samples[0].rows.shape[1], model, layer_numbers)
    check_width(samples, info)
    wanted = split_routed(routed, layout)
    reader = SampleReader(
        info, columns, last_row=last_row, missing=missing, allow_constant_layers=allow_constant_layers
    )
    topk_indices = torch.empty((layout.num_tokens, len(columns.here), info.topk), dtype=index_dtype(info.num_experts))
    replay_mask = torch.zeros(layout.num_tokens, dtype=torch.bool)
    indices, mask = topk_indices.numpy(), replay_mask.numpy()  # the same memory, which the reader fills
    ids = None if tokens is None else [part.numpy() for part in layout.split(tokens, "tokens")]
    start = 0
    for i, (sample, length) in enumerate(zip(samples, layout.lengths)):
        own = slice(start, start + length)
        reader.read(i, sample, length, wanted[i], None if ids is None else ids[i], indices[own], mask[own])
        start += length
    # A trace wants K distinct ids in every row, also in those whose place the live router takes.
    unrouted = np.flatnonzero(~mask)
    if unrouted.size:
        filler = spread_experts(0, layout.num_tokens, topk=info.topk, num_experts=info.num_experts).numpy()
        indices[unrouted] = filler[unrouted][:, None, :]
    trace = RoutingTrace.from_checked(
        topk_indices=topk_indices,
        layer_numbers=columns.numbers_here,
        num_experts=info.num_experts,
        replay_mask=replay_mask,
        token_ids=None if ids is None else torch.from_numpy(np.concatenate(ids)).to(torch.int32),
        sequence_lengths=layout.lengths,
        weight_version=token_versions(weight_version, layout),
    )
    num_routed = int(trace.replay_mask.sum())
    if keep is not None:
        trace = trace.keep(_as_keep(keep, layout))
    num_kept = int(trace.replay_mask.sum())
    num_stale = 0
    if stale is not None and max_age is not None and trainer_version is not None:
        num_stale = int(trace.find_stale(max_age, trainer_version=trainer_version).sum())
        trace = trace.limit_age(max_age, trainer_version=trainer_version, stale=stale)
    rows = layout.join(rows_of_lengths(layout.lengths), fill=-1)
    return Routes(
        trace=trace,
        rows=rows,
        num_absent=reader.num_absent,
        num_lost=reader.num_lost,
        num_not_kept=num_routed - num_kept,
        num_stale=num_stale,
    )


def _check_age_options(stale: Any, max_age: Any, trainer_version: Any) -> None:
    given = {"stale": stale, "max_age": max_age, "trainer_version": trainer_version}
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise LayoutError(
            f"{', '.join(name for name in given if name not in missing)} without {', '.join(missing)}: what is too old, and "
            "what then, takes all three of stale, max_age and trainer_version."
        )


def _as_keep(keep: Any, layout: TokenLayout) -> Tensor:
    """Return which tokens to keep, [num_tokens] bool, from values in the tokens' container."""
    parts = layout.split(keep, "keep")
    for i, part in enumerate(parts):
        # Not "non-zero": weights, log-probs or rows in the place of the mask would keep nearly everything.
        if part.dim() != 1 or part.dtype is not torch.bool:
            raise LayoutError(f"keep must be bool, one a token; sample {i} has {list(part.shape)} {part.dtype}.")
    kept = torch.cat(parts)
    if isinstance(keep, Tensor) and not keep.is_nested and int(keep.sum()) != int(kept.sum()):
        raise LayoutError(
            f"keep is True on {int(keep.sum()) - int(kept.sum())} positions that hold no token: is it padded on another side "
            "than the tokens? Give keep & attention_mask."
        )
    return kept
