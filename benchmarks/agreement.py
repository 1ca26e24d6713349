"""Cost of the comparison with the live router in a training step: `mrr.replay` with and without it, in turns.

python -m benchmarks.agreement          # whole steps, with the session opened and closed
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import megatron_router_replay as mrr
from benchmarks.measure import ratio, rounds, table
from benchmarks.step import LARGER, TINY, Case, Trainer
from tests.support.workers import GlooWorkers

KINDS: dict[str, dict[str, Any]] = {
    "without": {"min_agreement": 0},
    "one layer": {},
    "every layer": {"ask_every_layer": True},
}
CASES = [
    Case(model=TINY, repeats=15),
    Case(model=replace(LARGER, name="larger, half of its layers", layers=4), repeats=15),
]


class Checking(Trainer):
    """A trainer that replays in every step."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.inner = {kind: [] for kind in KINDS}

    def session(self, kind: str) -> Any:
        return mrr.replay(self.chunks, self.trace, **KINDS[kind])


def time_steps(case: Case) -> dict[str, list[float]]:
    """Run on the rank: seconds of the steps of every kind."""
    trainer = Checking(case)
    steps = {kind: partial(trainer.step, kind) for kind in KINDS}
    # The first session of a model compares all layers; here it is a warm-up.
    return rounds(steps, repeats=case.repeats, warm_up=2, clock=trainer.clock)


def main() -> None:
    rows = []
    for case in CASES:
        with GlooWorkers(1) as workers:
            (seconds,) = workers.run(time_steps, case, timeout_s=900.0)
        ms = sorted(seconds["without"])[case.repeats // 2] * 1000
        rows.append([case.model.name, f"{ms:.0f}", *(str(ratio(seconds, kind, "without")) for kind in list(KINDS)[1:])])
    print(table(["model", "without, ms", *(f"{kind} / without" for kind in list(KINDS)[1:])], rows))


if __name__ == "__main__":
    main()
