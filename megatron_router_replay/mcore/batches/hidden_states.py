"""Place the tokens that a forward got in the hidden states that its layers get.

They are laid out alike where a model embeds its tokens. A later pipeline stage may get them as they were before packing; a
multimodal model embeds them, merges its images in, packs them or splits them over context-parallel ranks, and calls its
language model with the result. Each token has one hidden state, in order, and padding fills the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megatron_router_replay.checks import shown
from megatron_router_replay.errors import LayoutError
from megatron_router_replay.mcore.batches.segments import Segments

INSERTS = (
    "the model inserts or drops some. Give it one placeholder for each embedding of an image, as the engine counts them; or "
    "give rows [b, s] of what its language model gets, by session.microbatch(rows, model)."
)
"""The end of a message about tokens and hidden states that differ in number."""


class Alignment(NamedTuple):
    """The lengths to which packing, or a model that pads its rows, fills sequences of hidden states after their tokens.

    Args:
        multiples: all sequences are filled to the next multiple of one of these, and not further.
        of_row: the last sequence, or the rest after it, may be filled further, up to a multiple of it for the whole row.
    """

    multiples: tuple[int, ...]
    of_row: int

    def explains(self, number: Any, size: Any) -> bool:
        """Return whether `number` tokens, [S], filled up in this way, make `size` hidden states, [S]."""
        for multiple in (1, *self.multiples):
            filled = -(-number // multiple) * multiple
            if (size == filled).all():
                return True
            more = int(size[-1] - filled[-1])
            if (size[:-1] == filled[:-1]).all() and 0 < more < self.of_row and not size.sum() % self.of_row:
                return True
        return False


EXACT = Alignment((), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardTokens:
    """The tokens that a forward got, and the layout of its hidden states.

    Args:
        segments: of the tokens.
        tokens: [total] int64, in their flat order.
        layout: the segments of the hidden states; the same object where they are laid out alike.
        is_packed: (tokens, hidden states) are packed sequences; their last segment is the rest of a row.
        rank: of the context-parallel ranks that share the hidden states.
        kept: (first, one past the last, number) of the positions of each segment that an attention mask keeps, from its
            begin, [S] each; None: there is no mask.
        alignment: of the sequences of hidden states; None: any number of positions of a sequence may be cut off or added, as
            a trainer does that gives a later stage its own tokens.
        language_ids: [n] int64, the ids that the language model got together with embeddings on this rank; None: none.
    """

    segments: Segments
    tokens: Any
    layout: Segments
    is_packed: tuple[bool, bool] = (False, False)
    rank: int = 0
    kept: tuple[Any, Any, Any] | None = None
    alignment: Alignment | None = None
    language_ids: Any = None

    def token_positions(self, start: Any, stop: Any, where: str) -> Any:
        """Return the flat position of the token of each hidden state, [total], -1: none; None: they are laid out alike.

        Args:
            start, stop: [S], the flat positions of each segment's first token that is no padding, and one past its last.
            where: the rank, chunk and micro-batch, for messages.

        Raises:
            LayoutError: there are more or fewer sequences or hidden states than tokens, or the ids that the language model
                got are of other tokens.
        """
        raw, layout = self.segments, self.layout
        if raw is layout:
            index = None
        else:
            num = self._number_of_sequences(where)
            begin, length = raw.begin[:num], (raw.end - raw.begin)[:num]
            first, size = layout.begin[:num], (layout.stop - layout.begin)[:num]
            skip = self._skipped(start[:num] - begin, stop[:num] - begin, length, size, where)
            # Not of padding, which a model fills with tokens of its own.
            count = np.clip(stop[:num] - begin - skip, 0, size)
            begin = begin + skip
            if raw.total == layout.total == count.sum() and (first == begin).all():
                index = None  # rows without padding, one after the other
            else:
                nth = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
                index = np.full(layout.total, -1)
                index[np.repeat(first, count) + nth] = np.repeat(begin, count) + nth
        if self.language_ids is not None:
            self._check_language_ids(index, where)
        return index

    def _number_of_sequences(self, where: str) -> int:
        num, computed = (len(each.begin) - packed for each, packed in zip((self.segments, self.layout), self.is_packed))
        if num != computed:
            raise LayoutError(
                f"MRR201: {where}: this forward got input_ids of {num} sequences and computes {computed}. A later pipeline "
                "stage needs the ids of the first one; a model that makes other sequences of its tokens takes rows [b, s] of "
                "what its language model gets, by session.microbatch(rows, model)."
            )
        return num

    def _skipped(self, start: Any, stop: Any, length: Any, size: Any, where: str) -> Any:
        """Return how many positions in front of each sequence have no hidden state, [S].

        Args:
            start, stop: of its tokens, from its begin.
            length: its positions.
            size: its hidden states, without padding where this is known.
        """
        none = np.zeros_like(length)
        packs = self.is_packed == (False, True)  # rows become packed sequences
        if self.alignment is None:
            # Where padding on the left is removed, tokens move to the front; rows of the same length stay as they are.
            return start if packs or self.segments.total != self.layout.total else none
        if not packs:
            self._check_numbers(length, (self.layout.end - self.layout.begin)[: len(length)], self.alignment, where)
            return none
        alignment = EXACT if self.layout.lengths_known else self.alignment
        if self.kept is None:
            if (start[stop > start] > 0).any():
                raise LayoutError(
                    f"MRR201: {where}: rows of input_ids that are padded on the left are packed inside of the model. Give it "
                    "attention_mask [b, s], 0 on padding."
                )
            # Without a mask, a model may also keep all positions.
            self._check_numbers(stop if (size < length).any() else length, size, alignment, where)
            return none
        first, past, number = self.kept
        if (number != past - first).any():
            raise LayoutError(
                f"MRR207: {where}: attention_mask is 0 between tokens of a sequence. Packing leaves these out, so the tokens "
                "after them would have other prefixes than in the rollout. Mask padding alone."
            )
        self._check_numbers(number, size, alignment, where)
        return first

    def _check_numbers(self, number: Any, size: Any, alignment: Alignment, where: str) -> None:
        """Raise unless each sequence has a hidden state for each of its tokens, and no more than alignment adds.

        The rest of a row, after its packed sequences, may grow up to a multiple.
        """
        rest, rest_size = (
            int(each.end[-1] - each.begin[-1]) if packed else 0
            for each, packed in zip((self.segments, self.layout), self.is_packed)
        )
        assert self.alignment is not None, "numbers are checked against it"
        most = max(1, self.alignment.of_row, *self.alignment.multiples)
        if not alignment.explains(number, size) or not 0 <= rest_size - rest < most:
            if rest or rest_size:
                number, size = np.append(number, rest), np.append(size, rest_size)
            raise LayoutError(
                f"MRR201: {where}: input_ids have sequences of {shown(number.tolist())} tokens, and {shown(size.tolist())} "
                f"hidden states are computed: {INSERTS}"
            )

    def _check_language_ids(self, index: Any, where: str) -> None:
        """Raise if the language model got other tokens; a model may replace its placeholders by one token."""
        tokens = self.tokens if index is None else np.where(index >= 0, self.tokens[index], -1)
        own = self.layout.of_rank(tokens, self.rank).numpy().ravel()
        differ = (own != self.language_ids) & (own >= 0)
        replaced = np.isin(own, own[differ])  # all of a placeholder's, or it is another change
        if differ.any() and (len(np.unique(self.language_ids[differ])) > 1 or (replaced != differ).any()):
            at = int(differ.argmax())
            raise LayoutError(
                f"MRR203: {where}: the language model got token {int(self.language_ids[at])} where the tokens of the model "
                f"around it have {int(own[at])} (position {at} of this rank, {int(differ.sum())} differ): it moves, drops or "
                "exchanges tokens. Give rows [b, s] of the language model's tokens, by session.microbatch(rows, model)."
            )

    def of_rank(self, values: Any) -> Tensor:
        """Return this rank's part of values of all hidden states, [b, s]."""
        return self.layout.of_rank(values, self.rank)


def alignment_of(config: Any, cp_size: int, *, sizes: Any = None) -> Alignment:
    """Return the Alignment of a model's sequences.

    Args:
        sizes: [S] of the sequences that the caller of a model which packs its own rows asks for: all of them may be multiples
            of 16 under any layout.

    Source: mbridge, mbridge/core/util.py, preprocess_packed_seqs; verl, verl/models/mcore/util.py, which fills sequences to
    multiples of 16 for FP8, and the whole row to one of 128; ROLL 8eb27cc2, megatron_strategy.py, _get_pad_factor: always 16.
    """
    multiple = int(config.tensor_model_parallel_size) * (2 * cp_size if cp_size > 1 else 1)
    is_fp8 = bool(getattr(config, "fp8", None))
    of_16 = is_fp8 or (sizes is not None and not (sizes % lcm(16, multiple)).any())
    return Alignment((multiple, lcm(16, multiple)) if of_16 else (multiple,), 128 * multiple if is_fp8 else 1)
