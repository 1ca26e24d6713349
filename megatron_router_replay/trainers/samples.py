"""Routed experts in a trainer's container -> the rows of each sample, beside the tokens they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.payload import Array
from megatron_router_replay.errors import LayoutError
from megatron_router_replay.runs import as_slice
from megatron_router_replay.trainers.containers import TokenLayout, as_samples, is_list


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRoutes:
    """One sample's routes: rows [T or T - 1, layers, topk], and what lies on its padding."""

    rows: Array
    padding: Array


def split_routes(routed_experts: Any, layout: TokenLayout) -> list[SampleRoutes]:
    """Return the routes of each sample of the batch.

    Args:
        routed_experts: as `take_routes` takes them.
        layout: of the tokens.

    Raises:
        LayoutError: they do not fit the tokens; names the sample.
    """
    if not is_list(routed_experts) and not getattr(routed_experts, "is_nested", False):
        return list(_padded_samples(_array(routed_experts, "routed_experts"), layout))
    parts = routed_experts if is_list(routed_experts) else as_samples(routed_experts, "routed_experts")
    samples = [_array(part, f"routed_experts of sample {i}") for i, part in enumerate(parts)]
    if len(samples) != len(layout.lengths):
        raise LayoutError(f"routed_experts hold {len(samples)} samples, the tokens {len(layout.lengths)}.")
    for i, (rows, length) in enumerate(zip(samples, layout.lengths)):
        if rows.ndim != 3 or rows.shape[1:] != samples[0].shape[1:]:
            raise LayoutError(
                f"routed_experts of sample {i} are {list(rows.shape)}, of sample 0 {list(samples[0].shape)}: each must be "
                "[rows, layers, topk]."
            )
        if len(rows) not in (length, length - 1):
            raise LayoutError(
                f"sample {i} has {len(rows)} rows of routes for {length} tokens: expected {max(length - 1, 0)} (the last "
                f"token has no route) or {length}. Were tokens cut, joined or padded without their routes?"
            )
    return [SampleRoutes(rows=rows, padding=rows[:0]) for rows in samples]


def _padded_samples(routes: Array, layout: TokenLayout) -> Iterator[SampleRoutes]:
    if routes.ndim != 4 or routes.shape[0] != len(layout.lengths):
        raise LayoutError(
            f"routed_experts are {list(routes.shape)}: a padded batch of {len(layout.lengths)} samples must be [B, S, "
            "layers, topk]."
        )
    in_front = [torch.arange(length) for length in layout.lengths]
    positions = in_front if layout.positions is None else layout.positions
    aligned = layout.positions is None or all(torch.equal(a, b) for a, b in zip(in_front, layout.positions))
    size = routes.shape[1]
    # An axis of another length was cut or widened on either side; only tokens that begin at 0 say on which.
    if not aligned and size not in (layout.seq_length, layout.seq_length - 1):
        raise LayoutError(
            f"routed_experts have {size} positions, the tokens {layout.seq_length}, with padding in front: which row is "
            "whose cannot be told. Give routes of as many positions as tokens, or one less."
        )
    for i, at in enumerate(positions):
        kept = at[at < size]
        if len(kept) < len(at) - 1:  # the last token alone may be without a row
            raise LayoutError(
                f"sample {i} has {len(at)} tokens, routed_experts end {len(at) - len(kept)} tokens before it."
            )
        padding = np.ones(size, np.bool_)
        padding[kept.numpy()] = False
        behind = as_slice(np.flatnonzero(padding).tolist())
        yield SampleRoutes(rows=routes[i, as_slice(kept.tolist())], padding=routes[i, behind])


def _array(values: Any, name: str) -> Array:
    """Return integers as numpy; without a copy where they are on the CPU."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise LayoutError(f"{name} must be integers, got {array.dtype}.")
    return array


def check_width(samples: Sequence[SampleRoutes], info: ModelRoutingInfo) -> None:
    """Raise unless the expert axis is the model's topk and the dtype holds its experts.

    Raises:
        LayoutError: it is not, or a sample's dtype does not.
    """
    rows = samples[0].rows
    if rows.shape[2] != info.topk:
        raise LayoutError(
            f"routed_experts have {rows.shape[2]} experts a token, the model's topk is {info.topk}: of another model, or "
            "with shared experts appended?"
        )
    for i, sample in enumerate(samples):
        if np.iinfo(sample.rows.dtype).max < info.num_experts - 1:
            raise LayoutError(
                f"routed_experts of sample {i} are {sample.rows.dtype}, which cannot hold the ids of {info.num_experts} "
                "experts: a cast has wrapped them. Keep them in int16 or wider."
            )


def split_routed(routed: Any, layout: TokenLayout) -> list[Array | None]:
    """Return, of each sample, [T] bool: the token has a route; None: nothing is said.

    Raises:
        LayoutError: it is neither a mask like the tokens nor a number of tokens for each sample.
    """
    if routed is None:
        return [None] * len(layout.lengths)
    of_tokens = getattr(routed, "is_nested", False) or (is_list(routed) and any(np.ndim(part) for part in routed))
    if not of_tokens:
        counts = torch.as_tensor(routed)
        if counts.dim() == 1 and counts.dtype is not torch.bool:
            known = [int(count) for count in counts.tolist()]
            if len(known) != len(layout.lengths) or any(not 0 <= n <= t for n, t in zip(known, layout.lengths)):
                raise LayoutError(
                    f"routed {known} must be a number of tokens, 0..T, for each sample of {layout.lengths}."
                )
            return [np.arange(length) < count for count, length in zip(known, layout.lengths)]
    return [(part != 0).numpy() for part in layout.split(routed, "routed")]
