"""The turns of a conversation, the parts of an interrupted rollout, or two servers' halves of a request -> one RoutingTrace.

Every turn sends the whole conversation so far and gets routes for some of it. What is kept, token by token:

- The first generation wins: a token was sampled under the routes of its own forward, so a later prefill of it, perhaps
  with newer weights, does not replace them. Where both have a route they are compared, which proves that they are of
  the same tokens.
- The last token of a turn has no route until the next turn prefills it; that real route replaces the missing one.
- Tokens between two parts that nobody sent routes for stay missing: the live router decides.

Rows are copied into memory that doubles when full, so n turns copy O(all tokens) bytes, not O(n * all tokens). Sequences are
not compared with one another here: `concat_traces` does that where they are joined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from megatron_router_replay.checks import as_integer
from megatron_router_replay.engines.decoder import Decoder
from megatron_router_replay.engines.model_info import ModelLike
from megatron_router_replay.engines.options import DecodeOptions, SharedOptions, TokenIds
from megatron_router_replay.engines.tokens import resolve_tokens
from megatron_router_replay.errors import PayloadError, TraceError
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trace.ids import spread_experts

_MIN_COMPARED = 64
"""Decisions that an overlap must have before its disagreement says anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """How two forwards of the same tokens agreed: decisions are (token, layer) pairs, compared as sets."""

    compared: int
    differing: int


class RoutingSegments:
    """Joins the traces of one growing sequence; `append` them in order.

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
        self._next_start = 0
        # By the names that a trace gives them, on the CPU; memory for more tokens than `_length`.
        self._rows = {"replay_mask": torch.empty(0, dtype=torch.bool)}

    def __len__(self) -> int:
        return self._length

    @property
    def next_start(self) -> int:
        """The first token without a route. Give it as `start` to the engine's next request and to `decode`.

        After a turn of S tokens it is S - 1, not S: the turn's last token has no route yet.
        """
        return self._next_start

    @property
    def num_missing(self) -> int:
        return int((~self._rows["replay_mask"][: self._length]).sum())

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
        start = as_integer("RoutingSegments: start", start, least=0, error=PayloadError)
        if not isinstance(trace, RoutingTrace):
            raise PayloadError(
                f"MRR101: RoutingSegments: cannot append a {type(trace).__name__}: decode the reply first."
            )
        trace = trace.to("cpu")
        new = self._check(trace, start, weight_version)
        old, end = self._length, start + len(trace)
        shared = max(0, min(old, end) - start)
        self._compare(new, trace, start, shared)
        # From here on nothing can fail: a segment that is refused has changed nothing but `overlap`.
        if self._first is None:
            self._first = trace[:0]
            self._rows = {name: values[:0].clone() for name, values in new.items()}
        self._reserve(max(end, old))
        if start > old:
            gap = spread_experts(old, start - old, topk=trace.topk, num_experts=trace.num_experts)
            self._rows["topk_indices"][old:start] = gap.unsqueeze(1)
            self._rows["replay_mask"][old:start] = False
            if "weight_version" in self._rows:
                self._rows["weight_version"][old:start] = -1
        # The first generation wins: of rows that both have, only those without a route so far take the new one.
        rows = (new["replay_mask"][:shared] & ~self._rows["replay_mask"][start : start + shared]).nonzero()[:, 0]
        for name, values in self._rows.items():
            values[start + rows] = new[name][rows]
            values[start + shared : end] = new[name][shared:]
        self._length = max(end, old)
        missing = (~self._rows["replay_mask"][self._next_start : self._length]).nonzero()
        self._next_start = self._next_start + int(missing[0]) if len(missing) else self._length

    def trace(self, *, sample_id: str | None = None) -> RoutingTrace:
        """Return the joined trace, a copy, with sequence_lengths (len(self),).

        Its weight_version, where segments have one, is that of each row's own forward, -1 on rows without a route.

        Raises:
            PayloadError: nothing was appended.
        """
        if self._first is None:
            raise PayloadError("MRR315: RoutingSegments: nothing was appended, so there is no trace.")
        return RoutingTrace.from_checked(
            layer_numbers=self._first.layer_numbers,
            num_experts=self._first.num_experts,
            sequence_lengths=(self._length,),
            sample_ids=None if sample_id is None else (sample_id,),
            **{name: values[: self._length].clone() for name, values in self._rows.items()},
        )

    def _check(self, trace: RoutingTrace, start: int, weight_version: int | None) -> dict[str, Tensor]:
        """Raise unless the trace belongs to this sequence; return its tensors, a row a token each, by their names."""
        try:
            # A later turn's route would take the place of a row that somebody left out.
            trace.check_nothing_left_out("append a segment")
        except TraceError as error:
            raise PayloadError(f"MRR111: RoutingSegments: {error}") from None
        if trace.weight_version is not None and weight_version is not None:
            raise PayloadError("MRR313: RoutingSegments: the trace carries weight versions; do not give another.")
        versions = trace.weight_version
        if weight_version is not None:
            versions = torch.full((len(trace),), weight_version, dtype=torch.int32)
        new = {"topk_indices": trace.topk_indices, "replay_mask": trace.replay_mask}
        new |= {} if trace.token_ids is None else {"token_ids": trace.token_ids}
        new |= {} if versions is None else {"weight_version": torch.where(trace.replay_mask, versions, -1)}
        if start > self._length and trace.token_ids is not None:
            raise PayloadError(
                f"MRR315: RoutingSegments: a segment starts at token {start}, only {self._length} are known: append "
                "the trace of the whole turn, whose rows without a route carry their token ids."
            )
        if self._first is None:
            return new
        for name in ("layer_numbers", "num_experts", "topk"):
            if getattr(trace, name) != getattr(self._first, name):
                raise PayloadError(
                    f"MRR107: RoutingSegments: a segment with {name}={getattr(trace, name)} behind one with "
                    f"{getattr(self._first, name)}: they are of different models."
                )
        for name, words in (("token_ids", "token ids"), ("weight_version", "weight versions")):
            if (name in self._rows) != (name in new):
                raise PayloadError(
                    f"MRR315: RoutingSegments: only some segments have {words}; give all of them or none."
                )
        if trace.token_ids is not None:
            shared = min(self._length - start, len(trace))
            earlier, again = self._rows["token_ids"][start : start + shared], trace.token_ids[:shared]
            if not torch.equal(earlier, again):
                row = int((earlier != again).nonzero()[0])
                raise PayloadError(
                    f"MRR315: RoutingSegments: token {start + row} is {int(again[row])}, an earlier segment had "
                    f"{int(earlier[row])} there. Was the history edited or tokenised anew between turns? Send the ids "
                    "of the earlier turns, or begin a new RoutingSegments."
                )
        return new

    def _compare(self, new: dict[str, Tensor], trace: RoutingTrace, start: int, shared: int) -> None:
        """Count the decisions on which two forwards of the same tokens differ; raise if they are of other tokens."""
        both = (self._rows["replay_mask"][start : start + shared] & new["replay_mask"][:shared]).nonzero()[:, 0]
        if not len(both):
            return
        earlier = self._rows["topk_indices"][start + both].sort(dim=2)[0]
        routes = new["topk_indices"][both].sort(dim=2)[0]
        differing = (earlier != routes).any(dim=2)
        self.overlap = Overlap(
            compared=self.overlap.compared + differing.numel(),
            differing=self.overlap.differing + int(differing.sum()),
        )
        # Other weights may choose other experts; only routes of the same weights say whether these are the same tokens.
        same_weights = torch.ones(len(both), dtype=torch.bool)
        if "weight_version" in new:
            same_weights = self._rows["weight_version"][start + both] == new["weight_version"][both]
        decisions = int(same_weights.sum()) * trace.num_layers
        wrong = int(differing[same_weights].sum())
        if decisions >= _MIN_COMPARED and wrong > self.max_disagreement * decisions:
            row, layer = (int(i) for i in (differing & same_weights.unsqueeze(1)).nonzero()[0])
            raise PayloadError(
                f"MRR315: RoutingSegments: {wrong} of {decisions} decisions on tokens {start + int(both[0])}.."
                f"{start + int(both[-1])} differ from those of an earlier segment with the same weights, first token "
                f"{start + int(both[row])}, layer_number {trace.layer_numbers[layer]}: {routes[row, layer].tolist()} after "
                f"{earlier[row, layer].tolist()}. These are routes of other tokens: is the segment's start right?"
            )

    def _reserve(self, length: int) -> None:
        """Make room for `length` tokens; doubling keeps the copies of n appends proportional to the final size."""
        room = len(self._rows["replay_mask"])
        if length <= room:
            return
        for name, values in self._rows.items():
            grown = values.new_empty((max(length, 2 * room), *values.shape[1:]))
            grown[: self._length] = values[: self._length]
            self._rows[name] = grown


def join_prefill_decode(
    prefill_reply: Any,
    decode_reply: Any,
    *,
    engine: Decoder,
    model: ModelLike,
    prompt_token_ids: TokenIds | None = None,
    sample_id: str | None = None,
    **options: Unpack[SharedOptions],
) -> RoutingTrace:
    """Return the routes of a request that a prefill and a decode server answered.

    The decode server got the prompt's keys and values from the prefill server, so its own rows of the prompt are rubbish
    (zeros, or those of an earlier request). A proxy keeps both replies:

        prefill_reply = await post(prefill_url, body | {"max_tokens": 1})           # P rows, one for each prompt token
        decode_reply = await post(decode_url, body | {"kv_transfer_params": ...})   # S - 1 rows, the last G - 1 count
        trace = join_prefill_decode(prefill_reply, decode_reply, engine=engines.vllm, model=checkpoint)

    Only ids tell that two replies are of one request, so both must have those of their prompt, or take `prompt_token_ids`.

    Args:
        prefill_reply: of the prefill server, with a row for every token of the prompt: ask for one output token.
        decode_reply: of the decode server. What it says of the prompt's routes is not looked at.
        engine: what decodes both, such as `engines.vllm`.
        model, options: as for `engine.decode`.
        prompt_token_ids: where the replies do not have them.

    Returns:
        [S, MoE layers, topk]: the prompt's rows from the prefill server, the others from the decode server.

    Raises:
        PayloadError: as `decode`; the replies have different prompts, or a prompt row is missing in the prefill reply.
    """
    replies = [engine.read(reply, batch=False) for reply in (prefill_reply, decode_reply)]
    if [len(of_reply) for of_reply in replies] != [1, 1]:
        raise PayloadError(
            f"MRR312: {engine.title}: each reply must hold one choice, these hold {[len(r) for r in replies]}."
        )
    given = DecodeOptions(prompt_token_ids=prompt_token_ids, **options)
    prefill, decode = (resolve_tokens(of_reply[0], given) for of_reply in replies)
    length = prefill.num_prompt_tokens
    if length is None or prefill.token_ids is None or decode.token_ids is None:
        raise PayloadError(
            f"MRR315: {engine.title}: nothing proves that the two replies are of one request: have both return token "
            "ids, or pass prompt_token_ids=..."
        )
    if length != decode.num_prompt_tokens:
        raise PayloadError(
            f"MRR315: {engine.title}: the prefill reply has a prompt of {length} tokens, the decode reply of "
            f"{decode.num_prompt_tokens}: they are of different requests."
        )
    first = engine.decode(prefill_reply, model=model, prompt_token_ids=prompt_token_ids, **options)[:length]
    missing = (~first.replay_mask).nonzero()
    if len(missing) and given.missing != "live":
        raise PayloadError(
            f"MRR315: {engine.title}: the prefill reply has no route of prompt token {int(missing[0])}: ask the prefill "
            "server for one output token (max_tokens=1), so that it sends the prompt's last row too."
        )
    segments = RoutingSegments()
    segments.append(first)
    segments.append(
        engine.decode(decode_reply, model=model, prompt_token_ids=prompt_token_ids, ignore_before=length, **options)
    )
    return segments.trace(sample_id=sample_id)
