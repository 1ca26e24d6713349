"""Where a replayed step's extra time goes: cProfile over steps with and without replay, by function of this package.

The profiler adds to each call, so that parts of many small calls look larger than they are. Opening and closing a session,
which walks over all modules, is timed without it.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from pathlib import Path
from typing import Any

import megatron_router_replay as mrr
from benchmarks.measure import Section, single_process, table
from benchmarks.step import LARGER, TINY, Case, Trainer
from megatron_router_replay.testing import reset_megatron_state

TITLE = "Profile: where the extra time of a replayed step goes"
CASES = [(Case(model=TINY, repeats=20), 12), (Case(model=LARGER, repeats=4), 12)]
"""Cases, and how many parts to show of each."""
PACKAGE = Path(mrr.__file__).parent


def is_ours(code: tuple[str, int, str]) -> bool:
    """Return whether a function of a profile is this package's, its testing part left out."""
    path = Path(code[0])
    return path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "testing")


Profile = dict[Any, Any]
"""`pstats.Stats(...).stats`: function -> (_, calls, own seconds, seconds with callees, {caller: the same four})."""


def own_parts(stats: Profile) -> dict[str, tuple[int, float]]:
    """Return {"function: what it calls": (calls, seconds)} of this package's functions, each second counted once."""
    parts: dict[str, tuple[int, float]] = {}

    def add(name: str, calls: int, seconds: float) -> None:
        before = parts.get(name, (0, 0.0))
        parts[name] = (before[0] + calls, before[1] + seconds)

    for function, (_, calls, own, _, callers) in stats.items():
        if is_ours(function):
            add(_name(function), calls, own)
            continue
        ours = {caller: entry for caller, entry in callers.items() if is_ours(caller)}
        # What calls back into the package, as autograd functions do, is counted there.
        below = reached(stats, {function}) if ours else set()
        inside = sum(
            entry[3]
            for name, (*_, outer) in stats.items()
            if is_ours(name)
            for caller, entry in outer.items()
            if caller in below
        )
        total = sum(entry[3] for entry in ours.values())
        what = function[2].removeprefix("<").removesuffix(">").split(" of ")[0].removeprefix("method '").strip("'")
        for caller, (_, calls_here, _, seconds) in ours.items():
            add(f"{_name(caller)}: {what}", calls_here, seconds - (inside * seconds / total if total else 0.0))
    return parts


def entries(stats: Profile) -> dict[str, tuple[int, float]]:
    """Return {function: (calls, seconds with callees)} of this package's functions that others call.

    Others that this package itself has called do not count: those seconds are in the first function's already.
    """
    found: dict[str, tuple[int, float]] = {}
    called_by_us = reached(stats, {function for function in stats if is_ours(function)})
    for function, (*_, callers) in stats.items():
        outer = [entry for caller, entry in callers.items() if not is_ours(caller) and caller not in called_by_us]
        # The function that is profiled has no caller at all.
        if is_ours(function) and (outer or not callers):
            calls, seconds = found.get(_name(function), (0, 0.0))
            outer = outer or [stats[function][:4]]
            found[_name(function)] = (
                calls + sum(entry[1] for entry in outer),
                seconds + sum(entry[3] for entry in outer),
            )
    return found


def reached(stats: Profile, start: set[Any]) -> set[Any]:
    """Return the functions of others that these lead to, themselves included, without a way through this package."""
    found = set(start)
    while new := {
        function
        for function, (*_, callers) in stats.items()
        if function not in found and not is_ours(function) and not found.isdisjoint(callers)
    }:
        found |= new
    return found


def _name(function: tuple[str, int, str]) -> str:
    return f"{Path(function[0]).stem}.{function[2]}"


def seconds_in(stats: Profile, name: str) -> float:
    """Return the seconds with callees of all functions whose name contains `name`."""
    return sum(entry[3] for function, entry in stats.items() if name in function[2])


def profile_case(case: Case) -> dict[str, Any]:
    """Profile steps of one case in turns, without and with replay."""
    trainer = Trainer(case)
    profiles = {kind: cProfile.Profile(time.thread_time) for kind in ("off", "replay")}
    opened = []
    for repeat in range(2 + case.repeats):
        for kind, profile in profiles.items():
            with trainer.session(kind) as session:
                if repeat < 2:
                    trainer.run(session)
                else:
                    profile.runcall(trainer.run, session)
        start = time.thread_time()
        with trainer.session("replay"):
            pass
        opened.append(float(f"{time.thread_time() - start:.4g}"))
    stats = {kind: pstats.Stats(profile).stats for kind, profile in profiles.items()}  # type: ignore[attr-defined]
    units = case.repeats * case.model.microbatches * case.model.layers
    return {
        "model": case.model.name,
        "units": units,
        "steps": case.repeats,
        "step_seconds": {kind: _total(of_kind) for kind, of_kind in stats.items()},
        "topk_seconds": {kind: seconds_in(of_kind, "_compute_topk") for kind, of_kind in stats.items()},
        "open_seconds": opened[2:],
        "entries": _listed(entries(stats["replay"])),
        "parts": _listed(own_parts(stats["replay"])),
    }


def _listed(parts: dict[str, tuple[int, float]]) -> list[list[Any]]:
    """Return [name, calls, seconds], the largest first."""
    listed = [[name, calls, float(f"{seconds:.4g}")] for name, (calls, seconds) in parts.items()]
    return sorted(listed, key=lambda part: -part[2])


def _total(stats: Profile) -> float:
    return float(sum(own for _, _, own, _, _ in stats.values()))


def measure() -> list[dict[str, Any]]:
    """Profile every case."""
    raw = []
    for case, _ in CASES:
        with single_process():
            raw.append(profile_case(case))
            reset_megatron_state()
    return raw


def render(raw: list[dict[str, Any]]) -> str:
    """Return two tables a model: by entry and by part."""
    lines = [
        "A step is the forwards and backwards of all micro-batches. *Entry*: what Megatron or the trainer calls, with all "
        "that it calls in turn. *Part*: each second once; a function without a colon is its own Python, with a colon what it "
        "calls outside of this package. Microseconds of processor time a micro-batch and layer, the profiler's included.",
    ]
    for case, (_, shown) in zip(raw, CASES):
        off, steps, units = case["step_seconds"]["off"], case["steps"], case["units"]
        added = sum(seconds for _, _, seconds in case["entries"])
        opened = statistics.median(case["open_seconds"])
        saved = case["topk_seconds"]["off"] - case["topk_seconds"]["replay"]
        lines += [
            "",
            f"The {case['model']} model: a step without takes {off / steps * 1000:.0f} ms under the profiler. Replay adds "
            f"{added / units * 1e6:.0f} us a micro-batch and layer ({added / off:.2%} of that step) and saves "
            f"{saved / units * 1e6:.0f} us of top-k ({saved / off:.2%}). Opening and closing a session takes "
            f"{opened * 1000:.1f} ms, without the profiler.",
            "",
            _table("entry", case["entries"], 8, case),
            "",
            _table("part", case["parts"], shown, case),
        ]
    return "\n".join([*lines, "", DONE])


DONE = """What was done about the largest parts so far (2026-11-21), with figures where before and after were measured:

- opening a session walked over the model's modules four times: 4.8 ms for 921 modules; one walk: 2.5 ms;
- recording gathered what its top-k had returned: 1.045 of live routing at 8192, 128, 8; now 1.006;
- a row without a route cost a top-k of all rows in group-limited routers: 1.03 of live; now 0.12;
- a router's routes lay scattered in memory; now one layer behind another;
- queuing a micro-batch looked for paddings and rows without a route where the trace has none, and asked the process groups
  for this rank's place every time: 128 us for 4 layers of 128 tokens in a hot loop; now 44;
- a router's selection was spread over many small calls: 23 us in the same loop; now 10;
- the gather was an autograd function that kept the indices and not the scores, 8 instead of 520 bytes a token and layer at
  128 experts; its Python took 1.08 of Megatron's replay with backward where torch's own gather takes what the router table
  says, so replay uses that now.

In a step, where nothing of this Python is in the processor's caches, it takes two to four times as long as in a loop."""


def _table(what: str, listed: list[list[Any]], shown: int, case: dict[str, Any]) -> str:
    per_unit = 1e6 / case["units"]
    total = sum(seconds for _, _, seconds in listed)
    rest = sum(seconds for _, _, seconds in listed[shown:])
    rows = [
        [f"`{name}`", f"{calls / case['steps']:.0f}", f"{seconds * per_unit:.1f}", f"{seconds / total:.1%}"]
        for name, calls, seconds in listed[:shown]
    ]
    if rest:
        rows.append([f"{len(listed) - shown} smaller", "", f"{rest * per_unit:.1f}", f"{rest / total:.1%}"])
    return table([what, "calls a step", "us", "share"], rows)


def main() -> Section:
    raw = measure()
    return Section(title=TITLE, text=render(raw), raw=raw)
