"""One generated sequence as an engine sent it, and the counts that its response states of it.

Every engine's module turns its forms of response into these; `front` does the rest for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from megatron_router_replay.engines.payload import Source, short_repr

Kind = Literal["prompt", "output", "all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedCount:
    """A number of tokens that a response states: of the prompt, of the output, or of both."""

    name: str
    kind: Kind
    value: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Token counts of a response with several choices: output summed over choices, each prompt counted once.

    Args:
        largest_prompt: the prompts are not summed, their largest is stated (Megatron-Core's server).
    """

    source: Source
    counts: tuple[StatedCount, ...]
    largest_prompt: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSpan:
    """Output tokens start..end - 1 were sampled by the weights that the engine calls `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One generated sequence.

    Args:
        routed_experts: in whatever form the engine sends it; None where the response has none.
        prompt_routed_experts: of vLLM 0.21, which sends the prompt's routes apart.
        prompt_is_proven: False: the response's prompt routes are not proven to be of this sequence's prompt.
        aborted: the engine gave the request up; without any output it then has no routes.
        counts: what the response states of this sequence.
        usage: what it states of all its sequences together; the replies of one response share the object.
        weight_spans: which weights sampled which part of the output; the last one ends with the output.
        weight_name: the engine's name of the weights, where it does not send spans.
    """

    source: Source
    routed_experts: Any
    prompt_routed_experts: Any = None
    prompt_is_proven: bool = True
    prompt_token_ids: Any = None
    output_token_ids: Any = None
    aborted: bool = False
    counts: tuple[StatedCount, ...] = ()
    usage: Usage | None = None
    weight_spans: tuple[WeightSpan, ...] = ()
    weight_name: str | None = None

    @property
    def has_routes(self) -> bool:
        return self.routed_experts is not None or self.prompt_routed_experts is not None


def get_field(item: Any, name: str) -> Any:
    """Return a field of a parsed JSON object or an attribute of a python object; None if it is not there."""
    # Most items are dicts, and asking an abstract class whether one is a Mapping costs more than reading the field.
    return item.get(name) if type(item) is dict or isinstance(item, Mapping) else getattr(item, name, None)


def first_known(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


def says(value: Any, word: str) -> bool:
    """Return whether a field holds this word; one that holds an array has no truth value to compare by."""
    return isinstance(value, str) and value == word


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
            raise source.error(f"{prefix}.{name} is {short_repr(value)}, it must be an integer of 0 or more.")
        counts.append(StatedCount(name=f"{prefix}.{name}", kind=kind, value=value))
    return tuple(counts)


USAGE: Mapping[str, Kind] = {"prompt_tokens": "prompt", "completion_tokens": "output", "total_tokens": "all"}


def read_usage(
    response: Any, *, source: Source, num_choices: int, largest_prompt: bool = False
) -> tuple[tuple[StatedCount, ...], Usage | None]:
    """Return the counts of `usage` for the one choice of a response, or for all its choices together.

    Raises:
        PayloadError: a count is no integer, or they contradict each other.
    """
    counts = read_counts(get_field(response, "usage"), USAGE, prefix="usage", source=source)
    values = {count.kind: count.value for count in counts}
    if len(values) == 3 and values["prompt"] + values["output"] != values["all"]:
        raise source.error(
            f"usage.total_tokens={values['all']} is not usage.prompt_tokens={values['prompt']} + "
            f"usage.completion_tokens={values['output']}."
        )
    # Of one choice each count is its own; of several only their sums can be compared.
    if num_choices == 1:
        return counts, None
    return (), Usage(source=source, counts=counts, largest_prompt=largest_prompt) if counts else None


def check_usage(
    usage: Usage, prompts: Sequence[int | None], outputs: Sequence[int | None], totals: Sequence[int | None]
) -> None:
    """Raise unless the counts of a response are those of its choices, as far as theirs are known.

    Args:
        prompts, outputs, totals: of each choice, in the order of their indexes.

    Source: vLLM 0.30, SGLang 0.5.23 (captures of n = 2 and of two prompts): choices of one prompt are neighbours.
    """
    stated = {count.kind: count for count in usage.counts}
    prompt, output = stated.get("prompt"), stated.get("output")
    known_prompts, known_outputs, known_totals = _known(prompts), _known(outputs), _known(totals)
    if output and known_outputs is not None:
        _agree(usage, output, {sum(known_outputs)})
    if prompt and known_prompts is not None:
        _agree(usage, prompt, _prompt_sums(known_prompts, largest=usage.largest_prompt))
    elif prompt and output and known_totals is not None and not usage.largest_prompt:
        # Each choice repeats its prompt, the count has it once for every n choices.
        repeated = sum(known_totals) - output.value
        _agree(usage, prompt, {repeated // n for n in _divisors(len(totals)) if repeated % n == 0})


def _known(values: Sequence[int | None]) -> list[int] | None:
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None


def _prompt_sums(prompts: list[int], *, largest: bool) -> set[int]:
    """Return what a response may state of its prompts: n choices of each, for every n that their lengths allow."""
    if largest:
        return {max(prompts)}
    # Nothing says whether four choices are of one prompt, two or four; choices of one prompt are neighbours.
    sums = set()
    for n in _divisors(len(prompts)):
        groups = [set(prompts[i : i + n]) for i in range(0, len(prompts), n)]
        if all(len(group) == 1 for group in groups):
            sums.add(sum(group.pop() for group in groups))
    return sums


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _agree(usage: Usage, count: StatedCount, right: set[int]) -> None:
    if count.value not in right:
        counted = " or ".join(map(str, sorted(right)))
        raise usage.source.error(
            f"{count.name}={count.value}, but the tokens of its choices make {counted}: these are not the tokens that the "
            "engine counted. Is a choice or part of one lost, or a BOS token?"
        )
