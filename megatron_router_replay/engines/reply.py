"""One generated sequence as an engine sent it, what its response states of it, and what is no reply at all.

`reader` turns every engine's forms of response into these; `decoder` does the rest for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeGuard

from megatron_router_replay.checks import shown
from megatron_router_replay.engines.payload import Source
from megatron_router_replay.errors import PayloadError

Kind = Literal["prompt", "output", "all"]


class StatedCount(NamedTuple):
    """A number of tokens that a response states: of the prompt, of the output, or of both."""

    name: str
    kind: Kind
    value: int


class WeightSpan(NamedTuple):
    """Output tokens start..end - 1 were sampled by the weights that the engine calls `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One generated sequence.

    Args:
        fields: what the reader found, by the names that `ReplyReader.fields` gives; an engine's `rows` know what is in them.
            `reply[name]` is None where the response has none.
        aborted: the engine gave the request up; without any output it then has no routes.
        counts: what the response states of this sequence.
        weight_spans: which weights sampled which part of the output; the last one ends with the output.
        weight_name: the engine's name of the weights, where it does not send spans.
    """

    source: Source
    fields: Mapping[str, Any] = field(default_factory=dict)
    aborted: bool = False
    counts: tuple[StatedCount, ...] = ()
    weight_spans: tuple[WeightSpan, ...] = ()
    weight_name: str | None = None

    def __getitem__(self, name: str) -> Any:
        return self.fields.get(name)


def get_field(item: Any, name: str) -> Any:
    """Return a field of a parsed JSON object or an attribute of a python object; None if it is not there."""
    # Most items are dicts, and asking an abstract class whether one is a Mapping costs more than reading the field.
    return item.get(name) if type(item) is dict or isinstance(item, Mapping) else getattr(item, name, None)


def first_known(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


MAX_COUNT = 1 << 48
"""No response counts so many tokens; integers of thousands of digits cannot even be written into a message."""


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether this is an integer that counts something; for python True is one, too."""
    return type(value) is int and 0 <= value < MAX_COUNT


def read_counts(holder: Any, names: Mapping[str, Kind], *, prefix: str, source: Source) -> tuple[StatedCount, ...]:
    """Return the counts that `holder` states under `names`; absent and null ones are left out.

    Raises:
        PayloadError: a count is there and no integer of 0 or more.
    """
    counts = []
    for name, kind in names.items():
        value = get_field(holder, name)
        if value is None:
            continue
        if not is_count(value):
            raise source.error(f"MRR309: {prefix}.{name} is {shown(value)}, it must be an integer of 0 or more.")
        counts.append(StatedCount(f"{prefix}.{name}", kind, value))
    return tuple(counts)


def refuse_non_reply(result: Any, engine: str) -> None:
    """Raise PayloadError, with the server's own words, where a caller holds something else than a reply."""
    words = None
    if result is None:
        words = "the result is None, so its routes are missing, though the model has MoE layers. Did the request fail?"
    elif isinstance(result, Mapping) and not {"choices", "outputs", "meta_info"} & set(result):
        stated = first_known(*(result.get(name) for name in ("error", "detail")))
        if stated is None and result.get("object") == "error":
            stated = result.get("message")
        if stated is not None:
            words = f"the server answered with an error: {shown(stated, 300)}. There is no reply to decode."
    elif isinstance(result, str) and (" " in result[:200] or result[:1] in ("{", "[", "<")):  # as no base64 has
        words = f"the result is the text {shown(result, 120)}: parse JSON first, of a stream each chunk by itself."
    if words is not None:
        raise PayloadError(f"MRR301: {engine}: {words}")
