"""What all commands share: results on stdout, everything else on stderr, errors in one sentence and exit code 2."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from shutil import get_terminal_size
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from megatron_router_replay.errors import RouterReplayError

BAD_INPUT = 2

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Step = Annotated[int | None, typer.Option(help="The step, if the folder holds several.", metavar="N")]


@contextmanager
def bad_input() -> Iterator[None]:
    """Turn an error that a user can mend into one message on stderr and exit code 2."""
    try:
        yield
    except (RouterReplayError, OSError) as error:
        typer.echo(
            wrap(f"error: {error}", width=get_terminal_size().columns if sys.stderr.isatty() else None), err=True
        )
        raise typer.Exit(BAD_INPUT) from error


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total) that moves a bar on stderr; nothing is drawn if that is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def emit(text: str, values: Any, *, as_json: bool) -> None:
    """Print one of the two on stdout; text is folded at the width of a terminal and left alone in a pipe."""
    if as_json:
        typer.echo(json.dumps(values, indent=2))
    else:
        typer.echo(wrap(text, width=get_terminal_size().columns if sys.stdout.isatty() else None))


def wrap(text: str, *, width: int | None) -> str:
    """Fold long lines at words, behind their own indentation; None: as they are."""
    if width is None:
        return text
    folded = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        folded += textwrap.wrap(
            line, width=max(40, width), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(folded)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return right-aligned columns as plain text, two spaces apart and before."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in [head, *rows])


def numbers(values: Sequence[int]) -> str:
    """Return "2..5, 9" for [2, 3, 4, 5, 9]."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ", ".join(str(value) for value in run) for run in runs)
