"""Say why the tokens of a sequence are those of no sample, or of several, and what to do."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_router_replay.mcore.batches.samples import Reading, SortedSamples, keys_of

CHANCE = 8
"""Up to so many equal tokens, a sequence and the beginning of a sample may be equal by chance."""


PADDED_LEFT = (
    "padding is in front of sequences: if attention sees it (no attention_mask hides it), no token has its routes"
)
CUT = (
    "position_ids alone separate the sequences of a row: give the model packed_seq_params, or an attention_mask of blocks, "
    "unless attention separates them already"
)
"""How the layout of a session's forwards may have made all routes wrong; see `RowLookup.layout`."""


class Misfit(NamedTuple):
    """An error about a sequence.

    Args:
        at: the position in the segment that it is about.
        text: the code, the fault, and the remedy.
    """

    at: int
    text: str

    def message(self, place: str) -> str:
        """Return the error's message; place: where it is."""
        code, text = self.text.split(": ", 1)
        return f"{code}: {place}: {text}"


class Names:
    """Names of a trace's samples, for messages."""

    def __init__(self, samples: SortedSamples, sample_ids: Any) -> None:
        self.samples, self._ids = samples, sample_ids

    def of(self, row: int) -> str:
        """Return how a message calls the sample of a row."""
        sample, _ = self.samples.name(row)
        return f"sample {sample}" + (f" ({self._ids[sample]!r})" if self._ids is not None else "")


def no_sample(
    names: Names,
    tokens: Any,
    reading: Reading,
    *,
    declared: tuple[int, ...] | None,
    lengths_known: bool,
    may_pad_left: bool,
    runs_differ: bool = False,
) -> Misfit:
    """Return why a sequence is not explained.

    Args:
        tokens: of the segment, [n], with padding around the sequence.
        reading: its best one.
        declared: the tokens of padding; None: not declared.
        lengths_known: the number of tokens is known, so there is no padding.
        may_pad_left: padding may precede the sequence.
        runs_differ: the sequences of this forward begin with different numbers of its first token.
    """
    samples, at = names.samples, reading.start + reading.known
    rest = tokens[at : at + reading.live]
    token, run = int(rest[0]), _run(rest)
    is_constant = run == len(rest)
    argument = f"padding_token_ids={[*(declared or ()), token]}"
    if not reading.known:
        # Of tokens in front of a sample, declared as padding, a second chat template would be accepted, with routes of other
        # prefixes. A packed sequence has no padding in front, but may be a single token of padding.
        may_pad = (run > 1 or runs_differ) if may_pad_left else (is_constant and not lengths_known)
        return _no_beginning(names, rest, at, run, argument, may_pad=may_pad, may_pad_left=may_pad_left)
    sample = names.of(reading.row)
    if is_constant and not lengths_known and (reading.is_whole or run > 1):
        whose = "all tokens" if reading.is_whole else f"the first {reading.known} tokens"
        return Misfit(
            at,
            f"MRR207: token {token} comes {run} times at the end, after {whose} of {sample}. If it is padding, say "
            f"{argument}, or give the model padding_mask or unpadded cu_seqlens_q.",
        )
    padding = ""
    if not lengths_known:
        may_pad_left = may_pad_left and _run(tokens) > reading.known  # the padding may be the samples' first token, too
        padding = _advice(tokens, rest, declared or (), may_pad_left=may_pad_left)
    if reading.is_whole:
        known = samples.num_known(keys_of(rest))
        if known > 1 or known == len(rest):
            following = names.of(samples.read(0, keys_of(rest[:known]), known, known).row)
            return Misfit(
                at,
                f"MRR206: it has all {reading.known} tokens of {sample}, and {following} begins here: give the model "
                f"packed_seq_params with the cu_seqlens of its sequences.{padding}",
            )
        return Misfit(
            at,
            f"MRR206: it has all {reading.known} tokens of {sample}, and from position {reading.known} on (token {token}) "
            f"more than one token that is no padding.{padding or ' If it is padding, give padding_mask.'}",
        )
    if reading.known <= CHANCE and (inside := _inside(samples, tokens[reading.start :], reading.known)):
        return Misfit(reading.start, _cut_on_the_left(names, inside) + padding)
    return Misfit(
        at,
        f"MRR206: its first {reading.known} tokens are those of {sample}, which has token "
        f"{int(samples.token_ids[reading.row + reading.known])} at position {reading.known}, but it has token {token} there. "
        f"Were the tokens of the rollout tokenized again, or changed?{padding}",
    )


def _advice(tokens: Any, rest: Any, declared: tuple[int, ...], *, may_pad_left: bool) -> str:
    """Return the advice if the tokens at one end of a sequence may be padding, "": none may be.

    Args:
        tokens: of the sequence, [n].
        rest: those after its sample.
        may_pad_left: equal tokens in front may be padding, too.
    """
    ends = [int(tokens[0])] if may_pad_left and _run(tokens) > 1 else []
    if _run(rest[::-1]) > 1 or len(rest) <= 2:
        ends.append(int(rest[-1]))
    # One token alone: the other end may be a sample's own, and declared it would hide that sample.
    token = next((token for token in ends if token not in declared), None)
    return "" if token is None else f" If token {token} is padding, say padding_token_ids={[*declared, token]}."


def _no_beginning(
    names: Names, tokens: Any, at: int, run: int, argument: str, *, may_pad: bool, may_pad_left: bool
) -> Misfit:
    samples, token = names.samples, int(tokens[0])
    known = samples.num_known(keys_of(tokens[run:]))
    begins = known > 1 or (known and known == len(tokens) - run)
    if may_pad and (run == len(tokens) or (run > 1 and begins)):
        where = "fills it" if run == len(tokens) else f"comes {run} times in front of it"
        return Misfit(
            at,
            f"MRR207: token {token} {where}, and no sample of the trace begins so. If it is padding, say {argument}, or give "
            "the model padding_mask or unpadded cu_seqlens_q.",
        )
    if begins:
        row = samples.read(0, keys_of(tokens[run : run + known]), known, known).row
        padding = f" If it is padding, {f'say {argument}' if may_pad else 'give the model padding_mask'}."
        return Misfit(
            at,
            f"MRR206: no sample of the trace begins with token {token}, but from the next one on it has {names.of(row)}. "
            "Is it a BOS token that the engine did not have? Then give the engine the same token ids, or leave it out in "
            f"training: routes with and without it differ.{padding if may_pad_left else ''}",
        )
    if inside := _inside(samples, tokens, 0):
        return Misfit(at, _cut_on_the_left(names, inside))
    return Misfit(
        at,
        f"MRR206: no sample of the trace begins with token {token}, nor with what follows it. Is this batch of another "
        "rollout, or was it cut on the left? An evaluation runs inside `with session.paused():`."
        + (f" If it is padding, say {argument}." if may_pad else ""),
    )


def _inside(samples: SortedSamples, tokens: Any, known: int) -> tuple[int, int] | None:
    """Return the (sample, position) of the tokens that a sequence begins with, more than `known`; None: there is none."""
    size = min(len(tokens), 2 * CHANCE)
    while size > max(1, known):
        if found := samples.locate_inside(keys_of(tokens[:size])):
            return found
        size -= 1
    return None


def _cut_on_the_left(names: Names, inside: tuple[int, int]) -> str:
    sample, position = inside
    name = names.of(names.samples.bounds[sample])
    return (
        f"MRR206: it begins with the tokens of {name} from position {position} on: it was cut on the left, and routes depend "
        "on all tokens before. Train on whole samples, or on ones that are cut on the right."
    )


def two_starts(names: Names, reading: Reading) -> Misfit:
    """Return that padding in front of a sequence may be tokens of it."""
    return Misfit(
        reading.start + reading.known,
        f"MRR206: tokens before {names.of(reading.row)} may be padding or may belong to another sample of the trace, which "
        "also has them. Give the model padding_mask, or both unpadded cu_seqlens_q and cu_seqlens_q_padded.",
    )


def masked_tokens(names: Names, reading: Reading, number: int) -> Misfit:
    """Return that a mask covers the tokens that continue a sample."""
    return Misfit(
        reading.known,
        f"MRR207: padding_mask, or unpadded cu_seqlens_q, end this sequence after {reading.known} tokens of "
        f"{names.of(reading.row)}, and the next {number} tokens are the sample's own. Is it a loss mask? padding_mask is "
        "True where padding is.",
    )


def masked_sample(names: Names, reading: Reading, at: int) -> Misfit:
    """Return that a mask covers a whole sequence, whose tokens are a sample's; `at`: where it begins."""
    return Misfit(
        at,
        f"MRR207: a mask calls all of this sequence padding, and its tokens are the first {reading.known} of "
        f"{names.of(reading.row)}, which would be routed live. attention_mask and cu_seqlens_q must keep a sample's tokens, "
        "and padding_mask is True where padding is; fill a batch up with rows of padding tokens.",
    )


def _run(tokens: Any) -> int:
    """Return how many equal tokens come first."""
    others = (tokens != tokens[0]).nonzero()[0]
    return int(others[0]) if others.size else len(tokens)
