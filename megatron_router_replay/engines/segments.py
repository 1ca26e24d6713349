"""The turns of a conversation, the parts of an interrupted rollout, or two servers' halves of a request -> one RoutingTrace.

Every turn sends the whole conversation so far and gets routes for some of it. The joined trace has, token by token:

- The first generation wins: a token was sampled under the routes of its own forward, so a later prefill of it, perhaps
  with newer weights, does not replace them.
- The last token of a turn has no route until the next turn prefills it; that real route replaces the missing one.
- Tokens without routes in any turn stay missing: the live router decides.

Token ids prove that two turns are of one conversation, so every turn needs them. Rows are copied into memory that doubles
when full, so n turns copy O(all tokens) bytes, not O(n * all tokens).
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from megatron_router_replay.engines.decoder import Decoder
from megatron_router_replay.engines.model_info import ModelLike, as_model_info
from megatron_router_replay.engines.options import DecodeOptions, SharedOptions, TokenIds
from megatron_router_replay.engines.tokens import resolve_tokens
from megatron_router_replay.errors import PayloadError
from megatron_router_replay.trace import RoutingTrace


class RoutingSegments:
    """Joins the traces of a growing sequence; `append` them in order."""

    def __init__(self) -> None:
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

    def append(self, trace: RoutingTrace, *, weight_version: int | None = None) -> None:
        """Add a turn.

        Args:
            trace: a decoded turn with its token ids, from the first token of the sequence on, as `decode` returns it.
            weight_version: of the weights that chose these routes, unless the trace carries it.

        Raises:
            PayloadError: another model's trace, token ids that are missing or differ from those already known, only some
                turns with a weight version, or rows that were left live by choice.
        """
        if not isinstance(trace, RoutingTrace):
            raise PayloadError(
                f"MRR101: RoutingSegments: cannot append a {type(trace).__name__}: decode the reply first."
            )
        new = self._check(trace.to("cpu"), weight_version)
        # From here on nothing can fail: a turn that is refused has changed nothing.
        if self._first is None:
            self._first = trace[:0]
            self._rows = {name: values[:0].clone() for name, values in new.items()}
        # A turn may be shorter than the tokens so far, when it was requested again.
        end = max(self._length, len(trace))
        shared = min(self._length, len(trace))
        self._reserve(end)
        # The first generation wins: of rows that both have, only those without a route so far take the new one.
        rows = (new["replay_mask"][:shared] & ~self._rows["replay_mask"][:shared]).nonzero()[:, 0]
        for name, values in self._rows.items():
            values[rows] = new[name][rows]
            values[shared : len(trace)] = new[name][shared:]
        self._length = end
        missing = (~self._rows["replay_mask"][self._next_start : end]).nonzero()
        self._next_start = self._next_start + int(missing[0]) if len(missing) else end

    def trace(self, *, sample_id: str | None = None) -> RoutingTrace:
        """Return the joined trace, a copy, with sequence_lengths (len(self),).

        Its weight_version, where turns have one, is that of each row's own forward, -1 on rows without a route.

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

    def _check(self, trace: RoutingTrace, weight_version: int | None) -> dict[str, Tensor]:
        """Raise unless the trace belongs to this sequence; return its tensors, a row a token each, by their names."""
        ids, versions = trace.token_ids, trace.weight_version
        if ids is None:
            raise PayloadError(
                "MRR315: RoutingSegments: a turn has no token ids, so nothing proves that it is of this conversation: have "
                "the engine return ids, or decode with token_ids=."
            )
        if versions is not None and weight_version is not None:
            raise PayloadError("MRR313: RoutingSegments: the trace carries weight versions; do not give another.")
        if weight_version is not None:
            versions = torch.full((len(trace),), weight_version, dtype=torch.int32)
        new = {"topk_indices": trace.topk_indices, "replay_mask": trace.replay_mask, "token_ids": ids}
        new |= {} if versions is None else {"weight_version": torch.where(trace.replay_mask, versions, -1)}
        if self._first is None:
            return new
        for name in ("layer_numbers", "num_experts", "topk"):
            if getattr(trace, name) != getattr(self._first, name):
                raise PayloadError(
                    f"MRR107: RoutingSegments: a segment with {name}={getattr(trace, name)} after one with "
                    f"{getattr(self._first, name)}: they are of different models."
                )
        if ("weight_version" in self._rows) != ("weight_version" in new):
            raise PayloadError(
                "MRR315: RoutingSegments: only some segments have weight versions; give all of them or none."
            )
        shared = min(self._length, len(trace))
        earlier = self._rows["token_ids"][:shared]
        if not torch.equal(earlier, ids[:shared]):
            token = int((earlier != ids[:shared]).nonzero()[0])
            raise PayloadError(
                f"MRR315: RoutingSegments: token {token} is {int(ids[token])}, an earlier segment had {int(earlier[token])} "
                "there. Was the history edited or tokenised anew between turns? Send the ids of the earlier turns, or begin "
                "a new RoutingSegments."
            )
        return new

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

    Only ids prove that two replies answer the same request, so both must have the ids of their prompt, or you pass
    `prompt_token_ids`.

    Args:
        prefill_reply: of the prefill server, with a row for every token of the prompt: request one output token.
        decode_reply: of the decode server; its rows of the prompt are ignored.
        engine: the decoder of both, such as `engines.vllm`.
        model, options: as for `engine.decode`.
        prompt_token_ids: where the replies do not have them.

    Returns:
        [S, MoE layers, topk]: the prompt's rows from the prefill server, the rest from the decode server.

    Raises:
        PayloadError: as `decode`; the replies have different prompts, or a prompt row is missing in the prefill reply.
    """
    info = as_model_info(model)
    given = DecodeOptions(prompt_token_ids=prompt_token_ids, **options)
    prefill, decode = (engine.read(reply)[:1] for reply in (prefill_reply, decode_reply))
    length, decode_length = (resolve_tokens(reply, given).num_prompt_tokens for reply in (*prefill, *decode))
    if length is None or length != decode_length:
        raise PayloadError(
            f"MRR315: {engine.title}: the prefill reply has a prompt of {length} tokens, the decode reply of {decode_length}"
            ": have both return token ids, or pass prompt_token_ids=..., or they are of different requests."
        )
    # The token that the prefill server sampled is dropped: the decode server samples it again.
    first = engine.trace_of(prefill, [given], info)[:length]
    missing = (~first.replay_mask).nonzero()
    if len(missing) and given.missing != "live":
        raise PayloadError(
            f"MRR315: {engine.title}: the prefill reply has no route of prompt token {int(missing[0])}: request one output "
            "token (max_tokens=1) from the prefill server, so that it sends the prompt's last row too."
        )
    segments = RoutingSegments()
    segments.append(first)
    segments.append(engine.trace_of(decode, [given], info, begin=length))
    return segments.trace(sample_id=sample_id)
