"""Responses with `choices` (or python objects with `outputs`), whole or as the chunks of a stream -> each choice's parts.

Choices are placed by their `index`, never by the order in which they arrive or stand in a list. The chunks of a stream have
the request's id in common, but so may whole replies: what makes a chunk is a choice that is not finished, or an index
without those before it. A stream is whole if every choice finishes, once and at its end; chunks that are lost or repeated
before that show in the number of its ids, by the rule of rows and by the counts that the reply states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_router_replay.engines.payload import Source, short_repr
from megatron_router_replay.engines.reply import first_known, get_field

_MAX_CHOICES = 1 << 20
"""No request asks for so many; an index beyond it is damaged."""

_Key = TypeVar("_Key")
_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """One response.

    Args:
        chunks: as they came; a response that was not streamed is one.
        choices: by index, the parts of each choice in order; the last one has its finish_reason and routes.
    """

    chunks: tuple[Any, ...]
    choices: tuple[tuple[Any, ...], ...]

    @property
    def name(self) -> str:
        """` of <id>` for messages, "" where the response has no id."""
        request = first_known(*(get_field(self.chunks[0], name) for name in ("request_id", "id")))
        return f" of {short_repr(request)}" if isinstance(request, (str, int)) else ""


def is_response(item: Any) -> bool:
    """Return whether this is a response with choices or outputs."""
    if isinstance(item, Mapping):
        return "choices" in item
    return getattr(item, "outputs", None) is not None


def find_responses(result: Any, *, engine: str) -> list[Response] | None:
    """Return the response that a result is, or those of a list of responses and chunks, in order of appearance.

    Returns:
        None if the result is something else.

    Raises:
        PayloadError: there is no choice, one is lost or there twice, a stream is broken, or its chunks have no id.
    """
    source = Source(engine=engine, field="the choices")
    if is_response(result):
        return [_whole(result, source)]
    if not isinstance(result, (list, tuple)) or not result or not all(is_response(item) for item in result):
        return None
    # One chunk makes chunks of all: whether a finished reply among them is whole or the last chunk of a stream, its id tells.
    if not any(_is_chunk(item, source) for item in result):
        return [_whole(item, source) for item in result]
    streams: dict[Any, list[Any]] = {}
    for item in result:
        request = first_known(get_field(item, "request_id"), get_field(item, "id"))
        streams.setdefault(request if isinstance(request, (str, int)) else None, []).append(item)
    if None in streams and len(streams) > 1:
        raise source.error(
            f"{len(streams[None])} of {len(result)} chunks have no request_id or id, so they cannot be told apart."
        )
    return [_joined(chunks, source) for chunks in streams.values()]


def check_bare_choices(items: Sequence[Any], *, engine: str) -> None:
    """Raise if a list of choices without their response could be one response's in another order."""
    indexes = [get_field(item, "index") for item in items]
    known = [index for index in indexes if isinstance(index, int)]
    # In order they are taken as they stand. Indexes that repeat are of several responses, whose order only the caller knows.
    if len(set(known)) > 1 and len(set(known)) == len(known) and known != sorted(known):
        raise Source(engine=engine, field="the choices").error(
            f"have index {short_repr(indexes)} in this order, without their response: are they in order, or of several "
            "responses? Pass the response itself, or decode each choice."
        )


def _items(response: Any, source: Source) -> Sequence[Any]:
    items = response["choices"] if isinstance(response, Mapping) else response.outputs
    if not isinstance(items, (list, tuple)):
        raise source.error(f"of the response are {type(items).__name__}, expected a list.")
    return items


def _indexes(items: Sequence[Any], source: Source) -> list[int]:
    """Return the index of each choice; those of choices that all have none are their positions."""
    indexes = [get_field(item, "index") for item in items]
    if all(index is None for index in indexes):
        return list(range(len(items)))
    if not all(type(index) is int and 0 <= index < _MAX_CHOICES for index in indexes):
        raise source.error(f"have index {short_repr(indexes)}: each must be an integer of 0 or more.")
    return indexes


def _is_chunk(item: Any, source: Source) -> bool:
    items = _items(item, source)
    indexes = _indexes(items, source)
    unfinished = any(_is_unfinished(choice) for choice in items)
    # The chunk with the usage has no choice, and vLLM's generate stream sends one choice at a time under its own index.
    return not items or unfinished or max(indexes) >= len(items) or str(get_field(item, "object")).endswith(".chunk")


def _is_unfinished(choice: Any) -> bool:
    """Return whether a choice says that it is not finished: it has the field, and nothing in it."""
    has = "finish_reason" in choice if isinstance(choice, Mapping) else hasattr(choice, "finish_reason")
    return has and get_field(choice, "finish_reason") is None


def _whole(item: Any, source: Source) -> Response:
    items = _items(item, source)
    if not items:
        raise source.error("of the response are none.")
    indexes = _indexes(items, source)
    choices = in_order(dict(zip(indexes, items)), indexes, source=source)
    return Response(chunks=(item,), choices=tuple((choice,) for choice in choices))


def _joined(chunks: Sequence[Any], source: Source) -> Response:
    choices: list[tuple[int, Any]] = []
    for chunk in chunks:
        items = _items(chunk, source)
        choices += zip(_indexes(items, source), items)
    if not choices:
        raise source.error("of the stream are none.")
    parts = join_chunks(choices, is_unfinished=_is_unfinished, source=source)
    return Response(chunks=tuple(chunks), choices=tuple(map(tuple, in_order(parts, list(parts), source=source))))


def join_chunks(
    chunks: Iterable[tuple[_Key, Any]], *, is_unfinished: Callable[[Any], bool], source: Source
) -> dict[_Key, list[Any]]:
    """Return the chunks of each stream, in order, from (stream, chunk) pairs in the order in which they came.

    Raises:
        PayloadError: a chunk came behind the one that finished its stream, or a stream is not finished.
    """
    streams: dict[_Key, list[Any]] = {}
    for key, chunk in chunks:
        stream = streams.setdefault(key, [])
        if stream and not is_unfinished(stream[-1]):
            raise source.error(
                f"the stream has a chunk of index {short_repr(key)} behind the one that finished it: a chunk came twice, or "
                "replies that share an id or index lie among the chunks. Decode each stream by itself."
            )
        stream.append(chunk)
    unfinished = [key for key, stream in streams.items() if is_unfinished(stream[-1])]
    if unfinished:
        raise source.error(f"the stream ends before index {unfinished[:8]} is finished: missing its last chunk.")
    return streams


def in_order(items: Mapping[int, _Item], indexes: Sequence[int], *, source: Source) -> list[_Item]:
    """Return items by their index, or raise PayloadError unless `indexes` are each of 0..n-1 once."""
    if sorted(indexes) != list(range(len(indexes))):
        raise source.error(
            f"have index {list(indexes)[:8]}, expected each of 0..{len(indexes) - 1} once: one is lost or there twice."
        )
    return [items[index] for index in range(len(indexes))]
