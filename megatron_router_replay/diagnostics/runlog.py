"""A run as JSON lines, written while it trains, and a verifier that adds everything up again.

`run_records` says what the lines hold. What a session reports at its end is counted by the session; what the micro-batches
say is counted here, from the rows and the trace. The verifier compares the two. Checksums are those of `route_checksums`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

import megatron_router_replay
from megatron_router_replay.diagnostics.metrics import route_checksums
from megatron_router_replay.diagnostics.plain import plain_record
from megatron_router_replay.diagnostics.run_records import is_count
from megatron_router_replay.diagnostics.run_records import read_run as read_run
from megatron_router_replay.errors import ReplayStateError, StoreError
from megatron_router_replay.trace import RoutingTrace


class Report(Protocol):
    """What a session's report offers, such as `SessionReport`."""

    def to_dict(self) -> dict[str, Any]:
        """Return its counts by name."""
        ...


class RunLog:
    """Writes one rank's part of a run; each line is on its way to the file when a call returns.

    Args:
        path: a new file, one a rank.
        rank: of the process.

    Raises:
        StoreError: the file exists or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, rank: int = 0) -> None:
        self.path = Path(path)
        try:
            # Never an existing file: two runs in one log would count from 0 twice, and the verifier would blame the run.
            self._file = self.path.open("x", encoding="utf-8", buffering=1)
        except OSError as error:
            raise StoreError(f"cannot write the log {self.path}: {error}.") from error
        self._seq = 0
        self._session = -1
        self._open = False
        self._write("run", version=megatron_router_replay.__version__, rank=rank)

    def begin(self, *, step: int, kind: str = "replay", tp_size: int = 1) -> None:
        """Note that a session begins.

        Args:
            tp_size: ranks that sequence parallelism splits each micro-batch over; a session counts its own part.

        Raises:
            ReplayStateError: the last session has no end yet.
        """
        if self._open:
            raise ReplayStateError(f"{self.path}: session {self._session} has no end() yet.")
        self._session += 1
        self._open = True
        self._write("begin", session=self._session, step=step, kind=kind, tp_size=tp_size)

    def microbatch(
        self,
        rows: Tensor,
        trace: RoutingTrace,
        *,
        padding: Tensor | None = None,
        layer_numbers: Sequence[int] | None = None,
        chunk: int = 0,
    ) -> None:
        """Note one micro-batch of one chunk: how its rows are routed, and the checksum of the routes of each layer.

        Args:
            rows: its `routing_rows`, -1 where there is none.
            trace: the routes that are replayed.
            padding: bool, of the same shape: the session's `padding=`; any other -1 is live.
            layer_numbers: MoE layers of the chunk; None: all of the trace.

        Raises:
            ReplayStateError: no session has begun.
        """
        self._check_open()
        part = trace if layer_numbers is None else trace.select_layers(layer_numbers)
        flat = rows.detach().reshape(-1).to(trace.device, torch.int64)
        # Counted from rows and trace, not asked of the session: the verifier compares two countings of one thing.
        known = flat[flat >= 0]
        replayed = int(trace.replay_mask[known].sum())
        num_padding = 0 if padding is None else int(padding.sum())
        sums = route_checksums(part, microbatches=[flat])[0].tolist()
        self._write(
            "microbatch",
            session=self._session,
            chunk=chunk,
            rows=flat.numel(),
            replayed=replayed,
            live=flat.numel() - replayed - num_padding,
            padding=num_padding,
            checksums={str(number): f"{value % (1 << 64):016x}" for number, value in zip(part.layer_numbers, sums)},
        )

    def end(self, report: Report) -> None:
        """Note that the session ended, and what it reports; call it behind the `with` block.

        Raises:
            ReplayStateError: no session has begun.
        """
        self._check_open()
        self._write("end", session=self._session, report=report.to_dict())
        self._open = False

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Note numbers of a step, for curves."""
        self._write("metrics", step=step, values={name: float(value) for name, value in values.items()})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._open:
            raise ReplayStateError(f"{self.path}: no session is open; call begin() first.")

    def _write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"seq": self._seq, "event": event, **values}) + "\n")
        self._seq += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCheck:
    """What the verifier found.

    Args:
        sessions, microbatches: how many the log has.
        rows_replayed: over all of them.
        problems: what does not add up; empty: everything does.
    """

    sessions: int
    microbatches: int
    rows_replayed: int
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values that `json.dumps` takes."""
        return plain_record(self)

    def __str__(self) -> str:
        lines = [
            f"{self.sessions:,} sessions, {self.microbatches:,} micro-batches, {self.rows_replayed:,} rows replayed",
            *(f"problem: {problem}" for problem in self.problems),
        ]
        return "\n".join([*lines, "it does not add up" if self.problems else "everything adds up"])


def verify_run(path: str | os.PathLike[str]) -> RunCheck:
    """Replay the accounting of a run: micro-batches of every session against what the session reported.

    Raises:
        StoreError: the file is no log, or a line is damaged or missing.
    """
    problems: list[str] = []
    sessions = microbatches = replayed = 0
    begun: dict[str, Any] | None = None
    seen: list[dict[str, Any]] = []
    for record in read_run(path):
        if record["event"] == "begin":
            if begun is not None:
                problems.append(_no_end(begun))
            sessions += 1
            begun, seen = record, []
        elif record["event"] == "microbatch":
            microbatches += 1
            replayed += record["replayed"]
            seen.append(record)
            if begun is None or record["session"] != begun["session"]:
                problems.append(f"micro-batch in line {record['seq'] + 1} is outside its session")
        elif record["event"] == "end":
            if begun is None or record["session"] != begun["session"]:
                problems.append(f"session {record['session']} ends without having begun")
            else:
                problems += _check_session(begun, seen, record["report"])
            begun = None
    if begun is not None:
        problems.append(_no_end(begun))
    if not sessions:
        problems.append("the log holds no session: nothing was recorded or replayed, so there is nothing to add up")
    return RunCheck(sessions=sessions, microbatches=microbatches, rows_replayed=replayed, problems=tuple(problems))


def _no_end(begun: dict[str, Any]) -> str:
    return f"session {begun['session']} (step {begun['step']}) has no end: the run stopped inside it"


def _check_session(begun: dict[str, Any], seen: list[dict[str, Any]], report: dict[str, Any]) -> Iterator[str]:
    name = f"session {begun['session']} (step {begun['step']})"
    # A chunk without MoE layers runs no router, so the session counts none of its micro-batches.
    counted = [record for record in seen if record["checksums"]]
    sums = {key: sum(record[key] for record in counted) for key in ("rows", "replayed", "live", "padding")}
    expected = {
        "microbatches": len(counted),
        "tokens": sums["rows"] // begun["tp_size"],
        "forwards": sum(len(record["checksums"]) for record in counted),
    }
    # Under sequence parallelism the log does not say which rows this rank's part has; a recording replays none.
    if begun["tp_size"] == 1 and begun["kind"] == "replay":
        expected |= {"rows_replayed": sums["replayed"], "rows_live": sums["live"], "rows_padding": sums["padding"]}
    for key, value in expected.items():
        # JSON's true equals 1 and its 1.0 as well: neither is a count that a session reports.
        if not is_count(report.get(key)) or report[key] != value:
            yield f"{name}: the session reports {key}={_shown(report.get(key))}, its micro-batches add up to {value}"
    # A session that verifies nothing reports no count of wrong decisions.
    counts = {key: 0 if report.get(key) is None else report[key] for key in _REPORTED}
    strange = [key for key, value in counts.items() if not is_count(value)]
    if strange:
        yield f"{name}: the session reports {strange[0]}={_shown(counts[strange[0]])}, which is no count"
        return
    if report.get("tokens") != sum(counts[key] for key in ("rows_replayed", "rows_live", "rows_padding")):
        yield f"{name}: replayed, live and padding rows do not add up to tokens={_shown(report.get('tokens'))}"
    if counts["decisions_wrong"]:
        yield f"{name}: {counts['decisions_wrong']} decisions left their router with other experts than were chosen"


_REPORTED = ("rows_replayed", "rows_live", "rows_padding", "decisions_wrong", "recomputes", "forwards")


def _shown(value: object) -> str:
    return str(value)[:40]


def compare_runs(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> list[str]:
    """Return what differs between the routes of two logs: the first checksum that does, for each step; [] if none.

    Args:
        a, b: logs of two runs, or of two ranks that hold the same layers of the same micro-batches.

    Raises:
        StoreError: see `read_run`.
    """
    sums_a, sums_b = (_checksums(path) for path in (a, b))
    lines = []
    for step, group in groupby(sorted({*sums_a, *sums_b}), key=itemgetter(0)):
        keys = list(group)
        different = [key for key in keys if sums_a.get(key) != sums_b.get(key)]
        if different:
            _, session, microbatch, layer = different[0]
            lines.append(
                f"step {step}: {len(different)} of {len(keys)} checksums differ, first session {session}, micro-batch "
                f"{microbatch}, layer {layer}: "
                f"{sums_a.get(different[0], 'missing')} and {sums_b.get(different[0], 'missing')}"
            )
    return lines


def _checksums(path: str | os.PathLike[str]) -> dict[tuple[int, int, int, int], str]:
    """(step, session of the step, micro-batch of the layer, layer_number) -> checksum."""
    found: dict[tuple[int, int, int, int], str] = {}
    # Counted within the step and the layer, because stages hold other layers and a resumed run other session numbers.
    sessions: Counter[int] = Counter()
    microbatches: Counter[int] = Counter()
    step = session = 0
    for record in read_run(path):
        if record["event"] == "begin":
            step = record["step"]
            session, sessions[step] = sessions[step], sessions[step] + 1
            microbatches.clear()
        elif record["event"] == "microbatch":
            for name, value in record["checksums"].items():
                layer = int(name)
                found[step, session, microbatches[layer], layer] = value
                microbatches[layer] += 1
    return found
