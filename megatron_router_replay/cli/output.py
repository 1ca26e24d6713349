"""What all commands share: results on stdout, everything else on stderr, errors in one sentence and exit code 2."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Any

import typer

from megatron_router_replay.cli import INTERRUPTED
from megatron_router_replay.errors import RouterReplayError
from megatron_router_replay.tables import printable as printable

BAD_INPUT = 2
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Out = Annotated[Path | None, typer.Option("--out", help="Also write the JSON to this file.", metavar="FILE")]
Step = Annotated[int | None, typer.Option(help="The step, if the folder holds several.", metavar="N")]


@contextmanager
def bad_input() -> Iterator[None]:
    """Turn whatever an input can cause into one message on stderr and exit code 2."""
    try:
        yield
    except (RouterReplayError, OSError) as error:
        fail(str(error), error)
    except MemoryError as error:
        fail("this input does not fit into memory.", error)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except typer.Exit:  # which is an Exception too
        raise
    except Exception as error:
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else None
        if missing in ("torch", "numpy", "safetensors", "megatron"):
            missing = "megatron-core" if missing == "megatron" else missing
            fail(
                f"router-replay needs {missing}, which is not installed; router-replay doctor names what is missing.",
                error,
            )
        text = (
            f"{type(error).__name__}: {error}. This is a fault of router-replay, which should have said what is wrong"
        )
        fail(f"{text} with the input; please report it with the command.", error)


def fail(message: str, cause: BaseException | None = None) -> None:
    """Print an error on stderr and leave with exit code 2."""
    width = get_terminal_size().columns if sys.stderr.isatty() else None
    typer.echo(_encodable(wrap(f"error: {printable(message)}", width=width), sys.stderr), err=True)
    raise typer.Exit(BAD_INPUT) from cause


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total) that moves a bar on stderr; nothing is drawn if that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def check_out(out: Path | None) -> None:
    """Refuse a file that cannot be written before any work is done."""
    if out is not None and not out.absolute().parent.is_dir():
        fail(f"cannot write {out}: its folder does not exist.")
    if out is not None and out.is_dir():
        fail(f"cannot write {out}: it is a folder.")


def emit(text: str, values: Any, *, as_json: bool, out: Path | None = None, fold: bool = True) -> None:
    """Print one of the two on stdout, and write the JSON to `out`; text is folded at the width of a terminal only."""
    content = json.dumps(values, indent=2)
    if out is not None:
        try:
            out.write_text(content + "\n", encoding="utf-8")
        except OSError as error:
            fail(f"cannot write {out}: {error}.", error)
    if as_json:
        typer.echo(content)
        return
    width = get_terminal_size().columns if fold and sys.stdout.isatty() else None
    lines = "\n".join(printable(line) for line in text.split("\n"))
    typer.echo(_encodable(wrap(lines, width=width), sys.stdout))


def _encodable(text: str, stream: Any) -> str:
    """Return text that a stream can write, whatever its encoding: `ü` in a terminal that knows ASCII only is escaped."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def wrap(text: str, *, width: int | None) -> str:
    """Fold long lines at words, behind their own indentation; None: as they are."""
    if width is None:
        return text
    folded = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        # Words are never broken: what a person copies from here is a path or an option.
        folded += textwrap.wrap(
            line, width=max(40, width), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(folded)


def numbers(values: Sequence[int]) -> str:
    """Return "2..5, 9" for [2, 3, 4, 5, 9]."""
    # Not `neighbour_runs`: a file's layer numbers may be larger than numpy's integers, which a command must still print.
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
