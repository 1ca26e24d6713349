"""The one `decode` and the one `decode_batch`: every engine's module has both, as the methods of its `Decoder`.

An engine differs in two functions: how its results are read into replies, and how the arrays of a reply are laid out. What a
caller may say, whose tokens the rows are, how many rows are legal and what a broken payload looks like is the same for all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from megatron_router_replay.engines.assemble import Allocate, build_trace
from megatron_router_replay.engines.model_info import ModelLike, ModelRoutingInfo, as_model_info
from megatron_router_replay.engines.options import DecodeOptions, TokenIds, WeightVersion
from megatron_router_replay.engines.reply import Reply, check_usage
from megatron_router_replay.engines.rows import RowLayout, SampleRows
from megatron_router_replay.engines.tokens import SampleTokens, resolve_tokens
from megatron_router_replay.engines.weights import stamp_versions
from megatron_router_replay.errors import PayloadError
from megatron_router_replay.trace import RoutingTrace

_LOG = logging.getLogger(__name__)


class ReadReplies(Protocol):
    """Turns a result into its generated sequences; `batch`: a list may hold any results, one behind the other."""

    def __call__(self, result: Any, *, batch: bool) -> list[Reply]: ...


LayRows = Callable[[Reply, ModelRoutingInfo, SampleTokens, DecodeOptions], RowLayout]
"""Reads the arrays of a reply that has routes, and says which columns and how many rows they have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """What a module of `engines` decodes with.

    Args:
        name: of the engine; messages begin with it.
        read: a result -> its replies.
        rows: a reply -> its arrays.
        if_missing: what to do about a reply without routes.
        reads_version: the payloads of some release do not say that they are of it, so that `version` must.
    """

    name: str
    read: ReadReplies
    rows: LayRows
    if_missing: str
    reads_version: bool = False

    def decode(
        self,
        result: Any,
        *,
        model: ModelLike,
        token_ids: TokenIds | None = None,
        start: int = 0,
        prompt_token_ids: TokenIds | None = None,
        num_tokens: int | None = None,
        choice: int | None = None,
        version: str | None = None,
        allow_surplus_rows: bool = False,
        allow_constant_layers: bool = False,
        weight_version: WeightVersion | None = None,
        sample_id: str | None = None,
        allocate: Allocate | None = None,
    ) -> RoutingTrace:
        """Return the routes of one sample: S rows for its S tokens, the last one (and those before `start`) without a route.

        Args:
            result: what the engine returned, in any of the forms that the module's docstring lists.
            model: ModelRoutingInfo, or the Hugging Face config as a dict, object or path.
            token_ids: prompt and output, [S]; compared with what the result says, needed where it says nothing.
            start, prompt_token_ids, num_tokens, version, allow_surplus_rows, allow_constant_layers, weight_version,
                sample_id: see `engines.DecodeOptions`.
            choice: the index of the choice to take of several.
            allocate: where the memory of topk_indices comes from, such as `transport.TraceMemory().take`; None: new
                memory.

        Returns:
            [S, MoE layers, topk] with sequence_lengths (S,), and token_ids and weight_version where known.

        Raises:
            PayloadError: routes are missing, do not fit the tokens or the model, or are damaged; the reply's own counts
                disagree with the tokens; there are several samples.
        """
        info = as_model_info(model)
        replies = self.read(result, batch=False)
        # True would be choice 1.
        if choice is not None and (isinstance(choice, bool) or not 0 <= choice < len(replies)):
            raise PayloadError(f"{self.name}: choice={choice!r} of a response with {len(replies)} choices.")
        if choice is None and len(replies) != 1:
            raise PayloadError(
                f"{self.name}: the response holds {len(replies)} choices, decode reads one: pass choice=... or use "
                "decode_batch."
            )
        options = DecodeOptions(
            token_ids=token_ids,
            prompt_token_ids=prompt_token_ids,
            num_tokens=num_tokens,
            start=start,
            version=version,
            allow_surplus_rows=allow_surplus_rows,
            allow_constant_layers=allow_constant_layers,
            weight_version=weight_version,
            sample_id=sample_id,
        )
        return self._trace(replies, {choice or 0: options}, info, allocate)

    def decode_batch(
        self,
        result: Any,
        *,
        model: ModelLike,
        token_ids: Sequence[TokenIds] | None = None,
        start: int | Sequence[int] = 0,
        prompt_token_ids: TokenIds | Sequence[TokenIds] | None = None,
        num_tokens: Sequence[int] | None = None,
        version: str | None = None,
        allow_surplus_rows: bool = False,
        allow_constant_layers: bool = False,
        weight_version: WeightVersion | None = None,
        sample_ids: Sequence[str] | None = None,
        allocate: Allocate | None = None,
    ) -> RoutingTrace:
        """Return the routes of all samples of a result, or of a list of results, behind one another.

        Args:
            result: as for `decode`, with several samples (n > 1, several prompts), or a list of such results.
            model: as for `decode`.
            token_ids, num_tokens, sample_ids: one per sample; choices of a response in the order of their index.
            start: one for all, or one per sample.
            prompt_token_ids: the ids of the one prompt that all samples have, or one list of ids per sample.
            version, allow_surplus_rows, allow_constant_layers, weight_version, allocate: as for `decode`, for all.

        Returns:
            The samples in order, with sequence_lengths.

        Raises:
            PayloadError: as for `decode`; a list has another length than the samples.
        """
        info = as_model_info(model)
        replies = self.read(result, batch=True)
        each: dict[str, Sequence[Any] | None] = {
            "token_ids": token_ids,
            "start": [start] * len(replies) if isinstance(start, (int, np.integer)) else _as_sequence("start", start),
            "prompt_token_ids": _per_sample(prompt_token_ids, len(replies)),
            "num_tokens": num_tokens,
            "sample_ids": sample_ids,
        }
        for name, values in each.items():
            if values is not None and len(_as_sequence(name, values)) != len(replies):
                raise PayloadError(f"{self.name}: {len(values)} {name} for {len(replies)} choices: give one a choice.")
        options = {
            i: DecodeOptions(
                **{
                    name.replace("sample_ids", "sample_id"): values[i]
                    for name, values in each.items()
                    if values is not None
                },
                version=version,
                allow_surplus_rows=allow_surplus_rows,
                allow_constant_layers=allow_constant_layers,
                weight_version=weight_version,
            )
            for i in range(len(replies))
        }
        return self._trace(replies, options, info, allocate)

    def _trace(
        self,
        replies: Sequence[Reply],
        options: Mapping[int, DecodeOptions],
        model: ModelRoutingInfo,
        allocate: Allocate | None,
    ) -> RoutingTrace:
        """Return the trace of the replies that have options; the others only take part in their response's counts."""
        # Before the tokens: a reply without routes has no ids either, most of the time, and to ask for those would mislead.
        for i in options:
            if not replies[i].has_routes and not replies[i].aborted:
                raise self._missing(replies[i])
        tokens = {i: resolve_tokens(replies[i], options[i]) for i in options}
        _check_usages(replies, tokens)
        samples = [self._sample(replies[i], model, tokens[i], options[i]) for i in options]
        trace = build_trace(samples, model=model, allocate=allocate)
        if _LOG.isEnabledFor(logging.INFO):
            rows = [len(samples), trace.num_tokens, int(trace.replay_mask.sum()), trace.num_layers]
            _LOG.info("%s: decoded %d samples: %d tokens, %d with a route, %d MoE layers", self.name, *rows)
        return trace

    def _missing(self, reply: Reply) -> PayloadError:
        return reply.source.error(
            f"missing, though the model has MoE layers: it would train on live routes. {self.if_missing}"
        )

    def _sample(
        self, reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions
    ) -> SampleRows:
        if options.version is not None and not self.reads_version:
            raise reply.source.error(f"version={options.version!r} means nothing here: the payload says what it is.")
        # An aborted request that had generated tokens had routes for them: without these they are lost.
        aborted = reply.aborted and tokens.nothing_generated
        if not reply.has_routes and not aborted:
            raise self._missing(reply)
        layout = self.rows(reply, model, tokens, options) if reply.has_routes else RowLayout(parts=())
        return SampleRows(
            source=reply.source,
            layout=layout,
            tokens=tokens,
            options=options,
            may_be_empty=aborted,
            weight_version=stamp_versions(
                num_tokens=tokens.num_tokens,
                num_prompt_tokens=tokens.num_prompt_tokens,
                spans=reply.weight_spans,
                weight_name=reply.weight_name,
                given=options.weight_version,
                source=reply.source,
            ),
        )


def _check_usages(replies: Sequence[Reply], tokens: Mapping[int, SampleTokens]) -> None:
    """Compare the counts of each response with several choices with its choices, also those that are not decoded."""
    # The replies of one response share the object, and two responses may have equal ones.
    responses: dict[int, list[int]] = {}
    for i, reply in enumerate(replies):
        if reply.usage is not None:
            responses.setdefault(id(reply.usage), []).append(i)
    for members in responses.values():
        usage = replies[members[0]].usage
        assert usage is not None
        known = [tokens.get(i) for i in members]
        check_usage(
            usage,
            [
                _length(replies[i].prompt_token_ids) if t is None else t.num_prompt_tokens
                for i, t in zip(members, known)
            ],
            [
                _length(replies[i].output_token_ids) if t is None else t.num_output_tokens
                for i, t in zip(members, known)
            ],
            [None if t is None else t.num_tokens for t in known],
        )


def _length(ids: Any) -> int | None:
    return len(ids) if hasattr(ids, "__len__") else None


def _as_sequence(name: str, values: Any) -> Sequence[Any]:
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__"):
        raise PayloadError(f"{name} is {type(values).__name__}, expected a list with one entry a sample.")
    result: Sequence[Any] = values
    return result


def _per_sample(prompts: Any, num_samples: int) -> Sequence[Any] | None:
    """Return one prompt per sample; a flat list of ids is the prompt of all."""
    if prompts is None:
        return None
    values = _as_sequence("prompt_token_ids", prompts)
    if isinstance(values, (torch.Tensor, np.ndarray)):
        return [values] * num_samples if values.ndim == 1 else list(values)
    # Arrays of no dimension have a length method as well, and are ids.
    flat = len(values) > 0 and not any(hasattr(value, "__len__") and getattr(value, "ndim", 1) for value in values)
    return [values] * num_samples if flat else values
