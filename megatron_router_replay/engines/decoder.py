"""The one `decode` and the one `decode_batch`: every engine is a `Decoder`.

An engine differs in two functions: how its results are read into replies, and how the arrays of a reply are laid out. What a
caller may say, whose tokens the rows are, how many rows are legal and what a broken payload looks like is the same for all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Unpack

import numpy as np
import torch

from megatron_router_replay.checks import warn
from megatron_router_replay.engines.model_info import ModelLike, ModelRoutingInfo, as_model_info
from megatron_router_replay.engines.options import Allocate, DecodeOptions, SampleOptions, SharedOptions, TokenIds
from megatron_router_replay.engines.reply import Reply, refuse_non_reply
from megatron_router_replay.engines.rows import RowLayout, SampleRows, build_trace
from megatron_router_replay.engines.tokens import SampleTokens, resolve_tokens, stamp_versions
from megatron_router_replay.errors import PayloadError
from megatron_router_replay.trace import RoutingTrace

_LOG = logging.getLogger(__name__)


class ReadReplies(Protocol):
    """Turns a result into its generated sequences; `batch`: a list may hold any results, in order."""

    def __call__(self, result: Any, *, batch: bool) -> list[Reply]: ...


LayRows = Callable[[Reply, ModelRoutingInfo, SampleTokens, DecodeOptions], RowLayout]
"""Reads the arrays of a reply that has routes, and says which columns and how many rows they have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """What one engine returns -> RoutingTrace.

    Args:
        name: of the engine in code, on the command line and as a file; `title`: in messages and documents.
        read: a result -> its replies.
        rows: a reply -> its arrays.
        start: how to start the engine and what to ask it for; a reply without routes is refused with it.
        request: an example that brings routes and the ids of their tokens.
        sends: what comes back.
        versions, tested: which releases are read, and how that was tested.
        routes: the fields of a reply of which one has routes.
        counted: what the engine counts differently from its ids; a reply -> the same with right counts.
        reads_files: a payload may stand in a file; False: it exists in a process alone.
    """

    name: str
    title: str
    read: ReadReplies
    rows: LayRows
    start: str
    request: str = ""
    sends: str = ""
    versions: str = ""
    tested: str = ""
    routes: tuple[str, ...] = ("routed_experts",)
    counted: Callable[[Reply, ModelRoutingInfo], Reply] | None = None
    reads_files: bool = True

    def decode(
        self,
        result: Any,
        *,
        model: ModelLike,
        choice: int | None = None,
        allocate: Allocate | None = None,
        **options: Unpack[SampleOptions],
    ) -> RoutingTrace:
        """Return the routes of one sample, a row for each of its S tokens.

        The last row, and those before `start`, have no route.

        Args:
            result: what the engine returned, in any of the forms that its file in `engines/decoders` lists.
            model: ModelRoutingInfo, or the Hugging Face config as a dict, object or path.
            choice: the index of the choice to take of several.
            allocate: where the memory of topk_indices comes from, such as a pool of your own; None: new
                memory.
            options: token_ids, start and the other fields of `engines.DecodeOptions`.

        Returns:
            [S, MoE layers, topk] with sequence_lengths (S,), and token_ids and weight_version where known.

        Raises:
            PayloadError: routes are missing, do not fit the tokens or the model, or are damaged; the reply's own counts
                disagree with the tokens; there are several samples.
        """
        info = as_model_info(model)
        replies = self._read(result, batch=False)
        # True would be choice 1.
        if choice is not None and (isinstance(choice, bool) or not 0 <= choice < len(replies)):
            raise PayloadError(f"MRR312: {self.title}: choice={choice!r} of a response with {len(replies)} choices.")
        if choice is None and len(replies) != 1:
            raise PayloadError(
                f"MRR312: {self.title}: the response holds {len(replies)} choices, decode reads one: pass choice=... or use "
                "decode_batch."
            )
        return self._trace([(replies[choice or 0], DecodeOptions(**options))], info, allocate)

    def decode_batch(
        self,
        result: Any,
        *,
        model: ModelLike,
        token_ids: Sequence[TokenIds] | None = None,
        prompt_token_ids: TokenIds | Sequence[TokenIds] | None = None,
        num_tokens: Sequence[int] | None = None,
        start: int | Sequence[int] = 0,
        sample_ids: Sequence[str] | None = None,
        allocate: Allocate | None = None,
        **options: Unpack[SharedOptions],
    ) -> RoutingTrace:
        """Return the routes of all samples of a result, or of a list of results.

        Args:
            result: as for `decode`, with several samples (n > 1, several prompts), or a list of such results.
            model, allocate: as for `decode`.
            token_ids, num_tokens, sample_ids: one per sample; choices of a response in the order of their index.
            start: one for all, or one per sample.
            prompt_token_ids: the ids of the one prompt that all samples have, or one list of ids per sample.
            options: the other fields of `engines.DecodeOptions`, for all samples.

        Returns:
            The samples in order, with sequence_lengths.

        Raises:
            PayloadError: as for `decode`; a list has another length than the samples.
        """
        info = as_model_info(model)
        replies = self._read(result, batch=True)
        given: dict[str, Any] = {
            "token_ids": token_ids,
            "prompt_token_ids": _per_sample(prompt_token_ids, len(replies)),
            "num_tokens": num_tokens,
            "start": [start] * len(replies) if isinstance(start, (int, np.integer)) else start,
            "sample_ids": sample_ids,
        }
        given = {name: _as_list(name, values) for name, values in given.items() if values is not None}
        for name, values in given.items():
            if len(values) != len(replies):
                raise PayloadError(
                    f"MRR312: {self.title}: {len(values)} {name} for {len(replies)} choices: give one a choice."
                )
        given["sample_id"] = given.pop("sample_ids", [None] * len(replies))
        each = [DecodeOptions(**{n: v[i] for n, v in given.items()}, **options) for i in range(len(replies))]
        return self._trace(list(zip(replies, each)), info, allocate)

    def _read(self, result: Any, *, batch: bool) -> list[Reply]:
        for item in [result, *(result if batch and isinstance(result, (list, tuple)) else ())]:
            refuse_non_reply(item, self.title)
        return self.read(result, batch=batch)

    def _trace(
        self, replies: list[tuple[Reply, DecodeOptions]], model: ModelRoutingInfo, allocate: Allocate | None
    ) -> RoutingTrace:
        # Before the tokens: a reply without routes has no ids either, most of the time, and to ask for those would mislead.
        for reply, options in replies:
            self._check_routes(reply, may_be_empty=reply.aborted or (options.missing == "live" and len(replies) > 1))
        samples = [self._sample(reply, model, options) for reply, options in replies]
        trace = build_trace(samples, model=model, allocate=allocate)
        if trace.token_ids is None:
            warn(
                "no token ids",
                "a trace without token ids: nothing proves that its rows are those of the tokens that a model runs. Have "
                "the engine return ids, or pass token_ids=.",
                once=True,  # a trainer may decode sample by sample
            )
        if _LOG.isEnabledFor(logging.INFO):
            rows = [len(samples), trace.num_tokens, int(trace.replay_mask.sum()), trace.num_layers]
            _LOG.info("%s: decoded %d samples: %d tokens, %d with a route, %d MoE layers", self.title, *rows)
        return trace

    def _has_routes(self, reply: Reply) -> bool:
        return any(reply[name] is not None for name in self.routes)

    def _check_routes(self, reply: Reply, *, may_be_empty: bool) -> None:
        if not self._has_routes(reply) and not may_be_empty:
            raise reply.source.error(
                f"MRR302: missing, though the model has MoE layers: it would train on live routes. {self.start}"
            )

    def _sample(self, reply: Reply, model: ModelRoutingInfo, options: DecodeOptions) -> SampleRows:
        reply = reply if self.counted is None else self.counted(reply, model)
        tokens = resolve_tokens(reply, options)
        sample = SampleRows(
            source=reply.source,
            layout=RowLayout(parts=()),
            tokens=tokens,
            options=options,
            weight_version=stamp_versions(reply, tokens, options.weight_version),
        )
        try:
            # An aborted request that had generated tokens had routes for them: without these they are lost.
            aborted = reply.aborted and tokens.nothing_generated
            self._check_routes(reply, may_be_empty=aborted)
            layout = self.rows(reply, model, tokens, options) if self._has_routes(reply) else RowLayout(parts=())
            if layout.start not in (None, options.start):
                if options.start:
                    raise reply.source.error(
                        f"MRR305: its rows begin at token {layout.start}, not at start={options.start}: leave start out."
                    )
                options = replace(options, start=layout.start)
        except PayloadError as error:
            return replace(sample, fault=error)  # `build_trace` raises it, or leaves the sample live
        return replace(sample, layout=layout, options=options, may_be_empty=aborted)


def _as_list(name: str, values: Any) -> Sequence[Any]:
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__"):
        raise PayloadError(f"MRR312: {name} is {type(values).__name__}, expected a list with one entry a sample.")
    result: Sequence[Any] = values
    return result


def _per_sample(prompts: Any, num_samples: int) -> Sequence[Any] | None:
    """Return one prompt per sample; a flat list of ids is the prompt of all."""
    if prompts is None:
        return None
    values = _as_list("prompt_token_ids", prompts)
    if isinstance(values, (torch.Tensor, np.ndarray)):
        return [values] * num_samples if values.ndim == 1 else list(values)
    # Arrays of no dimension have a length method as well, and are ids.
    flat = len(values) > 0 and not any(hasattr(value, "__len__") and getattr(value, "ndim", 1) for value in values)
    return [values] * num_samples if flat else values
