"""Convert a rollout's samples, tokens and routes, to the values of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_router_replay.checks import as_integer
from megatron_router_replay.errors import TraceError
from megatron_router_replay.trace.ids import check_topk_indices, empty_routes, fill_unrouted, find_outside
from megatron_router_replay.trace.runs import as_slice
from megatron_router_replay.trace.stale import find_stale_rows, same_as_before
from megatron_router_replay.trace.values import (
    as_int32,
    as_integer_array,
    as_integer_tensor,
    as_layer_numbers,
    as_mask,
    as_per_token,
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
    versions = [None] * len(tokens) if _is_one(weight_version) else weight_version
    for name, values in (("routes", routes), ("replay_mask", masks), ("weight_version", versions)):
        if len(values) != len(tokens):
            raise TraceError(
                f"MRR102: from_samples got {len(tokens)} samples of tokens, and {len(values)} of {name}: each is a list with "
                "one entry a sample, so a single sample is [tokens] and [routes]."
            )
    if not len(tokens):
        raise TraceError("MRR102: from_samples needs a sample at least: of none, topk is not known.")
    # All tokens first: memory for the whole trace is allocated once, and routes are copied into it sample by sample.
    token_ids, lengths = _join_tokens(tokens)
    ends = list(accumulate(lengths, initial=0))
    mask = np.zeros(ends[-1], np.bool_)
    joined: Tensor | None = None
    for number, (start, stop) in enumerate(pairwise(ends)):
        try:
            rows, routed = _sample(stop - start, routes[number], masks[number], num_experts, layer_numbers, last_token)
            if joined is None:
                check_topk(rows.shape[2], num_experts)
                joined = empty_routes(ends[-1], len(layer_numbers), rows.shape[2], num_experts=num_experts)
        except TraceError as error:
            raise _of_sample(number, error) from error
        indices = joined.numpy()
        if rows.shape[2] != indices.shape[2]:
            raise TraceError(f"MRR102: sample {number} has topk={rows.shape[2]}, sample 0 has another.")
        place = slice(start, start + len(rows))
        mask[place] = routed
        # A cast would wrap 300 to 44, and ids of rows without a route are ignored.
        if rows.dtype == indices.dtype or find_outside(rows, num_experts=num_experts) is None:
            indices[place] = rows
        else:
            out, checked = torch.from_numpy(indices[place]), torch.from_numpy(mask[place])
            with _naming(number):
                check_topk_indices(
                    rows, num_experts=num_experts, layer_numbers=layer_numbers, replay_mask=checked, out=out
                )
    assert joined is not None, "there is a sample"
    joined_mask = torch.from_numpy(mask)
    fill_unrouted(joined, joined_mask, num_experts=num_experts)
    _check(joined, mask, token_ids, ends, num_experts, layer_numbers)
    return {
        "num_experts": num_experts,
        "layer_numbers": layer_numbers,
        "sequence_lengths": lengths,
        "topk_indices": joined,
        "replay_mask": joined_mask,
        "token_ids": torch.from_numpy(token_ids),
        "weight_version": _join_versions(weight_version, lengths),
    }


def _of_sample(number: int, error: TraceError) -> TraceError:
    """Return an error with the number of its sample: a rollout has thousands."""
    return TraceError(f"MRR102: sample {number}: {error}")


@contextmanager
def _naming(number: int) -> Iterator[None]:
    try:
        yield
    except TraceError as error:
        raise _of_sample(number, error) from error


def _join_tokens(tokens: Sequence[Any]) -> tuple[Array, tuple[int, ...]]:
    """Return the tokens of all samples, [num_tokens] int32, and the length of each."""
    samples = []
    for number, each in enumerate(tokens):
        with _naming(number):
            ids = as_integer_array("tokens", each)
            if ids.ndim != 1:
                raise TraceError(
                    f"MRR102: tokens must be [T] and routes [T, layers, topk], got tokens {list(ids.shape)}."
                )
        samples.append(ids)
    lengths = tuple(map(len, samples))
    joined = np.empty(sum(lengths), np.int32)
    for number, (ids, stop) in enumerate(zip(samples, accumulate(lengths))):
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 2**31):
            with _naming(number):
                if int(ids.min()) < 0:
                    raise TraceError(f"MRR101: token {int(ids.min())} at position {int(ids.argmin())} is no token id.")
                raise TraceError(f"MRR101: token_ids reach {int(ids.max())}, which int32 cannot hold.")
        joined[stop - len(ids) : stop] = ids
    return joined, lengths


def _join_versions(weight_version: Any, lengths: Sequence[int]) -> Tensor | None:
    """Return the weight version of all samples, [num_tokens] int32; None: there is none."""
    if _is_one(weight_version):
        return as_per_token("weight_version", weight_version, sum(lengths))
    versions = []
    for number, (version, length) in enumerate(zip(weight_version, lengths, strict=True)):
        if version is not None:
            with _naming(number):
                given = as_integer_tensor("weight_version", version).cpu()
                if given.shape not in ((), (length,)):
                    raise TraceError(f"MRR102: weight_version must be one or [{length}], got {list(given.shape)}.")
                versions.append(as_int32("weight_version", given.expand(length)))
    if 0 < len(versions) < len(lengths):
        raise TraceError(
            f"MRR102: {len(versions)} of {len(lengths)} samples have a weight_version: give all or none one."
        )
    return torch.cat(versions) if versions else None


def _is_one(weight_version: Any) -> bool:
    # Integers of numpy and torch have a length method as well, which raises.
    return weight_version is None or isinstance(weight_version, int) or getattr(weight_version, "ndim", None) == 0


def _sample(
    length: int,
    routes: Any,
    mask: Any,
    num_experts: int,
    layer_numbers: tuple[int, ...],
    last_token: str | None,
) -> tuple[Array, Array | bool]:
    """Return the rows that a sample of T tokens may have, [T or T - 1, layers, topk], and which are routes; True: all."""
    rows = as_integer_array("routes", routes)
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
    # Rows of -1 have no route. An unsigned dtype cannot mark them so.
    routed: Array | bool = ~rows_of_minus_one(rows) if rows.dtype.kind == "i" else True
    if rows.dtype.kind == "i" or mask is not None or len(rows) == length:
        routed = np.broadcast_to(routed, len(rows))
        _check_ends(rows, routed, mask, length, last_token)
    if mask is not None:
        routed = routed & as_mask("replay_mask", mask, length).numpy()[: len(rows)]
    if last_token != "routed" and len(rows) == length:  # the engine never ran it
        rows, routed = rows[: length - 1], routed if isinstance(routed, bool) else routed[: length - 1]
    return rows, routed


def _check(
    indices: Tensor,
    mask: Array,
    token_ids: Array,
    ends: Sequence[int],
    num_experts: int,
    layer_numbers: tuple[int, ...],
) -> None:
    """Raise if a sample has a route that no router can have chosen, or one row over many tokens that differ.

    All samples are checked together, for most are short. Rows without a route have legal ids by now.
    """
    options: dict[str, Any] = {"num_experts": num_experts, "layer_numbers": layer_numbers}
    try:
        check_topk_indices(indices, **options)
    except TraceError:
        for number, (start, stop) in enumerate(pairwise(ends)):
            with _naming(number):
                check_topk_indices(indices[start:stop], **options)
        raise
    if not layer_numbers:
        return
    suspects = np.flatnonzero(same_as_before(indices.numpy(), mask)) + 1
    for number in np.unique(np.searchsorted(ends, suspects, side="right") - 1).tolist():
        rows = slice(ends[number], ends[number + 1])
        if runs := find_stale_rows(indices[rows].numpy(), token_ids[rows], mask[rows]):
            with _naming(number):
                raise TraceError(
                    f"MRR103: {runs[0].describe()} Leave such rows to the live router: -1 in every layer, or replay_mask."
                )


def _check_ends(rows: Array, routed: Array, mask: Any, length: int, last_token: str | None) -> None:
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
                "the token that it sampled last. If a token in front (BOS) is missing, every row is one token late: give "
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
