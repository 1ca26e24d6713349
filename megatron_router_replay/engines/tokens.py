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
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from megatron_router_replay.checks import as_integer, shown
from megatron_router_replay.engines.options import DecodeOptions, WeightVersion
from megatron_router_replay.engines.payload import Array, Source, as_token_ids
from megatron_router_replay.engines.reader import Kind, Reply, StatedCount, get_field, is_count
from megatron_router_replay.errors import PayloadError

_NPY_BASE64 = "k05VTVBZ"
"""The magic bytes of a .npy file, as base64."""

_NOUNS: dict[Kind, str] = {"prompt": "prompt tokens", "output": "output tokens", "all": "tokens"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleTokens:
    """The tokens of a sample, as far as they are known.

    Args:
        num_prompt_tokens: the token at which the generation begins.
        token_ids: [num_tokens] int32.
        weight_version: [num_tokens] int32, of the weights that chose each token's route.
    """

    num_tokens: int
    num_prompt_tokens: int | None = None
    token_ids: Array | None = None
    weight_version: Array | None = None

    @property
    def nothing_generated(self) -> bool:
        return self.num_prompt_tokens == self.num_tokens


class WeightSpan(NamedTuple):
    """Output tokens start..end - 1 were sampled by the weights that the engine calls `version`."""

    version: str
    start: int
    end: int


def resolve_tokens(reply: Reply, options: DecodeOptions) -> SampleTokens:
    """Return the tokens of a sample, after comparing the caller's with the reply's.

    Raises:
        PayloadError: the number of tokens is unknown, or two sources disagree; the message names both.
    """
    prompt, output, ids = _token_ids(reply, options)
    # Ids come first: of two counts that differ, a message then calls the stated one wrong.
    sized: list[tuple[str, Kind, Any]] = [
        ("the token ids", "all", ids),
        ("the prompt's ids", "prompt", prompt),
        ("the ids of the response's output", "output", output),
    ]
    counts = [StatedCount(name, kind, len(values)) for name, kind, values in sized if values is not None]
    if options.num_tokens is not None:
        counts.append(StatedCount("num_tokens", "all", options.num_tokens))
    counts += reply.counts
    spans = _read_spans(reply["weight_versions"], reply.source)
    # The spans of the weights cover the output, so the end of the last one counts it.
    if spans:
        counts.append(StatedCount("weight_versions[-1].end", "output", spans[-1].end))
    agreed = _agreed(counts, reply.source)
    if "all" not in agreed:
        raise _missing_ids(reply)
    numbers = _version_numbers(spans, reply["weight_version"], options.weight_version, reply)
    return SampleTokens(
        num_tokens=agreed["all"],
        num_prompt_tokens=agreed.get("prompt"),
        token_ids=ids,
        weight_version=_stamp(numbers, spans, agreed) if numbers else None,
    )


def _missing_ids(reply: Reply) -> PayloadError:
    """Return the error of a reply without its ids and without their number."""
    if reply["output_token_ids"] is not None:
        come, advice = "with the ids of the output alone", "pass the prompt that you sent as prompt_token_ids=..."
    else:
        come, advice = "without token ids", "pass the engine's own ids as token_ids=... (prompt and output)"
    # The request comes first: a text that is tokenized again may have other ids, as many and not the same.
    if reply.request_fields.token_ids:
        advice = f"send {reply.request_fields.token_ids} with the request, or {advice}"
    # The form of the routes shows the reply of the other engine, which has its ids in other fields.
    engine, routes = reply.source.engine, reply["routed_experts"]
    if (
        engine in ("vLLM", "SGLang")
        and isinstance(routes, str)
        and routes.startswith(_NPY_BASE64) != (engine == "vLLM")
    ):
        other = "SGLang" if engine == "vLLM" else "vLLM"
        advice = f"its routes look as {other} sends them, which engines.{other.lower()} reads; else {advice}"
    return reply.source.error(
        f"MRR309: comes {come}, so the tokens of its rows are unknown: {advice}. Never tokenize its text again."
    )


def _token_ids(reply: Reply, options: DecodeOptions) -> tuple[Array | None, Array | None, Array | None]:
    """Return the ids of prompt, output and both, each None where unknown; copies, never a buffer of the caller."""
    source = reply.source
    prompts, lists = (options.prompt_token_ids, reply["prompt_token_ids"]), (options.token_ids, reply["token_ids"])
    given, sent, output, given_ids, sent_ids = (
        None if each is None else as_token_ids(each, source=source)
        for each in (*prompts, reply["output_token_ids"], *lists)
    )
    if given_ids is not None and sent_ids is not None and not np.array_equal(given_ids, sent_ids):
        raise source.error(
            f"MRR309: token_ids ({len(given_ids)}) are not the prompt and output of the response ({len(sent_ids)} ids)."
        )
    ids = given_ids if sent_ids is None else sent_ids
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


def _agreed(counts: Sequence[StatedCount], source: Source) -> dict[Kind, int]:
    """Return the count of each kind that is known or follows from the other two."""
    known: dict[Kind, StatedCount] = {}
    # A reply that states all three may contradict itself, so the one that follows is compared as well.
    for count in chain(counts, _following(known)):
        if count.value < 0:
            raise source.error(f"MRR309: {count.name} leaves {count.value} {_NOUNS[count.kind]}.")
        first = known.setdefault(count.kind, count)
        if first.value != count.value:
            raise source.error(
                f"MRR309: {count.name}={count.value}, but {first.value} {_NOUNS[count.kind]} by {first.name}: these "
                "are not the tokens that the engine counted. Is a chunk of the stream lost, a choice, or a BOS token?"
            )
    return {kind: count.value for kind, count in known.items()}


def _following(known: Mapping[Kind, StatedCount]) -> Iterator[StatedCount]:
    """Yield the count that follows from two others, once these are known."""
    prompt, output, both = known.get("prompt"), known.get("output"), known.get("all")
    if prompt is not None and output is not None:
        name = f"{prompt.name} ({prompt.value}) and {output.name} ({output.value})"
        yield StatedCount(name, "all", prompt.value + output.value)
    elif both is not None and (part := prompt or output) is not None:
        name = f"{part.name}={part.value} of {both.name} ({both.value})"
        yield StatedCount(name, "output" if prompt is not None else "prompt", both.value - part.value)


def _read_spans(value: Any, source: Source) -> list[WeightSpan]:
    """Return `weight_versions` of a reply: dicts or objects with version, start and end; [] where there is none.

    Raises:
        PayloadError: not a list of such spans, or they do not follow one another from 0 on.
    """
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        raise source.error(f"MRR313: weight_versions is {type(value).__name__}, expected a list of spans.")
    spans: list[WeightSpan] = []
    for item in value:
        version, start, end = (get_field(item, name) for name in ("version", "start", "end"))
        before = spans[-1].end if spans else 0
        is_span = (type(version) is str or is_count(version)) and is_count(start) and is_count(end)
        # A gap would leave tokens without a version, and mean that a part of the output is lost.
        if not is_span or start != before or end < start:
            raise source.error(
                f"MRR313: weight_versions has {shown(item)} after {before} tokens: expected spans with version, start and "
                "end that follow one another. Is a part of the output lost?"
            )
        spans.append(WeightSpan(str(version), start, end))
    return spans


def _version_numbers(
    spans: Sequence[WeightSpan], name: Any, given: WeightVersion | None, reply: Reply
) -> dict[str, int]:
    """Return the number of each version that the reply names, or the number of all tokens; {} where none is known.

    Args:
        name: the engine's name of the weights, where it sends no spans.
        given: the caller's number, or the number of each name.

    Raises:
        PayloadError: the reply's versions changed and `given` is one number that is none of them, or they cannot be
            numbers; a name that is not in the mapping.
    """
    source, names = reply.source, list(dict.fromkeys(span.version for span in spans))
    numbers: dict[str, int] = {}
    if isinstance(given, Mapping):
        # A name without spans is of all tokens, if the caller maps it to a number.
        names = names or ([name] if isinstance(name, str) else [])
        if not names:
            field = reply.request_fields.weight_versions
            advice = f"Send {field} with the request, or pass" if field else "Pass"
            raise source.error(
                f"MRR313: weight_version names {sorted(map(str, given))[:8]}, but the reply was made by weights that it does "
                f"not name. {advice} your number of the only version, weight_version=17."
            )
        if missing := [name for name in names if name not in given]:
            raise source.error(
                f"MRR313: weight_version names {sorted(map(str, given))[:8]}, but the reply was made by {missing}: give "
                "your number of each version that it names."
            )
        numbers = {name: given[name] for name in names}
    elif given is not None and len(names) <= 1:
        numbers = {"": given}
    # Ten digits are enough for every integer of 32 bits; a longer name is a name.
    elif all(len(name) <= 11 and name.isascii() and name.removeprefix("-").isdigit() for name in names):
        numbers = {name: int(name) for name in names}
    # One number may repeat one of those that the reply names, and cannot be that of several names.
    if given is not None and not isinstance(given, Mapping) and given not in numbers.values():
        raise source.error(
            f"MRR313: weight_version={shown(given)}, but the weights of this reply changed, from version to version "
            f"{names}. Pass weight_version={{{names[0]!r}: ..., ...}}, your number for each."
        )
    return {
        name: as_integer("weight_version", number, least=-(2**31), most=2**31 - 1, error=source.error)
        for name, number in numbers.items()
    }


def _stamp(numbers: Mapping[str, int], spans: Sequence[WeightSpan], counts: Mapping[Kind, int]) -> Array:
    """Return the version of each token, [num_tokens] int32."""
    if len(numbers) == 1 or not spans[-1].end:
        return np.full(counts["all"], next(iter(numbers.values())), np.int32)
    by_output = np.repeat([numbers[span.version] for span in spans], [span.end - span.start for span in spans])
    # Row i sampled output token i - (P - 1); rows before and after these take the nearest version.
    sampled = np.arange(counts["all"]) - (counts["prompt"] - 1)
    stamped: Array = by_output[np.clip(sampled, 0, len(by_output) - 1)].astype(np.int32)
    return stamped
