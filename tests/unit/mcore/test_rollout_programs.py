"""Rollouts and batches as trainers have them: each token gets its own experts, or the session says why not.

A program is a rollout and a few micro-batches of it. The rollout has groups of one prompt, conversations of several turns,
equal answers, answers that end at the maximum length, aborted requests, lost rows. A micro-batch cuts, repeats and leaves
out samples, and pads on the right or left, packs, or packs with alignment. Which experts a token may get is known from how
the program was built; hooks on Megatron's routers read what it got. Nothing here asks the package which row a token has.

With padding declared, a program must be exact. Undeclared, it must be exact too, or raise in a forward; then the advice of
the error is followed until the program is exact.

The quick programs are the same ones in every run. The slow ones are new in each run, and the run prints the first seed:
FIRST_SEED=<it> repeats them. CI_ALL=1 draws 2,500 in place of 300.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, ReplayStateError
from tests.support.new_seeds import check_new_seeds
from tests.unit.mcore.tiny_chunk import EXPERTS, TOPK, VOCAB, Chunk, watched

QUICK = 60
LAYERS = (1, 2)
DRAWN: dict[str, Any] = {"min_agreement": 0, "min_replayed": 0}
"""Routes are drawn at random, so the live router agrees with none; a step may have few tokens with a route."""

Experts = tuple[tuple[int, ...], ...]
"""Of each layer, the experts of a token in order of their numbers."""


class Model(Chunk):
    """A chunk with a large vocabulary: different tokens may have one embedding."""

    def forward(self, input_ids: Tensor, number: int, **inputs: Any) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids % VOCAB, number, **inputs)


@dataclass
class Sample:
    """Tokens of the rollout, and the experts of each, None: it has no route."""

    tokens: list[int]
    experts: list[Experts | None]


@dataclass
class Part:
    """Tokens that a micro-batch has of a sample, and perhaps one more, at a row and column."""

    tokens: list[int]
    row: int
    column: int


@dataclass
class Batch:
    """A micro-batch: [b, s] ids, the other inputs of the forward, and where its parts are."""

    ids: list[list[int]]
    parts: list[Part]
    layout: str
    inputs: dict[str, Any] = field(default_factory=dict)
    bounds: list[int] = field(default_factory=list)  # of packed sequences, padded
    lengths: list[int] = field(default_factory=list)  # of packed sequences, unpadded


class Program:
    """A rollout and micro-batches of it, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        draw = self.random
        vocabulary = draw.choice([24, 24, 1000, 150_000])
        # A padding token of its own, or the end token, as many tokenizers have it; sometimes all sequences begin with it.
        self.eos = draw.choice([0, 2, vocabulary - 1])
        self.padding = self.eos if draw.random() < 0.5 else (1 if draw.random() < 0.5 else vocabulary)
        self.bos = [draw.choice([3, 3, self.padding, self.eos])] if draw.random() < 0.4 else []
        self.words = [token for token in range(4, min(vocabulary - 1, 4000)) if token not in (self.eos, self.padding)]
        self.longest = draw.choice([10, 16, 30])
        self._known: dict[tuple[int, ...], Experts] = {}
        self.samples = self._rollout()
        self.batches = [self._batch() for _ in range(draw.randint(1, 4))]

    # ---- the rollout
    def _words(self, most: int) -> list[int]:
        few = self.words[: self.random.choice([2, 8, len(self.words)])]
        return [self.random.choice(few) for _ in range(self.random.randint(1, most))]

    def _answer(self, room: int) -> list[int]:
        """Return an answer that ends with the end token, unless the maximum length cuts it."""
        answer = [*self._words(8), self.eos]
        if self.random.random() < 0.05:
            answer.insert(0, self.eos)  # one that a stop string did not end
        return answer[: max(0, room)]

    def _rollout(self) -> list[Sample]:
        draw, found = self.random, []
        template = self._words(4) if draw.random() < 0.7 else []
        for _ in range(draw.randint(1, 4)):
            prompt = [*self.bos, *template, *self._words(5)]
            answers: list[list[int]] = []
            for _ in range(draw.choice([1, 2, 4, 8])):
                is_equal = bool(answers) and draw.random() < 0.2
                answers.append(draw.choice(answers) if is_equal else self._answer(self.longest - len(prompt)))
                tokens = [*prompt, *answers[-1]]
                for _ in range(draw.choice([0, 0, 0, 1, 2])):  # turns
                    if draw.random() < 0.7:
                        found.append(tokens)  # a turn is a sample of its own, too
                    more = [*self._words(3), *self._answer(self.longest - len(tokens) - 3)]
                    tokens = [*tokens, *more]
                found.append(tokens)
        if draw.random() < 0.3:
            draw.shuffle(found)
        return [self._sample(tokens) for tokens in found]

    def _sample(self, tokens: list[int]) -> Sample:
        draw = self.random
        experts: list[Experts | None] = []
        for end in range(1, len(tokens) + 1):
            prefix = tuple(tokens[:end])
            if prefix not in self._known:
                self._known[prefix] = self._draw_experts()
            # An engine's second run over a prefix may differ in a near-tie.
            known = self._known[prefix]
            experts.append(self._flipped(known) if draw.random() < 0.01 else known)
        experts[-1] = None  # the engine did not run the last token
        if draw.random() < 0.03:  # it lost rows
            first = draw.randrange(len(tokens))
            experts = [None if first <= at < first + 4 else each for at, each in enumerate(experts)]
        return Sample(tokens, experts)

    def _draw_experts(self) -> Experts:
        return tuple(tuple(sorted(self.random.sample(range(EXPERTS), TOPK))) for _ in LAYERS)

    def _flipped(self, experts: Experts) -> Experts:
        """Return the experts of a token with another one in one layer."""
        flipped, layer = [list(each) for each in experts], self.random.randrange(len(LAYERS))
        others = sorted(set(range(EXPERTS)) - set(flipped[layer]))
        flipped[layer][self.random.randrange(TOPK)] = self.random.choice(others)
        return tuple(tuple(sorted(each)) for each in flipped)

    def trace(self) -> mrr.RoutingTrace:
        routes = [
            torch.tensor(
                [[list(layer) for layer in each] if each else [[-1] * TOPK] * len(LAYERS) for each in sample.experts]
            )
            for sample in self.samples
        ]
        tokens = [torch.tensor(sample.tokens) for sample in self.samples]
        return mrr.RoutingTrace.from_samples(
            tokens, routes, num_experts=EXPERTS, layer_numbers=LAYERS, last_token="unrouted"
        )

    # ---- micro-batches
    def _batch(self) -> Batch:
        draw = self.random
        chosen = [list(draw.choice(self.samples).tokens) for _ in range(draw.randint(1, 5))]
        if draw.random() < 0.2:  # the trainer's own maximum
            most = draw.randint(2, self.longest)
            chosen = [tokens[:most] for tokens in chosen]
        elif draw.random() < 0.1:  # the trainer appends an end token that the engine did not have
            chosen = [tokens if tokens[-1] == self.eos else [*tokens, self.eos] for tokens in chosen]
        layout = draw.choice(["right", "left", "packed", "aligned", "aligned", "filled"])
        make = {"right": self._padded, "left": self._padded}.get(layout, self._packed)
        return make(chosen, layout)

    def _padded(self, chosen: list[list[int]], layout: str) -> Batch:
        draw = self.random
        length = max(map(len, chosen))
        length += draw.choice([0, 0, 1, 3, -length % 8])
        rows, parts = [], []
        for number, tokens in enumerate(chosen):
            padding = [self.padding] * (length - len(tokens))
            parts.append(Part(tokens, number, len(padding) if layout == "left" else 0))
            rows.append([*padding, *tokens] if layout == "left" else [*tokens, *padding])
        batch = Batch(rows, parts, layout)
        if draw.random() < 0.5 and layout == "right":
            batch.inputs["position_ids"] = torch.arange(length).expand(len(rows), -1)
        return batch

    def _packed(self, chosen: list[list[int]], layout: str) -> Batch:
        """Return one row: without padding, with each sequence aligned, or filled up at its end."""
        multiple = self.random.choice([4, 8, 16]) if layout == "aligned" else 1
        row: list[int] = []
        parts, bounds = [], [0]
        for tokens in chosen:
            parts.append(Part(tokens, 0, len(row)))
            row += [*tokens, *[self.padding] * (-len(tokens) % multiple)]
            bounds.append(len(row))
        if layout == "filled":
            row += [self.padding] * (-len(row) % 16)
            # The rest is a sequence of its own, a part of the last one, or outside.
            kind = self.random.choice(["own", "last", "outside"])
            if kind == "own" and len(row) > bounds[-1]:
                bounds.append(len(row))
            elif kind == "last":
                bounds[-1] = len(row)
        lengths = [len(tokens) for tokens in chosen] + [0] * (len(bounds) - 1 - len(chosen))
        return Batch([row], parts, layout, bounds=bounds, lengths=lengths)

    # ---- a run
    def run(self, how: str, padding_token_ids: list[int] | None) -> None:
        """Run the micro-batches in a session, and compare what every router used.

        Args:
            how: "token", or "bound": the forward itself says what is padding, by a mask or unpadded cu_seqlens.
        """
        options = DRAWN if padding_token_ids is None else {**DRAWN, "padding_token_ids": padding_token_ids}
        chunk = Model(num_layers=len(LAYERS))
        with watched(chunk) as live:
            for number, batch in enumerate(self.batches):
                chunk(torch.tensor(batch.ids), number, **inputs(batch, "token"))
        is_refused = (
            nullcontext() if self._has_a_route() else pytest.raises(ReplayStateError, match=r"none of .* tokens")
        )
        with is_refused, watched(chunk) as seen, mrr.replay(chunk, self.trace(), **options):
            for number, batch in enumerate(self.batches):
                chunk(torch.tensor(batch.ids), number, **inputs(batch, how))
        for number, batch in enumerate(self.batches):
            self._check(number, batch, seen, live, is_told=how == "bound" or padding_token_ids is not None)

    def _has_a_route(self) -> bool:
        """Return whether a token of the batches may have a route: a rollout of short samples may have lost all of them."""
        parts = [part.tokens for batch in self.batches for part in batch.parts]
        return any(
            known is not None
            for sample in self.samples
            for tokens in parts
            if sample.tokens[: len(tokens)] in (tokens, tokens[:-1])
            for known in sample.experts[: len(tokens)]
        )

    def _check(self, number: int, batch: Batch, seen: Any, live: Any, *, is_told: bool) -> None:
        shape = len(batch.ids[0]), len(batch.ids)  # routers see tokens s-major
        used = [experts_of(seen[number, layer][0], shape) for layer in LAYERS]
        by_router = [experts_of(live[number, layer][0], shape) for layer in LAYERS[:1]]
        at_parts = set()
        for part in batch.parts:
            row = batch.ids[part.row]
            stop = min([bound for bound in batch.bounds if bound > part.column], default=len(row))
            stop = max(stop, part.column + len(part.tokens))
            holders = [s for s in self.samples if s.tokens[: len(part.tokens)] == part.tokens]
            if not holders:  # with an end token appended
                holders = [s for s in self.samples if s.tokens == part.tokens[:-1]]
            for position in range(part.column, stop):
                offset = position - part.column
                prefix = row[part.column : position + 1]
                known = [s.experts[offset] for s in self.samples if s.tokens[: offset + 1] == prefix]
                # Live is right where a sample that these tokens may be of has no route, and on padding.
                may_be_live = offset >= len(part.tokens) or any(
                    offset >= len(s.experts) or s.experts[offset] is None for s in holders
                )
                at_parts.add((part.row, position))
                got = tuple(each[position][part.row] for each in used)
                allowed = got in known
                if may_be_live and got[0] == by_router[0][position][part.row]:
                    allowed = True  # of later layers, the live choice depends on the experts before
                assert allowed, (
                    f"micro-batch {number} ({batch.layout}), row {part.row}, position {position}: token {offset} of "
                    f"{part.tokens} has {row[position]} and got {got}, its routes are {known}"
                )
        for row_number, row in enumerate(batch.ids):
            for position in range(len(row)):
                if (row_number, position) not in at_parts:
                    # Where nothing says what padding is, a sequence of it that is a sample's beginning is that sample's.
                    begin = max((bound for bound in batch.bounds if bound <= position), default=0)
                    prefix = row[begin : position + 1]
                    known = [s.experts[position - begin] for s in self.samples if s.tokens[: len(prefix)] == prefix]
                    is_sample = not is_told and tuple(each[position][row_number] for each in used) in known
                    is_live = used[0][position][row_number] == by_router[0][position][row_number]
                    assert is_live or is_sample, "padding is live"

    @property
    def is_padded(self) -> bool:
        """Whether a batch has a token of padding."""
        return any(sum(map(len, batch.ids)) > sum(len(part.tokens) for part in batch.parts) for batch in self.batches)


def inputs(batch: Batch, how: str) -> dict[str, Any]:
    """Return the other inputs of a forward."""
    if not batch.bounds:
        if how == "token":
            return batch.inputs
        is_padding = torch.ones(len(batch.ids), len(batch.ids[0]), dtype=torch.bool)
        for part in batch.parts:
            is_padding[part.row, part.column : part.column + len(part.tokens)] = False
        return {**batch.inputs, "padding_mask": is_padding}
    bounds = torch.tensor(batch.bounds, dtype=torch.int32)
    lengths = torch.tensor([0, *batch.lengths]).cumsum(0).int()
    known = {"cu_seqlens_q": bounds} if how == "token" else {"cu_seqlens_q": lengths, "cu_seqlens_q_padded": bounds}
    return {"packed_seq_params": SimpleNamespace(**known)}


def experts_of(routing_map: Tensor, shape: tuple[int, int]) -> list[list[tuple[int, ...]]]:
    """Return the experts of each token, [s][b]."""
    chosen = routing_map.int().topk(TOPK, dim=1).indices.sort(dim=1).values.view(*shape, TOPK)
    return [[tuple(experts) for experts in row] for row in chosen.tolist()]


def declared_is_exact(seed: int) -> str:
    program = Program(seed)
    for how, padding in (("token", [program.padding]), ("bound", None)):
        program.run(how, padding)
    return "exact"


def undeclared_is_exact_or_advised(seed: int) -> str:
    """Run without a word about padding; if that raises, follow the advice."""
    program, declared, how = Program(seed), None, "token"
    for step in range(4):
        try:
            program.run(how, declared)
        except LayoutError as error:
            # A token in front of all sequences alike may be of a second chat template: a mask is advised, no declaration.
            advice = re.search(
                r"padding_token_ids=\[([\d, ]+)\]|If it is padding, give the model (padding_mask)", str(error)
            )
            if advice is None:
                raise
            if advice[2]:
                declared, how = None, "bound"
            else:
                declared = [int(token) for token in advice[1].split(",")]
        else:
            return "exact" if step == 0 else f"refused {step} times, then exact"
    raise AssertionError(f"the advice padding_token_ids={declared} does not end")


@pytest.mark.parametrize("run", [declared_is_exact, undeclared_is_exact_or_advised])
def test_quick_programs(run: Any) -> None:
    results = Counter(run(seed) for seed in range(QUICK))
    assert len(results) == (2 if run is undeclared_is_exact_or_advised else 1), results


@pytest.mark.slow
@pytest.mark.parametrize("run", [declared_is_exact, undeclared_is_exact_or_advised])
def test_programs_that_no_run_had_before(run: Any) -> None:
    check_new_seeds(run)
