"""The replies of SGLang's runtime and of its JAX sibling: what `sglang` and `sglang_jax` share.

Both send `meta_info["routed_experts"]`, base64 of raw little-endian int32 [S - 1 - start, all hidden layers, topk] in C
order, without a shape, so the model's config and the number of tokens must account for every byte.

The chunks of a /generate stream state the number of output tokens so far, and `output_ids` are all of them or, with
incremental streaming, the new ones; every chunk must fit the count. A request of several samples streams them with an
`index`. Whole results are never taken for chunks, also if they share a request id: they are finished.

Source: SGLang 0.5.7 to 0.5.23, sglang-jax at commit cddbf6f, and captures of both (tests/unit/data/engine_captures).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megatron_router_replay.engines.front import Decoder
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.options import DecodeOptions
from megatron_router_replay.engines.payload import Source, as_array, decode_base64, parse_int32, short_repr
from megatron_router_replay.engines.reply import (
    Kind,
    Reply,
    first_known,
    get_field,
    read_counts,
    read_usage,
    says,
)
from megatron_router_replay.engines.responses import Response, find_responses, in_order, is_response, join_chunks
from megatron_router_replay.engines.rows import RowLayout, most_ids
from megatron_router_replay.engines.tokens import SampleTokens
from megatron_router_replay.engines.weights import read_spans

_COUNTS: Mapping[str, Kind] = {"prompt_tokens": "prompt", "completion_tokens": "output"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """What differs between the two engines.

    Args:
        routes_per_choice: OpenAI endpoints send routes with each choice; False: once for the response, those of its
            first result.
        ids_on_dense_layers: model types whose dense layers hold ids instead of filler.
    """

    name: str
    routes_per_choice: bool
    ids_on_dense_layers: tuple[str, ...] = ()

    def decoder(self) -> Decoder:
        """Return what the engine's module decodes with."""
        return Decoder(
            name=self.name,
            read=self.read,
            rows=self.rows,
            if_missing=(
                "Start the server with --enable-return-routed-experts and send return_routed_experts=true with each request."
            ),
        )

    def read(self, result: Any, *, batch: bool) -> list[Reply]:
        """Return the generated sequences of a response: of /generate (one, a list, a stream) or of an OpenAI endpoint."""
        responses = find_responses(result, engine=self.name)
        if responses is not None:
            return [reply for response in responses for reply in self._of_openai(response)]
        if isinstance(result, Mapping):
            return [self._of_generate([result], 0)]
        if isinstance(result, (list, tuple)) and result:
            if all(isinstance(item, Mapping) and not is_response(item) for item in result):
                streams = self._streams(result)
                return [self._of_generate(chunks, i) for i, chunks in enumerate(streams)]
            if batch:
                return [reply for item in result for reply in self.read(item, batch=False)]
        return [Reply(source=self._source("the result"), routed_experts=result)]

    def rows(self, reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
        """Return the rows [rows, all hidden layers, topk] of a base64 string, of the raw bytes or of an array."""
        value, source = reply.routed_experts, reply.source
        columns, topk = model.num_layers, model.topk
        if isinstance(value, str):
            value = decode_base64(value, source=source, max_bytes=4 * most_ids(model, tokens, options))
        if isinstance(value, (bytes, bytearray, memoryview)):
            raw, expected = bytes(value), max(tokens.num_tokens - options.start - 1, 0)
            if len(raw) != expected * columns * topk * 4:
                _explain_size(len(raw), (expected, expected + 1), model, source)
            array = parse_int32(raw, source=source, num_columns=columns, topk=topk)
        else:
            array = as_array(value, source=source)
            # What a caller decoded from base64 by himself has no shape.
            if array.ndim == 1 and array.size % (columns * topk) == 0:
                array = array.reshape(-1, columns, topk)
        return RowLayout(parts=(array,), filler_columns=() if model.model_type in self.ids_on_dense_layers else None)

    def _source(self, label: str) -> Source:
        return Source(engine=self.name, field="routed_experts", sample=label)

    def _streams(self, items: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
        """Return the chunks of each sample, in order of their index where they have one, else of their appearance."""
        source = self._source("the results")
        indexes = [item.get("index") for item in items]
        if any(index is not None for index in indexes) and not all(
            type(index) is int and 0 <= index < len(items) for index in indexes
        ):
            raise source.error(f"have index {short_repr(indexes)}: all chunks of one request must have one, or none.")
        if len(items) == 1:  # it may be the last chunk of a stream, or one that says nothing of its end
            return [[items[0]]]
        keys: list[Any] = indexes
        if indexes[0] is None:
            keys = list(range(len(items)))
            # Whole results may share an id, which says nothing then.
            if any(map(_is_unfinished, items)):
                keys = [key if isinstance(key := _request(item), str) else i for i, item in enumerate(items)]
        streams = join_chunks(zip(keys, items), is_unfinished=_is_unfinished, source=source)
        for key, chunks in streams.items():
            if any(_request(chunk) != _request(chunks[0]) for chunk in chunks):
                raise source.error(f"index {key} is of several requests: decode each request by itself.")
        return list(streams.values()) if indexes[0] is None else in_order(streams, list(streams), source=source)

    def _of_generate(self, chunks: Sequence[Mapping[str, Any]], position: int) -> Reply:
        """Return the reply of one result, or of the chunks of its stream."""
        last = chunks[-1]
        meta = last.get("meta_info")
        request = _request(last)
        source = self._source(
            f"sample {position}" + (f", request {short_repr(request)}" if isinstance(request, (str, int)) else "")
        )
        reason = get_field(meta, "finish_reason")
        spans = read_spans(get_field(meta, "weight_versions"), source=source)
        counts = [
            *read_counts(meta, _COUNTS, prefix="meta_info", source=source),
            *read_counts(reason, {"length": "output"}, prefix="finish_reason", source=source),
        ]
        for chunk in chunks[:-1]:
            # Every chunk repeats the number of prompt tokens.
            counts += read_counts(
                chunk.get("meta_info"), {"prompt_tokens": "prompt"}, prefix="meta_info", source=source
            )
        name = get_field(meta, "weight_version")
        return Reply(
            source=source,
            routed_experts=first_known(get_field(meta, "routed_experts"), last.get("routed_experts")),
            output_token_ids=last.get("output_ids") if len(chunks) == 1 else self._streamed_ids(chunks, source),
            aborted=says(_reason_type(reason), "abort"),
            counts=tuple(counts),
            weight_spans=spans,
            weight_name=name if isinstance(name, str) else None,
        )

    def _streamed_ids(self, chunks: Sequence[Mapping[str, Any]], source: Source) -> list[Any] | None:
        """Return all output ids of a stream, whose chunks hold all so far or only the new ones."""
        ids = [chunk.get("output_ids") for chunk in chunks]
        if all(value is None for value in ids):
            return None
        lists = [value for value in ids if isinstance(value, (list, tuple))]
        if len(lists) != len(ids):
            raise source.error("a chunk of the stream has no output_ids while others have: it is broken.")
        stated = [_completion_tokens(chunk, source) for chunk in chunks]
        # Two forms, which only the stated counts tell apart: each chunk has all ids so far, or the new ones alone.
        sizes = [len(value) for value in lists]
        sums = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        if all(count in (None, size) for count, size in zip(stated, sizes)) and stated[-1] is not None:
            for earlier, later in pairwise(lists):
                if list(later[: len(earlier)]) != list(earlier):
                    raise source.error("a chunk of the stream does not begin with the output_ids of the one before it.")
            return list(lists[-1])
        if all(count in (None, size) for count, size in zip(stated, sums)) and stated[-1] is not None:
            return [token for value in lists for token in value]
        raise source.error(
            f"the chunks of the stream have {sizes[:8]} output_ids and state completion_tokens {stated[:8]}: neither all so "
            "far nor the new ones. A chunk is lost or came twice."
        )

    def _of_openai(self, response: Response) -> list[Reply]:
        """Return the replies of a completions or chat response, or of the chunks of its stream."""
        num_choices = len(response.choices)
        # A stream states its usage in the last chunk, or in none.
        counted = next((c for c in reversed(response.chunks) if get_field(c, "usage") is not None), None)
        source = self._source("the response" + response.name)
        counts, usage = read_usage(counted, source=source, num_choices=num_choices)
        shared = [
            routes
            for c in response.chunks
            if (routes := get_field(get_field(c, "sglext"), "routed_experts")) is not None
        ]
        if not self.routes_per_choice and (num_choices != 1 or len(shared) > 1):
            raise source.error(
                f"sglext.routed_experts of a response with {num_choices} choices holds the routes of the first result only, "
                "the others are lost. Use /generate for n > 1 and for several prompts."
            )
        metadata = first_known(*(get_field(c, "metadata") for c in reversed(response.chunks)))
        # One metadata for the whole response: of several choices it cannot say whose tokens its spans are.
        spans = read_spans(get_field(metadata, "weight_versions"), source=source) if num_choices == 1 else ()
        name = get_field(metadata, "weight_version") if num_choices == 1 else None
        replies = []
        for index, parts in enumerate(response.choices):
            routes = [found for part in parts if (found := _routes_of_choice(part)) is not None] + (
                shared if num_choices == 1 else []
            )
            label = self._source(f"choice {index}{response.name}")
            if len(routes) > 1:
                raise label.error("two chunks of the stream carry routes, expected only the last one.")
            replies.append(
                Reply(
                    source=label,
                    routed_experts=routes[0] if routes else None,
                    aborted=says(_reason_type(get_field(parts[-1], "finish_reason")), "abort"),
                    counts=counts,
                    usage=usage,
                    weight_spans=spans,
                    weight_name=name if isinstance(name, str) else None,
                )
            )
        return replies


def _is_unfinished(item: Mapping[str, Any]) -> bool:
    """Return whether a result says that it is not finished: it is a chunk of a stream."""
    meta = item.get("meta_info")
    return isinstance(meta, Mapping) and "finish_reason" in meta and meta["finish_reason"] is None


def _request(item: Mapping[str, Any]) -> Any:
    return get_field(item.get("meta_info"), "id")


def _reason_type(reason: Any) -> Any:
    return reason.get("type") if isinstance(reason, Mapping) else reason


def _completion_tokens(chunk: Mapping[str, Any], source: Source) -> int | None:
    counts = read_counts(chunk.get("meta_info"), {"completion_tokens": "output"}, prefix="meta_info", source=source)
    return counts[0].value if counts else None


def _routes_of_choice(item: Any) -> Any:
    holders = (item, get_field(item, "meta_info"), get_field(item, "sglext"))
    return first_known(*(get_field(holder, "routed_experts") for holder in holders))


def _explain_size(size: int, expected: Sequence[int], model: ModelRoutingInfo, source: Source) -> None:
    """Raise if the size fits a well-known mistake; else leave it to the check of the rows."""
    wide, moe = model.topk + model.num_shared_experts, len(model.moe_layer_numbers)
    for count in expected:
        if count > 0 and wide != model.topk and size == count * model.num_layers * wide * 4:
            raise source.error(
                f"{size} bytes are {count} rows of {wide} experts a token: the model's topk is {model.topk}, and the "
                f"{model.num_shared_experts} shared experts, which are not routed, are appended."
            )
        if count > 0 and moe != model.num_layers and size == count * moe * model.topk * 4:
            raise source.error(
                f"{size} bytes are {count} rows of {moe} layers: the MoE layers only, expected all {model.num_layers} "
                "hidden layers. Is this the config of the served model?"
            )
