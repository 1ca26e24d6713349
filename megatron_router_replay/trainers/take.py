"""Routes in a trainer's container -> a trace of this rank's layers, and the rows of the trainer's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from megatron_router_replay.engines.decoder import warn_without_ids
from megatron_router_replay.engines.payload import Array
from megatron_router_replay.errors import LayoutError
from megatron_router_replay.layout import number_rows
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trace.ids import index_dtype, spread_experts
from megatron_router_replay.trainers.columns import columns_of
from megatron_router_replay.trainers.containers import Container, TokenLayout, is_list
from megatron_router_replay.trainers.reader import LastRow, SampleReader, split_has_route, split_routes


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRoutes:
    """A batch's routes, and which row is whose.

    Args:
        trace: one row a token, samples in order, with this rank's MoE layers; on the CPU.
        rows: the row of each token, int64, in the container and shape of the tokens; -1 on padding and nowhere else.
        num_absent: tokens without a route: filler (-1, or the same ids in every layer), or not in `has_route`; last tokens
            do not count.
        num_lost: tokens whose routes name an expert twice: the engine lost them. 0 unless missing="live".
        layout: of the tokens in their container.
    """

    trace: RoutingTrace
    rows: Container
    num_absent: int
    num_lost: int
    layout: TokenLayout

    def keep(self, mask: Any) -> BatchRoutes:
        """Return the batch with routes only where a mask is True. The mask has the container of the tokens; see
        `RoutingTrace.keep`.

        Args:
            mask: bool like the tokens, False on padding. A flat one, as `stale_rows` gives it, goes to `trace.keep`.

        Raises:
            LayoutError: it is not bool, has another shape, or is True on padding.
        """
        parts = self.layout.split(mask, "keep")
        for i, part in enumerate(parts):
            # Not "non-zero": weights, log-probs or rows in the place of the mask would keep nearly everything.
            if part.dim() != 1 or part.dtype is not torch.bool:
                raise LayoutError(
                    f"MRR801: keep must be bool, one a token; sample {i} has {list(part.shape)} {part.dtype}."
                )
        kept = torch.cat(parts)
        if isinstance(mask, Tensor) and not mask.is_nested and int(mask.sum()) != int(kept.sum()):
            raise LayoutError(
                f"MRR802: keep is True on {int(mask.sum()) - int(kept.sum())} positions that hold no token: is it padded "
                "on another side than the tokens? Give keep & attention_mask."
            )
        return replace(self, trace=self.trace.keep(kept))


def take_routes(
    routed_experts: Any,
    model: Any,
    *,
    layer_numbers: Sequence[int] | None = None,
    weight_version: Any = None,
    tokens: Any = None,
    attention_mask: Any = None,
    lengths: Any = None,
    has_route: Any = None,
    last_row: LastRow = "live",
    missing: Literal["raise", "live"] = "raise",
) -> BatchRoutes:
    """Return the trace of a batch's routes, and the rows of its tokens. The trace is for `mrr.replay`.

    Which:
        routed_experts: jagged nested [B, T_i or T_i - 1, layers, topk], padded [B, S, layers, topk], or a list of
            [T_i or T_i - 1, layers, topk]; tensors or numpy, any integer dtype that holds the model's experts. A padded
            one has its rows where a padded batch has its tokens (S or S - 1 positions), and filler on padding: -1, an
            expert twice, or the same ids in every layer. Of samples without padding in front it may have any S.
        model: this rank's model chunks, or a ModelRoutingInfo, which keeps every MoE layer.
        layer_numbers: Megatron's layer_number of each entry of the layer axis, 0 for one that is left out unread; None: all
            layers of the model or its MoE layers alone, by their number.
        weight_version: the weights that chose the routes: an int, one a sample [B], or one a token in the container of the
            tokens, as a partial rollout has them (below 0 where it is not known): of the forward that read the token, which
            chose its route and sampled the next one.

    Where the tokens are:
        tokens: jagged nested [B, T_i], padded [B, S], or a list of [T_i]. The trace then proves that rows and tokens match
            wherever they meet again. Without it, one of the next two says where they are.
        attention_mask: [B, S], non-zero where a padded batch has tokens.
        lengths: [B], tokens of each sample.

    Which rows are routes:
        has_route: where the container cannot say so: bool like the tokens, or [B], how many first ones of each sample.
            Others are routed live, whatever the container holds there. No loss mask: prompts are routed too.
        last_row: what a sample's last row is where it has as many rows as tokens. "live": filler, for an engine has no
            route of the token that it sampled last; a route there raises, for then all rows may be one too late.
            "copied": filler, or a copy of the row before it: scripts around SGLang append one to have a row a token; verl
            (zeros), NeMo-RL and SkyRL (0, 1, ...), slime and miles (T - 1 rows) do not. "replayed": a route, as of a
            recording; every sample must have one. "unchecked": either, for samples that were cut after they were generated;
            only a sample whose first row is filler and whose last one is a route is then told to be shifted.
        missing: a token (but the last) without a route: a row of -1, or an expert twice; see `engines.row_check`.
            "raise", or "live": the live router decides it, on every rank and in every layer, and it is counted.

    Returns:
        BatchRoutes; the same rows and the same `replay_mask` on every rank. `.keep(mask)` leaves routes out by choice.

    Raises:
        LayoutError: containers, shapes or layers do not fit; names the sample.
        PayloadError: rows that no router can have chosen, or that are missing; names the sample.
    """
    if last_row not in get_args(LastRow) or missing not in ("raise", "live"):
        raise LayoutError(
            f"MRR101: last_row={last_row!r}, missing={missing!r}: last_row is 'live', 'copied', 'replayed' or "
            "'unchecked', missing is 'raise' or 'live'."
        )
    layout = TokenLayout.of(tokens, attention_mask=attention_mask, lengths=lengths)
    samples = split_routes(routed_experts, layout)
    if not samples:
        raise LayoutError("MRR802: routed_experts hold no sample: there is nothing to replay in an empty batch.")
    num_columns, topk = samples[0].rows.shape[1:]
    info, columns = columns_of(num_columns, model, layer_numbers)
    if topk != info.topk:
        raise LayoutError(
            f"MRR802: routed_experts have {topk} experts a token, the model's topk is {info.topk}: of another model, or "
            "with shared experts appended?"
        )
    has = split_has_route(has_route, layout)
    versions = token_versions(weight_version, layout)
    reader = SampleReader(info, columns, last_row=last_row, missing=missing)
    topk_indices = torch.empty((layout.num_tokens, len(columns.here), topk), dtype=index_dtype(info.num_experts))
    replay_mask = torch.zeros(layout.num_tokens, dtype=torch.bool)
    indices, mask = topk_indices.numpy(), replay_mask.numpy()  # the same memory, which the reader fills
    ids = None if tokens is None else [part.numpy() for part in layout.split(tokens, "tokens")]
    start = 0
    for i, (sample, length) in enumerate(zip(samples, layout.lengths)):
        own = slice(start, start + length)
        reader.read(i, sample, length, has[i], indices[own], mask[own])
        start += length
    # A trace wants K distinct ids in every row, also in those whose place the live router takes.
    unrouted = np.flatnonzero(~mask)
    if unrouted.size:
        filler = spread_experts(0, layout.num_tokens, topk=topk, num_experts=info.num_experts).numpy()
        indices[unrouted] = filler[unrouted][:, None, :]
    if ids is None:
        warn_without_ids()
    trace = RoutingTrace.from_checked(
        topk_indices=topk_indices,
        layer_numbers=columns.numbers_here,
        num_experts=info.num_experts,
        replay_mask=replay_mask,
        token_ids=None if ids is None else torch.from_numpy(np.concatenate(ids)).to(torch.int32),
        sequence_lengths=layout.lengths,
        weight_version=versions,
    )
    return BatchRoutes(
        trace=trace,
        rows=layout.join(number_rows(layout.lengths), fill=-1),
        num_absent=reader.num_absent,
        num_lost=reader.num_lost,
        layout=layout,
    )


def _take_layers(rows: Array, layers: list[int], at: Array) -> Array:
    return np.asarray(rows[at][:, layers])


def token_versions(value: Any, layout: TokenLayout) -> Tensor | None:
    """Return the version of the weights that chose each token's route, [num_tokens] int32; `value` as of `take_routes`."""
    if value is None:
        return None
    # What has an axis beside the samples' is one a token; a flat one is one a sample, also where B equals T.
    of_tokens = (
        [np.ndim(each) > 0 for each in value]
        if is_list(value)
        else [value.dim() > 1 if isinstance(value, Tensor) else np.ndim(value) > 1]
    )
    if any(of_tokens) and not all(of_tokens):
        raise LayoutError(
            f"MRR804: weight_version has one version for sample {of_tokens.index(False)} and several for sample "
            f"{of_tokens.index(True)}: give one a sample, or one a token of every sample."
        )
    if any(of_tokens):
        parts = layout.split(value, "weight_version")
        for i, part in enumerate(parts):
            if part.dim() != 1:
                raise LayoutError(
                    f"MRR804: weight_version of sample {i} is {list(part.shape)}, expected [T], one a token."
                )
        return torch.cat([_as_versions(part) for part in parts])
    versions = _as_versions(value)
    if versions.dim() and list(versions.shape) != [len(layout.lengths)]:
        raise LayoutError(
            f"MRR804: weight_version must be an int, one for each of {len(layout.lengths)} samples, or one a token in "
            f"the container of the tokens, got {list(versions.shape)}."
        )
    return versions.expand(len(layout.lengths)).repeat_interleave(torch.tensor(layout.lengths, dtype=torch.int64))


def _as_versions(value: Any) -> Tensor:
    # numpy turns [1, True] into integers and [1, 2.0] into floats: a bool is looked for before, floats are refused behind.
    entries = value if is_list(value) else [value]
    holds_bool = any(isinstance(entry, bool | np.bool_) for entry in entries)
    array = value.cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if holds_bool or (array.dtype.kind not in "iu" and array.size):
        kinds = sorted({type(entry).__name__ for entry in entries}) if is_list(value) else [str(array.dtype)]
        raise LayoutError(
            f"MRR804: weight_version must hold integers, got {', '.join(kinds)}: give the number of each version, the "
            "same kind for every sample."
        )
    if array.size and not (-(2**31) <= int(array.min()) and int(array.max()) < 2**31):
        raise LayoutError(f"MRR804: weight_version reaches {int(array.max())}, which int32 cannot hold.")
    return torch.from_numpy(array.astype(np.int32))
