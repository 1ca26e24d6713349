"""The turns of a conversation, the parts of an interrupted rollout, or two servers' halves of a request -> one RoutingTrace.

Every turn sends the whole conversation so far and gets routes for some of it. The joined trace has, token by token:

- The first generation wins: a token was sampled under the routes of its own forward, so a later prefill of it, perhaps
  with newer weights, does not replace them.
- The last token of a turn has no route until the next turn prefills it; that real route replaces the missing one.
- Tokens without routes in any turn stay missing: the live router decides.

Token ids prove that two turns are of one conversation, so every turn needs them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

import torch

from megatron_router_replay.checks import shown
from megatron_router_replay.engines.decoder import Decoder
from megatron_router_replay.engines.model_info import ModelLike, as_model_info
from megatron_router_replay.engines.options import DecodeOptions, SharedOptions, TokenIds
from megatron_router_replay.engines.sample_rows import build_trace
from megatron_router_replay.engines.tokens import resolve_tokens
from megatron_router_replay.errors import PayloadError
from megatron_router_replay.trace import RoutingTrace, concat_traces


class RoutingSegments:
    """Joins the traces of a growing sequence; `append` them in order."""

    def __init__(self) -> None:
        self._trace: RoutingTrace | None = None

    def __len__(self) -> int:
        return 0 if self._trace is None else self._trace.num_tokens

    @property
    def next_start(self) -> int:
        """The first token without a route. Give it as `start` to the engine's next request and to `decode`.

        After a turn of S tokens it is S - 1, not S: the turn's last token has no route yet.
        """
        if self._trace is None or bool(self._trace.replay_mask.all()):
            return len(self)
        return int((~self._trace.replay_mask).nonzero()[0])

    @property
    def num_missing(self) -> int:
        return 0 if self._trace is None else int((~self._trace.replay_mask).sum())

    def append(self, trace: RoutingTrace) -> None:
        """Add a turn.

        Args:
            trace: a decoded turn with its token ids, from the first token of the sequence on, as `decode` returns it.

        Raises:
            PayloadError: token ids that are missing or differ from those already known; a trace of several samples.
            TraceError: another model's trace, or only some turns have weight versions.
        """
        if not isinstance(trace, RoutingTrace):
            raise PayloadError(
                f"MRR101: RoutingSegments: cannot append a {type(trace).__name__}: decode the reply first."
            )
        if trace.token_ids is None:
            raise PayloadError(
                "MRR315: RoutingSegments: a turn has no token ids, so nothing proves that it is of this conversation: have "
                "the engine return ids, or decode with token_ids=."
            )
        if trace.sequence_lengths is not None and len(trace.sequence_lengths) != 1:
            raise PayloadError(
                f"MRR312: RoutingSegments: a turn is one sample, and this trace has {len(trace.sequence_lengths)}: append "
                "each of trace.samples() to RoutingSegments of its own."
            )
        new, old = trace.to("cpu"), self._trace
        # A row without a route has no weights that chose it.
        versions = None if new.weight_version is None else torch.where(new.replay_mask, new.weight_version, -1)
        new = new._with(weight_version=versions, sequence_lengths=None, sample_ids=None)
        if old is None:
            self._trace = new
            return
        _check_history(old, new)
        # A turn may be shorter than the tokens so far, when it was requested again.
        rows = torch.arange(max(old.num_tokens, new.num_tokens))
        shared = min(old.num_tokens, new.num_tokens)
        # The first generation wins: of rows that both have, only those without a route so far take the new one.
        from_new = rows >= old.num_tokens
        from_new[:shared] = new.replay_mask[:shared] & ~old.replay_mask[:shared]
        self._trace = concat_traces([old, new]).gather_rows(rows + old.num_tokens * from_new)

    def trace(self, *, sample_id: str | None = None) -> RoutingTrace:
        """Return the joined trace, with sequence_lengths (len(self),).

        A later `append` does not change it. Its weight_version, where turns have one, is that of each row's own forward, and
        -1 on rows without a route.

        Raises:
            PayloadError: nothing was appended.
        """
        if self._trace is None:
            raise PayloadError("MRR315: RoutingSegments: nothing was appended, so there is no trace.")
        return self._trace.with_samples((len(self),), None if sample_id is None else (sample_id,))


def _check_history(old: RoutingTrace, new: RoutingTrace) -> None:
    """Raise unless a turn has the tokens that are known so far."""
    shared = min(old.num_tokens, new.num_tokens)
    assert old.token_ids is not None
    assert new.token_ids is not None
    different = (old.token_ids[:shared] != new.token_ids[:shared]).nonzero()
    if len(different):
        token = int(different[0])
        raise PayloadError(
            f"MRR315: RoutingSegments: token {token} is {int(new.token_ids[token])}, an earlier segment had "
            f"{int(old.token_ids[token])} there. Was the history edited or tokenised anew between turns? Send the ids of the "
            "earlier turns, or begin a new RoutingSegments."
        )


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
    if not isinstance(engine, Decoder):
        raise PayloadError(f"MRR101: engine={shown(engine)} must be a decoder, such as mrr.engines.vllm.")
    info = as_model_info(model)
    given = DecodeOptions(prompt_token_ids=prompt_token_ids, **options)
    prefill, decode = map(engine.read_one, (prefill_reply, decode_reply))
    length, decode_length = (resolve_tokens(reply, given).num_prompt_tokens for reply in (prefill, decode))
    if length is None or length != decode_length:
        raise PayloadError(
            f"MRR315: {engine.title}: the prefill reply has a prompt of {length} tokens, the decode reply of {decode_length}"
            ": have both return token ids, or pass prompt_token_ids=..., or they are of different requests."
        )
    # The token that the prefill server sampled is dropped: the decode server samples it again.
    whole = build_trace([engine.sample(prefill, given, info)], model=info)
    first = whole.gather_rows(slice(0, length))
    missing = (~first.replay_mask).nonzero()
    if len(missing) and given.missing != "live":
        raise PayloadError(
            f"MRR315: {engine.title}: the prefill reply has no route of prompt token {int(missing[0])}: request one output "
            "token (max_tokens=1) from the prefill server, so that it sends the prompt's last row too."
        )
    segments = RoutingSegments()
    segments.append(first)
    generated = replace(engine.sample(decode, given, info), begin=length)
    segments.append(build_trace([generated], model=info))
    joined = segments.trace(sample_id=sample_id)
    if whole.num_tokens > joined.num_tokens:
        raise PayloadError(
            f"MRR315: {engine.title}: the prefill reply has {whole.num_tokens} tokens, the decode reply "
            f"{joined.num_tokens}: give the prefill reply first, and request one output token from that server."
        )
    return joined
