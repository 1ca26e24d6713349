"""Whose rows these are: the tokens of a sample, put together from the caller and the reply and compared.

Nothing in an array of routes says which tokens it is of, so whatever else says it must agree: token ids with token ids, and
every count that a reply states with the number of ids that are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_router_replay.engines.options import DecodeOptions
from megatron_router_replay.engines.payload import Array, Source, as_token_ids
from megatron_router_replay.engines.reply import Kind, Reply, StatedCount

_NOUNS: dict[Kind, str] = {"prompt": "prompt tokens", "output": "output tokens", "all": "tokens"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTokens:
    """The tokens of one sample: how many, where the generation begins, and which, as far as known."""

    num_tokens: int
    num_prompt_tokens: int | None
    token_ids: Array | None

    @property
    def num_output_tokens(self) -> int | None:
        return None if self.num_prompt_tokens is None else self.num_tokens - self.num_prompt_tokens

    @property
    def nothing_generated(self) -> bool:
        return self.num_prompt_tokens == self.num_tokens


def resolve_tokens(reply: Reply, options: DecodeOptions) -> SampleTokens:
    """Return the tokens of a sample; what the caller gives and what the reply says must agree.

    Raises:
        PayloadError: the number of tokens cannot be told, or two sources disagree; the message names both.
    """
    source = reply.source
    prompt, output, ids = _token_ids(reply, options)
    # Ids come first: of two counts that differ, a message then calls the stated one wrong.
    counts: list[StatedCount] = []
    if ids is not None:
        counts.append(StatedCount(name="the token ids", kind="all", value=len(ids)))
    if prompt is not None:
        counts.append(StatedCount(name="the prompt's ids", kind="prompt", value=len(prompt)))
    if output is not None:
        counts.append(StatedCount(name="the ids of the response's output", kind="output", value=len(output)))
    if options.num_tokens is not None:
        counts.append(StatedCount(name="num_tokens", kind="all", value=options.num_tokens))
    counts += reply.counts
    if reply.weight_spans:
        spans_end = reply.weight_spans[-1].end
        counts.append(StatedCount(name="weight_versions[-1].end", kind="output", value=spans_end))
    known = _agreed(counts, source)
    total = known.get("all")
    if total is None:
        raise source.error(
            "cannot tell how many tokens these rows belong to: pass token_ids=... (prompt and output), or "
            "prompt_token_ids=... where the response has the output, or num_tokens=... if ids are unknown."
        )
    num_prompt = known.get("prompt")
    return SampleTokens(
        num_tokens=total.value, num_prompt_tokens=None if num_prompt is None else num_prompt.value, token_ids=ids
    )


def _token_ids(reply: Reply, options: DecodeOptions) -> tuple[Array | None, Array | None, Array | None]:
    """Return the ids of prompt, output and both, each None where unknown; copies, never a buffer of the caller."""
    source = reply.source
    prompt = None if options.prompt_token_ids is None else as_token_ids(options.prompt_token_ids, source=source)
    if reply.prompt_token_ids is not None:
        sent = as_token_ids(reply.prompt_token_ids, source=source)
        if prompt is not None and not np.array_equal(prompt, sent):
            raise source.error(
                f"prompt_token_ids ({len(prompt)}) are not the prompt of the response ({len(sent)} ids)."
            )
        prompt = sent
    output = None if reply.output_token_ids is None else as_token_ids(reply.output_token_ids, source=source)
    if options.token_ids is None:
        both = None if prompt is None or output is None else np.concatenate([prompt, output])
        return prompt, output, both
    ids = as_token_ids(options.token_ids, source=source)
    # Ids of the re-tokenised text may be as many and not the same, so they are compared one by one.
    if prompt is not None and not np.array_equal(ids[: len(prompt)], prompt):
        raise source.error(f"token_ids ({len(ids)}) do not begin with the prompt of the response ({len(prompt)} ids).")
    if output is not None and (len(output) > len(ids) or not np.array_equal(ids[len(ids) - len(output) :], output)):
        raise source.error(
            f"token_ids ({len(ids)}) do not end with the output of the response ({len(output)} ids): they are prompt and "
            "output of this very sample, not of its re-tokenised text."
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
                f"{count.name}={count.value}, but {first.value} {_NOUNS[count.kind]} by {first.name}: these are not the "
                "tokens that the engine counted. Is a chunk of the stream lost, or a BOS token?"
            )
    # Two counts make the third: a reply that states all three may contradict itself.
    for kind, count in _following(known):
        if count.value < 0:
            raise source.error(f"{count.name} leaves {count.value} {_NOUNS[kind]}.")
        if known.setdefault(kind, count).value != count.value:
            raise source.error(f"{known[kind].name}={known[kind].value}, but {count.name} make {count.value}.")
    return known


def _following(known: dict[Kind, StatedCount]) -> Iterator[tuple[Kind, StatedCount]]:
    prompt, output, both = known.get("prompt"), known.get("output"), known.get("all")
    if prompt is not None and output is not None:
        name = f"{prompt.name} ({prompt.value}) and {output.name} ({output.value})"
        yield "all", StatedCount(name=name, kind="all", value=prompt.value + output.value)
    elif both is not None and (part := prompt or output) is not None:
        other: Kind = "output" if prompt is not None else "prompt"
        name = f"{part.name}={part.value} of {both.name} ({both.value})"
        yield other, StatedCount(name=name, kind=other, value=both.value - part.value)
