"""The turns of a conversation, or the parts of an interrupted rollout -> one RoutingTrace.

Every turn sends the whole conversation so far and gets routes for some of it. What is kept, token by token:

- The first generation wins: a token was sampled under the routes of its own forward, so a later prefill of it, perhaps
  with newer weights, does not replace them. Where both have a route they are compared, which proves that they are of
  the same tokens.
- The last token of a turn has no route until the next turn prefills it; that real route replaces the missing one.
- Tokens between two parts that nobody sent routes for stay missing: the live router decides.

Rows are copied into memory that doubles when full, so n turns copy O(all tokens) bytes, not O(n * all tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_router_replay.errors import PayloadError, TraceError
from megatron_router_replay.ids import spread_experts
from megatron_router_replay.left_live import check_nothing_left_out
from megatron_router_replay.trace import RoutingTrace

_MIN_COMPARED = 64
"""Decisions that an overlap must have before its disagreement says anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """How two forwards of the same tokens agreed: decisions are (token, layer) pairs, compared as sets."""

    compared: int
    differing: int


class RoutingSegments:
    """Joins traces of the same growing sequence; `append` them in the order they were generated.

    Args:
        max_disagreement: share of decisions of one weight version that may differ where two segments overlap. Two
            forwards with the same weights disagree on up to a tenth; of other tokens they disagree on most.

    Attributes:
        overlap: decisions compared and differing so far, with the same weights and with newer ones.
    """

    def __init__(self, *, max_disagreement: float = 0.25) -> None:
        self.max_disagreement = max_disagreement
        self.overlap = Overlap(compared=0, differing=0)
        self._first: RoutingTrace | None = None
        self._length = 0
        self._indices = torch.empty(0)
        self._mask = torch.empty(0, dtype=torch.bool)
        self._token_ids: Tensor | None = None
        self._versions: Tensor | None = None
        self._next_start = 0

    def __len__(self) -> int:
        return self._length

    @property
    def next_start(self) -> int:
        """The first token without a route: what to ask for next, as `start` of the engine's request and of `decode`.

        After a turn of S tokens it is S - 1, not S: the turn's last token has no route yet.
        """
        return self._next_start

    @property
    def num_missing(self) -> int:
        return int((~self._mask[: self._length]).sum())

    def append(self, trace: RoutingTrace, *, start: int = 0, weight_version: int | None = None) -> None:
        """Add a segment; row i of `trace` is token start + i of the sequence.

        Args:
            trace: a decoded turn. `decode(..., start=n)` returns all S rows of the turn, so its `start` here is 0.
            start: >= 0; tokens between the end so far and `start` stay without a route.
            weight_version: of the weights that chose these routes, unless the trace carries it.

        Raises:
            PayloadError: another model's trace, token ids that differ from those already known, an overlap with too
                many different routes, only some segments with token ids or a weight version, or rows that were left live by
                choice.
        """
        versions = self._check(trace, start, weight_version)
        end = start + len(trace)
        old = self._length
        self._compare(trace, start, versions)
        self._reserve(max(end, old), trace, versions)
        if start > old:
            gap = spread_experts(old, start - old, topk=trace.topk, num_experts=trace.num_experts)
            self._indices[old:start] = gap.to(self._indices.dtype).unsqueeze(1)
            self._mask[old:start] = False
            if self._versions is not None:
                self._versions[old:start] = -1
        shared = max(0, min(old, end) - start)
        if shared:
            # The first generation wins: of rows that both have, only those without a route so far take the new one.
            rows = (trace.replay_mask[:shared] & ~self._mask[start : start + shared]).nonzero()[:, 0]
            self._write(rows + start, rows, trace, versions)
        if end > old:
            fresh = slice(max(old, start), end)
            source = slice(fresh.start - start, len(trace))
            self._write(fresh, source, trace, versions)
            if self._token_ids is not None and trace.token_ids is not None:
                self._token_ids[fresh] = trace.token_ids[source]
        self._length = max(end, old)
        missing = (~self._mask[self._next_start : self._length]).nonzero()
        self._next_start = self._next_start + int(missing[0]) if len(missing) else self._length

    def trace(self, *, sample_id: str | None = None) -> RoutingTrace:
        """Return the joined trace, a copy, with sequence_lengths (len(self),).

        Its weight_version, where segments have one, is that of each row's own forward, -1 on rows without a route.

        Raises:
            PayloadError: nothing was appended.
        """
        if self._first is None:
            raise PayloadError("RoutingSegments: nothing was appended, so there is no trace.")
        end = self._length
        return RoutingTrace.from_checked(
            topk_indices=self._indices[:end].clone(),
            layer_numbers=self._first.layer_numbers,
            num_experts=self._first.num_experts,
            replay_mask=self._mask[:end].clone(),
            token_ids=None if self._token_ids is None else self._token_ids[:end].clone(),
            sequence_lengths=(end,),
            sample_ids=None if sample_id is None else (sample_id,),
            weight_version=None if self._versions is None else self._versions[:end].clone(),
        )

    def _check(self, trace: RoutingTrace, start: int, weight_version: int | None) -> Tensor | None:
        """Raise unless the trace belongs to this sequence; return its weight versions [rows], None if it has none."""
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise PayloadError(f"RoutingSegments: start={start!r} must be an integer of 0 or more.")
        try:
            # A later turn's route would take the place of a row that somebody left out.
            check_nothing_left_out(trace.left_live, "append a segment", "the joined trace")
        except TraceError as error:
            raise PayloadError(f"RoutingSegments: {error}") from None
        if trace.weight_version is not None and weight_version is not None:
            raise PayloadError("RoutingSegments: the trace carries weight versions; do not give another.")
        versions = trace.weight_version
        if weight_version is not None:
            versions = torch.full((len(trace),), weight_version, dtype=torch.int32)
        if self._first is None:
            if start and trace.token_ids is not None:
                raise PayloadError(
                    f"RoutingSegments: the token ids of 0..{start - 1}, before this segment, are unknown."
                )
            return versions
        for name in ("layer_numbers", "num_experts", "topk"):
            if getattr(trace, name) != getattr(self._first, name):
                raise PayloadError(
                    f"RoutingSegments: a segment with {name}={getattr(trace, name)} behind one with "
                    f"{getattr(self._first, name)}: they are of different models."
                )
        for name, earlier, new in (
            ("token ids", self._token_ids, trace.token_ids),
            ("weight versions", self._versions, versions),
        ):
            if (earlier is None) != (new is None):
                raise PayloadError(f"RoutingSegments: only some segments have {name}; give all of them or none.")
        if self._token_ids is not None and trace.token_ids is not None:
            self._check_token_ids(trace.token_ids, start)
        return versions

    def _check_token_ids(self, token_ids: Tensor, start: int) -> None:
        assert self._token_ids is not None
        if start > self._length:
            raise PayloadError(
                f"RoutingSegments: a segment starts at token {start}, only {self._length} are known: append the trace of "
                "the whole turn, whose rows without a route carry their token ids."
            )
        shared = max(0, min(self._length - start, len(token_ids)))
        if torch.equal(self._token_ids[start : start + shared], token_ids[:shared]):
            return
        row = int((self._token_ids[start : start + shared] != token_ids[:shared]).nonzero()[0])
        raise PayloadError(
            f"RoutingSegments: token {start + row} is {int(token_ids[row])}, an earlier segment had "
            f"{int(self._token_ids[start + row])} there. Was the history edited or tokenised anew between turns? "
            "Send the ids of the earlier turns, or begin a new RoutingSegments."
        )

    def _compare(self, trace: RoutingTrace, start: int, versions: Tensor | None) -> None:
        shared = max(0, min(self._length - start, len(trace)))
        both = (self._mask[start : start + shared] & trace.replay_mask[:shared]).nonzero()[:, 0]
        if not len(both):
            return
        earlier, new = self._indices[both + start].sort(dim=2)[0], trace.topk_indices[both].sort(dim=2)[0]
        differing = (earlier != new).any(dim=2)
        self.overlap = Overlap(
            compared=self.overlap.compared + differing.numel(),
            differing=self.overlap.differing + int(differing.sum()),
        )
        # Other weights may choose other experts; only routes of the same weights say whether these are the same tokens.
        same_weights = torch.ones(len(both), dtype=torch.bool)
        if self._versions is not None and versions is not None:
            same_weights = self._versions[both + start] == versions[both]
        decisions = int(same_weights.sum()) * trace.num_layers
        wrong = int(differing[same_weights].sum())
        if decisions >= _MIN_COMPARED and wrong > self.max_disagreement * decisions:
            row, layer = (int(i) for i in (differing & same_weights.unsqueeze(1)).nonzero()[0])
            raise PayloadError(
                f"RoutingSegments: {wrong} of {decisions} decisions on tokens {start + int(both[0])}.."
                f"{start + int(both[-1])} differ from those of an earlier segment with the same weights, first token "
                f"{start + int(both[row])}, layer_number {trace.layer_numbers[layer]}: {new[row, layer].tolist()} after "
                f"{earlier[row, layer].tolist()}. These are routes of other tokens: is the segment's start right?"
            )

    def _reserve(self, length: int, trace: RoutingTrace, versions: Tensor | None) -> None:
        """Make room for `length` tokens; doubling keeps the copies of n appends proportional to the final size."""
        if self._first is None:
            self._first = trace.slice_rows(0, 0)
            self._indices = torch.empty((0, trace.num_layers, trace.topk), dtype=trace.topk_indices.dtype)
            self._token_ids = None if trace.token_ids is None else torch.empty(0, dtype=torch.int32)
            self._versions = None if versions is None else torch.empty(0, dtype=torch.int32)
        if length <= len(self._mask):
            return
        size = max(length, 2 * len(self._mask))
        self._indices = _grown(self._indices, size, self._length)
        self._mask = _grown(self._mask, size, self._length)
        self._token_ids = None if self._token_ids is None else _grown(self._token_ids, size, self._length)
        self._versions = None if self._versions is None else _grown(self._versions, size, self._length)

    def _write(
        self, tokens: slice | Tensor, rows: slice | Tensor, trace: RoutingTrace, versions: Tensor | None
    ) -> None:
        """Copy rows of the trace to these tokens of the sequence."""
        self._indices[tokens] = trace.topk_indices[rows].to(self._indices.device)
        self._mask[tokens] = trace.replay_mask[rows]
        if self._versions is not None and versions is not None:
            self._versions[tokens] = torch.where(trace.replay_mask[rows], versions[rows], -1)


def _grown(tensor: Tensor, size: int, used: int) -> Tensor:
    grown = torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype)
    grown[:used] = tensor[:used]
    return grown
