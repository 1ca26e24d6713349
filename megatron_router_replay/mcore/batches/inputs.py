"""Read the segments and tokens of a forward out of the call of a model chunk, on the host."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_router_replay.checks import as_integers
from megatron_router_replay.errors import LayoutError, ReplayStateError
from megatron_router_replay.mcore.batches.hidden_states import INSERTS, Alignment, ForwardTokens, alignment_of
from megatron_router_replay.mcore.batches.segments import CpPartition, Segments
from megatron_router_replay.mcore.core.streams import collective_device, to_host

MAX_TOKEN = (1 << 31) - 1
"""The highest token id; a trace has 32 bits for it."""

_CACHE_KEYWORDS = ("inference_context", "inference_params")
"""Keywords of Megatron-Core by which a forward continues the sequences of earlier ones."""


Bounds = tuple[Tensor | None, Tensor | None]
"""(cu_seqlens that count padding, cu_seqlens without padding); the same tensor twice if there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardInputs:
    """The arguments of a forward from which its tokens are read.

    Args:
        input_ids: [b, s] integers; None: the call has none.
        packed_seq_params: Megatron's PackedSeqParams; None: a padded batch.
        padding_mask: bool, True: padding; None: not given.
        attention_mask: [b, s] integers or bool, 0: padding; None: not given, or of another shape.
        position_ids: [b, s] integers; None: not given, or of another shape.
        hidden: [s, b, h] that layers get; None: the call has none, so tokens are embedded as they are.
        outer: the inputs of the model around this one, which made `hidden` of its tokens; None: these are its own.
        has_cache: it got a cache with the tokens before its own.
    """

    input_ids: Tensor | None
    packed_seq_params: Any = None
    padding_mask: Tensor | None = None
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    hidden: Tensor | None = None
    outer: ForwardInputs | None = None
    has_cache: bool = False

    @property
    def bounds(self) -> Bounds:
        """Return the starts of packed sequences: with padding, and without it; None each: a padded batch."""
        padded = getattr(self.packed_seq_params, "cu_seqlens_q_padded", None)
        unpadded = getattr(self.packed_seq_params, "cu_seqlens_q", None)
        # Positions of input_ids count padding, so the padded ones come first.
        return unpadded if padded is None else padded, unpadded


@lru_cache(maxsize=32)  # every micro-batch reads the same signatures
def positional_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments that may be given by position, `self` among them."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, each in inspect.signature(function).parameters.items() if each.kind in kinds)


def read_inputs(method: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> ForwardInputs:
    """Return the ForwardInputs of a call of a method of a model, by name or by position."""
    # One that is given twice, or too many of them: the method itself raises.
    named = dict(zip(positional_names(method)[1:], args)) | kwargs
    ids = named.get("input_ids")
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_nested or ids.dim() not in (1, 2):
        ids = None
    if ids is not None and ids.dim() == 1:
        ids = ids.unsqueeze(0)
    hidden = named.get("decoder_input")
    return ForwardInputs(
        input_ids=ids,
        packed_seq_params=named.get("packed_seq_params"),
        padding_mask=named.get("padding_mask"),
        attention_mask=_of_shape(ids, named.get("attention_mask")),
        # Of another shape, such as M-RoPE's [3, b, s], `Segments.cut` cannot read them.
        position_ids=_of_shape(ids, named.get("position_ids")),
        hidden=hidden if isinstance(hidden, Tensor) and hidden.dim() == 3 else None,
        has_cache=any(named.get(name) is not None for name in _CACHE_KEYWORDS),
    )


TAKEN = ForwardInputs(input_ids=None)
"""In place of the inputs around a language model, once a forward of it took them."""


def _of_shape(ids: Tensor | None, values: Any) -> Tensor | None:
    is_like = isinstance(values, Tensor) and ids is not None and values.shape == ids.shape
    return values if is_like and not values.is_floating_point() else None


def context_parallel_group(module: nn.Module, packed: Any) -> dist.ProcessGroup | None:
    """Return the ranks that share a forward's sequences; None: this rank has all.

    Raises:
        LayoutError: the size of the group changes from micro-batch to micro-batch, and the group is not given.
    """
    group, size = getattr(packed, "cp_group", None), getattr(packed, "local_cp_size", None)
    # Megatron's dynamic context parallelism: the model's group has another size than this micro-batch's.
    if size is not None and group is None and int(size) != 1:
        raise LayoutError(
            f"MRR204: packed_seq_params have local_cp_size={int(size)} and no cp_group: which ranks share these sequences is "
            "not known. Set packed_seq_params.cp_group."
        )
    if group is None and size is None:
        collection = getattr(module, "pg_collection", None)
        group = getattr(collection, "cp", None) if collection is not None else getattr(module, "cp_group", None)
        if group is None and collection is None and parallel_state.is_initialized():
            group = parallel_state.get_context_parallel_group(check_initialized=False)
    return None if group is None or group.size() == 1 else group


def hidden_shape(module: nn.Module, hidden: Tensor | None) -> tuple[int, int] | None:
    """Return [b, s] of the hidden states that the layers of a module get; None: it embeds its tokens as they are.

    Args:
        hidden: [s, b, h] that it got; None: none.
    """
    if not getattr(module, "pre_process", True):
        hidden = getattr(getattr(module, "decoder", None), "input_tensor", None)
    if not isinstance(hidden, Tensor):
        return None
    config: Any = module.config
    # Sequence parallelism splits s over the tensor-parallel ranks.
    split = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return int(hidden.shape[1]), int(hidden.shape[0]) * split


class TokenReader:
    """Read the segments and tokens of forwards over all context-parallel ranks.

    Args:
        padding_token_ids: the tokens of padding; None: not declared.
        cp_partition_mode: how context-parallel ranks share sequences; None: that of packed_seq_params, else zigzag.

    Attributes:
        padding_token_ids: the tokens of padding, as integers of Python.
    """

    def __init__(self, *, padding_token_ids: Sequence[int] | None, cp_partition_mode: CpPartition | None) -> None:
        if cp_partition_mode not in (None, "zigzag", "contiguous"):
            raise LayoutError(f"MRR101: cp_partition_mode={cp_partition_mode!r} must be 'zigzag' or 'contiguous'.")
        self.padding_token_ids: tuple[int, ...] | None = None
        if isinstance(padding_token_ids, Sequence) and None in padding_token_ids:
            raise LayoutError(
                f"MRR101: padding_token_ids={list(padding_token_ids)}: a tokenizer without a pad token has None. Give the "
                "token that fills your batches, or [] if nothing does."
            )
        if padding_token_ids is not None:
            # torch would make a float tensor of an empty list.
            is_empty = isinstance(padding_token_ids, Sequence) and not padding_token_ids
            given = torch.empty(0, dtype=torch.int64) if is_empty else padding_token_ids
            self.padding_token_ids = tuple(as_integers(given, "padding_token_ids").reshape(-1).tolist())
        self._partition = cp_partition_mode

    def _segments_of(
        self,
        inputs: ForwardInputs,
        shape: tuple[int, int],
        group: dist.ProcessGroup | None,
        cu_seqlens: Any = None,
        unpadded: Any = None,
    ) -> Segments:
        """Return the Segments of a forward, without lengths of a padding mask.

        Args:
            shape: [b, s] of this rank.
            group: the context-parallel ranks; None: this rank has all.
            cu_seqlens, unpadded: those of the inputs, on the host.
        """
        size = 1 if group is None else group.size()
        partition: Any = self._partition or getattr(inputs.packed_seq_params, "cp_partition_mode", None) or "zigzag"
        chunk = getattr(inputs.packed_seq_params, "zigzag_cp_min_chunk_size", None)
        if partition not in ("zigzag", "contiguous") or (size > 1 and chunk):
            raise LayoutError(
                f"MRR204: cannot place the positions of context-parallel ranks under cp_partition_mode={partition!r}, "
                f"zigzag_cp_min_chunk_size={chunk}: supported are 'zigzag' without a chunk size and 'contiguous'."
            )
        return Segments.of(shape, cu_seqlens, unpadded=unpadded, cp_size=size, partition=partition)

    def read(self, module: nn.Module, inputs: ForwardInputs, where: str) -> ForwardTokens:
        """Return the tokens of a forward, on the host, and their places in its hidden states.

        Where some of the inputs are on a GPU, the host waits for it once.

        Args:
            module: the innermost chunk.
            where: the rank, chunk and micro-batch, for messages.

        Raises:
            ReplayStateError: the call has no ids.
            LayoutError: a token id is below 0, or 2 ** 31 or more; or they are laid out as nothing that is known.
        """
        source = inputs if inputs.outer is None else inputs.outer
        if inputs.has_cache or source.input_ids is None:
            raise _no_tokens(module, inputs, source, where)
        group = context_parallel_group(module, inputs.packed_seq_params)
        shapes = _Shapes.of(module, inputs, source)
        (ids, *arrays), bounds, outer_bounds, language_ids = _read_host(inputs, source, shapes, group)
        layout = self._segments_of(inputs, shapes.shape, group, *bounds)
        raw = layout
        if not shapes.is_alike or (
            outer_bounds is not None and group is None and not _same(outer_bounds[0], bounds[0])
        ):
            raw = shapes.raw_segments(bounds if outer_bounds is None else outer_bounds, where)
        is_alike = raw is layout
        tokens, *arrays = (raw.in_order(each) for each in (ids, *arrays))
        if tokens.size and not 0 <= tokens.min() <= tokens.max() <= MAX_TOKEN:
            raise _no_token_id(raw, tokens)
        masks = dict(zip(shapes.columns[1:], arrays))
        if "position_ids" in masks:
            raw = raw.cut(masks["position_ids"])
        raw, kept = self._with_lengths(raw, masks)
        rank = 0 if group is None else group.rank()
        language_ids = None if language_ids is None else language_ids.ravel()
        if is_alike:
            return ForwardTokens(
                segments=raw, tokens=tokens, layout=raw, rank=rank, kept=kept, language_ids=language_ids
            )
        return ForwardTokens(
            segments=self._bounded(raw, layout, shapes),
            tokens=tokens,
            layout=layout,
            is_packed=(shapes.was_packed, shapes.is_packed),
            rank=rank,
            kept=kept,
            alignment=_alignment(module, inputs, shapes, raw, layout, 1 if group is None else group.size()),
            language_ids=language_ids,
        )

    def _bounded(self, raw: Segments, layout: Segments, shapes: _Shapes) -> Segments:
        """Return the Segments of tokens that packing cuts, if nothing else says where they end."""
        if shapes.was_packed or not shapes.is_packed or raw.lengths_known or self.padding_token_ids is not None:
            return raw
        # cu_seqlens gives the lengths of packed sequences, so raw tokens after them are padding.
        size = (layout.stop - layout.begin)[: len(raw.begin)]
        return replace(raw, stop=np.minimum(raw.stop, raw.begin + size)) if len(size) == len(raw.begin) else raw

    def _with_lengths(self, segments: Segments, masks: dict[str, Any]) -> tuple[Segments, Any]:
        """Return the Segments with the lengths that masks give, and what an attention mask keeps, see ForwardTokens."""
        padding, attention = masks.get("padding_mask"), masks.get("attention_mask")
        if padding is None and attention is None:
            return segments, None
        if attention is not None and padding is None and not self.padding_token_ids and attention.all():
            length = segments.end - segments.begin  # a mask that keeps all
            return replace(segments, lengths_known=True, searches_left=False), (np.zeros_like(length), length, length)
        by_attention = segments if attention is None else segments.with_lengths(attention == 0)
        if padding is None:
            known = by_attention
            # It may count padding as tokens, as NeMo-RL's does, so declared padding is looked for inside of it.
            if self.padding_token_ids:
                known = replace(known, may_pad=True, searches_left=segments.searches_left)
        else:
            known = segments.with_lengths((padding != 0) | (False if attention is None else attention == 0))
        kept = None
        if attention is not None:
            start, stop = by_attention.start, by_attention.stop
            sums = np.append(0, (attention != 0).cumsum())
            kept = start - segments.begin, stop - segments.begin, sums[segments.end] - sums[segments.begin]
        return known, kept


def _alignment(
    module: nn.Module, inputs: ForwardInputs, shapes: _Shapes, raw: Segments, layout: Segments, cp_size: int
) -> Alignment | None:
    """Return the Alignment of hidden states that are laid out otherwise than the tokens, see ForwardTokens."""
    if inputs.outer is not None:
        return alignment_of(module.config, cp_size)
    if not getattr(module, "pre_process", True):
        return None
    packs = shapes.is_packed and not shapes.was_packed  # its own rows, as its caller asks
    sizes = (layout.stop - layout.begin)[: len(raw.begin)] if packs else None
    return alignment_of(module.config, cp_size, sizes=sizes)


def _no_tokens(module: nn.Module, inputs: ForwardInputs, source: ForwardInputs, where: str) -> ReplayStateError:
    """Return the error of a forward whose tokens are not known."""
    name = type(module).__name__
    if inputs.has_cache:
        return ReplayStateError(
            f"MRR424: {where}: {name} got an inference_context, and its cache has the tokens before "
            "its input_ids, so their rows cannot be found. Generate inside `session.paused()`."
        )
    if source is TAKEN:
        return ReplayStateError(
            f"MRR407: {where}: {name} ran twice in one forward of the model around it, so which of its "
            "tokens it has is not known. Run the second one inside `session.paused()`, or give its rows [b, s] by "
            "session.microbatch(rows, model) right before it."
        )
    return ReplayStateError(
        f"MRR424: {where}: {name} got no input_ids, nor did a model around it, so the tokens that "
        "it routes are not known. Pass input_ids to every pipeline stage; open the session on the model that gets "
        "them, as a multimodal model, not on a part of it; or give rows [b, s] right before the forward, by "
        "session.microbatch(rows, model)."
    )


def _no_token_id(raw: Segments, tokens: Any) -> LayoutError:
    """Return the error of tokens of which one is no token id."""
    at = int(np.flatnonzero((tokens < 0) | (tokens > MAX_TOKEN))[0])
    return LayoutError(
        f"MRR201: {raw.place(at)} is {int(tokens[at])}: token ids must be 0 to 2 ** 31 - 1. A model that puts other inputs "
        "at such places takes session.microbatch(rows, model)."
    )


class _Shapes(NamedTuple):
    """The layout of a forward's tokens by their shapes, before the host has read them.

    Args:
        ids_shape, shape: [b, s] of the tokens, and of the hidden states.
        was_packed, is_packed: the tokens, and the hidden states, are packed sequences.
        is_alike: they are laid out alike; context-parallel ranks have a part of the tokens each.
        columns: names of the inputs with a value for each token.
        bounds: of the hidden states.
        outer_bounds: of the tokens, where those of the model around are different ones; None: they are not.
    """

    ids_shape: tuple[int, int]
    shape: tuple[int, int]
    was_packed: bool
    is_packed: bool
    is_alike: bool
    columns: tuple[str, ...]
    bounds: Bounds
    outer_bounds: Bounds | None

    @classmethod
    def of(cls, module: nn.Module, inputs: ForwardInputs, source: ForwardInputs) -> _Shapes:
        assert source.input_ids is not None, "checked"
        ids_shape = int(source.input_ids.shape[0]), int(source.input_ids.shape[1])
        shape = hidden_shape(module, inputs.hidden) or ids_shape
        bounds = inputs.bounds
        outer_bounds = bounds if source is inputs else source.bounds
        cu_seqlens = bounds[0] if outer_bounds[0] is None else outer_bounds[0]
        was_packed = cu_seqlens is not None and (ids_shape[0] == 1 or shape == ids_shape)
        if cu_seqlens is not None and ids_shape[0] == 1 and cu_seqlens.numel() == 2:
            # One sequence alone may be a row with padding, which packing removes.
            is_kept = has_own_forward(module, inputs) and source.attention_mask is not None
            was_packed = shape == ids_shape and not is_kept
        is_packed = bounds[0] is not None
        is_alike = shape == ids_shape and was_packed == is_packed
        columns = ["input_ids"]
        # A mask of another layout than the tokens is ignored.
        if source.padding_mask is not None and source.padding_mask.numel() == source.input_ids.numel():
            columns.append("padding_mask")
        if source.attention_mask is not None:
            columns.append("attention_mask")
        # Packed sequences have cu_seqlens, so position_ids cut rows of a padded batch alone.
        if source.position_ids is not None and is_alike and not is_packed:
            columns.append("position_ids")
        has_outer_bounds = outer_bounds[0] is not None and outer_bounds[0] is not bounds[0]
        return cls(
            ids_shape, shape, was_packed, is_packed, is_alike, tuple(columns),
            bounds, outer_bounds if has_outer_bounds else None,
        )  # fmt: skip

    def raw_segments(self, bounds: Any, where: str) -> Segments:
        """Return the Segments of tokens that are not laid out as the hidden states.

        Args:
            bounds: of the tokens, on the host, padded and unpadded.

        Raises:
            LayoutError: there are fewer packed tokens than cu_seqlens count.
        """
        padded, unpadded = bounds if self.was_packed else (None, None)
        if padded is not None and padded[-1] > self.ids_shape[1]:
            raise LayoutError(
                f"MRR201: {where}: input_ids have {self.ids_shape[1]} packed tokens, and cu_seqlens are of {padded[-1]} "
                f"hidden states: {INSERTS}"
            )
        return Segments.of(self.ids_shape, padded, unpadded=unpadded)


def has_own_forward(module: nn.Module, inputs: ForwardInputs | None = None) -> bool:
    """Return whether layers may get tokens in another layout than the module: not where its forward is Megatron-Core's."""
    return (inputs is not None and inputs.outer is not None) or not type(module).forward.__module__.startswith(
        "megatron.core."
    )


def _read_host(
    inputs: ForwardInputs, source: ForwardInputs, shapes: _Shapes, group: Any
) -> tuple[list[Any], Any, Any, Any]:
    """Return on the host: the columns of all ranks that have a part of the tokens, bounds, those around them, and more ids.

    One wait for a GPU.
    """
    columns: list[Tensor] = [getattr(source, name) for name in shapes.columns]
    padded, unpadded = shapes.bounds
    bounds = [padded, None if unpadded is padded else unpadded, *(shapes.outer_bounds or ())]
    ids = inputs.input_ids if inputs.outer is not None else None
    if ids is not None and tuple(ids.shape) != shapes.shape:
        ids = None
    device = collective_device(group) if group is not None and shapes.is_alike else None
    if device is not None and device.type != "cpu":
        columns = _gathered([each.to(device) for each in columns], group)
    *arrays, ids = to_host([*columns, *bounds, ids])
    arrays, host_bounds = arrays[: len(columns)], arrays[len(columns) :]
    if device is not None and device.type == "cpu":
        arrays = to_host(_gathered([torch.from_numpy(each) for each in arrays], group))
    return arrays, host_bounds[:2], host_bounds[2:] or None, ids


def _same(one: Any, other: Any) -> bool:
    return one is not None and other is not None and np.array_equal(one, other)


def _gathered(columns: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Return values of all context-parallel ranks, [cp_size, n] int32 each; a token that is none is -1.

    One collective, of 4 to 12 bytes a token: then every rank has whole sequences, and all decide alike.
    """
    tokens, *others = (each.flatten() for each in columns)
    tokens = torch.where((tokens < 0) | (tokens > MAX_TOKEN), -1, tokens)
    sent = torch.stack([each.to(torch.int32) for each in (tokens, *others)])
    parts = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(parts, sent, group=group)
    return list(torch.stack(parts, dim=1))
