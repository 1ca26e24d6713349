"""Convert a rollout's samples, tokens and routes, to the values of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_router_replay.checks import as_integer
from megatron_router_replay.errors import TraceError
from megatron_router_replay.trace.ids import check_topk_indices, fill_unrouted, index_dtype
from megatron_router_replay.trace.runs import as_slice
from megatron_router_replay.trace.stale import find_stale_rows
from megatron_router_replay.trace.values import (
    as_int32,
    as_integer_array,
    as_integer_tensor,
    as_layer_numbers,
    as_mask,
    check_holds_experts,
    check_topk,
    rows_of_minus_one,
)

Array = npt.NDArray[Any]


def join_samples(
    tokens: Sequence[Any],
    routes: Sequence[Any],
    *,
    num_experts: int,
    layer_numbers: Any,
    replay_mask: Sequence[Any] | None,
    weight_version: Any,
    last_token: str | None,
) -> dict[str, Any]:
    """Return the checked values of a trace of samples; see `RoutingTrace.from_samples`.

    Routes are checked and copied once, in blocks that fit a processor's cache.
    """
    if last_token not in (None, "unrouted", "routed"):
        raise TraceError(f"MRR101: last_token={last_token!r} must be 'unrouted' or 'routed'.")
    layer_numbers, num_experts = as_layer_numbers(layer_numbers), as_integer("num_experts", num_experts)
    masks: Sequence[Any] = [None] * len(tokens) if replay_mask is None else replay_mask
    versions = [weight_version] * len(tokens) if _is_one(weight_version) else weight_version
    for name, values in (("routes", routes), ("replay_mask", masks), ("weight_version", versions)):
        if len(values) != len(tokens):
            raise TraceError(
                f"MRR102: from_samples got {len(tokens)} samples of tokens, and {len(values)} of {name}: each is a list with "
                "one entry a sample, so a single sample is [tokens] and [routes]."
            )
    if not len(tokens):
        raise TraceError("MRR102: from_samples needs a sample at least: of none, topk is not known.")
    # All tokens first: memory for the whole is allocated once, and no sample's routes are kept beside it.
    parts: dict[str, list[Tensor]] = {"token_ids": [], "replay_mask": [], "weight_version": []}
    for number, ids in enumerate(tokens):
        with _naming(number):
            parts["token_ids"].append(_token_ids(ids))
    lengths = tuple(ids.numel() for ids in parts["token_ids"])
    indices: Tensor | None = None
    first = 0
    for number, (ids, mask, version) in enumerate(zip(parts["token_ids"], masks, versions, strict=True)):
        with _naming(number):
            rows, routed = _sample(ids, routes[number], mask, num_experts, layer_numbers, last_token)
            if indices is None:
                check_topk(rows.shape[2], num_experts)
                shape = sum(lengths), len(layer_numbers), rows.shape[2]
                indices = torch.empty(shape, dtype=index_dtype(num_experts))
        if rows.shape[2] != indices.shape[2]:
            raise TraceError(f"MRR102: sample {number} has topk={rows.shape[2]}, sample 0 has another.")
        with _naming(number):
            _copy(rows, indices[first : first + len(rows)], routed, ids, num_experts, layer_numbers)
            if version is not None:
                parts["weight_version"].append(_version(version, ids.numel()))
        parts["replay_mask"].append(routed)
        first += ids.numel()
    assert indices is not None, "there is a sample"
    if 0 < len(parts["weight_version"]) < len(lengths):
        raise TraceError(
            f"MRR102: {len(parts['weight_version'])} of {len(lengths)} samples have a weight_version: give all or none one."
        )
    per_token = {name: torch.cat(values) for name, values in parts.items() if values}
    fill_unrouted(indices, per_token["replay_mask"], num_experts=num_experts)
    return {
        "num_experts": num_experts,
        "layer_numbers": layer_numbers,
        "sequence_lengths": lengths,
        "topk_indices": indices,
        **per_token,
    }


@contextmanager
def _naming(number: int) -> Iterator[None]:
    """Name the sample in errors of the block: a rollout has thousands."""
    try:
        yield
    except TraceError as error:
        raise TraceError(f"MRR102: sample {number}: {error}") from error


def _token_ids(tokens: Any) -> Tensor:
    """Return a sample's tokens, [T] int32, a copy."""
    ids = as_integer_tensor("tokens", tokens).cpu()
    if ids.dim() != 1:
        raise TraceError(f"MRR102: tokens must be [T] and routes [T, layers, topk], got tokens {list(ids.shape)}.")
    if ids.numel() and int(ids.min()) < 0:
        raise TraceError(f"MRR101: token {int(ids.min())} at position {int(ids.argmin())} is no token id.")
    return as_int32("token_ids", ids)


def _version(version: Any, length: int) -> Tensor:
    """Return a sample's weight version, [T] int32."""
    given = as_integer_tensor("weight_version", version).cpu()
    if given.shape not in ((), (length,)):
        raise TraceError(f"MRR102: weight_version must be one or [{length}], got {list(given.shape)}.")
    return as_int32("weight_version", given.expand(length))


def _is_one(weight_version: Any) -> bool:
    # Integers of numpy and torch have a length method as well, which raises.
    return weight_version is None or isinstance(weight_version, int) or getattr(weight_version, "ndim", None) == 0


def _sample(
    ids: Tensor,
    routes: Any,
    mask: Any,
    num_experts: int,
    layer_numbers: tuple[int, ...],
    last_token: str | None,
) -> tuple[Array, Tensor]:
    """Return the routes that a sample may have, [T or T - 1, layers, topk], and its mask, [T] bool."""
    rows, length = as_integer_array("routes", routes), ids.numel()
    if rows.ndim != 3:
        raise TraceError(
            f"MRR102: tokens must be [T] and routes [T, layers, topk], got [{length}] and {list(rows.shape)}."
        )
    check_holds_experts("routes", rows, num_experts)
    swapped = " Give [T, layers, topk]: the tokens are on axis 1." if rows.shape[1] in (length, length - 1) else ""
    rows = _named_layers(rows, layer_numbers)
    # Engines that did not run the token sampled last return T - 1 rows.
    if len(rows) != length and (len(rows) != length - 1 or last_token == "routed"):
        expected = f"{length}" if last_token == "routed" else f"{length} or {length - 1}"
        raise TraceError(
            f"MRR302: {len(rows)} rows of routes for {length} tokens: expected {expected}. Mark rows without a route "
            f"with -1 in every layer.{swapped}"
        )
    routed = torch.zeros(length, dtype=torch.bool)
    routed[: len(rows)] = torch.from_numpy(~rows_of_minus_one(rows))
    _check_ends(rows, routed[: len(rows)], mask, length, last_token)
    if mask is not None:
        routed &= as_mask("replay_mask", mask, length)
    if last_token != "routed" and length:
        routed[-1], rows = False, rows[: length - 1]  # the engine never ran it
    return rows, routed


def _copy(
    rows: Array, memory: Tensor, routed: Tensor, ids: Tensor, num_experts: int, layer_numbers: tuple[int, ...]
) -> None:
    """Check a sample's routes and copy them, [n, layers, topk], into the memory of its first n tokens."""
    routed, ids = routed[: len(rows)], ids[: len(rows)]
    check_topk_indices(rows, num_experts=num_experts, layer_numbers=layer_numbers, replay_mask=routed, out=memory)
    if layer_numbers and (runs := find_stale_rows(memory.numpy(), ids.numpy(), routed.numpy())):
        raise TraceError(
            f"MRR103: {runs[0].describe()} Leave such rows to the live router: -1 in every layer, or replay_mask."
        )


def _check_ends(rows: Array, routed: Tensor, mask: Any, length: int, last_token: str | None) -> None:
    """Raise if the rows look as if they belonged to the neighbours of their tokens.

    Args:
        routed: [rows] bool, False: this row is -1.
    """
    if last_token is None and length > 1 and len(rows) == length:
        is_masked = mask is not None and not bool(as_mask("replay_mask", mask, length)[-1])
        filler = (rows[-1] == 0) | (rows[-1] == np.arange(rows.shape[2]))
        if bool(routed[-1]) and not is_masked and not bool(filler.all()):
            raise TraceError(
                f"MRR302: {length} rows of routes for {length} tokens, and the last row is a route. An engine does not run "
                "the token that it sampled last. If the tokens lack one in front (BOS), every row is one token late: give "
                "the engine's ids. If a forward ran all tokens: last_token='routed'. To drop the last row: "
                "last_token='unrouted'."
            )
    # A message without routes in front of a sample is longer than one token.
    if mask is None and routed.shape[0] > 1 and not bool(routed[0]) and bool(routed[1]):
        raise TraceError(
            "MRR302: row 0 alone is -1 in front of routes, so every row may be one token late. Row i is the route of "
            "token i. If token 0 has none, say so with replay_mask."
        )


def _named_layers(rows: Array, layer_numbers: tuple[int, ...]) -> Array:
    """Return the routes of the layers `layer_numbers`, [T, len(layer_numbers), topk]."""
    if rows.shape[1] == len(layer_numbers):
        return rows
    if not layer_numbers or rows.shape[1] < layer_numbers[-1]:
        raise TraceError(
            f"MRR302: routes have {rows.shape[1]} layers, layer_numbers name {len(layer_numbers)}, up to "
            f"{max(layer_numbers, default=0)}: give one entry for each of these, or for each decoder layer of the model."
        )
    # Engines may return an entry for every decoder layer, dense ones too; numbers begin at 1.
    return rows[:, as_slice([number - 1 for number in layer_numbers])]
