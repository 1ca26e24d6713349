"""Random training programs: every router decision of every recompute is exact, or a RouterReplayError says why not.

A program is a random sequence of what trainers do: forwards of several micro-batches under any kind of checkpoint, called
through a wrapper, itself or through `.forward`, backwards in any order and of several at once, in-place changes of outputs,
failures that are caught, the package's own errors among them, evaluations, dropped graphs, graphs used twice, sessions of
every kind inside each other and left early, rows that a forward which failed left behind, backwards on other threads. Between
any two steps the routers may get other weights. Which forward a recompute belongs to is read off a number that travels
through the model, never asked of the package.

The quick programs are the same ones in every run. The slow ones are new in each run, and the run prints the first seed:
FIRST_SEED=<it> repeats them. CI_ALL=1 draws 5,000 in place of 1,500.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.mcore.core.hooks import sources_of
from tests.support.new_seeds import new_seeds
from tests.unit.mcore.tiny_chunk import (
    KINDS,
    Chunk,
    as_map,
    disturb,
    held,
    non_reentrant,
    plain,
    random_trace,
    reentrant,
    watched,
)

ROWS = 64
QUICK = 50

FALSE_ALARMS = ("MRR414", "MRR415", "exchanged during the session", "other experts than were decided")
"""What no program does, so an error of these words is one of the package itself."""


@dataclass
class Forward:
    """What the program remembers of one forward."""

    number: int
    held: bool  # by a session
    rows: Tensor | None  # [b, s] of a replay
    trace: mrr.RoutingTrace | None
    loss: Tensor | None = None


class Wrapper(torch.nn.Module):
    def __init__(self, module: Chunk) -> None:
        super().__init__()
        self.module = module
        self.fails = ""

    def forward(self, *args: Any) -> Tensor:
        if self.fails == "before":
            raise ArithmeticError("injected")
        output: Tensor = self.module(*args)
        if self.fails == "behind":
            raise ArithmeticError("injected")
        return output


class Program:
    def __init__(self, seed: int, chunk: Chunk) -> None:
        self.random = random.Random(seed)
        self.chunk = chunk
        self.wrapper = Wrapper(chunk)
        self.number = 0
        self.forwards: dict[int, Forward] = {}
        self.sessions: list[Any] = []
        self.traces: WeakKeyDictionary[Any, mrr.RoutingTrace] = WeakKeyDictionary()  # of a replay: what it shall use
        # Session and rows of a forward that failed: before the chunk's own began, so they are there still; or in it.
        self.left: tuple[Any, Tensor] | None = None
        self.again: tuple[Any, Tensor] | None = None
        self.log: list[str] = []
        self.errors: list[str] = []
        # A recompute of a forward that was held, in a kind of checkpoint that is known, must not raise.
        self.false_alarms: list[str] = []

    def run(self) -> None:
        for _ in range(self.random.randint(6, 18)):
            self.try_to(
                self.random.choices(
                    [self.open, self.close, self.forward, self.backward, self.drop, self.evaluate, self.change_weights],
                    [4, 2, 9, 5, 1, 1, 3],
                )[0]
            )
        self.change_weights()
        while any(forward.loss is not None for forward in self.forwards.values()):
            self.try_to(self.backward)

    def try_to(self, step: Callable[[], None]) -> None:
        """Take a step; of those that the package refuses, some end the program, and some are caught by the trainer."""
        try:
            step()
        except mrr.RouterReplayError as error:
            self.log.append(f"  {type(error).__name__}: {error}")
            self.errors.append(str(error))
            if self.random.random() < 0.4 and "under another session" not in str(error):
                raise

    def open(self) -> None:
        kind = self.random.choice(["freeze", "record", "replay"])
        self.log.append(f"open {kind}")
        if kind == "freeze":
            session = mrr.freeze_recompute(self.wrapper, ask_every_layer=self.random.random() < 0.3)
        elif kind == "record":
            session = mrr.record(self.wrapper)
        else:
            mask = torch.tensor([self.random.random() < 0.8 for _ in range(ROWS)])
            trace = random_trace(ROWS, seed=self.random.randrange(1 << 20), replay_mask=mask)
            given = trace if kind == "replay" else None
            session = mrr.replay(self.wrapper, given, verify=self.random.random() < 0.3, min_replayed=0)
            self.traces[session] = trace
        self.sessions.append(session)

    def close(self) -> None:
        if self.sessions:
            session = self.sessions.pop(self.random.randrange(len(self.sessions)))
            self.log.append(f"close {session.kind}")
            if self.random.random() < 0.3:
                session.__exit__(ArithmeticError, ArithmeticError(), None)
            else:
                session.close()

    def forward(self) -> None:
        chunk = self.chunk
        kind = self.random.choice(["plain", *KINDS])
        chunk.around = plain if kind == "plain" else KINDS[kind][0]
        b, s = self.random.choice([(1, 4), (2, 3), (3, 2)])
        input_ids = torch.randint(32, (b, s))
        given, rows = self.takes_rows(), None
        if given is not None:
            if self.left is not None and self.left[0] is given:
                rows, self.left = self.left[1], None
                input_ids = torch.randint(32, rows.shape)
            elif self.again is not None and self.again[0] is given:
                rows, self.again = self.again[1], None
                input_ids = torch.randint(32, rows.shape)
                given.microbatch(rows)
            else:
                rows = self.give(given, input_ids)
        number = self.number
        self.number += 1
        trace = None if given is None else self.traces.get(given)
        call = self.random.choice([self.wrapper, self.wrapper, chunk, chunk.forward])
        fails = self.random.random() < 0.15
        self.wrapper.fails = self.random.choice(["before", "behind", *[""] * 12])
        chunk.fail_at = self.random.randrange(3) if fails else None
        outer = self.random.choice([None, None, None, reentrant, non_reentrant])
        in_place = self.random.random() < 0.3
        self.log.append(
            f"forward {number} of {type(call).__name__} {kind} outer={outer and outer.__name__} "
            f"fails={fails} {self.wrapper.fails}"
        )
        self.forwards[number] = Forward(number, bool(self.sessions), rows, trace)
        try:
            if outer is None:
                logits = call(input_ids, number)
                if in_place:
                    logits.div_(0.7)
                loss = logits.square().mean()
            else:
                around = chunk.around  # the recompute must call what the forward called

                def chunk_and_loss(scale: Tensor) -> Tensor:
                    chunk.around = around
                    return (call(input_ids, number) * scale).square().mean()

                loss = outer(chunk_and_loss, torch.ones(1, requires_grad=True))
        except ArithmeticError:
            if rows is not None and call is self.wrapper and self.wrapper.fails == "before":
                self.left = given, rows
            elif rows is not None and self.random.random() < 0.5:
                self.again = given, rows
            return
        finally:
            chunk.fail_at = None
            self.wrapper.fails = ""
        self.forwards[number].loss = loss

    def takes_rows(self) -> Any:
        """The session that takes the rows of the next forward."""
        return next((session for session in reversed(self.sessions) if session._microbatches), None)

    def give(self, session: Any, input_ids: Tensor) -> Tensor:
        # Each once, because no token could be compared; some have none.
        drawn = self.random.sample([*range(ROWS), *[-1] * 4], input_ids.numel())
        rows = torch.tensor(drawn).view(input_ids.shape)
        if session.kind == "record":
            rows = torch.full(input_ids.shape, -1)  # the same row twice would rightly be refused
        session.microbatch(rows)
        return rows

    def backward(self) -> None:
        waiting = [forward for forward in self.forwards.values() if forward.loss is not None]
        if not waiting:
            return
        chosen = self.random.sample(waiting, self.random.randint(1, len(waiting)))
        retain = self.random.random() < 0.2
        self.log.append(f"backward {[forward.number for forward in chosen]} retain={retain}")
        total = torch.stack([forward.loss for forward in chosen if forward.loss is not None]).sum()
        if not retain:
            for forward in chosen:
                forward.loss = None
        errors: list[BaseException] = []

        def run_backward() -> None:
            try:
                total.backward(retain_graph=retain)
            except BaseException as error:
                errors.append(error)

        if self.random.random() < 0.2:
            thread = threading.Thread(target=run_backward)
            thread.start()
            thread.join()
        else:
            run_backward()
        if errors:
            for forward in chosen:
                forward.loss = None  # a backward that stopped halfway cannot be repeated
            if all(forward.held for forward in chosen):
                self.false_alarms.append(f"backward {[forward.number for forward in chosen]}: {errors[0]}")
            raise errors.pop()  # kept here, it would keep this frame, and with it the graph

    def drop(self) -> None:
        waiting = [forward for forward in self.forwards.values() if forward.loss is not None]
        if waiting:
            self.random.choice(waiting).loss = None
            gc.collect()

    def evaluate(self) -> None:
        """A forward without gradients, as that of the old log-probs, whose recompute never comes."""
        if self.left is not None:  # the forward would take these rows
            return
        self.log.append("evaluate")
        input_ids, given = torch.randint(32, (2, 2)), self.takes_rows()
        rows = None if given is None else self.give(given, input_ids)
        number, self.number = self.number, self.number + 1
        self.forwards[number] = Forward(number, bool(self.sessions), rows, given and self.traces.get(given))
        with self.random.choice([torch.no_grad, torch.inference_mode])():
            self.chunk(input_ids, number)

    def change_weights(self) -> None:
        disturb(self.chunk, seed=self.random.randrange(1 << 20))


def wrong_decisions(program: Program, seen: dict[tuple[int, int], list[Tensor]]) -> list[str]:
    """What was routed otherwise than it must: replayed rows as the trace says, recomputes as their forward."""
    wrong = []
    for (number, layer), maps in seen.items():
        forward = program.forwards.get(number)
        if forward is None or not forward.held:
            continue
        if not all(torch.equal(maps[0], later) for later in maps[1:]):
            wrong.append(f"forward {number} layer {layer}: a recompute")
        if forward.trace is not None and forward.rows is not None:
            rows = forward.rows.t().reshape(-1)
            routed = (rows >= 0) & forward.trace.replay_mask[rows.clamp(min=0)]
            target = as_map(forward.trace.layer(layer)[rows[routed]])
            if not torch.equal(maps[0][routed], target):
                wrong.append(f"forward {number} layer {layer}: not the trace's routes")
    return wrong


def check(seed: int, chunk: Chunk) -> str:
    """Run one program; return how it ended."""
    program = Program(seed, chunk)
    torch.manual_seed(seed)
    ending = "exact"
    with watched(chunk) as seen:
        try:
            program.run()
            for session in reversed(program.sessions):
                session.close()
        except mrr.RouterReplayError as error:
            ending = type(error).__name__
            program.errors.append(str(error))
        # A program that was stopped by an error is over; what ran before was exact all the same.
        mrr.close_sessions(chunk)
    wrong = wrong_decisions(program, seen)
    log = f"seed {seed}: {wrong}\n  " + "\n  ".join(program.log)
    assert not wrong, log
    program.false_alarms += [error for error in program.errors if any(words in error for words in FALSE_ALARMS)]
    assert not program.false_alarms, f"{program.false_alarms}\n{log}"
    return ending


def nothing_is_left(chunk: Chunk) -> bool:
    """Whether no session holds the routers, and no tape their calls, once every graph is gone."""
    for _ in range(200):
        # Of a backward that raised, torch keeps the nodes that were to come until this thread's next backward; another
        # thread's go when the system has ended it, which `join` does not wait for.
        torch.zeros((), requires_grad=True).backward()
        if held(chunk) == 0:
            return not any(map(sources_of, chunk.routers))
        time.sleep(0.05)
    return False


def endings(seeds: range) -> dict[str, int]:
    chunk = Chunk()
    counts: dict[str, int] = {}
    for seed in seeds:
        ending = check(seed, chunk)
        counts[ending] = counts.get(ending, 0) + 1
        if seed % 50 == 0:
            assert nothing_is_left(chunk), f"seed {seed}: something is left"
    return counts


def test_random_programs_are_exact_or_raise():
    counts = endings(range(QUICK))
    assert counts["exact"] > QUICK / 5


@pytest.mark.slow
def test_thousands_of_random_programs_are_exact_or_raise():
    seeds = new_seeds(1500, num_of_all=5000)
    assert endings(seeds)["exact"] > len(seeds) / 5
