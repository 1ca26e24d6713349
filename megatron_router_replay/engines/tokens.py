"""Whose rows these are: the token ids of a sample, put together from the caller and the response and compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_router_replay.engines.payload import Array, Source, as_token_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTokens:
    """The tokens of one sample: how many, where the generation begins, and which, as far as known."""

    num_tokens: int
    num_prompt_tokens: int | None
    token_ids: Array | None


def get_field(item: Any, name: str) -> Any:
    """Return a field of a parsed JSON object or an attribute of a python object; None if it is not there."""
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


def as_count(value: Any) -> int | None:
    """Return a count that a response states, or None if it states none that can be used."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def resolve_tokens(
    *,
    source: Source,
    token_ids: Any = None,
    given_prompt: Any = None,
    sent_prompt: Any = None,
    sent_output: Any = None,
    num_tokens: int | None = None,
    counted_prompt: int | None = None,
    counted_output: int | None = None,
) -> SampleTokens:
    """Return the tokens of a sample; what the caller gives and what the response says must agree.

    Args:
        token_ids: prompt and output, from the caller.
        given_prompt: the prompt alone, from the caller.
        sent_prompt, sent_output: from the response.
        num_tokens: from the caller, where ids are unknown.
        counted_prompt, counted_output: numbers of tokens that the response states.

    Raises:
        PayloadError: the number of tokens cannot be told, or two sources disagree.
    """
    prompt = None if given_prompt is None else as_token_ids(given_prompt, source=source)
    if sent_prompt is not None:
        sent = as_token_ids(sent_prompt, source=source)
        if prompt is not None and not np.array_equal(prompt, sent):
            raise source.error(
                f"prompt_token_ids ({len(prompt)}) are not the prompt of the response ({len(sent)} ids)."
            )
        prompt = sent
    output = None if sent_output is None else as_token_ids(sent_output, source=source)
    ids = None if token_ids is None else as_token_ids(token_ids, source=source)
    if ids is None and prompt is not None and output is not None:
        ids = np.concatenate([prompt, output])
    num_prompt = _num_prompt_tokens(ids, prompt, output, source)
    if ids is None:
        return _counted(source, num_tokens, prompt, output, counted_prompt, counted_output)
    if num_tokens is not None and num_tokens != len(ids):
        raise source.error(f"num_tokens={num_tokens}, but {len(ids)} token ids are known.")
    return SampleTokens(num_tokens=len(ids), num_prompt_tokens=num_prompt, token_ids=ids)


def _num_prompt_tokens(ids: Array | None, prompt: Array | None, output: Array | None, source: Source) -> int | None:
    if ids is None:
        return None
    if prompt is not None and not np.array_equal(ids[: len(prompt)], prompt):
        raise source.error(f"token_ids ({len(ids)}) do not begin with the prompt of the response ({len(prompt)} ids).")
    if output is not None and (len(output) > len(ids) or not np.array_equal(ids[len(ids) - len(output) :], output)):
        raise source.error(
            f"token_ids ({len(ids)}) do not end with the output of the response ({len(output)} ids): they are prompt and "
            "output of this very sample, not of its re-tokenised text."
        )
    if prompt is not None and output is not None and len(prompt) + len(output) != len(ids):
        raise source.error(
            f"{len(ids)} token_ids were given, the response has {len(prompt)} prompt and {len(output)} output ids."
        )
    if prompt is not None:
        return len(prompt)
    return None if output is None else len(ids) - len(output)


def _counted(
    source: Source,
    num_tokens: int | None,
    prompt: Array | None,
    output: Array | None,
    counted_prompt: int | None,
    counted_output: int | None,
) -> SampleTokens:
    num_prompt = counted_prompt if prompt is None else len(prompt)
    num_output = counted_output if output is None else len(output)
    if num_tokens is None:
        if num_prompt is None or num_output is None:
            raise source.error(
                "cannot tell how many tokens these rows belong to: pass token_ids=... (prompt and output), or "
                "prompt_token_ids=... where the response has the output, or num_tokens=... if ids are unknown."
            )
        num_tokens = num_prompt + num_output
    elif num_prompt is None and num_output is not None:
        num_prompt = num_tokens - num_output
    elif num_prompt is not None and num_output is not None and num_prompt + num_output != num_tokens:
        raise source.error(
            f"num_tokens={num_tokens}, but the response has {num_prompt} prompt and {num_output} output tokens."
        )
    if num_tokens < 0 or not 0 <= (num_prompt or 0) <= num_tokens:
        raise source.error(f"num_tokens={num_tokens} cannot hold {num_prompt} prompt and {num_output} output tokens.")
    return SampleTokens(num_tokens=num_tokens, num_prompt_tokens=num_prompt, token_ids=None)
