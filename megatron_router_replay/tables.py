"""Rows of cells -> plain text: the one table that reports, diffs and commands print.

Nothing here needs torch: a command must work where it is missing.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Categories of characters that a terminal obeys or hides: controls, directions, halves of pairs, line separators."""


def printable(text: object) -> str:
    """Return text from a file or a command line with everything escaped that a terminal would obey or hide."""
    return "".join(
        char.encode("unicode_escape", "surrogatepass").decode("ascii")
        if unicodedata.category(char) in _UNSEEN
        else char
        for char in str(text)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Cells with titles, or facts: a label, its value and a remark in each row.

    Args:
        rows: cells of each row, as many in every row.
        head: titles of the columns; empty: facts need none.
        words: columns of words, aligned left; all other columns are numbers, aligned right.
        left_out: a sentence about rows that are not here; empty: all are.
    """

    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()
    words: Sequence[int] = ()
    left_out: str = ""

    def text(self) -> str:
        """Return columns with two spaces before each, one line a row, without trailing spaces."""
        lines = [*([self.head] if self.head else []), *self.rows]
        # A title or cell may come from a file, with line breaks or colours; escaped, columns stay columns.
        cells = [[printable(cell) for cell in line] for line in lines]
        widths = [max(map(len, column)) for column in zip(*cells)]
        align = [str.ljust if column in self.words else str.rjust for column in range(len(widths))]
        text = ["  " + "  ".join(pad(cell, width) for pad, cell, width in zip(align, line, widths)) for line in cells]
        return "\n".join(line.rstrip() for line in [*text, *([f"  {self.left_out}"] if self.left_out else [])])


def percent(value: float) -> str:
    """Return a share as "1.84 %"; only 0 and 1 round to 0 % and 100 %."""
    for limit, words in ((0.0001, "< 0.01 %"), (0.9999, "> 99.99 %")):
        if 0 < value < 1 and (value < limit if limit < 0.5 else value > limit):
            return words
    return f"{value:.2%}".replace("%", " %")


def share(count: int | float, total: int | float) -> str:
    """Return count / total in per cent, "-" of nothing."""
    return percent(count / total) if total else "-"


def number_words(numbers: Iterable[int], most: int = 8) -> str:
    """Return "2..4, 9" of [2, 3, 4, 9], in the order given; at most so many runs."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [f"{first}" if first == last else f"{first}..{last}" for first, last in runs[:most]]
    return ", ".join([*shown, *(["..."] if len(runs) > most else [])]) or "none"


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Return "layer 5", or "layers 2..4, 9"."""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {number_words(numbers)}"
