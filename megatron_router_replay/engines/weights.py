"""Which weights chose which rows: the spans that an engine states of its output -> one version a token.

A span says which version *sampled* the output tokens start..end - 1. Output token j was sampled by the forward of the token
before it, and that forward chose that token's route: row P - 1 + j has the version of output token j. Rows of the prompt
come from the prefill, which sampled output token 0. The last token was never forwarded and keeps the last version.

Source: SGLang 0.5.23, srt.utils.weight_versions; vLLM 0.32 sends the same fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_router_replay.engines.payload import Array, Source, short_repr
from megatron_router_replay.engines.reply import MAX_COUNT, WeightSpan, get_field, is_count


def read_spans(value: Any, *, source: Source) -> tuple[WeightSpan, ...]:
    """Return `weight_versions` of a reply: dicts or objects with version, start and end; () where there is none.

    Raises:
        PayloadError: not a list of such spans, or they do not follow one another from 0 on.
    """
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise source.error(f"weight_versions is {type(value).__name__}, expected a list of spans.")
    spans: list[WeightSpan] = []
    for item in value:
        version, start, end = (get_field(item, name) for name in ("version", "start", "end"))
        named = type(version) is str or (type(version) is int and abs(version) < MAX_COUNT)
        if not (named and is_count(start) and is_count(end)):
            raise source.error("weight_versions has a span without version, start or end, or with others than numbers.")
        if start != (spans[-1].end if spans else 0) or end < start:
            raise source.error(
                f"weight_versions has a span {start}..{end} behind {spans[-1].end if spans else 0} tokens: spans must "
                "follow one another. Is a part of the output lost?"
            )
        spans.append(WeightSpan(version=str(version), start=start, end=end))
    return tuple(spans)


def stamp_versions(
    *,
    num_tokens: int,
    num_prompt_tokens: int | None,
    spans: Sequence[WeightSpan],
    weight_name: str | None,
    given: int | Mapping[str, int] | None,
    source: Source,
) -> Array | None:
    """Return the version of each token, [num_tokens] int32; None where nobody gives one that is a number.

    Args:
        spans: of the reply; their end is the number of output tokens.
        weight_name: the engine's name of the weights where it sends no spans.
        given: the caller's number, or the number of each name.

    Raises:
        PayloadError: the reply's versions changed and `given` says one number that is none of them, or they cannot be
            numbers; a name that is not in the mapping.
    """
    names = list(dict.fromkeys(span.version for span in spans))
    if not names and weight_name is not None:
        names = [weight_name]
    if isinstance(given, Mapping):
        missing = [name for name in names if name not in given]
        if missing or not names:
            raise source.error(
                f"weight_version names {sorted(map(str, given))[:8]}, but the reply was made by "
                f"{missing or 'weights that it does not name'}."
            )
        numbers = {name: given[name] for name in names}
    elif len(names) <= 1 and given is not None:
        return _filled(num_tokens, given, source)
    else:
        numbers = _as_numbers(names, given, source) if spans else {}
    if not numbers:
        return None
    num_output = spans[-1].end if spans else 0
    if len(names) == 1 or num_output == 0:
        return _filled(num_tokens, numbers[names[0]], source)
    assert num_prompt_tokens is not None, "spans state the output, and how many tokens there are is known"
    by_output = np.concatenate([_filled(span.end - span.start, numbers[span.version], source) for span in spans])
    # Row i sampled output token i - (P - 1). Rows before it are of the prefill, which sampled output token 0 (the same
    # weights), and the last row was never forwarded: both take the nearest version.
    sampled = np.arange(num_tokens) - (num_prompt_tokens - 1)
    stamped: Array = by_output[np.clip(sampled, 0, num_output - 1)]
    return stamped


def _as_numbers(names: Sequence[str], given: int | None, source: Source) -> dict[str, int]:
    """Return the integers that the names of an engine are; {} if they are none and the caller gives no number."""
    # Ten digits hold every integer of 32 bits; a name that is longer is a name.
    if all(len(name) <= 11 and name.isascii() and name.removeprefix("-").isdigit() for name in names):
        numbers = {name: int(name) for name in names}
        if given is None or given in numbers.values():
            return numbers
    elif given is None:
        return {}
    raise source.error(
        f"weight_version={short_repr(given)}, but the weights of this reply changed, from version to version {list(names)}. "
        f"Pass weight_version={{{names[0]!r}: ..., ...}}, your number for each."
    )


def _filled(size: int, version: int, source: Source) -> Array:
    if isinstance(version, bool) or not hasattr(version, "__index__") or not -(2**31) <= version.__index__() < 2**31:
        raise source.error(f"weight_version={short_repr(version)} must be an integer of 32 bits.")
    return np.full(size, int(version), np.int32)
