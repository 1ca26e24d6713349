"""One generated sequence as an engine sent it, with the counts that its response states; and values that are no reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np
import torch

from megatron_router_replay.checks import shown
from megatron_router_replay.engines.payload import Source
from megatron_router_replay.errors import PayloadError

Kind = Literal["prompt", "output", "all"]

MAX_COUNT = 1 << 48
"""No response counts so many tokens; integers of thousands of digits cannot even be written into a message."""


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
        fields: values by the names of `ReplyReader.fields`; `reply[name]` is None where the response has none.
        aborted: the engine gave the request up; without any output it then has no routes.
        counts: numbers of tokens that the response states of this sequence.
        weight_spans: the weights that sampled each part of the output; the last span ends with the output.
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
    """Return a field of a parsed JSON object or an attribute of a Python object; None if it is not there."""
    # Most items are dicts, and isinstance of an abstract class costs more than reading the field.
    return item.get(name) if type(item) is dict or isinstance(item, Mapping) else getattr(item, name, None)


def first_known(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether this is an integer that counts something; for Python True is one, too."""
    return type(value) is int and 0 <= value < MAX_COUNT


def read_counts(holder: Any, names: Mapping[str, Kind], *, prefix: str, source: Source) -> list[StatedCount]:
    """Return the counts that `holder` states under `names`; absent and null ones are left out.

    Raises:
        PayloadError: a count is there and no integer of 0 or more.
    """
    values = {name: value for name in names if (value := get_field(holder, name)) is not None}
    for name, value in values.items():
        if not is_count(value):
            raise source.error(f"MRR309: {prefix}.{name} is {shown(value)}, it must be an integer of 0 or more.")
    return [StatedCount(f"{prefix}.{name}", names[name], value) for name, value in values.items()]


def read_spans(value: Any, *, source: Source) -> tuple[WeightSpan, ...]:
    """Return `weight_versions` of a reply: dicts or objects with version, start and end; () where there is none.

    Raises:
        PayloadError: not a list of such spans, or they do not follow one another from 0 on.
    """
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise source.error(f"MRR313: weight_versions is {type(value).__name__}, expected a list of spans.")
    spans: list[WeightSpan] = []
    for item in value:
        version, start, end = (get_field(item, name) for name in ("version", "start", "end"))
        is_named = type(version) is str or (type(version) is int and abs(version) < MAX_COUNT)
        if not (is_named and is_count(start) and is_count(end)):
            raise source.error(
                "MRR313: weight_versions has a span without version, start or end, or with others than numbers."
            )
        before = spans[-1].end if spans else 0
        # A gap would leave tokens without a version, and mean that a part of the output is lost.
        if start != before or end < start:
            raise source.error(
                f"MRR313: weight_versions has a span {start}..{end} after {before} tokens: spans must follow one "
                "another. Is a part of the output lost?"
            )
        spans.append(WeightSpan(str(version), start, end))
    return tuple(spans)


def refuse_non_reply(result: Any, engine: str) -> None:
    """Raise PayloadError, with the server's own words, where a caller passes something that is no reply."""
    if isinstance(result, (list, tuple, np.ndarray, torch.Tensor)):
        return  # the rows of an array: there may be many
    kind, words = type(result).__name__, None
    if result is None:
        words = "the result is None, so its routes are missing, though the model has MoE layers. Did the request fail?"
    elif isinstance(result, Mapping) and not {"choices", "outputs", "meta_info"} & set(result):
        message = result.get("message") if result.get("object") == "error" else None
        stated = first_known(result.get("error"), result.get("detail"), message)
        if stated is not None:
            words = f"the server answered with an error: {shown(stated, 300)}. There is no reply to decode."
    elif isinstance(result, (str, bytes)):
        start = result[:200] if isinstance(result, str) else result[:200].decode("latin-1")
        # Base64 has no blank and begins with no bracket. Raw ids of int32 may begin with one, but have bytes of 0.
        is_text = all(character >= " " or character in "\t\r\n" for character in start)
        if is_text and (start.startswith(("{", "[", "<", "data:")) or " " in start):
            kind = "text" if isinstance(result, str) else "bytes"
            words = f"the result is the {kind} {shown(result, 120)}: parse JSON first, of a stream each chunk apart."
    elif isawaitable(result):
        words = f"the result is a {kind} that was not awaited: await it, and parse JSON first."
    elif not any(hasattr(result, name) for name in ("choices", "outputs", "routed_experts", "__array__")) and any(
        callable(getattr(result, name, None)) for name in ("json", "read")
    ):
        words = f"the result is a {kind}, a response of HTTP: parse JSON first, with response.json() or json.load(response)."
    if words is not None:
        raise PayloadError(f"MRR301: {engine}: {words}")
