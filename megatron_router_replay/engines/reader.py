"""Results -> replies: one reader for every engine, told by a few names where an engine has its fields.

It reads python objects, their dicts, responses parsed from JSON with `choices` (or `outputs`), whole or as the chunks of one
stream, single choices, requests or results of /generate, and lists of all these.

Choices are placed by their `index`, never by the order in which they arrive. The chunks of a stream have the request's id in
common, but so may whole replies: what makes a chunk is a choice that is not finished, or an index without those before it. A
stream is whole if every choice finishes, once and at its end; chunks that are lost or repeated before that show in the number
of its ids, by the rule of rows and by the counts that the reply states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from megatron_router_replay.checks import shown
from megatron_router_replay.engines.payload import Source, as_token_ids, is_tensor
from megatron_router_replay.engines.reply import Kind, Reply, StatedCount, first_known, get_field, is_count, read_counts
from megatron_router_replay.engines.tokens import read_spans

_MAX_CHOICES = 1 << 20
"""No request asks for so many; an index beyond it is damaged."""

_USAGE: Mapping[str, Kind] = {"prompt_tokens": "prompt", "completion_tokens": "output", "total_tokens": "all"}

FIELDS = {
    "routed_experts": ("routed_experts",),
    "prompt_token_ids": ("prompt_token_ids",),
    "output_token_ids": ("token_ids",),
}
"""What is read of every engine, and the names that most give it."""


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
        keep_all: what to ask the engine for, where a response of several choices has the routes of the first alone.
        unwrap: what is done with routes and ids first.
        check: raises if the replies of one response contradict each other.
    """

    engine: str
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: FIELDS)
    inside: tuple[str, ...] = ("message", "metadata")
    shared: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()
    counts: tuple[tuple[str, Kind], ...] = ()
    abort: str = "abort"
    stream: Literal["new", "counted"] | None = None
    keep_all: str = "Send one request a choice."
    unwrap: Callable[[Any, Source], Any] | None = None
    check: Callable[[list[Reply]], None] | None = None

    def read(self, result: Any, *, batch: bool) -> list[Reply]:
        """Return the generated sequences of a result; `batch`: a list may hold any results, in order.

        Raises:
            PayloadError: there is no choice, one is lost or there twice, or a stream is broken.
        """
        if _has_choices(result):
            return self._of_response([result])
        if self._is_choice(result):
            return [self._of_choice([result])]
        items = result if isinstance(result, (list, tuple)) else ()
        source = self._source("the list")
        is_list_of_responses = bool(items) and all(map(_has_choices, items))
        if is_list_of_responses and any(self._is_chunk(item, source) for item in items):
            return self._of_response(items)
        if not is_list_of_responses and items and all(map(self._is_choice, items)):
            groups = [[self._of_choice(parts)] for parts in self._bare_choices(items, source)]
        elif items and (batch or is_list_of_responses):
            groups = [self.read(item, batch=False) for item in items]
        else:
            source = self._source("the array")
            return [Reply(source=source, fields={"routed_experts": self._unwrapped(result, source)})]
        replies = [reply for group in groups for reply in group]
        if len(groups) == 1:
            return replies
        names = [", ".join(filter(None, (f"sample {i}", reply.source.sample))) for i, reply in enumerate(replies)]
        return [replace(reply, source=replace(reply.source, sample=name)) for reply, name in zip(replies, names)]

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
        values = (first_known(*(get_field(holder, known) for known in self.fields[name])) for holder in holders)
        return [value for value in values if value is not None]

    def _ids(self, name: str, holders: Iterable[Any], source: Source, *others: Any) -> Any:
        """Return ids that must be the same wherever they stand; None where they stand nowhere."""
        values = [*(self._unwrapped(value, source) for value in self._values(name, holders)), *others]
        values = [value for value in values if value is not None]
        if different := [value for value in values if value is not values[0]]:
            ids = as_token_ids(values[0], source=source)
            for other in (as_token_ids(value, source=source) for value in different):
                if not np.array_equal(ids, other):
                    raise source.error(
                        f"MRR311: states different {name}, of {len(other)} and {len(ids)} ids: is a chunk of another "
                        "request?"
                    )
        return values[0] if values else None

    def _of_response(self, chunks: Sequence[Any]) -> list[Reply]:
        """Return the replies of one response; one that was not streamed is one chunk."""
        request = self._request_label(chunks[0])
        source = replace(self._source(request), field="the response")
        if len(chunks) == 1:
            pairs = _choices(chunks[0], source)
            choices = _in_order([index for index, _ in pairs], [[choice] for _, choice in pairs], source)
        elif self.stream is None:
            raise source.error(
                "MRR311: chunks of this engine are not joined: pass the last one, if it has all, or send the request without "
                "stream."
            )
        else:
            self._check_request(chunks, source)
            choices = self._joined((pair for chunk in chunks for pair in _choices(chunk, source)), source)
        holders = [holder for chunk in reversed(chunks) for holder in self._holders(chunk)]
        first_alone = len(choices) > 1 and bool(self._values("routed_experts", holders))
        if first_alone and not any(self._values("routed_experts", self._holders(parts[-1])) for parts in choices):
            raise source.error(
                f"MRR312: with {len(choices)} choices it holds the routes of the first result only, the others are lost. "
                f"{self.keep_all} Is this a reply of another engine?"
            )
        counts: Sequence[StatedCount] = ()
        # A stream states its usage in the last chunk, or in none. Of several choices it is a sum, which counts none of them.
        usage = first_known(*(get_field(chunk, "usage") for chunk in reversed(chunks)))
        if len(choices) == 1:
            counts = read_counts(usage, _USAGE, prefix="usage", source=source)
        prompt, outputs = self._ids("prompt_token_ids", holders, source), self._outputs(holders, len(choices), source)
        replies = [
            self._of_choice(
                parts,
                self._source(f"choice {i}", request),
                response=holders,
                is_only=len(choices) == 1,
                counts=counts,
                prompt=prompt,
                outputs=outputs[i],
            )
            for i, parts in enumerate(choices)
        ]
        if self.check is not None:
            self.check(replies)
        return replies

    def _outputs(self, holders: Iterable[Any], num_choices: int, source: Source) -> list[list[Any]]:
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
                elif num_choices == 1:
                    outputs[0].append(value)
        return outputs

    def _of_choice(
        self,
        parts: Sequence[Any],
        source: Source | None = None,
        *,
        response: Sequence[Any] = (),
        is_only: bool = True,
        counts: Sequence[StatedCount] = (),
        prompt: Any = None,
        outputs: Sequence[Any] = (),
    ) -> Reply:
        """Return the reply of one choice.

        Args:
            parts: the chunks of a stream, or the whole choice.
            response: where its response may have fields; () if it came without one.
            is_only: it is the only choice of its response.
            counts, prompt, outputs: what the response states of it.
        """
        if source is None:
            index = _index(parts[0])
            source = self._source("" if index is None else f"choice {index}", self._request_label(parts[0]))
        # The last chunk comes first: it has the counts and the spans of all the output.
        holders = [holder for part in reversed(parts) for holder in self._holders(part)]
        # What a response says of several choices could be of any of them, but for the prompt.
        known = [*holders, *response] if is_only else holders
        fields = {name: first_known(*self._values(name, known)) for name in self.fields}
        fields |= {name: first_known(*self._values(name, [*holders, *response])) for name in self.shared}
        routes = self._values("routed_experts", known)
        if any(not _is_same(value, routes[0]) for value in routes):
            raise source.error(
                "MRR311: two parts of it carry routes, and different ones: expected the last chunk alone."
            )
        fields["routed_experts"] = self._unwrapped(routes[0], source) if routes else None
        # A batch of prompts has a prompt a choice, which is not the one of the response.
        prompt = prompt if is_only or not self._values("prompt_token_ids", holders) else None
        fields["prompt_token_ids"] = self._ids("prompt_token_ids", holders, source, prompt)
        output = self._output_ids(parts, source, has_routes=bool(routes))
        fields["output_token_ids"] = self._ids("output_token_ids", (), source, output, *outputs)
        counts = [*counts, *self._counts(parts[-1], dict(self.counts), source)]
        for part in parts[:-1]:  # every chunk repeats the number of prompt tokens
            counts += self._counts(part, {name: kind for name, kind in self.counts if kind == "prompt"}, source)
        reason = first_known(*(get_field(holder, "finish_reason") for holder in self._holders(parts[-1])))
        if isinstance(reason, Mapping):
            counts += read_counts(reason, {"length": "output"}, prefix="finish_reason", source=source)
            reason = reason.get("type")
        weights, spans = (
            first_known(*(get_field(holder, name) for holder in known))
            for name in ("weight_version", "weight_versions")
        )
        return Reply(
            source=source,
            fields=fields,
            aborted=isinstance(reason, str) and reason == self.abort,
            counts=tuple(counts),
            weight_spans=read_spans(spans, source=source),
            weight_name=weights if isinstance(weights, str) else None,
        )

    def _counts(self, part: Any, names: Mapping[str, Kind], source: Source) -> Iterator[StatedCount]:
        if names:
            yield from read_counts(part, names, prefix="the choice", source=source)
            for place in self.inside:
                yield from read_counts(get_field(part, place), names, prefix=place, source=source)

    def _output_ids(self, parts: Sequence[Any], source: Source, *, has_routes: bool) -> Any:
        """Return the ids of the output; those of the chunks of a stream follow one another, or are all so far."""
        if len(parts) == 1:
            return self._ids("output_token_ids", self._holders(parts[0]), source)
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
        stated = [next((c.value for c in self._counts(part, output, source)), None) for part in parts]
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

    def _bare_choices(self, items: Sequence[Any], source: Source) -> list[Sequence[Any]]:
        """Return the parts of each choice of a list of choices or results, or of chunks of /generate."""
        indexes = [get_field(item, "index") for item in items]
        has_index = any(index is not None for index in indexes)
        if has_index and any(_index(item) is None for item in items):
            raise source.error(f"MRR312: has index {shown(indexes)}: all must have an integer of 0 or more, or none.")
        if self.stream == "counted" and len(items) > 1 and (has_index or any(map(self._is_unfinished, items))):
            streams = self._joined(zip(indexes if has_index else [0] * len(items), items), source)
            for chunks in streams:
                self._check_request(chunks, source)
            return streams
        # In order they are taken as they stand. Indexes that repeat are of several responses, in the caller's order.
        if has_index and len(set(indexes)) == len(indexes) and indexes != sorted(indexes):
            raise source.error(
                f"MRR312: has index {shown(indexes)} in this order, without their response: are they in order, or of several "
                "responses? Pass the response itself, or decode each choice."
            )
        return [[item] for item in items]

    def _request(self, item: Any) -> Any:
        inside = (get_field(get_field(item, name), "id") for name in self.inside)
        return first_known(get_field(item, "request_id"), get_field(item, "id"), *inside)

    def _request_label(self, item: Any) -> str:
        request = self._request(item)
        return f"request {str(request)[:60]}" if isinstance(request, str) or is_count(request) else ""

    def _check_request(self, chunks: Sequence[Any], source: Source) -> None:
        # As texts: an id may be anything, and arrays do not compare to one truth.
        requests = {shown(self._request(chunk), 200) for chunk in chunks}
        if len(requests) > 1:
            raise source.error(
                f"MRR311: its chunks are of several requests, {', '.join(sorted(requests)[:4])}: decode each stream by "
                "itself, or pass a list of streams."
            )

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

    def _joined(self, chunks: Iterable[tuple[int, Any]], source: Source) -> list[Sequence[Any]]:
        """Return the chunks of each choice, from (index, chunk) pairs in the order in which they came.

        Raises:
            PayloadError: a chunk came behind the one that finished its choice, or a choice is lost or not finished.
        """
        streams: dict[int, list[Any]] = {}
        for index, chunk in chunks:
            stream = streams.setdefault(index, [])
            if stream and not self._is_unfinished(stream[-1]):
                raise source.error(
                    f"MRR311: the stream has a chunk of index {index} behind the one that finished it: a chunk came twice, "
                    "or whole replies lie among the chunks. Decode each stream by itself."
                )
            stream.append(chunk)
        unfinished = [index for index, stream in streams.items() if self._is_unfinished(stream[-1])]
        if unfinished:
            raise source.error(
                f"MRR311: the stream ends before index {unfinished[:8]} is finished: missing its last chunk."
            )
        return _in_order(list(streams), list(streams.values()), source)


def _is_same(value: Any, first: Any) -> bool:
    """Return whether two texts are equal, or two values of another kind one object: arrays are not compared."""
    return value is first or (isinstance(value, (str, bytes)) and type(value) is type(first) and value == first)


def _index(choice: Any) -> int | None:
    index = get_field(choice, "index")
    return index if type(index) is int and 0 <= index < _MAX_CHOICES else None


def _has_choices(item: Any) -> bool:
    if isinstance(item, Mapping):
        return "choices" in item or "outputs" in item
    return getattr(item, "outputs", None) is not None


def _choices(response: Any, source: Source) -> list[tuple[int, Any]]:
    """Return (index, choice) of each choice; the index of choices that all have none is their position."""
    is_dict = isinstance(response, Mapping)
    items = response["choices" if "choices" in response else "outputs"] if is_dict else response.outputs
    if not isinstance(items, (list, tuple)):
        raise source.error(f"MRR301: its choices are {type(items).__name__}, expected a list.")
    indexes = [get_field(item, "index") for item in items]
    if all(index is None for index in indexes):
        return list(enumerate(items))
    if any(_index(item) is None for item in items):
        raise source.error(f"MRR312: its choices have index {shown(indexes)}: each must be an integer of 0 or more.")
    return list(zip(indexes, items))


def _in_order(indexes: Sequence[int], choices: Sequence[Sequence[Any]], source: Source) -> list[Sequence[Any]]:
    """Return choices by their index, or raise PayloadError unless `indexes` are each of 0..n-1 once."""
    if not indexes:
        raise source.error("MRR301: it has no choices.")
    if sorted(indexes) != list(range(len(indexes))):
        raise source.error(
            f"MRR312: its choices have index {list(indexes)[:8]}, expected each of 0..{len(indexes) - 1} once: one is lost "
            "or there twice."
        )
    return [choice for _, choice in sorted(zip(indexes, choices), key=lambda pair: pair[0])]
