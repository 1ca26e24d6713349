"""Results -> replies: one reader for all engines, and a table of field names for each.

A result is a reply (a dict parsed from JSON, or a Python object), the list of the chunks of a stream, or an array. A reply
has choices, or is itself one. Choices are sorted by their `index`, in whatever order they arrive.

The chunks of a choice are complete if the last one, and no earlier one, has a finish reason. A chunk that is lost or comes
twice before that changes the number of ids, so the rule of rows and the counts that the reply states reveal it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import isawaitable
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np
import torch

from megatron_router_replay.checks import shown
from megatron_router_replay.engines.payload import Source, as_token_ids, is_tensor
from megatron_router_replay.errors import PayloadError

Kind = Literal["prompt", "output", "all"]

_USAGE: Mapping[str, Kind] = {"prompt_tokens": "prompt", "completion_tokens": "output", "total_tokens": "all"}

_INSIDE = ("message", "meta_info", "sglext", "metadata")
"""Fields of a response or a choice that contain more of its fields."""

_ABSENT = object()

FIELDS = {
    "routed_experts": ("routed_experts",),
    "prompt_token_ids": ("prompt_token_ids",),
    "output_token_ids": ("token_ids",),
    "weight_version": ("weight_version",),
    "weight_versions": ("weight_versions",),
}
"""The fields that most engines have, under the names that most engines use."""


class StatedCount(NamedTuple):
    """A number of tokens that a response states: of the prompt, of the output, or of both."""

    name: str
    kind: Kind
    value: int


class RequestFields(NamedTuple):
    """Fields of a request that bring more into its reply, as an error can quote them; "" where an engine has no such field.

    Args:
        token_ids: brings the ids of prompt and output.
        weight_versions: brings the versions of the weights that sampled the output.
    """

    token_ids: str = ""
    weight_versions: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One generated sequence as an engine sent it.

    Args:
        fields: values by the names of `ReplyReader.fields`; `reply[name]` is None where the response has none.
        aborted: the engine gave the request up; without any output it then has no routes.
        counts: numbers of tokens that the response states of this sequence.
        request_fields: of the engine, for messages about fields that are missing.
    """

    source: Source
    fields: Mapping[str, Any] = field(default_factory=dict)
    aborted: bool = False
    counts: tuple[StatedCount, ...] = ()
    request_fields: RequestFields = RequestFields()

    def __getitem__(self, name: str) -> Any:
        return self.fields.get(name)


class ReplyPart:
    """A choice, a chunk of one, or the response around it, with the fields of the objects in `_INSIDE`."""

    def __init__(self, item: Any) -> None:
        inner = {name: get_field(item, name) for name in _INSIDE}
        self.holders = {"the choice": item} | {name: value for name, value in inner.items() if value is not None}

    def values(self, names: Iterable[str], absent: Any = None) -> list[Any]:
        """Return the values of a field, at most one for each object; those that are `absent` are left out."""
        found = (
            next((value for name in names if (value := get_field(holder, name, absent)) is not absent), absent)
            for holder in self.holders.values()
        )
        return [value for value in found if value is not absent]

    def counts(self, names: Mapping[str, Kind], source: Source) -> list[StatedCount]:
        """Return the counts of all its objects; see `read_counts`."""
        pairs = self.holders.items() if names else ()
        return [count for name, holder in pairs for count in read_counts(holder, names, prefix=name, source=source)]

    @property
    def request(self) -> Any:
        """The id of its request, or None."""
        return first_known(self.values(("request_id", "id")))

    @property
    def finish_reason(self) -> Any:
        """The reason of its end: None if it has not ended, "" if it has no such field."""
        reasons = self.values(("finish_reason",), _ABSENT)
        return first_known(reasons) if reasons else ""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReplyReader:
    """The table of an engine's fields, which reads its results.

    Args:
        title: of the engine, in messages.
        fields: our name of a field -> the engine's names of it. `token_ids` are prompt and output in one list. An engine's
            own `rows` read the other fields beyond `FIELDS`.
        counts: fields that count the tokens of a choice. The chunks of a stream have all ids so far or the new ones, which
            a count of the output decides; without one they have the new ones.
        streams: whether the engine's streams have routes.
        choices_advice: advice for a response of several choices with the routes of the first one alone.
        unwrap: applied to routes and ids before anything else.
        request_fields: for messages about fields that a reply does not have.
    """

    title: str
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: FIELDS)
    counts: Mapping[str, Kind] = field(default_factory=dict)
    streams: bool = False
    choices_advice: str = "Send one request a choice."
    unwrap: Callable[[Any, Source], Any] = lambda value, source: value
    request_fields: RequestFields = RequestFields()

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
            routes = {"routed_experts": self.unwrap(result, source)}
            return [Reply(source=source, fields=routes, request_fields=self.request_fields)]
        if len(chunks) > 1 and not self.streams:
            raise source.error(
                "MRR311: is a list of replies, and this engine streams no routes: send the request without stream, and pass "
                "several results to decode_batch."
            )
        streams = _choices(chunks, source)
        # Usage, and SGLang's routes and ids, come with the last chunks of a stream, so these are first.
        response = [ReplyPart(chunk) for chunk in reversed(chunks) if _items(chunk) is not _ABSENT]
        if len(streams) > 1:
            self._check_shared([parts[-1] for parts in streams.values()], response, source)
        replies = [self._reply(parts, index, len(streams), response, source) for index, parts in streams.items()]
        if len(streams) > 1:
            _check_usage(replies, response, source)
        return replies

    def _is_reply(self, item: Any) -> bool:
        if isinstance(item, Mapping):
            return not is_tensor(item)
        return any(hasattr(item, name) for name in ("choices", "outputs", *self.fields["routed_experts"]))

    def _values(self, name: str, parts: Iterable[ReplyPart]) -> list[Any]:
        return [value for part in parts for value in part.values(self.fields.get(name, ()))]

    def _check_shared(self, choices: Sequence[ReplyPart], response: Sequence[ReplyPart], source: Source) -> None:
        """Raise if the routes of a response are not those of all its choices."""
        if self._values("routed_experts", response) and not self._values("routed_experts", choices):
            raise source.error(
                f"MRR312: with {len(choices)} choices it has the routes of the first result only; the rest are lost. "
                f"{self.choices_advice} Is this a reply of another engine?"
            )
        if self._values("prompt_routed_experts", response):
            # Without ids, n samples of a prompt look like a sample of each of n prompts.
            ids = [value for choice in choices for value in self._values("prompt_token_ids", [choice])[:1]]
            if len(ids) < len(choices) or len({as_token_ids(each, source=source).tobytes() for each in ids}) > 1:
                raise source.error(
                    "MRR302: it has the prompt's routes for the first prompt of a request only, and not all choices are "
                    "proven to have that prompt. Send one prompt a request; return_token_ids=true lets choices prove theirs."
                )

    def _reply(
        self, parts: Sequence[ReplyPart], index: int, num_choices: int, response: Sequence[ReplyPart], source: Source
    ) -> Reply:
        """Return the reply of a choice.

        Args:
            parts: the chunks of its stream, or the complete choice.
            response: the parts that may have fields of its response; () if there is none.
        """
        request = first_known(part.request for part in (parts[-1], *response))
        labels = [f"choice {index}"] if num_choices > 1 else []
        labels += [f"request {str(request)[:60]}"] if isinstance(request, str) or is_count(request) else []
        source = replace(source, sample=", ".join(labels))
        own = parts[::-1]  # the last chunk comes first: it has the counts and the spans of all the output
        # A field of a response with several choices may be any choice's, unless it is of their prompt.
        known = [*own, *response] if num_choices == 1 else own
        fields = {
            name: first_known(self._values(name, [*own, *response] if name.startswith("prompt") else known))
            for name in self.fields
        }
        routes = self._values("routed_experts", known)
        # SGLang before pull request 35323 repeats a choice's routes in the response, which is the same text.
        if any(not _is_same(value, routes[0]) for value in routes):
            raise source.error(
                "MRR311: two parts of it carry routes, and different ones: expected the last chunk alone."
            )
        fields["routed_experts"] = self.unwrap(routes[0], source) if routes else None
        # A batch of prompts has a prompt for each choice, and the response may repeat one of them.
        prompts = self._values("prompt_token_ids", known) or self._values("prompt_token_ids", response)
        fields["prompt_token_ids"] = self._agreed_ids("prompt_token_ids", prompts, source)
        outputs = self._output_ids(parts, source) if len(parts) == 1 or routes else []
        outputs += self._listed_ids(response, index, num_choices, source)
        fields["output_token_ids"] = self._agreed_ids("output_token_ids", outputs, source)
        counts = [count for part in parts for count in part.counts(self.counts, source)]
        # The chunks before the last one count the output so far.
        counts = [count for count in counts if count.kind == "prompt"] + parts[-1].counts(self.counts, source)
        reason = parts[-1].finish_reason
        if isinstance(reason, Mapping):  # SGLang: {"type": "length", "length": 16}
            counts += read_counts(reason, {"length": "output"}, prefix="finish_reason", source=source)
            reason = reason.get("type")
        if num_choices == 1:  # the usage of several choices is a sum, which counts none of them
            counts += read_counts(_usage_of(response), _USAGE, prefix="usage", source=source)
        aborted = isinstance(reason, str) and reason == "abort"
        return Reply(
            source=source,
            fields=fields,
            aborted=aborted,
            counts=tuple(counts),
            request_fields=self.request_fields,
        )

    def _output_ids(self, parts: Sequence[ReplyPart], source: Source) -> list[Any]:
        """Return the lists of output ids that a choice has, or the one list that its chunks make."""
        if len(parts) == 1:
            return self._values("output_token_ids", parts)
        ids = [first_known(self._values("output_token_ids", [part])) for part in parts]
        if all(value is None for value in ids):
            return []
        for i, value in enumerate(ids):
            if not isinstance(value, (list, tuple)):
                raise source.error(
                    f"MRR311: chunk {i} of the stream has the ids {shown(value)} and others have a list: it is broken."
                )
        if "output" in self.counts.values():
            counts = [part.counts(self.counts, source) for part in parts]
            stated = [first_known(count.value for count in each if count.kind == "output") for each in counts]
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

    def _listed_ids(self, response: Sequence[ReplyPart], index: int, num_choices: int, source: Source) -> list[Any]:
        """Return the output ids of a choice in the lists that a response has for all choices, as SGLang's `sglext`."""
        lists = self._values("output_token_ids", response)
        place = index if num_choices > 1 else 0  # a single choice may have kept its index of a larger response
        for value in lists:
            if not (isinstance(value, (list, tuple)) and len(value) == num_choices and place < num_choices):
                size = len(value) if hasattr(value, "__len__") else shown(value)
                raise source.error(f"MRR312: has {size} lists of output ids for {num_choices} choices: is one lost?")
        return [value[place] for value in lists]

    def _agreed_ids(self, name: str, values: Sequence[Any], source: Source) -> Any:
        """Return ids that must be the same in all places that have them; None where no place has them."""
        values = [self.unwrap(value, source) for value in values]
        if len(values) > 1:
            first, *others = [as_token_ids(value, source=source) for value in values]
            for other in others:
                if not np.array_equal(first, other):
                    raise source.error(
                        f"MRR311: states different {name}, of {len(other)} and {len(first)} ids: is a chunk of another "
                        "request?"
                    )
        return first_known(values)


def _choices(chunks: Sequence[Any], source: Source) -> dict[int, list[ReplyPart]]:
    """Return index -> the parts of a choice, in the order of the indexes: one part, or the chunks of its stream."""
    streams: dict[int, list[ReplyPart]] = {}
    # The chunks of a response have one id, at the key None here; bare chunks have an id of their choice.
    requests: dict[int | None, str] = {}
    for chunk in chunks:
        whole, is_bare = ReplyPart(chunk), _items(chunk) is _ABSENT
        pairs = _indexed(chunk, source, is_chunk=len(chunks) > 1)
        for index, choice in pairs:
            # The chunks of n choices arrive interleaved, each under the index of its choice.
            parts = streams.setdefault(index, [])
            if parts and parts[-1].finish_reason is not None:
                raise source.error(
                    f"MRR311: index {index} comes again after its end: a chunk came twice, or these are several results, "
                    "which decode_batch takes as a list."
                )
            parts.append(whole if is_bare else ReplyPart(choice))
        request, choice_of_id = shown(whole.request, 80), pairs[0][0] if is_bare else None
        first = requests.setdefault(choice_of_id, request)
        if request != first:
            raise source.error(
                f"MRR311: its chunks are of several requests, {first} and {request}: decode_batch takes a list of streams."
            )
    if not streams:
        raise source.error("MRR301: it has no choices.")
    # Whole choices may be some of a response's: a caller regroups the samples of a prompt, or drops bad ones.
    if any(len(parts) > 1 for parts in streams.values()) and sorted(streams) != list(range(len(streams))):
        raise source.error(
            f"MRR312: the choices of this stream have index {sorted(streams)[:8]}, expected each of 0..{len(streams) - 1}: "
            "all chunks of one are lost."
        )
    # Only the last chunk has the routes. A single chunk that was given as a reply raises here, too.
    unfinished = [index for index, parts in streams.items() if parts[-1].finish_reason is None]
    if unfinished:
        raise source.error(
            f"MRR311: ends before index {unfinished[:8]} is finished: its last chunk is missing. The chunks of a stream "
            "are one result: give decode their list, and decode_batch a list of such lists."
        )
    return dict(sorted(streams.items()))


def _usage_of(response: Sequence[ReplyPart]) -> Any:
    return first_known(value for part in response for value in part.values(("usage",)))


def _check_usage(replies: Sequence[Reply], response: Sequence[ReplyPart], source: Source) -> None:
    """Raise if the usage of a response counts more output tokens than its choices have together: one of them is lost."""
    stated = read_counts(_usage_of(response), {"completion_tokens": "output"}, prefix="usage", source=source)
    lengths = [_output_length(reply) for reply in replies]
    known = [length for length in lengths if length is not None]
    if stated and len(known) == len(lengths) and stated[0].value > sum(known):
        raise source.error(
            f"MRR312: usage.completion_tokens={stated[0].value}, but its {len(replies)} choices have {sum(known)} output "
            "tokens: a choice is lost. If you dropped choices yourself, drop the usage, too."
        )


def _output_length(reply: Reply) -> int | None:
    """Return the number of output tokens by the reply's ids, or by a count that it states; None if it has neither."""
    ids = reply["output_token_ids"]
    if ids is not None:
        return len(as_token_ids(ids, source=reply.source))
    return next((count.value for count in reply.counts if count.kind == "output"), None)


def _indexed(reply: Any, source: Source, *, is_chunk: bool) -> list[tuple[int, Any]]:
    """Return (index, choice) of each choice; the index of choices that all have none is their position."""
    items = _items(reply)
    is_choice = items is _ABSENT
    if is_choice:
        items = [reply]
    if not isinstance(items, (list, tuple)):
        raise source.error(f"MRR301: its choices are {type(items).__name__}, expected a list.")
    indexes = [get_field(item, "index") for item in items]
    # A choice without its response is one sample, whatever place it had there.
    if all(index is None for index in indexes) or (is_choice and not is_chunk):
        return list(enumerate(items))
    if not all(map(is_count, indexes)) or len(set(indexes)) < len(indexes):
        raise source.error(
            f"MRR312: its choices have index {shown(indexes)}: each must be an integer of 0 or more, and there once."
        )
    return list(zip(indexes, items))


def _items(reply: Any) -> Any:
    """Return the choices of a reply, of any type; _ABSENT if it is itself one."""
    choices = get_field(reply, "choices", _ABSENT)
    return get_field(reply, "outputs", _ABSENT) if choices is _ABSENT else choices


def _is_same(value: Any, first: Any) -> bool:
    """Return whether two texts are equal, or two values of another kind one object: arrays are not compared."""
    return value is first or (isinstance(value, (str, bytes)) and type(value) is type(first) and value == first)


def get_field(item: Any, name: str, default: Any = None) -> Any:
    """Return a field of a parsed JSON object or an attribute of a Python object; `default` if it is not there."""
    # Most items are dicts, and isinstance of an abstract class costs more than reading the field.
    if type(item) is dict or isinstance(item, Mapping):
        return item.get(name, default)
    return getattr(item, name, default)


def first_known(values: Iterable[Any]) -> Any:
    """Return the first value that is not None; None if all are."""
    return next((value for value in values if value is not None), None)


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether this is an integer that counts something; for Python True is one, too."""
    # Bounded, because Python refuses to write integers of thousands of digits into a message.
    return type(value) is int and 0 <= value < 1 << 48


def read_counts(holder: Any, names: Mapping[str, Kind], *, prefix: str, source: Source) -> list[StatedCount]:
    """Return the counts that an object states under `names`; absent and null ones are left out.

    Raises:
        PayloadError: a count is there and no integer of 0 or more.
    """
    values = {name: value for name in names if (value := get_field(holder, name)) is not None}
    for name, value in values.items():
        if not is_count(value):
            raise source.error(f"MRR309: {prefix}.{name} is {shown(value)}, it must be an integer of 0 or more.")
    return [StatedCount(f"{prefix}.{name}", names[name], value) for name, value in values.items()]


def refuse_non_reply(result: Any, engine: str) -> None:
    """Raise PayloadError, with the server's own words, where a caller passes something that is no reply."""
    if isinstance(result, (list, tuple, np.ndarray, torch.Tensor)):
        return  # the rows of an array: there may be many
    kind, words = type(result).__name__, None
    if result is None:
        words = "None, so its routes are missing, though the model has MoE layers. Did the request fail?"
    elif isinstance(result, Mapping) and not {"choices", "outputs", "meta_info"} & set(result):
        message = result.get("message") if result.get("object") == "error" else None
        stated = first_known([result.get("error"), result.get("detail"), message])
        if stated is not None:
            words = f"an error of the server: {shown(stated, 300)}. There is no reply to decode."
    elif isinstance(result, (str, bytes)):
        start = result[:200] if isinstance(result, str) else result[:200].decode("latin-1")
        # Base64 has no blank and begins with no bracket. Raw ids of int32 may begin with one, but have bytes of 0.
        if "\0" not in start and (start.startswith(("{", "[", "<", "data:")) or " " in start):
            words = f"the text {shown(result, 120)}: parse JSON first, of a stream each chunk apart."
        if start.endswith((".json", ".jsonl")):
            words = f"the path {shown(result, 120)}: read the file and parse JSON first."
    elif isinstance(result, os.PathLike):
        words = f"the path {os.fspath(result)!r}: read the file and parse JSON first."
    elif isawaitable(result):
        words = f"a {kind} that was not awaited: await it, and parse JSON first."
    elif not any(hasattr(result, name) for name in ("choices", "outputs", "routed_experts", "__array__")) and any(
        callable(getattr(result, name, None)) for name in ("json", "read")
    ):
        words = f"a {kind}, a response of HTTP: parse JSON first, with response.json() or json.load(response)."
    if words is not None:
        raise PayloadError(f"MRR301: {engine}: the result is {words}")
