"""Read the segments and tokens of a forward out of the call of a model chunk, on the host."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_router_replay.checks import as_integers
from megatron_router_replay.errors import LayoutError
from megatron_router_replay.mcore.batches.segments import Partition, Segments
from megatron_router_replay.mcore.core.streams import collective_device, to_host

MAX_TOKEN = (1 << 31) - 1
"""The highest token id; a trace has 32 bits for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardInputs:
    """The arguments of a chunk's forward from which its tokens are read.

    Args:
        input_ids: [b, s] integers; None: the call has none.
        packed_seq_params: Megatron's PackedSeqParams; None: a padded batch.
        padding_mask: bool, True: padding; None: not given.
        position_ids: [b, s] integers; None: not given, or of another shape.
    """

    input_ids: Tensor | None
    packed_seq_params: Any = None
    padding_mask: Tensor | None = None
    position_ids: Tensor | None = None

    @property
    def cu_seqlens(self) -> Tensor | None:
        """Return the starts of packed sequences with padding; None: a padded batch."""
        # Positions of input_ids count padding, so the padded cu_seqlens come first.
        padded = getattr(self.packed_seq_params, "cu_seqlens_q_padded", None)
        return self.unpadded_cu_seqlens if padded is None else padded

    @property
    def unpadded_cu_seqlens(self) -> Tensor | None:
        """Return the starts of packed sequences, without padding where both are given."""
        return getattr(self.packed_seq_params, "cu_seqlens_q", None)


@lru_cache(maxsize=16)  # every micro-batch reads the same signature
def _positional_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments that may be given by position, `self` among them."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, each in inspect.signature(forward).parameters.items() if each.kind in kinds)


def read_inputs(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> ForwardInputs:
    """Return the ForwardInputs of a call of a module, by name or by position."""
    # One that is given twice, or too many of them: the forward itself raises.
    named = dict(zip(_positional_names(type(module).forward)[1:], args)) | kwargs
    ids, position_ids = named.get("input_ids"), named.get("position_ids")
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_nested or ids.dim() not in (1, 2):
        ids = None
    if ids is not None and ids.dim() == 1:
        ids = ids.unsqueeze(0)
    # Of another shape, such as M-RoPE's [3, b, s], `Segments.cut` cannot read them.
    if not isinstance(position_ids, Tensor) or ids is None or position_ids.shape != ids.shape:
        position_ids = None
    return ForwardInputs(
        input_ids=ids,
        packed_seq_params=named.get("packed_seq_params"),
        padding_mask=named.get("padding_mask"),
        position_ids=position_ids,
    )


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


def received_shape(module: nn.Module) -> tuple[int, int] | None:
    """Return [b, s] of a later stage's hidden states; None: this stage embeds tokens."""
    hidden = getattr(getattr(module, "decoder", None), "input_tensor", None)  # [s, b, h]
    if getattr(module, "pre_process", True) or not isinstance(hidden, Tensor):
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

    def __init__(self, *, padding_token_ids: Sequence[int] | None, cp_partition_mode: Partition | None) -> None:
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

    def segments_of(
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

    def read(self, inputs: ForwardInputs, group: dist.ProcessGroup | None) -> tuple[Segments, Any]:
        """Return the Segments of a forward, and the tokens of all ranks, [total] int64, on the host.

        Where some of the inputs are on a GPU, the host waits for it once.

        Raises:
            LayoutError: a token id is below 0, or 2 ** 31 or more.
        """
        ids = inputs.input_ids
        assert ids is not None, "checked"
        # Packed sequences have cu_seqlens, so position_ids cut rows of a padded batch alone.
        mask, positions = inputs.padding_mask, inputs.position_ids if inputs.cu_seqlens is None else None
        if mask is not None and mask.numel() != ids.numel():
            mask = None  # of another layout than the tokens
        unpadded = None if inputs.unpadded_cu_seqlens is inputs.cu_seqlens else inputs.unpadded_cu_seqlens
        columns = [each for each in (ids, mask, positions) if each is not None]
        device = None if group is None else collective_device(group)
        if group is not None and device is not None and device.type != "cpu":
            columns = _gathered([each.to(device) for each in columns], group)
        *arrays, cu_seqlens, unpadded = to_host([*columns, inputs.cu_seqlens, unpadded])
        if group is not None and device is not None and device.type == "cpu":
            arrays = to_host(_gathered([torch.from_numpy(each) for each in arrays], group))
        segments = self.segments_of(inputs, (int(ids.shape[0]), int(ids.shape[1])), group, cu_seqlens, unpadded)
        flat = [segments.in_order(each) for each in arrays]
        tokens = flat[0]
        if tokens.size and not 0 <= tokens.min() <= tokens.max() <= MAX_TOKEN:
            at = int(np.flatnonzero((tokens < 0) | (tokens > MAX_TOKEN))[0])
            raise LayoutError(
                f"MRR201: {segments.place(at)} is {int(tokens[at])}: token ids must be 0 to 2 ** 31 - 1. A model that puts "
                "other inputs at such places takes session.microbatch(rows, model)."
            )
        if positions is not None:
            segments = segments.cut(flat[-1])
        if mask is not None:
            segments = segments.with_lengths(flat[1] != 0)
        return segments, tokens


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
