"""The rows of the benchmark and their table, which `benchmarks/RESULTS.md` includes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import table

SAVED = Path(__file__).parents[1] / "raw" / "gpu.md"

HEAD = ["part", "case", "ms", "to base", "operations", "waits", "pageable", "MiB held", "MiB at peak", "verdict"]

LEGEND = (
    "*to base*: the device's time as a ratio to the part's first case, in turns. *Operations*, *waits* (of the host for the "
    "device) and *pageable* uploads are of one step. *MiB held*: allocated by a forward and alive until its "
    "backward; *at peak*: in forward and backward. A verdict is *exact*, *left out* with a reason, or **wrong** with a "
    "description; `-` is a case without a promise."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The measurements of one case; None: not measured.

    Args:
        case: its name in the part.
        verdict: see LEGEND.
        wrong: the promise that is broken; "": none.
    """

    case: str
    verdict: str = "exact"
    wrong: str = ""
    ms: float | None = None
    ratio: float | None = None
    operations: int | None = None
    waits: int | None = None
    pageable: int | None = None
    held: float | None = None
    peak: float | None = None

    def cells(self, part: str) -> list[str]:
        """Return one line of the table."""
        values: list[Any] = [self.operations, self.waits, self.pageable]
        return [
            part,
            self.case,
            "" if self.ms is None else f"{self.ms:.3g}",
            "" if self.ratio is None else f"{self.ratio:.3f}",
            *("" if value is None else str(value) for value in values),
            *("" if value is None else f"{value:.1f}" for value in (self.held, self.peak)),
            (f"**wrong**: {self.wrong}" if self.wrong else self.verdict).replace("|", "/").replace("\n", " "),
        ]


def text(environment: str, rows: Sequence[tuple[str, Row]], wrong: Sequence[str]) -> str:
    """Return the report of the rows there are."""
    verdict = "All of it is as promised." if not wrong else "Not as promised: " + "; ".join(wrong) + "."
    return "\n\n".join([environment, table(HEAD, [row.cells(part) for part, row in rows]), LEGEND, verdict]) + "\n"


def in_words(error: BaseException) -> str:
    """Return an error in one line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}"
