"""Where a replayed step's extra time goes: cProfile over steps with and without replay, by function of this package.

The profiler itself adds about a microsecond a call, so small parts look larger than they are.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import megatron_router_replay as mrr
from benchmarks.measure import Section, single_process, table
from benchmarks.step import LARGER, TINY, Case, Trainer
from megatron_router_replay.testing import reset_megatron_state

TITLE = "Profile: where the extra time of a replayed step goes"
CASES = [(Case(model=TINY, repeats=20), 12), (Case(model=LARGER, repeats=4), 12)]
"""Cases, and how many parts to show of each."""
ENDS = {"replay.replay", "session.__enter__", "session.__exit__"}
"""Entries once a session, not once a micro-batch."""
PACKAGE = Path(mrr.__file__).parent


def is_ours(code: tuple[str, int, str]) -> bool:
    """Return whether a function of a profile is this package's, its testing part left out."""
    path = Path(code[0])
    return path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "testing")


def own_parts(stats: dict[Any, Any]) -> dict[str, tuple[int, float]]:
    """Return {"function: what it calls": (calls, seconds)} of this package's functions, each second counted once.

    Args:
        stats: `pstats.Stats(...).stats`: function -> (_, calls, own seconds, seconds with callees, callers).
    """
    parts: dict[str, tuple[int, float]] = {}
    called: dict[Any, list[tuple[Any, int, float]]] = defaultdict(list)
    for callee, (*_, callers) in stats.items():
        for caller, (_, calls, _, seconds) in callers.items():
            called[caller].append((callee, calls, seconds))
    for function, (_, calls, own, _, _) in stats.items():
        if not is_ours(function):
            continue
        name = f"{Path(function[0]).stem}.{function[2]}"
        parts[name] = (calls, parts.get(name, (0, 0.0))[1] + own)
        for callee, times, seconds in called[function]:
            if not is_ours(callee):
                what = (
                    callee[2].removeprefix("<").removesuffix(">").split(" of ")[0].removeprefix("method '").strip("'")
                )
                key = f"{name}: {what}"
                before = parts.get(key, (0, 0.0))
                parts[key] = (before[0] + times, before[1] + seconds)
    return parts


def entries(stats: dict[Any, Any]) -> dict[str, tuple[int, float]]:
    """Return {function: (calls, seconds with callees)} of this package's functions that others call."""
    found: dict[str, tuple[int, float]] = {}
    for function, (*_, callers) in stats.items():
        outer = [entry for caller, entry in callers.items() if not is_ours(caller)]
        if is_ours(function) and outer:
            name = f"{Path(function[0]).stem}.{function[2]}"
            calls, seconds = found.get(name, (0, 0.0))
            found[name] = (calls + sum(entry[0] for entry in outer), seconds + sum(entry[3] for entry in outer))
    return found


def seconds_in(stats: dict[Any, Any], name: str) -> float:
    """Return the seconds with callees of all functions whose name contains `name`."""
    return sum(entry[3] for function, entry in stats.items() if name in function[2])


def profile_case(case: Case) -> dict[str, Any]:
    """Profile steps of one case in turns, without and with replay."""
    trainer = Trainer(case)
    profiles = {kind: cProfile.Profile(time.thread_time) for kind in ("off", "replay")}
    for repeat in range(2 + case.repeats):
        for kind, profile in profiles.items():
            if repeat < 2:
                trainer.step(kind)
            else:
                profile.runcall(trainer.step, kind)
    stats = {kind: pstats.Stats(profile).stats for kind, profile in profiles.items()}  # type: ignore[attr-defined]
    units = case.repeats * case.model.microbatches * case.model.layers
    return {
        "model": case.model.name,
        "units": units,
        "steps": case.repeats,
        "step_seconds": {kind: _total(of_kind) for kind, of_kind in stats.items()},
        "topk_seconds": {kind: seconds_in(of_kind, "_compute_topk") for kind, of_kind in stats.items()},
        "entries": _listed(entries(stats["replay"])),
        "parts": _listed(own_parts(stats["replay"])),
    }


def _listed(parts: dict[str, tuple[int, float]]) -> list[list[Any]]:
    """Return [name, calls, seconds], the largest first."""
    listed = [[name, calls, float(f"{seconds:.4g}")] for name, (calls, seconds) in parts.items()]
    return sorted(listed, key=lambda part: -part[2])


def _total(stats: dict[Any, Any]) -> float:
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
        "One step opens a session, runs all micro-batches and closes it. *Entry*: what Megatron or the trainer calls, with "
        "all that it calls in turn. *Part*: each second once; a function without a colon is its own Python, one with a colon "
        "what it calls outside of this package. Microseconds of processor time a micro-batch and layer, the profiler's "
        "included.",
    ]
    for case, (_, shown) in zip(raw, CASES):
        off, steps, units = case["step_seconds"]["off"], case["steps"], case["units"]
        session = sum(seconds for name, _, seconds in case["entries"] if name in ENDS)
        added = sum(seconds for _, _, seconds in case["entries"]) - session
        saved = case["topk_seconds"]["off"] - case["topk_seconds"]["replay"]
        lines += [
            "",
            f"The {case['model']} model: a step without takes {off / steps * 1000:.0f} ms under the profiler. Replay adds "
            f"{added / units * 1e6:.0f} us a micro-batch and layer ({added / off:.2%} of that step) and saves "
            f"{saved / units * 1e6:.0f} us of top-k ({saved / off:.2%}); opening and closing the session takes "
            f"{session / steps * 1000:.1f} ms.",
            "",
            _table("entry", case["entries"], 8, case),
            "",
            _table("part", case["parts"], shown, case),
        ]
    return "\n".join(lines)


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
