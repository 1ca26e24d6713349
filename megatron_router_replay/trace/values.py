"""The values of a caller or of a file's header -> the values that a trace stores: checked, and copies of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_router_replay.checks import as_integer, shown
from megatron_router_replay.errors import TraceError
from megatron_router_replay.trace.ids import check_topk_indices, empty_routes, fill_unrouted, index_dtype

_MAX_INTEGER = (1 << 63) - 1

_MINUS_ONE_ROWS = 1024
"""Rows that are compared with -1 at a time: of many, the comparison would take as much memory as they do."""


def as_integer_tensor(name: str, value: Any) -> Tensor:
    """Return `value` as a tensor of an integer dtype that torch can compute with; may share memory with it."""
    if isinstance(value, Tensor):
        tensor = value.detach()
        _check_integers(name, tensor)
    else:
        array = as_integer_array(name, value)
        # torch has no other byte order, and warns of read-only memory.
        is_readable = array.flags.writeable and array.flags.aligned and array.dtype.isnative
        is_readable &= all(step >= 0 and step % array.itemsize == 0 for step in array.strides)
        tensor = torch.from_numpy(array if is_readable else array.astype(array.dtype.newbyteorder("=")))
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch has no arithmetic for these
        tensor = tensor.to(torch.int64)
    return tensor


def as_integer_array(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Return `value` as an array of any integer dtype; may share memory with it."""
    if isinstance(value, Tensor):
        _check_integers(name, value)
        return value.detach().cpu().numpy()
    array = _as_array(name, value)
    if array.dtype.kind not in "iu" and array.size:
        raise TraceError(f"MRR101: {name} must hold integers, got {array.dtype} from {type(value).__name__}.")
    return array if array.size else array.astype(np.int64)  # numpy's empty lists are floats


def _check_integers(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        raise TraceError(f"MRR101: {name} must hold integers, got {tensor.dtype}.")


def _as_array(name: str, value: Any) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:  # nested lists of several lengths, or tensors that are on a GPU
        raise TraceError(f"MRR101: {name} must be an array, got {type(value).__name__}: {error}") from None


def check_holds_experts(name: str, indices: Tensor | np.ndarray[Any, Any], num_experts: int) -> None:
    """Raise TraceError if the dtype of indices is too narrow for the highest id: a cast has wrapped ids to valid ones."""
    limits = torch.iinfo(indices.dtype) if isinstance(indices, Tensor) else np.iinfo(indices.dtype)
    if 0 not in indices.shape and limits.max < num_experts - 1:
        raise TraceError(
            f"MRR101: {name} are {indices.dtype}, too narrow for the ids of {num_experts} experts: higher ids were wrapped."
        )


def as_mask(name: str, value: Any, num_tokens: int) -> Tensor:
    """Return [num_tokens] bool, which may share memory with a tensor that was given; or raise TraceError."""
    array = None if isinstance(value, Tensor) else _as_array(name, value)
    if array is not None and array.dtype.kind not in "biufc":  # torch has no texts and no objects
        raise TraceError(f"MRR102: {name} must be [{num_tokens}] bool, got {array.dtype} from {type(value).__name__}.")
    mask = value.detach() if array is None else torch.from_numpy(array.copy())
    if mask.dtype is not torch.bool or mask.shape != (num_tokens,):
        dtype = str(mask.dtype).removeprefix("torch.")
        raise TraceError(f"MRR102: {name} must be [{num_tokens}] bool, got {list(mask.shape)} {dtype}.")
    return mask


def as_replay_mask(value: Any, indices: Tensor) -> Tensor:
    """Return [num_tokens] bool, False where `value` is, or a row is -1 in every layer; or raise TraceError."""
    num_tokens = indices.shape[0]
    if indices.is_cpu:
        missing = torch.from_numpy(rows_of_minus_one(indices.numpy()))
    else:
        missing = torch.zeros(num_tokens, dtype=torch.bool, device=indices.device)
        if indices.dtype is not torch.uint8 and indices[:1].numel():  # of no layers, all() would be -1
            missing = (indices == -1).flatten(1).all(dim=1)
    if value is None:
        return ~missing
    return as_mask("replay_mask", value, num_tokens).to(indices.device) & ~missing


def rows_of_minus_one(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return [num_tokens] bool, True where [num_tokens, layers, topk] is -1 in all places; unsigned rows never are."""
    missing = np.zeros(len(rows), np.bool_)
    if rows.dtype.kind == "i" and rows[:1].size:
        # Hardly any row begins with -1, so the rest is hardly ever read.
        starts = np.flatnonzero(rows[:, 0, 0] == -1)
        for at in range(0, len(starts), _MINUS_ONE_ROWS):
            block = starts[at : at + _MINUS_ONE_ROWS]
            missing[block] = (rows[block] == -1).all(axis=(1, 2))
    return missing


def as_stored_indices(indices: Tensor, mask: Tensor, *, num_experts: int, layer_numbers: tuple[int, ...]) -> Tensor:
    """Return checked indices in the stored dtype, rows outside the mask filled with distinct ids; a copy."""
    stored = empty_routes(*indices.shape, num_experts=num_experts, device=indices.device)
    # Checked as they came, before narrowing: a cast would wrap 300 to 44, and 256 to expert 0.
    out = stored if indices.is_cpu else None
    check_topk_indices(indices, num_experts=num_experts, layer_numbers=layer_numbers, replay_mask=mask, out=out)
    if out is None:
        stored.copy_(indices)
    fill_unrouted(stored, mask, num_experts=num_experts)
    return stored


def as_per_token(name: str, value: Any, num_tokens: int) -> Tensor | None:
    """Return [num_tokens] int32, a copy, from that many integers or one for all; or raise TraceError."""
    if value is None:
        return None
    tensor = as_integer_tensor(name, value)
    if tensor.dim() == 0:
        tensor = tensor.expand(num_tokens)
    if tensor.shape != (num_tokens,):
        raise TraceError(f"MRR102: {name} must be [{num_tokens}], one a token, got shape {list(tensor.shape)}.")
    return as_int32(name, tensor)


def as_int32(name: str, values: Tensor) -> Tensor:
    """Return integers as int32, a copy; or raise TraceError."""
    if values.numel():
        lowest, highest = map(int, values.aminmax())
        if lowest < -(2**31) or highest >= 2**31:
            raise TraceError(f"MRR101: {name} lies in {lowest}..{highest}, which int32 cannot hold.")
    return values.to(torch.int32, copy=True)


def check_topk(topk: int, num_experts: int) -> None:
    """Raise TraceError unless that many of that many experts can be chosen and stored."""
    index_dtype(num_experts)
    if not 1 <= topk <= num_experts:
        raise TraceError(f"MRR101: topk={topk} must lie in 1..num_experts={num_experts}.")


def as_layer_numbers(value: Any) -> tuple[int, ...]:
    """Return increasing layer numbers from 1 or more, or raise TraceError."""
    numbers = _as_integers("layer_numbers", value)
    if (numbers and numbers[0] < 1) or any(a >= b for a, b in pairwise(numbers)):
        raise TraceError(f"MRR104: layer_numbers must increase from 1 or more, got {shown(list(numbers))}.")
    return numbers


def as_sequence_lengths(value: Any, num_tokens: int) -> tuple[int, ...] | None:
    """Return lengths that add up to num_tokens, or raise TraceError."""
    if value is None:
        return None
    lengths = _as_integers("sequence_lengths", value)
    if sum(lengths) != num_tokens or min(lengths, default=0) < 0:
        raise TraceError(
            f"MRR105: sequence_lengths {shown(list(lengths))} add up to {sum(lengths)}, the trace has {num_tokens} "
            "tokens; none may be negative."
        )
    return lengths


def as_sample_ids(value: Any, lengths: tuple[int, ...] | None) -> tuple[str, ...] | None:
    """Return one name for each of the lengths, or raise TraceError."""
    if value is None:
        return None
    names = _as_tuple("sample_ids", value)
    if any(not isinstance(name, str) for name in names):
        raise TraceError(f"MRR105: sample_ids={shown(names)} must be a list of strings.")
    if lengths is None or len(names) != len(lengths):
        known = None if lengths is None else len(lengths)
        raise TraceError(f"MRR105: sample_ids names {len(names)} samples, sequence_lengths {known}.")
    return names


def _as_integers(name: str, values: Any) -> tuple[int, ...]:
    # Of 64 bits at the most, so that sizes which are computed of them stay small integers.
    return tuple(as_integer(name, value, least=-_MAX_INTEGER, most=_MAX_INTEGER) for value in _as_tuple(name, values))


def _as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    # A text is a list of its letters, and a mapping one of its keys: both are mistakes.
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise TraceError(f"MRR101: {name}={shown(values)} must be a list.")
    return tuple(values)
