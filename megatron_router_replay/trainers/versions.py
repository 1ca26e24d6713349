"""Weight versions as a trainer holds them: one for the batch, one a sample, or one a token -> one a token."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_router_replay.errors import LayoutError
from megatron_router_replay.trainers.containers import TokenLayout, is_list


def token_versions(value: Any, layout: TokenLayout) -> Tensor | None:
    """Return the version of the weights that chose each token's route, [num_tokens] int32.

    Args:
        value: an int; [B] ints, one a sample; or one a token, in the container of the tokens or a list of [T_i], as a partial
            rollout has them, below 0 where a token's is not known. None: nothing is known.
        layout: of the tokens.

    Raises:
        LayoutError: no integers, bools, integers that int32 cannot hold, or another number of them.
    """
    if value is None:
        return None
    # What has an axis beside the samples' is one a token; a flat one is one a sample, also where B equals T.
    if getattr(value, "is_nested", False) or (np.ndim(value) > 1 if not is_list(value) else _is_per_token(value)):
        parts = layout.split(value, "weight_version")
        for i, part in enumerate(parts):
            if part.dim() != 1:
                raise LayoutError(f"weight_version of sample {i} is {list(part.shape)}, expected [T], one a token.")
        return torch.cat([_as_versions(part) for part in parts])
    versions = _as_versions(value)
    if versions.dim() and list(versions.shape) != [len(layout.lengths)]:
        raise LayoutError(
            f"weight_version must be an int, one for each of {len(layout.lengths)} samples, or one a token in the container "
            f"of the tokens, got {list(versions.shape)}."
        )
    return versions.expand(len(layout.lengths)).repeat_interleave(torch.tensor(layout.lengths, dtype=torch.int64))


def _is_per_token(values: Any) -> bool:
    """Return whether a list holds a row of versions for each sample.

    Raises:
        LayoutError: some of its entries are rows and others single versions.
    """
    rows = [np.ndim(value) > 0 for value in values]
    if any(rows) and not all(rows):
        raise LayoutError(
            f"weight_version has one version for sample {rows.index(False)} and several for sample {rows.index(True)}: give "
            "one a sample, or one a token of every sample."
        )
    return any(rows)


def _as_versions(value: Any) -> Tensor:
    # numpy turns [1, True] into integers and [1, 2.0] into floats: a bool is looked for before, floats are refused behind.
    entries = value if is_list(value) else [value]
    holds_bool = any(isinstance(entry, bool | np.bool_) for entry in entries)
    array = value.cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if holds_bool or (array.dtype.kind not in "iu" and array.size):
        kinds = sorted({type(entry).__name__ for entry in entries}) if is_list(value) else [str(array.dtype)]
        raise LayoutError(
            f"weight_version must hold integers, got {', '.join(kinds)}: give the number of each version, the same kind for "
            "every sample."
        )
    if array.size and not (-(2**31) <= int(array.min()) and int(array.max()) < 2**31):
        raise LayoutError(f"weight_version reaches {int(array.max())}, which int32 cannot hold.")
    return torch.from_numpy(array.astype(np.int32))
