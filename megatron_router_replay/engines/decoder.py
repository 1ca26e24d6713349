"""`decode` and `decode_batch`: every engine is a `Decoder`.

Engines differ in the table of their fields (`ReplyReader`) and in the layout of their arrays (`rows`). The caller's options,
the tokens that the rows belong to, the number of legal rows and the check of each row are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np

from megatron_router_replay.checks import check_options
from megatron_router_replay.engines.model_info import ModelLike, ModelRoutingInfo, as_model_info
from megatron_router_replay.engines.options import (
    DecodeOptions,
    SampleOptions,
    SharedOptions,
    TokenIds,
)
from megatron_router_replay.engines.reader import Reply, ReplyReader
from megatron_router_replay.engines.sample_rows import RowLayout, SampleRows, build_trace
from megatron_router_replay.engines.tokens import SampleTokens, resolve_tokens
from megatron_router_replay.errors import PayloadError
from megatron_router_replay.trace import RoutingTrace

LayRows = Callable[[Reply, ModelRoutingInfo, SampleTokens], RowLayout]
"""Reads the arrays of a reply that has routes; returns them with their layers and legal last row."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Decoder(ReplyReader):
    """Turns the results of an engine into a RoutingTrace.

    Args:
        rows: a reply -> its arrays.
        setup: how to start the engine and what to send, for the message about a reply without routes.
        complete: a reply -> the same with what the engine says of it in its own way; the caller's options say what is known.
    """

    rows: LayRows
    setup: str = ""
    complete: Callable[[Reply, ModelRoutingInfo, DecodeOptions], Reply] = lambda reply, model, options: reply

    def decode(self, result: Any, *, model: ModelLike, **options: Unpack[SampleOptions]) -> RoutingTrace:
        """Return the routes of a sample, a row for each of its S tokens.

        The last row, and those before `start`, have no route.

        Args:
            result: a reply of the engine in any form that its file in `engines/decoders` lists, or the list of all chunks
                of a stream.
            model: ModelRoutingInfo, or the Hugging Face config as a dict, object or path.
            options: token_ids, start and the other fields of `engines.DecodeOptions`.

        Returns:
            [S, MoE layers, topk] with sequence_lengths (S,), and token_ids and weight_version where known.

        Raises:
            PayloadError: routes are missing, do not fit the tokens or the model, or are damaged; the reply's own counts
                disagree with the tokens; there are several samples.
        """
        check_options("decode", options, SampleOptions.__annotations__)
        info, reply = as_model_info(model), self.read_one(result)
        return build_trace([self.sample(reply, DecodeOptions(**options), info)], model=info)

    def decode_batch(
        self,
        results: Any,
        *,
        model: ModelLike,
        token_ids: Sequence[TokenIds] | None = None,
        prompt_token_ids: TokenIds | Sequence[TokenIds] | None = None,
        num_tokens: Sequence[int] | None = None,
        start: int | Sequence[int] = 0,
        sample_ids: Sequence[str] | None = None,
        **options: Unpack[SharedOptions],
    ) -> RoutingTrace:
        """Return the routes of all samples of a response or of a list of results.

        Args:
            results: a response (its choices come sorted by their index) or a list of results, each as `decode` takes it
                (the chunks of a stream are one result, a list in the list).
            model: as for `decode`.
            token_ids, num_tokens, sample_ids: one for each sample, in the order of the result.
            start: one for all, or one for each sample.
            prompt_token_ids: the ids of the one prompt that all samples have, or a list with the ids of each sample.
            options: the other fields of `engines.DecodeOptions`, for all samples.

        Returns:
            The samples in order, with sequence_lengths.

        Raises:
            PayloadError: as for `decode`; a list has another length than the samples.
        """
        check_options("decode_batch", options, SampleOptions.__annotations__)
        info, replies = as_model_info(model), self._read_all(results)
        given: dict[str, Any] = {
            "token_ids": token_ids,
            "prompt_token_ids": [prompt_token_ids] * len(replies) if _is_flat(prompt_token_ids) else prompt_token_ids,
            "num_tokens": num_tokens,
            "start": [start] * len(replies) if isinstance(start, (int, np.integer)) else start,
            "sample_ids": sample_ids,
        }
        given = {name: values for name, values in given.items() if values is not None}
        for name, values in given.items():
            if not _is_list(values):
                raise PayloadError(
                    f"MRR312: {name} is {type(values).__name__}, expected a list with one entry a sample."
                )
            if len(values) != len(replies):
                raise PayloadError(
                    f"MRR312: {self.title}: {len(values)} {name} for {len(replies)} samples: give one for each."
                )
        given["sample_id"] = given.pop("sample_ids", [None] * len(replies))
        samples = []
        for i, reply in enumerate(replies):
            own = {name: values[i] for name, values in given.items()}
            samples.append(self.sample(reply, DecodeOptions(**own, **options), info))
        return build_trace(samples, model=info)

    def read_one(self, result: Any) -> Reply:
        """Return the only generated sequence of a result; raise PayloadError if it has several choices."""
        first, *others = self.read(result)
        if others:
            raise PayloadError(
                f"MRR312: {self.title}: the response has {1 + len(others)} choices, expected one: decode_batch reads several."
            )
        return first

    def _read_all(self, results: Any) -> list[Reply]:
        if not isinstance(results, (list, tuple)):
            return self.read(results)
        if not results:
            raise PayloadError(f"MRR301: {self.title}: the list of results is empty.")
        replies = [reply for result in results for reply in self.read(result)]
        names = [", ".join(filter(None, (f"sample {i}", reply.source.sample))) for i, reply in enumerate(replies)]
        return [replace(reply, source=replace(reply.source, sample=name)) for reply, name in zip(replies, names)]

    def sample(self, reply: Reply, options: DecodeOptions, model: ModelRoutingInfo) -> SampleRows:
        """Return the arrays of a reply and their tokens."""
        has_routes = reply["routed_experts"] is not None or reply["prompt_routed_experts"] is not None
        lost = f"MRR302: missing, though the model has MoE layers: it would train on live routes. {self.setup}"
        # Before the tokens: a reply without routes often has no ids either, and the advice to pass ids would mislead.
        if not has_routes and not reply.aborted:
            raise reply.source.error(lost)
        reply = self.complete(reply, model, options)
        if not has_routes:  # nor a version that chose them, whatever names the caller's numbers are for
            options = replace(options, weight_version=None)
        tokens = resolve_tokens(reply, options)
        # An aborted request that had generated tokens had routes for them.
        may_be_empty = reply.aborted and tokens.nothing_generated
        if not has_routes and not may_be_empty:
            raise reply.source.error(lost)
        none = RowLayout(arrays=(), layer_numbers=model.moe_layer_numbers)
        layout = self.rows(reply, model, tokens) if has_routes else none
        return SampleRows(
            source=reply.source,
            layout=layout,
            tokens=tokens,
            options=options,
            may_be_empty=may_be_empty,
            ids_field=reply.request_fields.token_ids,
        )


def _is_list(values: Any) -> bool:
    """Return whether values are a list, a tuple, or an array with an axis."""
    has_items = hasattr(values, "__len__") and hasattr(values, "__getitem__")
    return has_items and not isinstance(values, (str, bytes, Mapping)) and getattr(values, "ndim", 1) > 0


def _is_flat(prompts: Any) -> bool:
    """Return whether this is one list of token ids, the prompt of all samples, and not a list of such lists."""
    return _is_list(prompts) and len(prompts) > 0 and not _is_list(prompts[0])
