"""The containers of a trainer's tokens: which positions are tokens of which sample, and how to lay out values like them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_router_replay.errors import LayoutError, listed

Container = Tensor | list[Tensor]
"""Per-token values as a trainer holds them: jagged nested [B, T_i, ...], padded [B, S, ...], or a list of [T_i, ...]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLayout:
    """Where the tokens of a batch are, in their trainer's container.

    Args:
        lengths: tokens of each sample.
        positions: of a padded batch, the positions of each sample's tokens, in order; None: the samples have no padding.
        seq_length: S of a padded batch.
        like: the container to imitate: a nested tensor, or None.
        device: of the tokens.
    """

    lengths: tuple[int, ...]
    positions: tuple[Tensor, ...] | None = None
    seq_length: int = 0
    like: Tensor | None = None
    device: torch.device = torch.device("cpu")

    @classmethod
    def of(cls, tokens: Any = None, *, attention_mask: Any = None, lengths: Any = None) -> TokenLayout:
        """Read the layout off what the trainer has.

        Args:
            tokens: jagged nested [B, T_i], padded [B, S], or a list of [T_i].
            attention_mask: [B, S], non-zero where a padded batch has tokens; without `tokens`, it says where they would be.
            lengths: [B], tokens of each sample, which a padded batch has on the left; without `tokens`, those of a list.

        Raises:
            LayoutError: nothing or too much is given, or shapes disagree.
        """
        if attention_mask is not None and lengths is not None:
            raise LayoutError("MRR801: attention_mask and lengths both say where the tokens are: give one of them.")
        if attention_mask is not None:
            mask = _as_tensor(attention_mask, "attention_mask") != 0
            if mask.dim() != 2 or mask.is_nested:
                raise LayoutError(f"MRR801: attention_mask must be [B, S], got {_shape(mask)}.")
            if tokens is not None and _shape(tokens) != list(mask.shape):
                raise LayoutError(
                    f"MRR801: tokens are {_shape(tokens)}, attention_mask {list(mask.shape)}: one mask a position."
                )
            return cls._padded(mask, mask.device if tokens is None else _as_tensor(tokens, "tokens").device)
        known = None if lengths is None else [int(length) for length in _as_tensor(lengths, "lengths").tolist()]
        if known is not None and any(length < 0 for length in known):
            raise LayoutError(f"MRR801: lengths {known} hold a negative one.")
        if tokens is None:
            if known is None:
                raise LayoutError(
                    "MRR801: where the tokens are is not said: give tokens=, attention_mask= or lengths=."
                )
            return cls(lengths=tuple(known))
        if not is_list(tokens):
            tensor = _as_tensor(tokens, "tokens")
            if not tensor.is_nested:
                return cls._right_padded(tensor, known)
        samples = as_samples(tokens, "tokens")
        for i, sample in enumerate(samples):
            if sample.dim() != 1:
                raise LayoutError(
                    f"MRR801: tokens of sample {i} are {list(sample.shape)}, expected [T], one value a token."
                )
        of_tokens = tuple(sample.shape[0] for sample in samples)
        if known is not None and tuple(known) != of_tokens:
            raise LayoutError(f"MRR801: lengths {known} are not those of the tokens, {list(of_tokens)}.")
        device = samples[0].device if samples else torch.device("cpu")
        return cls(lengths=of_tokens, like=None if is_list(tokens) else tokens, device=device)

    @classmethod
    def _right_padded(cls, tokens: Tensor, lengths: list[int] | None) -> TokenLayout:
        if tokens.dim() != 2:
            raise LayoutError(
                f"MRR801: tokens must be nested, a padded [B, S] or a list of [T], got {list(tokens.shape)}. Of one "
                "packed row, take the samples before they are packed, and pack the rows as the tokens."
            )
        num_samples, size = tokens.shape
        known = [size] * num_samples if lengths is None else lengths
        if len(known) != num_samples or any(length > size for length in known):
            raise LayoutError(
                f"MRR801: lengths {lengths} do not fit tokens of {list(tokens.shape)}: one of 0..S a sample."
            )
        mask = torch.arange(size) < torch.tensor(known, dtype=torch.int64).unsqueeze(1)
        return cls._padded(mask, tokens.device)

    @classmethod
    def _padded(cls, mask: Tensor, device: torch.device) -> TokenLayout:
        # On the CPU, where every value that is laid out like the tokens is read.
        positions = tuple(row.nonzero()[:, 0] for row in mask.cpu())
        return cls(
            lengths=tuple(len(of_sample) for of_sample in positions),
            positions=positions,
            seq_length=mask.shape[1],
            device=device,
        )

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def split(self, values: Any, name: str) -> list[Tensor]:
        """Return per-token values in the tokens' container, or a list, as [T_i, ...] of each sample, on the CPU.

        Raises:
            LayoutError: they are not one value a token.
        """
        if self.positions is not None and not is_list(values):
            tensor = _as_tensor(values, name)
            if not tensor.is_nested:
                shape = [len(self.lengths), self.seq_length]
                if list(tensor.shape[:2]) != shape:
                    raise LayoutError(f"MRR801: {name} is {list(tensor.shape)}, the tokens are {shape}.")
                return [row[at] for row, at in zip(tensor.cpu(), self.positions)]
        samples = as_samples(values, name)
        given = [sample.shape[0] if sample.dim() else -1 for sample in samples]  # a scalar is not one value a token
        if given != list(self.lengths):
            i = next(
                (i for i, (a, b) in enumerate(zip(given, self.lengths)) if a != b), min(len(given), len(self.lengths))
            )
            raise LayoutError(
                f"MRR801: {name} has values for {len(given)} samples of [{listed(given)}] tokens, the tokens are "
                f"{len(self.lengths)} samples of [{listed(self.lengths)}]; the first that differs is sample {i}."
            )
        return [sample.cpu() for sample in samples]

    def join(self, parts: Sequence[Tensor], *, fill: int) -> Container:
        """Return values of each sample, [T_i, ...], in the tokens' container and on their device; `fill` on padding."""
        if self.positions is not None:
            inner = parts[0].shape[1:] if parts else ()
            dtype = parts[0].dtype if parts else torch.int64
            padded = torch.full((len(parts), self.seq_length, *inner), fill, dtype=dtype)
            for row, part, at in zip(padded, parts, self.positions):
                row[at] = part
            return padded.to(self.device)
        moved = [part.to(self.device) for part in parts]
        if self.like is None:
            return moved
        like: Any = self.like  # torch's stubs know of no nested tensor
        if like.layout is torch.jagged and like.lengths() is None:
            # The same offsets, not equal ones: torch computes with two nested tensors only if they share them.
            return torch.nested.nested_tensor_from_jagged(torch.cat(moved), offsets=like.offsets())
        return torch.nested.as_nested_tensor(moved, layout=self.like.layout)


def is_list(values: Any) -> bool:
    """Return whether values are a list of samples; numpy keeps ragged ones in an array of objects."""
    return isinstance(values, list | tuple) or (isinstance(values, np.ndarray) and values.dtype == object)


def as_samples(values: Any, name: str) -> list[Tensor]:
    """Return a list, or a nested or padded tensor, as one tensor a sample.

    Raises:
        LayoutError: a sample is no tensor or array.
    """
    if is_list(values):
        return [_as_tensor(value, f"sample {i} of {name}") for i, value in enumerate(values)]
    return list(_as_tensor(values, name).unbind())


def flatten(values: Container) -> Tensor:
    """Return all values of a container, [n]."""
    if isinstance(values, Tensor) and not values.is_nested:
        return values.reshape(-1)
    jagged: Any = values  # torch's stubs know of no nested tensor
    if isinstance(values, Tensor) and values.layout is torch.jagged and jagged.lengths() is None:
        whole: Tensor = jagged.values()  # its samples would wait for the device to say where each ends
        return whole
    parts = [part.reshape(-1) for part in as_samples(values, "values")]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _as_tensor(values: Any, name: str) -> Tensor:
    try:
        tensor = values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    except (TypeError, ValueError, RuntimeError) as error:
        raise LayoutError(
            f"MRR801: {name} must be a tensor or an array, got {type(values).__name__}: {error}"
        ) from error
    return tensor.detach()


def _shape(values: Any) -> list[Any]:
    return [len(values)] if is_list(values) else list(values.shape)
