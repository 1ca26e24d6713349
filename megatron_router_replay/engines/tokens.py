"""The tokens of the rows and the weights that chose them, from the caller and the reply, compared with each other.

An array of routes does not identify its tokens, so everything else must agree: token ids with token ids, and every count that
a reply states with the number of ids that are used.

A weight span gives the version that *sampled* the output tokens start..end - 1. Output token j was sampled by the forward of
the token before it, and that forward chose that token's route: row P - 1 + j has the version of output token j. Rows of the
prompt come from the prefill, which sampled output token 0. The last token was never forwarded and keeps the last version.

Source: of the spans, SGLang 0.5.23, srt.utils.weight_versions; vLLM 0.32 sends the same fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_router_replay.checks import as_integer, shown
from megatron_router_replay.engines.options import DecodeOptions, WeightVersion
from megatron_router_replay.engines.payload import Array, Source, as_token_ids
from megatron_router_replay.engines.reply import (
    MAX_COUNT,
    Kind,
    Reply,
    StatedCount,
    WeightSpan,
    get_field,
    is_count,
)

_NOUNS: dict[Kind, str] = {"prompt": "prompt tokens", "output": "output tokens", "all": "tokens"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTokens:
    """The tokens of a sample: their number, the start of the generation, and their ids, as far as known."""

    num_tokens: int
    num_prompt_tokens: int | None
    token_ids: Array | None

    @property
    def nothing_generated(self) -> bool:
        return self.num_prompt_tokens == self.num_tokens


def resolve_tokens(reply: Reply, options: DecodeOptions) -> SampleTokens:
    """Return the tokens of a sample, after comparing the caller's with the reply's.

    Raises:
        PayloadError: the number of tokens is unknown, or two sources disagree; the message names both.
    """
    prompt, output, ids = _token_ids(reply, options)
    # Ids come first: of two counts that differ, a message then calls the stated one wrong.
    known: list[tuple[str, Kind, Any]] = [
        ("the token ids", "all", ids),
        ("the prompt's ids", "prompt", prompt),
        ("the ids of the response's output", "output", output),
    ]
    counts = [StatedCount(name, kind, len(values)) for name, kind, values in known if values is not None]
    if options.num_tokens is not None:
        counts.append(StatedCount("num_tokens", "all", options.num_tokens))
    counts += reply.counts
    # The spans of the weights cover the output, so the end of the last one counts it.
    if reply.weight_spans:
        counts.append(StatedCount("weight_versions[-1].end", "output", reply.weight_spans[-1].end))
    agreed = _agreed(counts, reply.source)
    if "all" not in agreed:
        raise reply.source.error(
            "MRR309: the number of tokens of these rows is unknown: pass token_ids=... (prompt and output), or "
            "prompt_token_ids=... where the response has the output, or num_tokens=... if ids are unknown."
        )
    num_prompt = agreed["prompt"].value if "prompt" in agreed else None
    return SampleTokens(num_tokens=agreed["all"].value, num_prompt_tokens=num_prompt, token_ids=ids)


def _token_ids(reply: Reply, options: DecodeOptions) -> tuple[Array | None, Array | None, Array | None]:
    """Return the ids of prompt, output and both, each None where unknown; copies, never a buffer of the caller."""
    source = reply.source
    given, sent, output, ids = (
        None if value is None else as_token_ids(value, source=source)
        for value in (
            options.prompt_token_ids,
            reply["prompt_token_ids"],
            reply["output_token_ids"],
            options.token_ids,
        )
    )
    if given is not None and sent is not None and not np.array_equal(given, sent):
        raise source.error(
            f"MRR309: prompt_token_ids ({len(given)}) are not the prompt of the response ({len(sent)} ids)."
        )
    prompt = given if sent is None else sent
    if ids is None:
        return prompt, output, None if prompt is None or output is None else np.concatenate([prompt, output])
    # Ids of the re-tokenised text may be as many and not the same, so they are compared one by one.
    if prompt is not None and not np.array_equal(ids[: len(prompt)], prompt):
        raise source.error(
            f"MRR309: token_ids ({len(ids)}) do not begin with the prompt of the response ({len(prompt)} ids)."
        )
    if output is not None and (len(output) > len(ids) or not np.array_equal(ids[len(ids) - len(output) :], output)):
        raise source.error(
            f"MRR309: token_ids ({len(ids)}) do not end with the output of the response ({len(output)} ids): they are "
            "prompt and output of this very sample, not of its re-tokenised text."
        )
    # That the two together are as many as all is checked with the counts.
    return prompt, output, ids


def _agreed(counts: list[StatedCount], source: Source) -> dict[Kind, StatedCount]:
    """Return one count of each kind that is known or follows from the other two."""
    known: dict[Kind, StatedCount] = {}
    for count in counts:
        first = known.setdefault(count.kind, count)
        if first.value != count.value:
            raise source.error(
                f"MRR309: {count.name}={count.value}, but {first.value} {_NOUNS[count.kind]} by {first.name}: these "
                "are not the tokens that the engine counted. Is a chunk of the stream lost, or a BOS token?"
            )
    # Two counts make the third: a reply that states all three may contradict itself.
    for count in _following(known):
        if count.value < 0:
            raise source.error(f"MRR309: {count.name} leaves {count.value} {_NOUNS[count.kind]}.")
        if known.setdefault(count.kind, count).value != count.value:
            raise source.error(
                f"MRR309: {known[count.kind].name}={known[count.kind].value}, but {count.name} make {count.value}."
            )
    return known


def _following(known: dict[Kind, StatedCount]) -> Iterator[StatedCount]:
    prompt, output, both = known.get("prompt"), known.get("output"), known.get("all")
    if prompt is not None and output is not None:
        name = f"{prompt.name} ({prompt.value}) and {output.name} ({output.value})"
        yield StatedCount(name, "all", prompt.value + output.value)
    elif both is not None and (part := prompt or output) is not None:
        name = f"{part.name}={part.value} of {both.name} ({both.value})"
        yield StatedCount(name, "output" if prompt is not None else "prompt", both.value - part.value)


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
        named = type(version) is str or (type(version) is int and abs(version) < MAX_COUNT)
        if not (named and is_count(start) and is_count(end)):
            raise source.error(
                "MRR313: weight_versions has a span without version, start or end, or with others than numbers."
            )
        before = spans[-1].end if spans else 0
        # Spans without gaps: a gap would leave tokens without a version, and mean that a part of the output is lost.
        if start != before or end < start:
            raise source.error(
                f"MRR313: weight_versions has a span {start}..{end} after {before} tokens: spans must follow one "
                "another. Is a part of the output lost?"
            )
        spans.append(WeightSpan(str(version), start, end))
    return tuple(spans)


def stamp_versions(reply: Reply, tokens: SampleTokens, given: WeightVersion | None) -> Array | None:
    """Return the version of each token, [num_tokens] int32; None where neither side gives a number.

    Args:
        given: the caller's number, or the number of each name.

    Raises:
        PayloadError: the reply's versions changed and `given` is one number that is none of them, or they cannot be
            numbers; a name that is not in the mapping.
    """
    source, spans = reply.source, reply.weight_spans
    names = list(dict.fromkeys(span.version for span in spans))
    # A name without spans is of all tokens, if the caller maps it to a number.
    if not names and reply.weight_name is not None:
        names = [reply.weight_name]
    if isinstance(given, Mapping):
        missing = [name for name in names if name not in given]
        if missing or not names:
            raise source.error(
                f"MRR313: weight_version names {sorted(map(str, given))[:8]}, but the reply was made by "
                f"{missing or 'weights that it does not name'}."
            )
        numbers = {name: given[name] for name in names}
    elif len(names) <= 1 and given is not None:
        return _filled(tokens.num_tokens, given, source)
    else:
        numbers = _as_numbers(names, given, source) if spans else {}
    if not numbers:
        return None
    num_output = spans[-1].end if spans else 0
    if len(names) == 1 or num_output == 0:
        return _filled(tokens.num_tokens, numbers[names[0]], source)
    assert tokens.num_prompt_tokens is not None, "spans state the output, and how many tokens there are is known"
    by_output = np.concatenate([_filled(span.end - span.start, numbers[span.version], source) for span in spans])
    # Row i sampled output token i - (P - 1); rows before and after these take the nearest version.
    sampled = np.arange(tokens.num_tokens) - (tokens.num_prompt_tokens - 1)
    stamped: Array = by_output[np.clip(sampled, 0, num_output - 1)]
    return stamped


def _as_numbers(names: Sequence[str], given: int | None, source: Source) -> dict[str, int]:
    """Return the integers that the names of an engine are; {} if they are none and the caller gives no number."""
    # Ten digits are enough for every integer of 32 bits; a longer name is a name.
    if all(len(name) <= 11 and name.isascii() and name.removeprefix("-").isdigit() for name in names):
        numbers = {name: int(name) for name in names}
        if given is None or given in numbers.values():
            return numbers
    elif given is None:
        return {}
    raise source.error(
        f"MRR313: weight_version={shown(given)}, but the weights of this reply changed, from version to version "
        f"{list(names)}. Pass weight_version={{{names[0]!r}: ..., ...}}, your number for each."
    )


def _filled(size: int, version: int, source: Source) -> Array:
    number = as_integer("weight_version", version, least=-(2**31), most=2**31 - 1, error=source.error)
    return np.full(size, number, np.int32)
