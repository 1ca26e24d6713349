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
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, TypeVar

import numpy as np

from megatron_router_replay.checks import shown
from megatron_router_replay.engines.payload import Source, as_token_ids, is_tensor
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

FIELDS = {
    "routed_experts": ("routed_experts",),
    "prompt_token_ids": ("prompt_token_ids",),
    "output_token_ids": ("token_ids",),
}
"""What is read of every engine, and the names that most give it."""

_Key = TypeVar("_Key")
_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Response:
    """What one response says of all its choices.

    Args:
        holders: where it may have fields: its chunks, the last one first, and what they hold.
        prompt_ids: the prompt, or None.
        output_ids: the output of each choice, wherever the response states it.
    """

    counts: Sequence[StatedCount] = ()
    usage: Usage | None = None
    holders: Sequence[Any] = ()
    prompt_ids: Any = None
    output_ids: Sequence[Sequence[Any]] = ((),)

    @property
    def has_one_choice(self) -> bool:
        return len(self.output_ids) == 1


_NO_RESPONSE = _Response()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyReader:
    """Where an engine's results have what is read of them; `read` is what its `Decoder` calls.

    Args:
        engine: for messages.
        fields: our name of a field -> the names that the engine gives it, on a choice or on what `inside` names. Those of
            `FIELDS` are read of every engine, the others are for its own `rows`.
        inside: what a response or a choice may hold fields in.
        shared: fields of a response that are of all its choices.
        listed: fields of a response that have an entry for each choice, by the names that the engine gives them.
        counts: fields that count the choice's tokens, and what they count.
        abort: the finish reason of a request that the engine gave up.
        stream: what the chunks of a stream have of the ids: the "new" ones, or, as the "counted" tokens tell, new ones or all
            so far; None: the last chunk has all, or the engine does not stream routes.
        largest_prompt: as of `Usage`.
        keep_all: what to ask the engine for, where a response of several choices has the routes of the first alone.
        unwrap: what is done with routes and ids first.
        prove: what is left to show of the replies of one response.
    """

    engine: str
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: FIELDS)
    inside: tuple[str, ...] = ("message", "metadata")
    shared: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()
    counts: tuple[tuple[str, Kind], ...] = ()
    abort: str = "abort"
    stream: Literal["new", "counted"] | None = None
    largest_prompt: bool = False
    keep_all: str = "Send one request a choice."
    unwrap: Callable[[Any, Source], Any] | None = None
    prove: Callable[[list[Reply]], list[Reply]] | None = None

    def read(self, result: Any, *, batch: bool) -> list[Reply]:
        """Return the generated sequences of a result; `batch`: a list may hold any results, in order.

        Raises:
            PayloadError: there is no choice, one is lost or there twice, a stream is broken, or its chunks have no id.
        """
        source = self._source()
        responses = self._find_responses(result, replace(source, field="the choices"))
        if responses is not None:
            groups = [self._of_response(chunks, choices) for chunks, choices in responses]
        elif self._is_choice(result):
            groups = [[self._of_choice([result])]]
        elif _is_filled(result) and all(map(self._is_choice, result)):
            groups = [[self._of_choice(parts)] for parts in self._bare_choices(result)]
        elif _is_filled(result) and batch:
            groups = [self.read(item, batch=False) for item in result]
        else:
            fields = {"routed_experts": self._unwrapped(result, source)}
            return [Reply(source=replace(source, sample="the array"), fields=fields)]
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
        name = self.fields["routed_experts"][0]
        return Source(engine=self.engine, field=name, sample=", ".join(filter(None, labels)))

    def _unwrapped(self, value: Any, source: Source) -> Any:
        return value if self.unwrap is None else self.unwrap(value, source)

    def _is_choice(self, item: Any) -> bool:
        if isinstance(item, Mapping):
            return not is_tensor(item)
        return any(hasattr(item, name) for name in self.fields["routed_experts"])

    def _holders(self, item: Any) -> list[Any]:
        """Return where a choice, a chunk or a response may have its fields: itself and, two deep, what `inside` names."""
        holders = [item]
        for _ in range(2):
            inside = (get_field(holder, name) for holder in holders for name in self.inside)
            holders += [
                holder for holder in inside if holder is not None and not any(holder is known for known in holders)
            ]
        return holders

    def _values(self, name: str, holders: Iterable[Any]) -> list[Any]:
        """Return the values of a field, at most one of each holder."""
        found = (first_known(*(get_field(holder, known) for known in self.fields[name])) for holder in holders)
        return [value for value in found if value is not None]

    def _of_response(self, chunks: Sequence[Any], choices: Sequence[Sequence[Any]]) -> list[Reply]:
        """Return the replies of one response; one that was not streamed is one chunk."""
        name = self._request_label(chunks[0])
        source = replace(self._source(name), field="the response")
        if self.stream is None and len(chunks) > 1:
            raise source.error(
                "MRR311: chunks of this engine are not joined: pass the last one, if it has all, or send the request without "
                "stream."
            )
        holders = [holder for chunk in reversed(chunks) for holder in self._holders(chunk)]
        if len(choices) > 1 and self._values("routed_experts", holders):
            own = [self._values("routed_experts", self._holders(parts[-1])) for parts in choices]
            if not any(own):
                raise source.error(
                    f"MRR312: with {len(choices)} choices it holds the routes of the first result only, the others are lost. "
                    f"{self.keep_all} Is this a reply of another engine?"
                )
        # A stream states its usage in the last chunk, or in none.
        counted = next((c for c in reversed(chunks) if get_field(c, "usage") is not None), None)
        counts, usage = read_usage(counted, source=source, num_choices=len(choices), largest_prompt=self.largest_prompt)
        response = _Response(
            counts=counts,
            usage=usage,
            holders=holders,
            prompt_ids=_agreed_ids(self._unwrapped_all("prompt_token_ids", holders, source), "prompts", source),
            output_ids=self._outputs_of_response(holders, len(choices), source),
        )
        replies = [self._of_choice(parts, name, number=i, response=response) for i, parts in enumerate(choices)]
        return replies if self.prove is None else self.prove(replies)

    def _unwrapped_all(self, name: str, holders: Iterable[Any], source: Source) -> list[Any]:
        return [self._unwrapped(value, source) for value in self._values(name, holders)]

    def _outputs_of_response(self, holders: Iterable[Any], num_choices: int, source: Source) -> list[list[Any]]:
        """Return what a response states, beside its choices, of the output of each."""
        outputs: list[list[Any]] = [[] for _ in range(num_choices)]
        for holder in holders:
            for name in self.fields["output_token_ids"]:
                value = get_field(holder, name)
                if value is not None and name in self.listed:
                    if not isinstance(value, (list, tuple)) or len(value) != num_choices:
                        size = len(value) if hasattr(value, "__len__") else shown(value)
                        raise source.error(f"MRR312: has {size} {name} for {num_choices} choices.")
                    for output, ids in zip(outputs, value):
                        output.append(ids)
                elif value is not None and num_choices == 1:
                    outputs[0].append(value)
        return outputs

    def _of_choice(
        self, parts: Sequence[Any], *labels: str, number: int = 0, response: _Response = _NO_RESPONSE
    ) -> Reply:
        """Return the reply of one choice; `parts`: the chunks of a stream, or the whole choice."""
        if response is _NO_RESPONSE:
            index = _index(parts[0])
            labels = ("" if index is None else f"choice {index}", self._request_label(parts[0]))
        else:
            labels = (f"choice {number}", *labels)
        source = self._source(*labels)
        last = parts[-1]
        # The last chunk comes first: it has the counts and the spans of all the output.
        own = [holder for part in reversed(parts) for holder in self._holders(part)]
        # What a response says of several choices could be of any of them, but for the prompt.
        known = [*own, *response.holders] if response.has_one_choice else own
        fields = {name: first_known(*self._values(name, known)) for name in self.fields}
        fields |= {name: first_known(*self._values(name, [*own, *response.holders])) for name in self.shared}
        routes = self._values("routed_experts", known)
        if any(not _is_same(value, routes[0]) for value in routes):
            raise source.error(
                "MRR311: two parts of it carry routes, and different ones: expected the last chunk alone."
            )
        fields["routed_experts"] = self._unwrapped(routes[0], source) if routes else None
        prompts = self._unwrapped_all("prompt_token_ids", own, source)
        if (response.has_one_choice or not prompts) and response.prompt_ids is not None:
            prompts.append(response.prompt_ids)
        fields["prompt_token_ids"] = _agreed_ids(prompts, "prompts", source)
        outputs = [self._output_ids(parts, source, has_routes=bool(routes)), *response.output_ids[number]]
        fields["output_token_ids"] = _agreed_ids([ids for ids in outputs if ids is not None], "outputs", source)
        reason = first_known(*(get_field(holder, "finish_reason") for holder in self._holders(last)))
        is_dict = isinstance(reason, Mapping)
        word = reason.get("type") if is_dict else reason
        name = first_known(*(get_field(holder, "weight_version") for holder in known))
        stated = [*response.counts, *self._stated(last, dict(self.counts), source)]
        if is_dict:
            stated += read_counts(reason, {"length": "output"}, prefix="finish_reason", source=source)
        for part in parts[:-1]:  # every chunk repeats the number of prompt tokens
            stated += self._stated(part, {n: kind for n, kind in self.counts if kind == "prompt"}, source)
        return Reply(
            source=source,
            fields=fields,
            aborted=isinstance(word, str) and word == self.abort,
            counts=tuple(stated),
            usage=response.usage,
            weight_spans=read_spans(first_known(*(get_field(h, "weight_versions") for h in known)), source=source),
            weight_name=name if isinstance(name, str) else None,
        )

    def _stated(self, part: Any, names: Mapping[str, Kind], source: Source) -> Iterator[StatedCount]:
        if names:
            yield from read_counts(part, names, prefix="the choice", source=source)
            for place in self.inside:
                yield from read_counts(get_field(part, place), names, prefix=place, source=source)

    def _output_ids(self, parts: Sequence[Any], source: Source, *, has_routes: bool) -> Any:
        """Return the ids of the output; those of the chunks of a stream follow one another, or are all so far."""
        if len(parts) == 1:
            return _agreed_ids(
                self._unwrapped_all("output_token_ids", self._holders(parts[0]), source), "outputs", source
            )
        ids = [first_known(*self._values("output_token_ids", self._holders(part))) for part in parts]
        # Of a completions or chat stream some chunks have no ids and none has routes.
        if not has_routes or all(value is None for value in ids):
            return None
        for i, value in enumerate(ids):
            if not isinstance(value, (list, tuple)):
                raise source.error(
                    f"MRR311: chunk {i} of the stream has the ids {shown(value)} while others have a list: it is broken."
                )
        joined = [token for value in ids for token in value]
        if self.stream != "counted":
            return joined
        output = {name: kind for name, kind in self.counts if kind == "output"}
        stated = [next((c.value for c in self._stated(part, output, source)), None) for part in parts]
        # The last chunk of a stream that repeats itself has all that the earlier ones had.
        if stated[-1] == len(ids[-1]):
            return list(ids[-1])
        sizes = list(accumulate(map(len, ids)))
        if stated[-1] is None or any(count not in (None, size) for count, size in zip(stated, sizes)):
            raise source.error(
                f"MRR311: the chunks of the stream have {list(map(len, ids))[:8]} ids and state {stated[:8]} of them: "
                "neither all so far nor the new ones. A chunk is lost or came twice."
            )
        return joined

    def _bare_choices(self, items: Sequence[Any]) -> list[Sequence[Any]]:
        """Return the parts of each choice of a list of choices, results or chunks without a response around them."""
        source = self._source("the list")
        indexes = [get_field(item, "index") for item in items]
        if self.stream != "counted":
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
            names = [self._request(item) if any(map(self._is_unfinished, items)) else None for item in items]
            keys = [name if isinstance(name, str) else i for i, name in enumerate(names)]
        streams = self._join_chunks(zip(keys, items), source)
        for key, chunks in streams.items():
            # As texts: an id may be anything, and arrays do not compare to one truth.
            if len({shown(self._request(chunk), 200) for chunk in chunks}) > 1:
                raise source.error(f"MRR311: index {key} is of several requests: decode each request by itself.")
        return list(streams.values()) if not has_index else _in_order(streams, list(streams), source)

    def _request(self, item: Any) -> Any:
        inside = (get_field(get_field(item, name), "id") for name in self.inside)
        return first_known(get_field(item, "request_id"), get_field(item, "id"), *inside)

    def _request_label(self, item: Any) -> str:
        request = self._request(item)
        return f"request {str(request)[:60]}" if isinstance(request, str) or is_count(request) else ""

    def _find_responses(self, result: Any, source: Source) -> list[tuple[Sequence[Any], list[Sequence[Any]]]] | None:
        """Return (chunks, parts of each choice) of the responses of a result, in order of appearance; None: it is none."""
        if _has_choices(result):
            return [_whole(result, source)]
        if not _is_filled(result) or not all(map(_has_choices, result)):
            return None
        # One chunk makes chunks of all: whether a finished reply among them is whole or the last chunk, its id tells.
        if not any(self._is_chunk(item, source) for item in result):
            return [_whole(item, source) for item in result]
        streams: dict[Any, list[Any]] = {}
        for item in result:
            request = self._request(item)
            streams.setdefault(request if isinstance(request, (str, int)) else None, []).append(item)
        if None in streams and len(streams) > 1:
            raise source.error(
                f"MRR311: {len(streams[None])} of {len(result)} chunks have no request_id or id, so nothing tells them apart."
            )
        return [self._joined(chunks, source) for chunks in streams.values()]

    def _is_chunk(self, response: Any, source: Source) -> bool:
        choices = _choices(response, source)
        kind = get_field(response, "object")
        # The chunk with the usage has no choice, and vLLM's generate stream sends one choice at a time under its own index.
        return (
            any(self._is_unfinished(choice) or index >= len(choices) for index, choice in choices)
            or not choices
            or (isinstance(kind, str) and kind.endswith(".chunk"))
        )

    def _is_unfinished(self, choice: Any) -> bool:
        """Return whether a choice says that it is not finished: it has the field, and nothing in it."""
        for holder in self._holders(choice):
            if "finish_reason" in holder if isinstance(holder, Mapping) else hasattr(holder, "finish_reason"):
                return get_field(holder, "finish_reason") is None
        return False

    def _joined(self, chunks: Sequence[Any], source: Source) -> tuple[Sequence[Any], list[Sequence[Any]]]:
        parts = self._join_chunks((pair for chunk in chunks for pair in _choices(chunk, source)), source)
        if not parts:
            raise source.error("MRR311: of the stream are none.")
        return chunks, _in_order(parts, list(parts), source)

    def _join_chunks(self, chunks: Iterable[tuple[_Key, Any]], source: Source) -> dict[_Key, Sequence[Any]]:
        """Return the chunks of each stream, in order, from (stream, chunk) pairs in the order in which they came.

        Raises:
            PayloadError: a chunk came behind the one that finished its stream, or a stream is not finished.
        """
        streams: dict[_Key, list[Any]] = {}
        for key, chunk in chunks:
            stream = streams.setdefault(key, [])
            if stream and not self._is_unfinished(stream[-1]):
                raise source.error(
                    f"MRR311: the stream has a chunk of index {shown(key)} behind the one that finished it: a chunk came "
                    "twice, or replies that share an id or index lie among the chunks. Decode each stream by itself."
                )
            stream.append(chunk)
        unfinished = [key for key, stream in streams.items() if self._is_unfinished(stream[-1])]
        if unfinished:
            raise source.error(
                f"MRR311: the stream ends before index {unfinished[:8]} is finished: missing its last chunk."
            )
        return dict(streams)


def _is_same(value: Any, first: Any) -> bool:
    """Return whether two texts are equal, or two values of another kind one object: arrays are not compared."""
    return value is first or (isinstance(value, (str, bytes)) and type(value) is type(first) and value == first)


def _agreed_ids(values: Sequence[Any], what: str, source: Source) -> Any:
    """Return ids that must be the same wherever they stand; None where they stand nowhere."""
    if others := [value for value in values if value is not values[0]]:
        ids = as_token_ids(values[0], source=source)
        for other in (as_token_ids(value, source=source) for value in others):
            if not np.array_equal(ids, other):
                raise source.error(
                    f"MRR311: states different {what}, of {len(other)} and {len(ids)} ids: is a chunk of another request?"
                )
    return values[0] if values else None


def _index(choice: Any) -> int | None:
    index = get_field(choice, "index")
    return index if type(index) is int and 0 <= index < _MAX_CHOICES else None


def _is_filled(result: Any) -> bool:
    return isinstance(result, (list, tuple)) and len(result) > 0


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


def _whole(response: Any, source: Source) -> tuple[Sequence[Any], list[Sequence[Any]]]:
    choices = _choices(response, source)
    if not choices:
        raise source.error("MRR301: of the response are none.")
    return [response], [[choice] for choice in _in_order(dict(choices), [index for index, _ in choices], source)]


def _in_order(items: Mapping[int, _Item], indexes: Sequence[int], source: Source) -> list[_Item]:
    """Return items by their index, or raise PayloadError unless `indexes` are each of 0..n-1 once."""
    if sorted(indexes) != list(range(len(indexes))):
        raise source.error(
            f"MRR312: have index {list(indexes)[:8]}, expected each of 0..{len(indexes) - 1} once: one is lost or "
            "there twice."
        )
    return [items[index] for index in range(len(indexes))]
