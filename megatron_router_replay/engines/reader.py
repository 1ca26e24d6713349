"""Results -> replies: a reader for all engines, and a table of field names for each.

A result is a reply (a dict parsed from JSON, or a Python object), the list of the chunks of a stream, or an array. A reply
has choices, or is itself one. Choices are sorted by their `index`, in whatever order they arrive.

The chunks of a choice are complete if the last one, and no earlier one, has a finish reason. A chunk that is lost or comes
twice before that changes the number of ids, so the rule of rows and the counts that the reply states reveal it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from megatron_router_replay.checks import shown
from megatron_router_replay.engines.payload import Source, as_token_ids, is_tensor
from megatron_router_replay.engines.reply import (
    Kind,
    Reply,
    StatedCount,
    first_known,
    get_field,
    is_count,
    read_counts,
    read_spans,
    refuse_non_reply,
)

_USAGE: Mapping[str, Kind] = {"prompt_tokens": "prompt", "completion_tokens": "output", "total_tokens": "all"}

FIELDS = {
    "routed_experts": ("routed_experts",),
    "prompt_token_ids": ("prompt_token_ids",),
    "output_token_ids": ("token_ids",),
}
"""The fields that every engine's table has, under the names that most engines use."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReplyReader:
    """The table of an engine's fields, which reads its results.

    Args:
        title: of the engine, in messages.
        fields: our name of a field -> the engine's names of it, on a choice or in one of `inside`. An engine's own `rows`
            read the fields beyond those of `FIELDS`.
        inside: fields of a response or a choice that contain more of its fields.
        shared: fields of a response that all its choices share, as they share one prompt.
        listed: the field of a response that has the output ids of each choice in a list.
        counts: fields that count the tokens of a choice.
        stream: "new": each chunk has its own ids; "counted": its own or all so far, which its counts decide; None: the
            engine streams no routes.
        keep_all: advice for a response of several choices with the routes of the first one alone.
        unwrap: applied to routes and ids before anything else.
    """

    title: str
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: FIELDS)
    inside: tuple[str, ...] = ("message", "metadata")
    shared: tuple[str, ...] = ()
    listed: str = ""
    counts: Mapping[str, Kind] = field(default_factory=dict)
    stream: Literal["new", "counted"] | None = None
    keep_all: str = "Send one request a choice."
    unwrap: Callable[[Any, Source], Any] = lambda value, source: value

    def read(self, result: Any) -> list[Reply]:
        """Return the generated sequences of a result, in the order of their index.

        Raises:
            PayloadError: no reply, no choice, a choice is lost or there twice, or a stream is incomplete.
        """
        source = Source(engine=self.title, field=self.fields["routed_experts"][0])
        chunks = list(result) if isinstance(result, (list, tuple)) else [result]
        for chunk in chunks:
            refuse_non_reply(chunk, self.title)
        # Nested lists and lists of arrays are routes. A list with anything else among replies is read so too, and raises.
        if not chunks or not all(map(self._is_reply, chunks)):
            return [Reply(source=source, fields={"routed_experts": self.unwrap(result, source)})]
        if len(chunks) > 1 and self.stream is None:
            raise source.error(
                "MRR311: is a list of replies, and this engine streams no routes: send the request without stream, and pass "
                "several results to decode_batch."
            )
        choices = self._choices(chunks, source)
        # Usage, and SGLang's routes and ids, come with the last chunks of a stream, so these are first.
        response = [holder for chunk in reversed(chunks) if _has_choices(chunk) for holder in self._holders(chunk)]
        if len(choices) > 1:
            self._check_shared(choices, response, source)
        return [self._reply(parts, index, len(choices), response, source) for index, parts in enumerate(choices)]

    def _is_reply(self, item: Any) -> bool:
        if isinstance(item, Mapping):
            return not is_tensor(item)
        return any(hasattr(item, name) for name in ("choices", "outputs", *self.fields["routed_experts"]))

    def _holders(self, item: Any) -> list[Any]:
        """Return the objects that may have fields of an item: the item itself and, two deep, those of `inside`."""
        holders = [item]
        for _ in range(2):
            inner = [get_field(holder, name) for holder in holders for name in self.inside]
            holders += [each for each in inner if each is not None and not any(each is known for known in holders)]
        return holders

    def _values(self, name: str, holders: Iterable[Any]) -> list[Any]:
        """Return the values of a field, at most one for each object."""
        values = (first_known(*(get_field(holder, known) for known in self.fields[name])) for holder in holders)
        return [value for value in values if value is not None]

    def _choices(self, chunks: Sequence[Any], source: Source) -> list[list[Any]]:
        """Return the parts of each choice in the order of the indexes: one part, or the chunks of its stream."""
        streams: dict[int, list[Any]] = {}
        # The chunks of a response have one id, at the key None here; bare chunks have an id of their choice.
        requests: dict[int | None, set[str]] = {}
        for chunk in chunks:
            pairs = _indexed(chunk, source, is_chunk=len(chunks) > 1)
            for index in [None] if _has_choices(chunk) else [index for index, _ in pairs]:
                requests.setdefault(index, set()).add(shown(self._request(self._holders(chunk)), 80))
            for index, choice in pairs:
                # The chunks of n choices arrive interleaved, each under the index of its choice.
                parts = streams.setdefault(index, [])
                if parts and not self._is_unfinished(parts[-1]):
                    raise source.error(
                        f"MRR311: index {index} comes again after its end: a chunk came twice, or these are several results, "
                        "which decode_batch takes as a list."
                    )
                parts.append(choice)
        if several := next((sorted(names) for names in requests.values() if len(names) > 1), None):
            raise source.error(
                f"MRR311: its chunks are of several requests, {', '.join(several[:4])}: decode_batch takes a list of streams."
            )
        if not streams:
            raise source.error("MRR301: it has no choices.")
        if sorted(streams) != list(range(len(streams))):
            raise source.error(
                f"MRR312: its choices have index {sorted(streams)[:8]}, expected each of 0..{len(streams) - 1}: one is lost."
            )
        # Only the last chunk has the routes. A single chunk that was given as a reply raises here, too.
        unfinished = [index for index, parts in streams.items() if self._is_unfinished(parts[-1])]
        if unfinished:
            raise source.error(
                f"MRR311: ends before index {unfinished[:8]} is finished: its last chunk is missing. The chunks of a stream "
                "are one result: give decode their list, and decode_batch a list of such lists."
            )
        return [streams[index] for index in range(len(streams))]

    def _is_unfinished(self, choice: Any) -> bool:
        """Return whether a choice has a finish reason that is None; a choice without the field is complete."""
        having = [
            holder
            for holder in self._holders(choice)
            if ("finish_reason" in holder if isinstance(holder, Mapping) else hasattr(holder, "finish_reason"))
        ]
        return bool(having) and all(get_field(holder, "finish_reason") is None for holder in having)

    def _request(self, holders: Iterable[Any]) -> Any:
        return first_known(*(get_field(holder, name) for holder in holders for name in ("request_id", "id")))

    def _check_shared(self, choices: Sequence[Sequence[Any]], response: Sequence[Any], source: Source) -> None:
        """Raise if the routes of a response are not those of all its choices."""
        last = [self._holders(parts[-1]) for parts in choices]
        if self._values("routed_experts", response) and not any(self._values("routed_experts", each) for each in last):
            raise source.error(
                f"MRR312: with {len(choices)} choices it has the routes of the first result only; the rest are lost. "
                f"{self.keep_all} Is this a reply of another engine?"
            )
        if any(self._values(name, response) for name in self.shared):
            # Without ids, n samples of a prompt look like a sample of each of n prompts.
            ids = [value for each in last for value in self._values("prompt_token_ids", each)[:1]]
            if len(ids) < len(choices) or len({as_token_ids(each, source=source).tobytes() for each in ids}) > 1:
                raise source.error(
                    "MRR302: it has the prompt's routes for the first prompt of a request only, and not all choices are "
                    "proven to have that prompt. Send one prompt a request; return_token_ids=true lets choices prove theirs."
                )

    def _reply(
        self, parts: Sequence[Any], index: int, num_choices: int, response: Sequence[Any], source: Source
    ) -> Reply:
        """Return the reply of a choice.

        Args:
            parts: the chunks of its stream, or the complete choice.
            response: the objects that may have fields of its response; () if there is none.
        """
        last = self._holders(parts[-1])
        request = self._request([*last, *response])
        labels = [f"choice {index}"] if num_choices > 1 else []
        labels += [f"request {str(request)[:60]}"] if isinstance(request, str) or is_count(request) else []
        source = replace(source, sample=", ".join(labels))
        # The last chunk comes first: it has the counts and the spans of all the output.
        own = [holder for part in reversed(parts) for holder in self._holders(part)]
        # Apart from the prompt, a field of a response with several choices may be any choice's.
        known = [*own, *response] if num_choices == 1 else own
        fields = {
            name: first_known(*self._values(name, [*own, *response] if name in self.shared else known))
            for name in self.fields
        }
        routes = self._values("routed_experts", known)
        # SGLang before pull request 35323 repeats a choice's routes in the response, which is the same text.
        if any(not _is_same(value, routes[0]) for value in routes):
            raise source.error(
                "MRR311: two parts of it carry routes, and different ones: expected the last chunk alone."
            )
        fields["routed_experts"] = self.unwrap(routes[0], source) if routes else None
        prompts = self._values("prompt_token_ids", own)
        # A batch of prompts has a prompt for each choice, and the response may repeat one of them.
        prompts += self._values("prompt_token_ids", response) if num_choices == 1 or not prompts else []
        fields["prompt_token_ids"] = self._agreed_ids("prompt_token_ids", prompts, source)
        outputs = self._output_ids(parts, source, has_routes=bool(routes))
        outputs += self._listed_ids(response, index, num_choices, source)
        fields["output_token_ids"] = self._agreed_ids("output_token_ids", outputs, source)
        counts = [count for part in parts[:-1] for count in self._counts(part, source) if count.kind == "prompt"]
        counts += self._counts(parts[-1], source)
        reason = first_known(*(get_field(holder, "finish_reason") for holder in last))
        if isinstance(reason, Mapping):  # SGLang: {"type": "length", "length": 16}
            counts += read_counts(reason, {"length": "output"}, prefix="finish_reason", source=source)
            reason = reason.get("type")
        if num_choices == 1:  # the usage of several choices is a sum, which counts none of them
            usage = first_known(*(get_field(holder, "usage") for holder in response))
            counts += read_counts(usage, _USAGE, prefix="usage", source=source)
        weights, spans = (
            first_known(*(get_field(holder, name) for holder in known))
            for name in ("weight_version", "weight_versions")
        )
        return Reply(
            source=source,
            fields=fields,
            aborted=isinstance(reason, str) and reason == "abort",
            counts=tuple(counts),
            weight_spans=read_spans(spans, source=source),
            weight_name=weights if isinstance(weights, str) else None,
        )

    def _counts(self, part: Any, source: Source) -> list[StatedCount]:
        named = {"the choice": part} | {name: get_field(part, name) for name in self.inside}
        return [
            count
            for prefix, holder in named.items()
            for count in read_counts(holder, self.counts, prefix=prefix, source=source)
        ]

    def _output_ids(self, parts: Sequence[Any], source: Source, *, has_routes: bool) -> list[Any]:
        """Return the lists of output ids that a choice has, or the one list that its chunks make."""
        if len(parts) == 1:
            return self._values("output_token_ids", self._holders(parts[0]))
        ids = [first_known(*self._values("output_token_ids", self._holders(part))) for part in parts]
        # Some chunks of a completions or chat stream have no ids, and none has routes.
        if not has_routes or all(value is None for value in ids):
            return []
        for i, value in enumerate(ids):
            if not isinstance(value, (list, tuple)):
                raise source.error(
                    f"MRR311: chunk {i} of the stream has the ids {shown(value)} and others have a list: it is broken."
                )
        if self.stream == "counted":
            stated = [next((c.value for c in self._counts(part, source) if c.kind == "output"), None) for part in parts]
            # The last chunk of a stream that repeats itself has all ids of the earlier ones.
            if stated[-1] == len(ids[-1]):
                return [list(ids[-1])]
            sizes = accumulate(map(len, ids))
            if stated[-1] is None or any(count not in (None, size) for count, size in zip(stated, sizes)):
                raise source.error(
                    f"MRR311: the chunks of the stream have {list(map(len, ids))[:8]} ids and state {stated[:8]} of them: "
                    "neither all so far nor the new ones. A chunk is lost or came twice."
                )
        return [[token for value in ids for token in value]]

    def _listed_ids(self, response: Sequence[Any], index: int, num_choices: int, source: Source) -> list[Any]:
        """Return the output ids of a choice in the lists that a response has for all choices."""
        lists = [get_field(holder, self.listed) for holder in response] if self.listed else []
        lists = [value for value in lists if value is not None]
        for value in lists:
            if not (isinstance(value, (list, tuple)) and len(value) == num_choices):
                size = len(value) if hasattr(value, "__len__") else shown(value)
                raise source.error(f"MRR312: has {size} {self.listed} for {num_choices} choices.")
        return [value[index] for value in lists]

    def _agreed_ids(self, name: str, values: Sequence[Any], source: Source) -> Any:
        """Return ids that must be the same in all places that have them; None where no place has them."""
        values = [self.unwrap(value, source) for value in values]
        for value in values[1:]:
            first, second = (as_token_ids(each, source=source) for each in (values[0], value))
            if not np.array_equal(first, second):
                raise source.error(
                    f"MRR311: states different {name}, of {len(second)} and {len(first)} ids: is a chunk of another request?"
                )
        return values[0] if values else None


def _is_same(value: Any, first: Any) -> bool:
    """Return whether two texts are equal, or two values of another kind one object: arrays are not compared."""
    return value is first or (isinstance(value, (str, bytes)) and type(value) is type(first) and value == first)


def _has_choices(item: Any) -> bool:
    return any(
        name in item if isinstance(item, Mapping) else getattr(item, name, None) is not None
        for name in ("choices", "outputs")
    )


def _indexed(reply: Any, source: Source, *, is_chunk: bool) -> list[tuple[int, Any]]:
    """Return (index, choice) of each choice; the index of choices that all have none is their position."""
    has_choices = _has_choices(reply)
    items = first_known(get_field(reply, "choices"), get_field(reply, "outputs")) if has_choices else [reply]
    if not isinstance(items, (list, tuple)):
        raise source.error(f"MRR301: its choices are {type(items).__name__}, expected a list.")
    indexes = [get_field(item, "index") for item in items]
    # A choice without its response is one sample, whatever place it had there.
    if all(index is None for index in indexes) or not (has_choices or is_chunk):
        return list(enumerate(items))
    # Bounded, because Python refuses to write integers of thousands of digits into a message.
    if not all(type(index) is int and 0 <= index < 2**31 for index in indexes) or len(set(indexes)) < len(indexes):
        raise source.error(
            f"MRR312: its choices have index {shown(indexes)}: each must be an int32 of 0 or more, and there once."
        )
    return list(zip(indexes, items))
