"""The lines of a run's log: what each must hold, and the one reader.

One object a line, `{"seq": 0, "event": ..., ...}`; seq counts from 0 without gaps:

    run         version, rank
    begin       session (0, 1, ...), step, kind, tp_size
    microbatch  session, chunk, rows, replayed, live, padding, checksums {layer_number: 16 hex digits}
    end         session, report: `SessionReport.to_dict()`
    metrics     step, values {name: number}

Every line is checked for what it is before anything is counted, so that an altered log is told from one that does not add up.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megatron_router_replay.errors import StoreError


def _is(kind: type) -> Callable[[Any], bool]:
    # Not isinstance: JSON's true would pass as an integer.
    return lambda value: type(value) is kind


def is_count(value: Any, *, least: int = 0) -> bool:
    """Tell whether a JSON value is an integer from `least` on."""
    return type(value) is int and value >= least


def _are_checksums(value: Any) -> bool:
    return type(value) is dict and all(
        re.fullmatch("[0-9]{1,9}", name) and type(number) is str and re.fullmatch("[0-9a-f]{16}", number)
        for name, number in value.items()
    )


def _are_numbers(value: Any) -> bool:
    return type(value) is dict and all(type(number) in (int, float) for number in value.values())


_COUNTS = ("session", "chunk", "rows", "replayed", "live", "padding")
_FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "run": {"version": _is(str), "rank": _is(int)},
    "begin": {"session": is_count, "step": _is(int), "kind": _is(str), "tp_size": partial(is_count, least=1)},
    "microbatch": {**dict.fromkeys(_COUNTS, is_count), "checksums": _are_checksums},
    "end": {"session": is_count, "report": _is(dict)},
    "metrics": {"step": _is(int), "values": _are_numbers},
}
"""Event -> its fields and what each must be."""


def read_run(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of a log.

    Raises:
        StoreError: not a log, a line is damaged, or lines are missing.
    """
    try:
        with open(path, encoding="utf-8") as file:
            number = -1
            for number, line in enumerate(file):
                yield _parse(line, number, path)
            if number < 0:
                raise StoreError(f"cannot read the log {path}: it is empty.")
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"cannot read the log {path}: {error}.") from error


def _parse(line: str, number: int, path: str | os.PathLike[str]) -> dict[str, Any]:
    record: Any
    where = f"cannot read the log {path}: line {number + 1}"
    try:
        record = json.loads(line)
    except RecursionError:
        raise StoreError(f"{where} is nested too deeply for a record of a run.") from None
    except ValueError as error:
        raise StoreError(f"{where} is no JSON ({error}); a crash may have cut it off.") from None
    event = record.get("event") if isinstance(record, dict) else None
    if not isinstance(event, str) or event not in _FIELDS or not _FIELDS[event].keys() <= record.keys():
        raise StoreError(f"{where} is no record of a run: {line[:60].strip()}")
    wrong = [name for name, is_right in _FIELDS[event].items() if not is_right(record[name])]
    if wrong:
        raise StoreError(
            f"{where} has {wrong[0]}={str(record[wrong[0]])[:60]}: it was altered, or is no record of a run."
        )
    if not is_count(record.get("seq")) or record["seq"] != number:
        raise StoreError(
            f"{where} has seq {str(record.get('seq'))[:20]}, expected {number}: lines are missing or were moved."
        )
    return dict(record)
