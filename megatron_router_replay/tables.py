"""Rows of cells -> plain text or HTML: the one table that reports, diffs, pages and commands print."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

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
        name: one word, the id of the HTML table: `table-<name>`.
        rows: cells of each row, as many in every row.
        head: titles of the columns; empty: facts need none.
        words: columns of words, which stand on the left; all others hold numbers and stand on the right.
        bars: column -> length of a bar behind each of its cells, 0..1, where HTML is styled to show bars.
        left_out: a sentence about rows that are not here; empty: all are.
    """

    name: str
    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()
    words: Sequence[int] = ()
    bars: Mapping[int, Sequence[float]] = field(default_factory=dict)
    left_out: str = ""

    def text(self) -> str:
        """Return columns two spaces apart and before, one line a row, nothing behind the last cell."""
        lines = [*([self.head] if self.head else []), *self.rows]
        # A title or cell from outside may hold line breaks or colours; escaped, columns stay columns.
        cells = [[printable(cell) for cell in line] for line in lines]
        widths = [max(map(len, column)) for column in zip(*cells)]
        align = [str.ljust if column in self.words else str.rjust for column in range(len(widths))]
        text = ["  " + "  ".join(pad(cell, width) for pad, cell, width in zip(align, line, widths)) for line in cells]
        return "\n".join(line.rstrip() for line in [*text, *([f"  {self.left_out}"] if self.left_out else [])])

    def html(self) -> str:
        """Return a `<table>` that a notebook or a page shows; every cell is escaped."""
        head = "".join(f"<th{self._style(i)}>{escape(title)}</th>" for i, title in enumerate(self.head))
        body = "".join(
            "<tr>" + "".join(f"<td{self._style(i, row)}>{escape(cell)}</td>" for i, cell in enumerate(cells)) + "</tr>"
            for row, cells in enumerate(self.rows)
        )
        columns = len(self.head) or max(map(len, self.rows), default=1)
        foot = f'<tfoot><tr><td colspan="{columns}">{escape(self.left_out)}</td></tr></tfoot>' if self.left_out else ""
        return (
            f'<table id="table-{escape(self.name)}">'
            + (f"<thead><tr>{head}</tr></thead>" if head else "")
            + f"<tbody>{body}</tbody>{foot}</table>"
        )

    def _style(self, column: int, row: int | None = None) -> str:
        bar = f"--bar:{self.bars[column][row]:.1%};" if row is not None and column in self.bars else ""
        # Inline, because notebooks drop style sheets.
        return f' style="{bar}text-align:{"left" if column in self.words else "right"}"'


def share(count: int | float, total: int | float) -> str:
    """Return count / total in per cent, "-" of nothing."""
    return f"{count / total:.2%}" if total else "-"
