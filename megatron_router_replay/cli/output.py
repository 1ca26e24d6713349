"""What all commands share: results on stdout, everything else on stderr, errors in one sentence and exit code 2."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_router_replay.cli import INTERRUPTED
from megatron_router_replay.errors import RouterReplayError
from megatron_router_replay.tables import printable, replace_text

BAD_INPUT = 2
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.", metavar="")]
Out = Annotated[Path | None, typer.Option("--out", help="Also write the JSON to this file.", metavar="FILE")]
Step = Annotated[int | None, typer.Option(help="The step, if the folder holds several.", metavar="N")]


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Turn whatever an input can cause into one message on stderr and exit code 2."""
    try:
        yield
    except (RouterReplayError, OSError) as error:
        fail(str(error), error)
    except MemoryError as error:
        fail("MRR902: this input does not fit into memory.", error)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except typer.Exit:  # which is an Exception too
        raise
    except Exception as error:
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else None
        if missing in ("torch", "numpy", "safetensors", "xxhash", "megatron"):
            missing = "megatron-core" if missing == "megatron" else missing
            fail(
                f"MRR903: router-replay needs {missing}, which is not installed; router-replay doctor names what is missing.",
                error,
            )
        fault = "This is a fault of router-replay, which should have said what is wrong with the input"
        fail(f"MRR905: {type(error).__name__}: {error}. {fault}; please report it with the command.", error)


def fail(message: str, cause: BaseException | None = None) -> None:
    """Print an error on stderr and leave with exit code 2."""
    say(f"error: {printable(message)}")
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
        fail(f"MRR501: cannot write {out}: its folder does not exist.")
    if out is not None and out.is_dir():
        fail(f"MRR501: cannot write {out}: it is a folder.")


def emit(text: str, values: Any, *, as_json: bool, out: Path | None = None) -> None:
    """Print one of the two on stdout, and write the JSON to `out`."""
    content = json.dumps(values, indent=2)
    if out is not None:
        try:
            replace_text(out, content + "\n")
        except OSError as error:
            fail(f"MRR501: cannot write {out}: {error}.", error)
    if not as_json:
        content = _shown(text, sys.stdout)
    try:
        typer.echo(content)
        sys.stdout.flush()
    except OSError as error:  # a full disk, or a pipe that nobody reads any more
        # What is left in the buffer would fail once more when Python shuts down, and change the exit code.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        fail(f"MRR501: cannot write the result to stdout: {error}.", error)


def say(text: str) -> None:
    """Print a remark on stderr."""
    with suppress(OSError):  # nobody reads it; the exit code says what matters
        typer.echo(_shown(text, sys.stderr), err=True)


def _shown(text: str, stream: Any) -> str:
    """Return text that a stream can write and a terminal shows as it is: `ü` where it knows ASCII only is escaped."""
    lines = "\n".join(printable(line) for line in text.split("\n"))
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return lines.encode(encoding, "backslashreplace").decode(encoding)
