"""Find the trace rows of a forward by the inputs of its model chunk.

once a trace          with_index               the sorted prefixes, and the copies on a GPU
once a session        Follower                 the judgement of all its forwards
once a micro-batch    Follower.find            the call's tokens -> segments -> samples -> rows
                      number_tokens            of a recording: the call's tokens -> segments -> samples of their own
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from megatron_router_replay.checks import Check
from megatron_router_replay.errors import LayoutError, ReplayStateError
from megatron_router_replay.mcore.batches.index import PrefixIndex, index_of
from megatron_router_replay.mcore.batches.inputs import (
    ForwardInputs,
    TokenReader,
    context_parallel_group,
    received_shape,
)
from megatron_router_replay.mcore.batches.judge import SegmentJudge
from megatron_router_replay.mcore.batches.locate import locate
from megatron_router_replay.mcore.batches.rows import RowInputs
from megatron_router_replay.mcore.batches.segments import PaddingRuns, Partition, Segments
from megatron_router_replay.trace import RoutingTrace

_LOG = logging.getLogger(__name__)

DEVICE_BYTES = 1 << 30
"""The most that an index and the routes of one chunk may take on a GPU; above it, both stay on the host."""


def with_index(trace: RoutingTrace, layer_numbers: Sequence[int], device: torch.device) -> RoutingTrace:
    """Return layers of a trace with its PrefixIndex in `derived["index"]`, on a device.

    Above `DEVICE_BYTES` both stay on the host, which logs a warning.
    """
    # Kept with the trace: all sessions share the copies, and all chunks share the index.
    key = (device, tuple(layer_numbers))
    if key not in trace.derived:
        index, kept = index_of(trace), trace.select_layers(layer_numbers)
        if device.type != "cpu" and trace.device.type == "cpu":
            row_bytes = kept.num_layers * kept.topk * kept.topk_indices.element_size()
            # `index.nbytes` includes the tokens; the trace on the GPU has a second copy.
            if index.nbytes + index.token_ids.nbytes + row_bytes * trace.num_tokens > DEVICE_BYTES:
                _LOG.warning(
                    "index and routes of the trace take more than %d MiB and stay on the CPU, so the host waits for the GPU "
                    "once in every micro-batch",
                    DEVICE_BYTES >> 20,
                )
            else:
                if (device, "index") not in trace.derived:
                    trace.derived[device, "index"] = index.to(device)
                index, kept = trace.derived[device, "index"], kept.to(device)
        kept.derived["index"] = index
        trace.derived[key] = kept
    found: RoutingTrace = trace.derived[key]
    return found


class Follower:
    """Find the trace rows of a session's forwards.

    Args:
        trace: of the session.
        padding_token_ids: the tokens of padding; None: padding is one token, the same in all forwards.
        cp_partition_mode: how context-parallel ranks share sequences; None: that of packed_seq_params, else zigzag.
        check: raises at once on the CPU, at the end of the session on a GPU.
    """

    def __init__(
        self,
        trace: RoutingTrace,
        *,
        padding_token_ids: Sequence[int] | None,
        cp_partition_mode: Partition | None,
        check: Check,
    ) -> None:
        self._reader = TokenReader(padding_token_ids=padding_token_ids, cp_partition_mode=cp_partition_mode)
        self._judge = SegmentJudge(trace, declares_padding=padding_token_ids is not None, check=check)
        self._check = check

    def find(self, module: nn.Module, inputs: ForwardInputs, index: PrefixIndex, where: str) -> RowInputs:
        """Return the rows of a forward on this rank.

        RowInputs.token_ids is None on a later stage whose input_ids have another shape than its hidden states.

        Args:
            module: the innermost chunk.
            index: of the session's trace, on the device where rows are gathered.
            where: the rank, chunk and micro-batch, for messages.

        Raises:
            ReplayStateError: the call has no ids.
            LayoutError: tokens are of no sample of the trace.
        """
        ids = inputs.input_ids
        if ids is None:
            raise ReplayStateError(
                f"MRR424: {where}: {type(module).__name__} got no input_ids, so its rows cannot be found. Pass input_ids to "
                "every pipeline stage, open the session on the inner model that takes them, or queue rows [b, s] with "
                "session.microbatch(rows, model) before the forward."
            )
        device = index.token_ids.device
        group, shape = context_parallel_group(module, inputs.packed_seq_params), received_shape(module)
        rank = 0 if group is None else group.rank()
        # A later stage may get its tokens as they were before packing or splitting: each rank has whole sequences then.
        is_raw = shape is not None and shape != tuple(ids.shape)
        if is_raw:
            raw = ForwardInputs(input_ids=ids, padding_mask=inputs.padding_mask)
            segments, tokens = self._reader.read(raw, None, device)
        else:
            segments, tokens = self._reader.read(inputs, group, device)
        located = locate(index, tokens, segments, padding_token_ids=self._reader.padding_token_ids)
        live = self._judge.add(where, segments, located)
        first, count = segments.start + located.start, located.count
        # From `tokens`: where the index is on the host, a second copy of input_ids would wait for the GPU again.
        own = None if is_raw else segments.of_rank(tokens, rank)
        if is_raw:
            assert shape is not None, "a later stage"
            layout = self._reader.segments_of(inputs, shape, group, device)
            if len(layout.begin) != len(segments.begin):
                raise LayoutError(
                    f"MRR201: {where}: this pipeline stage was given input_ids of {len(segments.begin) - 1} sequences and "
                    f"computes {len(layout.begin) - 1}: pass it the ids as the first stage gets them."
                )
            # Both layouts have the same sequences in the same order; in this one they begin without padding, and may be cut
            # on the right.
            segments, first, length = layout, layout.begin, layout.end - layout.begin
            count = torch.minimum(count, length)
            live = torch.minimum(live, length - count)
        rows, padding = segments.rows(first, count, located.row, live)
        if segments.is_jump is not None:
            # Neighbouring rows are neighbours in one sample, so their position_ids must not jump.
            is_inside = (rows[1:] > 0) & (rows[1:] == rows[:-1] + 1)
            self._check(
                (segments.is_jump[1:] & is_inside).any(),
                f"MRR206: {where}: position_ids restart or jump within the tokens of one sample, so this row holds several "
                "sequences: give the model packed_seq_params.",
            )
        rivals = located.has_rivals.sum()
        return RowInputs(
            rows=segments.of_rank(rows, rank),
            token_ids=own,
            padding=None if padding is None else segments.of_rank(padding, rank),
            # On a GPU a tensor: an int would need a synchronization.
            num_ambiguous=int(rivals) if device.type == "cpu" else rivals,
        )

    def problems(self) -> list[str]:
        """Return the error texts that depend on all forwards; this synchronizes a GPU."""
        return self._judge.problems()


def number_tokens(
    reader: TokenReader, module: nn.Module, inputs: ForwardInputs, where: str, check: Check
) -> tuple[Tensor, Tensor]:
    """Number the tokens of a recorded forward in the order of its samples.

    Returns:
        The numbers on this rank, [b, s] int64 from 0, -1: padding; and the length of each segment's sample, [S].

    Raises:
        ReplayStateError: the call has no ids, or this stage has them in another layout than its hidden states.
        LayoutError: sequences end or begin with equal tokens, which may be padding.
    """
    ids, shape = inputs.input_ids, received_shape(module)
    if ids is None or (shape is not None and shape != tuple(ids.shape)):
        given = "no input_ids" if ids is None else f"input_ids {list(ids.shape)} for hidden states {list(shape or ())}"
        raise ReplayStateError(
            f"MRR424: {where}: {type(module).__name__} got {given}, so the tokens that it routes are not known. Pass the "
            "ids of the first stage to every pipeline stage, or queue rows [b, s] with recording.microbatch(rows, model)."
        )
    group = context_parallel_group(module, inputs.packed_seq_params)
    segments, tokens = reader.read(inputs, group, ids.device)
    start, stop, is_doubtful = cut_samples(tokens, segments, padding_token_ids=reader.padding_token_ids)
    # A padding token in a sample, or a sample without its last token, would make a wrong trace: the caller must decide.
    check(
        is_doubtful.any(),
        f"MRR207: {where}: sequences begin or end with several equal tokens, so a recording cannot tell padding from "
        "samples. Give the model padding_mask or unpadded cu_seqlens_q, or say mrr.record(..., padding_token_ids=[...]), "
        "where [] says that there is no padding.",
    )
    count = stop - start
    numbers, _ = segments.rows(start, count, count.cumsum(0) - count, torch.zeros_like(count))
    return segments.of_rank(numbers, 0 if group is None else group.rank()), count


def cut_samples(
    tokens: Tensor, segments: Segments, *, padding_token_ids: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return start and stop of segments' samples, and a mask of doubtful ones; [S].

    A sample is doubtful if several equal tokens at its ends may be padding.

    Args:
        tokens: [total] integers in flat order.
        padding_token_ids: the tokens of padding; None: not declared.
    """
    runs = PaddingRuns(pad(tokens, (1, 1), value=-1), padding_token_ids)
    start, stop = segments.start, segments.stop
    padding_from, run = runs.trailing(start, stop), torch.zeros_like(start)
    if segments.searches_left:
        run = runs.leading(start, segments.end)
    is_bounded = torch.zeros_like(stop, dtype=torch.bool) if segments.is_bounded is None else segments.is_bounded
    if padding_token_ids is None:
        # A single token at an end is the sample's; several equal ones may be padding.
        return start, stop, ~is_bounded & ((stop - padding_from > 1) | (run > 1))
    start = torch.where(is_bounded, start, start + run)
    stop = torch.where(is_bounded, stop, torch.maximum(padding_from, start))
    return start, stop, torch.zeros_like(is_bounded)
