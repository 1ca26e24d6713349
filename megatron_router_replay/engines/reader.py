"""Results -> replies: one reader for every engine, told by a few names where an engine has its fields.

It reads python objects, their dicts, responses parsed from JSON with `choices` (or `outputs`), whole or as the chunks of a
stream, single choices, requests or results of /generate, and lists of all these.

Choices are placed by their `index`, never by the order in which they arrive or stand in a list. The chunks of a stream have
the request's id in common, but so may whole replies: what makes a chunk is a choice that is not finished, or an index
without those before it. A stream is whole if every choice finishes, once and at its end; chunks that are lost or repeated
before that show in the number of its ids, by the rule of rows and by the counts that the reply states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar

import numpy as np

from megatron_router_replay.checks import shown
from megatron_router_replay.engines.payload import Source, as_token_ids
from megatron_router_replay.engines.reply import (
    Kind,
    Reply,
    StatedCount,
    Usage,
    first_known,
    get_field,
    is_count,
    read_counts,
    read_usage,
)
from megatron_router_replay.engines.tokens import read_spans

_MAX_CHOICES = 1 << 20
"""No request asks for so many; an index beyond it is damaged."""

_Key = TypeVar("_Key")
_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Response:
    """What one response says of all its choices; `holders` are those of its chunks, the last one first."""

    counts: Sequence[StatedCount] = ()
    usage: Usage | None = None
    holders: Sequence[Any] = ()
    prompt_ids: Any = None
    has_one_choice: bool = True


_NO_RESPONSE = _Response()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyReader:
    """Where an engine's results have what is read of them; `read` is what its `Decoder` calls.

    Args:
        engine: for messages.
        routes, prompt_ids, output_ids: the names of these fields of a choice, or of what it holds (`meta_info`, `message`,
            `sglext`).
        counts: fields there that count the choice's tokens, and what they count.
        abort: the finish reason of a request that the engine gave up.
        stream: what the chunks of a stream have of the ids: the "new" ones, "all" so far, either as the counts tell that each
            chunk "states"; None: the engine does not stream routes.
        first_only: the routes of a response are those of its first result alone, so one with several choices is refused.
        largest_prompt: as of `Usage`.
        unwrap: what is done with routes and ids first.
    """

    engine: str
    routes: tuple[str, ...] = ("routed_experts",)
    prompt_ids: tuple[str, ...] = ("prompt_token_ids",)
    output_ids: tuple[str, ...] = ("token_ids",)
    counts: tuple[tuple[str, Kind], ...] = ()
    abort: str = "abort"
    stream: Literal["new", "all", "states"] | None = "new"
    first_only: bool = False
    largest_prompt: bool = False
    unwrap: Callable[[Any, Source], Any] | None = None

    def read(self, result: Any, *, batch: bool) -> list[Reply]:
        """Return the generated sequences of a result; `batch`: a list may hold any results, in order.

        Raises:
            PayloadError: there is no choice, one is lost or there twice, a stream is broken, or its chunks have no id.
        """
        source = self._source()
        responses = _find_responses(result, replace(source, field="the choices"))
        if responses is not None:
            groups = [self._of_response(chunks, choices) for chunks, choices in responses]
        elif self._is_choice(result):
            groups = [[self._of_choice([result])]]
        elif _is_filled(result) and all(map(self._is_choice, result)):
            groups = [[self._of_choice(parts)] for parts in self._bare_choices(result)]
        elif _is_filled(result) and batch:
            groups = [self.read(item, batch=False) for item in result]
        else:
            return [Reply(source=replace(source, sample="the array"), routed_experts=self._unwrapped(result, source))]
        if len(groups) == 1:
            return groups[0]
        replies = [reply for group in groups for reply in group]
        return [
            replace(
                reply, source=replace(reply.source, sample=", ".join([f"sample {i}", reply.source.sample]).strip(", "))
            )
            for i, reply in enumerate(replies)
        ]

    def _source(self, *labels: str) -> Source:
        return Source(engine=self.engine, field=self.routes[0], sample=", ".join(filter(None, labels)))

    def _unwrapped(self, value: Any, source: Source) -> Any:
        return value if self.unwrap is None else self.unwrap(value, source)

    def _is_choice(self, item: Any) -> bool:
        return isinstance(item, Mapping) or any(hasattr(item, name) for name in self.routes)

    def _of_response(self, chunks: Sequence[Any], choices: Sequence[Sequence[Any]]) -> list[Reply]:
        """Return the replies of one response; one that was not streamed is one chunk."""
        name = _request_label(chunks[0])
        source = replace(self._source(name), field="the response")
        if self.stream is None and len(chunks) > 1:
            raise source.error("MRR311: the server does not stream routes: send the request without stream.")
        if self.first_only and len(choices) != 1:
            raise source.error(
                f"MRR312: with {len(choices)} choices it holds the routes of the first result only, the others are lost. Use "
                "/generate for n > 1 and for several prompts. Is this a reply of another engine?"
            )
        # A stream states its usage in the last chunk, or in none.
        counted = next((c for c in reversed(chunks) if get_field(c, "usage") is not None), None)
        counts, usage = read_usage(counted, source=source, num_choices=len(choices), largest_prompt=self.largest_prompt)
        holders = [holder for chunk in reversed(chunks) for holder in _holders(chunk)]
        response = _Response(
            counts=counts,
            usage=usage,
            holders=holders,
            prompt_ids=self._one_prompt(self._values(self.prompt_ids, holders), source),
            has_one_choice=len(choices) == 1,
        )
        replies = [self._of_choice(parts, f"choice {i}", name, response=response) for i, parts in enumerate(choices)]
        return _prove_prompts(replies)

    def _of_choice(self, parts: Sequence[Any], *labels: str, response: _Response = _NO_RESPONSE) -> Reply:
        """Return the reply of one choice; `parts`: the chunks of a stream, or the whole choice."""
        if not labels:
            index = _index(parts[0])
            labels = ("" if index is None else f"choice {index}", _request_label(parts[0]))
        source = self._source(*labels)
        last = parts[-1]
        # The last chunk comes first: it has the counts and the spans of all the output.
        own = [holder for part in reversed(parts) for holder in _holders(part)]
        # What a response says of several choices could be of any of them, but for the prompt.
        known = [*own, *response.holders] if response.has_one_choice else own
        prompts = self._values(self.prompt_ids, own)
        if response.has_one_choice or not prompts:
            prompts.append(response.prompt_ids)
        routes = self._values(self.routes, known)
        if len(routes) > 1 and self.stream != "all":
            raise source.error("MRR311: two chunks of the stream carry routes, expected only the last one.")
        reason = self._find(("finish_reason",), _holders(last))
        is_dict = isinstance(reason, Mapping)
        word, name = reason.get("type") if is_dict else reason, self._find(("weight_version",), known)
        stated = [*response.counts, *self._stated(last, dict(self.counts), source)]
        if is_dict:
            stated += read_counts(reason, {"length": "output"}, prefix="finish_reason", source=source)
        for part in parts[:-1]:  # every chunk repeats the number of prompt tokens
            stated += self._stated(part, {n: kind for n, kind in self.counts if kind == "prompt"}, source)
        return Reply(
            source=source,
            routed_experts=self._unwrapped(routes[0], source) if routes else None,
            prompt_routed_experts=self._find(("prompt_routed_experts",), [*own, *response.holders]),
            prompt_token_ids=self._one_prompt(prompts, source),
            output_token_ids=self._output_ids(parts, source, has_routes=bool(routes)),
            raw_dtype=self._find(("routed_experts_dtype",), known),
            aborted=isinstance(word, str) and word == self.abort,
            counts=tuple(stated),
            usage=response.usage,
            weight_spans=read_spans(self._find(("weight_versions",), known), source=source),
            weight_name=name if isinstance(name, str) else None,
        )

    def _find(self, names: Sequence[str], holders: Iterable[Any]) -> Any:
        for holder in holders:
            for name in names:
                if (value := get_field(holder, name)) is not None:
                    return value
        return None

    def _values(self, names: Sequence[str], holders: Iterable[Any]) -> list[Any]:
        return [value for holder in holders if (value := self._find(names, [holder])) is not None]

    def _one_prompt(self, values: Sequence[Any], source: Source) -> Any:
        """Return the prompt's ids, which must be the same wherever they stand; None where they stand nowhere."""
        prompts = [self._unwrapped(value, source) for value in values if value is not None] or [None]
        if others := [prompt for prompt in prompts if prompt is not prompts[0]]:
            ids = as_token_ids(prompts[0], source=source)
            for other in (as_token_ids(prompt, source=source) for prompt in others):
                if not np.array_equal(ids, other):
                    raise source.error(
                        f"MRR311: states different prompts, of {len(other)} and {len(ids)} ids: is a chunk of another "
                        "request?"
                    )
        return prompts[0]

    def _stated(self, part: Any, names: Mapping[str, Kind], source: Source) -> Iterator[StatedCount]:
        if names:
            yield from read_counts(part, names, prefix="the choice", source=source)
            yield from read_counts(get_field(part, "meta_info"), names, prefix="meta_info", source=source)

    def _output_ids(self, parts: Sequence[Any], source: Source, *, has_routes: bool) -> Any:
        """Return the ids of the output; those of the chunks of a stream follow one another, or are all so far."""
        ids = [self._find(self.output_ids, _holders(part)) for part in parts]
        if len(ids) == 1 or self.stream == "all" or all(value is None for value in ids):
            return self._unwrapped(ids[-1], source)
        if not has_routes:
            return None  # a completions or chat stream, some of whose chunks have no ids and none has routes
        for i, value in enumerate(ids):
            if not isinstance(value, (list, tuple)):
                raise source.error(
                    f"MRR311: chunk {i} of the stream has the ids {shown(value)} while others have a list: it is broken."
                )
        if self.stream == "new":
            return [token for value in ids for token in value]
        output = {name: kind for name, kind in self.counts if kind == "output"}
        stated = [next((c.value for c in self._stated(part, output, source)), None) for part in parts]
        # Two forms, which only the stated counts tell apart: each chunk has all ids so far, or the new ones alone.
        sizes = [len(value) for value in ids]
        is_all, is_new = (
            stated[-1] is not None and all(count in (None, size) for count, size in zip(stated, known))
            for known in (sizes, accumulate(sizes))
        )
        if is_all and any(list(later[: len(earlier)]) != list(earlier) for earlier, later in pairwise(ids)):
            raise source.error("MRR311: a chunk of the stream does not begin with the ids of the one before it.")
        if not (is_all or is_new):
            raise source.error(
                f"MRR311: the chunks of the stream have {sizes[:8]} ids and state {stated[:8]} of them: neither all so "
                "far nor the new ones. A chunk is lost or came twice."
            )
        return list(ids[-1]) if is_all else [token for value in ids for token in value]

    def _bare_choices(self, items: Sequence[Any]) -> list[Sequence[Any]]:
        """Return the parts of each choice of a list of choices, results or chunks without a response around them."""
        source = self._source("the list")
        indexes = [get_field(item, "index") for item in items]
        if self.stream != "states":
            known = [index for index in indexes if isinstance(index, int)]
            # In order they are taken as they stand. Indexes that repeat are of several responses, in the caller's order.
            if len(set(known)) > 1 and len(set(known)) == len(known) and known != sorted(known):
                raise source.error(
                    f"MRR312: has index {shown(indexes)} in this order, without their response: are they in order, or "
                    "of several responses? Pass the response itself, or decode each choice."
                )
            return [[item] for item in items]
        has_index = any(index is not None for index in indexes)
        if has_index and not all(type(index) is int and 0 <= index < len(items) for index in indexes):
            raise source.error(f"MRR312: has index {shown(indexes)}: all chunks of one request must have one, or none.")
        if len(items) == 1:  # it may be the last chunk of a stream, or one that says nothing of its end
            return [items]
        keys: list[Any] = indexes
        if not has_index:
            # Whole results may share an id, which says nothing then.
            names = [_request(item) if any(map(_is_unfinished, items)) else None for item in items]
            keys = [name if isinstance(name, str) else i for i, name in enumerate(names)]
        streams = _join_chunks(zip(keys, items), source)
        for key, chunks in streams.items():
            # As texts: an id may be anything, and arrays do not compare to one truth.
            if len({shown(_request(chunk), 200) for chunk in chunks}) > 1:
                raise source.error(f"MRR311: index {key} is of several requests: decode each request by itself.")
        return list(streams.values()) if not has_index else _in_order(streams, list(streams), source)


def _holders(item: Any) -> list[Any]:
    """Return where a choice, a chunk or a response may have its fields."""
    inside = (get_field(item, name) for name in ("meta_info", "sglext", "message", "metadata"))
    return [item, *(holder for holder in inside if holder is not None)]


def _request(item: Any) -> Any:
    inside = get_field(item, "meta_info")
    return first_known(get_field(item, "request_id"), get_field(item, "id"), get_field(inside, "id"))


def _request_label(item: Any) -> str:
    request = _request(item)
    return f"request {str(request)[:60]}" if isinstance(request, str) or is_count(request) else ""


def _index(choice: Any) -> int | None:
    index = get_field(choice, "index")
    return index if type(index) is int and 0 <= index < _MAX_CHOICES else None


def _is_filled(result: Any) -> bool:
    return isinstance(result, (list, tuple)) and len(result) > 0


def _prove_prompts(replies: list[Reply]) -> list[Reply]:
    """Mark the choices whose prompt is that of the first one; only there do vLLM 0.21's prompt routes belong."""
    if len(replies) == 1 or all(reply.prompt_routed_experts is None for reply in replies):
        return replies
    # Without ids, n samples of one prompt look like one sample of each of n prompts.
    known = all(reply.prompt_token_ids is not None for reply in replies)
    prompts = [as_token_ids(reply.prompt_token_ids, source=reply.source) for reply in replies] if known else []
    is_first = [np.array_equal(prompt, prompts[0]) for prompt in prompts] or [False] * len(replies)
    return [replace(reply, prompt_is_proven=proven) for reply, proven in zip(replies, is_first)]


def _find_responses(result: Any, source: Source) -> list[tuple[Sequence[Any], list[Sequence[Any]]]] | None:
    """Return (chunks, parts of each choice) of the responses that a result is, in order of appearance; None: it is none."""
    if _has_choices(result):
        return [_whole(result, source)]
    if not _is_filled(result) or not all(map(_has_choices, result)):
        return None
    # One chunk makes chunks of all: whether a finished reply among them is whole or the last chunk of a stream, its id tells.
    if not any(_is_chunk(item, source) for item in result):
        return [_whole(item, source) for item in result]
    streams: dict[Any, list[Any]] = {}
    for item in result:
        request = _request(item)
        streams.setdefault(request if isinstance(request, (str, int)) else None, []).append(item)
    if None in streams and len(streams) > 1:
        raise source.error(
            f"MRR311: {len(streams[None])} of {len(result)} chunks have no request_id or id, so they cannot be told apart."
        )
    return [_joined(chunks, source) for chunks in streams.values()]


def _has_choices(item: Any) -> bool:
    if isinstance(item, Mapping):
        return "choices" in item or "outputs" in item
    return getattr(item, "outputs", None) is not None


def _choices(response: Any, source: Source) -> list[tuple[int, Any]]:
    """Return (index, choice) of each choice; the index of choices that all have none is their position."""
    is_dict = isinstance(response, Mapping)
    items = response["choices" if "choices" in response else "outputs"] if is_dict else response.outputs
    if not isinstance(items, (list, tuple)):
        raise source.error(f"MRR301: of the response are {type(items).__name__}, expected a list.")
    indexes = [get_field(item, "index") for item in items]
    if all(index is None for index in indexes):
        return list(enumerate(items))
    if any(_index(item) is None for item in items):
        raise source.error(f"MRR312: have index {shown(indexes)}: each must be an integer of 0 or more.")
    return list(zip(indexes, items))


def _is_chunk(response: Any, source: Source) -> bool:
    choices = _choices(response, source)
    kind = get_field(response, "object")
    # The chunk with the usage has no choice, and vLLM's generate stream sends one choice at a time under its own index.
    return (
        any(_is_unfinished(choice) or index >= len(choices) for index, choice in choices)
        or not choices
        or (isinstance(kind, str) and kind.endswith(".chunk"))
    )


def _is_unfinished(choice: Any) -> bool:
    """Return whether a choice says that it is not finished: it has the field, and nothing in it."""
    for holder in (choice, get_field(choice, "meta_info")):
        if "finish_reason" in holder if isinstance(holder, Mapping) else hasattr(holder, "finish_reason"):
            return get_field(holder, "finish_reason") is None
    return False


def _whole(response: Any, source: Source) -> tuple[Sequence[Any], list[Sequence[Any]]]:
    choices = _choices(response, source)
    if not choices:
        raise source.error("MRR301: of the response are none.")
    return [response], [[choice] for choice in _in_order(dict(choices), [index for index, _ in choices], source)]


def _joined(chunks: Sequence[Any], source: Source) -> tuple[Sequence[Any], list[Sequence[Any]]]:
    parts = _join_chunks((pair for chunk in chunks for pair in _choices(chunk, source)), source)
    if not parts:
        raise source.error("MRR311: of the stream are none.")
    return chunks, _in_order(parts, list(parts), source)


def _join_chunks(chunks: Iterable[tuple[_Key, Any]], source: Source) -> dict[_Key, Sequence[Any]]:
    """Return the chunks of each stream, in order, from (stream, chunk) pairs in the order in which they came.

    Raises:
        PayloadError: a chunk came behind the one that finished its stream, or a stream is not finished.
    """
    streams: dict[_Key, list[Any]] = {}
    for key, chunk in chunks:
        stream = streams.setdefault(key, [])
        if stream and not _is_unfinished(stream[-1]):
            raise source.error(
                f"MRR311: the stream has a chunk of index {shown(key)} behind the one that finished it: a chunk came "
                "twice, or replies that share an id or index lie among the chunks. Decode each stream by itself."
            )
        stream.append(chunk)
    unfinished = [key for key, stream in streams.items() if _is_unfinished(stream[-1])]
    if unfinished:
        raise source.error(
            f"MRR311: the stream ends before index {unfinished[:8]} is finished: missing its last chunk."
        )
    return dict(streams)


def _in_order(items: Mapping[int, _Item], indexes: Sequence[int], source: Source) -> list[_Item]:
    """Return items by their index, or raise PayloadError unless `indexes` are each of 0..n-1 once."""
    if sorted(indexes) != list(range(len(indexes))):
        raise source.error(
            f"MRR312: have index {list(indexes)[:8]}, expected each of 0..{len(indexes) - 1} once: one is lost or "
            "there twice."
        )
    return [items[index] for index in range(len(indexes))]
