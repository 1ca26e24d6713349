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
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trainers.columns import columns_of
from megatron_router_replay.trainers.containers import Container, TokenLayout
from megatron_router_replay.trainers.reader import LastRow, SampleReader
from megatron_router_replay.trainers.samples import check_width, split_routed, split_routes


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """A batch's routes, and which row is whose.

    Args:
        trace: one row a token, samples behind one another, with this rank's MoE layers; on the CPU.
        rows: the row of each token, int64, in the container and shape of the tokens; -1 on padding and nowhere else.
        num_absent: tokens without a route: filler (-1, or the same ids in every layer), or not in `routed`; last tokens
            do not count.
        num_lost: tokens whose routes name an expert twice: the engine lost them. 0 unless missing="live".
    """

    trace: RoutingTrace
    rows: Container
    num_absent: int
    num_lost: int


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
            "replayed": a route, as of a recording; every sample must have one. "as_given": either, for samples that were
            cut after they were generated; nothing then tells rows that are shifted.
        missing: a token (but the last) without a route: a row of -1, one that has the same ids in every layer, such as
            0, 1, 2, ..., which trainers use as filler (where no router would choose it in 2 ** 40 tokens), or one that
            names an expert twice, which is lost data. "raise", or "live": the live router decides it, on every rank and in
            every layer, and it is counted.
        layer_numbers: Megatron's layer_number of each entry of the layer axis, 0 for one that is left out unread; None:
            all layers of the model or its MoE layers alone, by their number.
        weight_version: of the weights that chose the routes: an int, or one a sample.
        allow_constant_layers: believe a layer that repeats one route in every row of a sample.

    Returns:
        Routes; the same rows and the same `replay_mask` on every rank.

    Raises:
        LayoutError: containers, shapes or layers do not fit; names the sample.
        PayloadError: rows that no router can have chosen, or that are missing; names the sample and its row.
    """
    if last_row not in get_args(LastRow) or missing not in ("raise", "live"):
        raise LayoutError(f"last_row={last_row!r}, missing={missing!r}: see the docstring for what they may be.")
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
    dtype = np.dtype(np.uint8 if index_dtype(info.num_experts) is torch.uint8 else np.int16)
    indices = np.empty((layout.num_tokens, len(columns.here), info.topk), dtype)
    mask = np.zeros(layout.num_tokens, np.bool_)
    ids = None if tokens is None else [part.numpy() for part in layout.split(tokens, "tokens")]
    start = 0
    for i, (sample, length) in enumerate(zip(samples, layout.lengths)):
        own = slice(start, start + length)
        reader.read(i, sample, length, wanted[i], None if ids is None else ids[i], indices[own], mask[own])
        start += length
    unrouted = np.flatnonzero(~mask)
    if unrouted.size:
        filler = spread_experts(0, layout.num_tokens, topk=info.topk, num_experts=info.num_experts).numpy()
        indices[unrouted] = filler[unrouted][:, None, :]
    trace = RoutingTrace.from_checked(
        topk_indices=torch.from_numpy(indices),
        layer_numbers=columns.numbers_here,
        num_experts=info.num_experts,
        replay_mask=torch.from_numpy(mask),
        token_ids=None if ids is None else torch.from_numpy(np.concatenate(ids)).to(torch.int32),
        sequence_lengths=layout.lengths,
        weight_version=_weight_versions(weight_version, layout.lengths),
    )
    rows = layout.join(rows_of_lengths(layout.lengths), fill=-1)
    return Routes(trace=trace, rows=rows, num_absent=reader.num_absent, num_lost=reader.num_lost)


def _weight_versions(value: Any, lengths: Sequence[int]) -> Tensor | None:
    if value is None:
        return None
    versions = torch.as_tensor(value).to(torch.int32)
    if versions.dim() and list(versions.shape) != [len(lengths)]:
        raise LayoutError(f"weight_version must be an int or one for each of {len(lengths)} samples, got {value!r}.")
    return versions.expand(len(lengths)).repeat_interleave(torch.tensor(lengths))
