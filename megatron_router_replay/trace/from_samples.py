"""Convert a rollout's samples, tokens and routes, to the values of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.checks import as_integer
from megatron_router_replay.errors import TraceError
from megatron_router_replay.trace.ids import check_topk_indices, index_dtype
from megatron_router_replay.trace.stale import find_stale_rows
from megatron_router_replay.trace.values import as_integer_tensor, as_layer_numbers, as_mask, check_holds_experts


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
    """Return RoutingTrace's arguments for samples; see `RoutingTrace.from_samples`."""
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
    parts: dict[str, list[Tensor]] = {"topk_indices": [], "replay_mask": [], "token_ids": [], "weight_version": []}
    for number, (ids, rows, mask, version) in enumerate(zip(tokens, routes, masks, versions, strict=True)):
        try:
            part = _sample(ids, rows, mask, version, num_experts, layer_numbers, last_token)
        except TraceError as error:  # a rollout has thousands of samples: name this one
            raise TraceError(f"MRR102: sample {number}: {error}") from error
        for name, values in part.items():
            parts[name].append(values)
    # torch.cat would raise as well, but without the number of a sample.
    topk = {part.shape[2] for part in parts["topk_indices"]}
    if len(topk) > 1:
        first = next(
            i for i, part in enumerate(parts["topk_indices"]) if part.shape[2] != parts["topk_indices"][0].shape[2]
        )
        raise TraceError(
            f"MRR102: sample {first} has topk={parts['topk_indices'][first].shape[2]}, sample 0 has another."
        )
    if not parts["topk_indices"]:
        raise TraceError("MRR102: from_samples needs a sample at least: of none, topk is not known.")
    return {
        "num_experts": num_experts,
        "layer_numbers": layer_numbers,
        "sequence_lengths": [part.numel() for part in parts["token_ids"]],
        **{name: torch.cat(values) for name, values in parts.items() if values},
    }


def _is_one(weight_version: Any) -> bool:
    # Integers of numpy and torch have a length method as well, which raises.
    return weight_version is None or isinstance(weight_version, int) or getattr(weight_version, "ndim", None) == 0


def _sample(
    tokens: Any,
    routes: Any,
    mask: Any,
    version: Any,
    num_experts: int,
    layer_numbers: tuple[int, ...],
    last_token: str | None,
) -> dict[str, Tensor]:
    """Return the values of a sample, a row for each of its T tokens."""
    ids, rows = as_integer_tensor("tokens", tokens).cpu(), as_integer_tensor("routes", routes).cpu()
    if ids.dim() != 1 or rows.dim() != 3:
        raise TraceError(
            f"MRR102: tokens must be [T] and routes [T, layers, topk], got {list(ids.shape)} and {list(rows.shape)}."
        )
    if ids.numel() and int(ids.min()) < 0:
        raise TraceError(f"MRR101: token {int(ids.min())} at position {int(ids.argmin())} is no token id.")
    check_holds_experts("routes", rows, num_experts)
    swapped = (
        " Give [T, layers, topk]: the tokens are on axis 1." if rows.shape[1] in (ids.numel(), ids.numel() - 1) else ""
    )
    rows = _named_layers(rows, layer_numbers)
    length, has_last = ids.numel(), rows.shape[0] == ids.numel()
    # Engines that did not run the token sampled last return T - 1 rows.
    if not has_last and (rows.shape[0] != length - 1 or last_token == "routed"):
        expected = f"{length}" if last_token == "routed" else f"{length} or {length - 1}"
        raise TraceError(
            f"MRR302: {rows.shape[0]} rows of routes for {length} tokens: expected {expected}. Mark rows without a route "
            f"with -1 in every layer.{swapped}"
        )
    # Rows of -1 have no route. An unsigned dtype cannot mark them so.
    missing = (rows == -1).flatten(1).all(1) if layer_numbers else torch.zeros(rows.shape[0], dtype=torch.bool)
    routed = ~missing if rows.dtype.is_signed else torch.ones_like(missing)
    _check_ends(rows, routed, mask, length, last_token)
    routed = torch.nn.functional.pad(routed, (0, length - rows.shape[0]))
    if mask is not None:
        routed = routed & as_mask("replay_mask", mask, length)
    if last_token != "routed" and length:
        routed = torch.cat([routed[:-1], torch.zeros(1, dtype=torch.bool)])  # the engine never ran it
    check_topk_indices(rows, num_experts=num_experts, layer_numbers=layer_numbers, replay_mask=routed[: rows.shape[0]])
    if layer_numbers and (
        runs := find_stale_rows(rows.numpy(), ids[: rows.shape[0]].numpy(), routed[: rows.shape[0]].numpy())
    ):
        raise TraceError(
            f"MRR103: {runs[0].describe()} Leave such rows to the live router: -1 in every layer, or replay_mask."
        )
    # Ids of masked rows are ignored; 0 is valid in every dtype.
    stored = torch.zeros(length, *rows.shape[1:], dtype=index_dtype(num_experts))
    stored[: rows.shape[0]] = torch.where(routed[: rows.shape[0]].view(-1, 1, 1), rows, 0).to(stored.dtype)
    values = {"topk_indices": stored, "replay_mask": routed, "token_ids": ids}
    if version is not None:
        given = as_integer_tensor("weight_version", version).cpu()
        values["weight_version"] = given.expand(length) if given.dim() == 0 else given
        if values["weight_version"].shape != (length,):
            raise TraceError(f"MRR102: weight_version must be one or [{length}], got {list(given.shape)}.")
    return values


def _check_ends(rows: Tensor, routed: Tensor, mask: Any, length: int, last_token: str | None) -> None:
    """Raise if the rows look as if they belonged to the neighbours of their tokens.

    Args:
        routed: [rows] bool, False: this row is -1.
    """
    if last_token is None and length > 1 and rows.shape[0] == length:
        is_masked = mask is not None and not bool(as_mask("replay_mask", mask, length)[-1])
        filler = (rows[-1] == 0) | (rows[-1] == torch.arange(rows.shape[2]))
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


def _named_layers(rows: Tensor, layer_numbers: tuple[int, ...]) -> Tensor:
    """Return the routes of the layers `layer_numbers`, [T, len(layer_numbers), topk]."""
    if rows.shape[1] == len(layer_numbers):
        return rows
    if not layer_numbers or rows.shape[1] < layer_numbers[-1]:
        raise TraceError(
            f"MRR302: routes have {rows.shape[1]} layers, layer_numbers name {len(layer_numbers)}, up to "
            f"{max(layer_numbers, default=0)}: give one entry for each of these, or for each decoder layer of the model."
        )
    # Engines may return an entry for every decoder layer, dense ones too; numbers begin at 1.
    return rows[:, [number - 1 for number in layer_numbers]]
