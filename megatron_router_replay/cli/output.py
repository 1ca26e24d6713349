"""Output of all commands: results on stdout, everything else on stderr, errors in one sentence with exit code 2."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer

from megatron_router_replay.errors import RouterReplayError
from megatron_router_replay.tables import printable

BAD_INPUT, INTERRUPTED = 2, 130
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.", metavar="")]
Step = Annotated[int | None, typer.Option(help="The step, if the folder has several.", metavar="N")]


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Turn every error that an input can cause into one message on stderr and exit code 2."""
    try:
        yield
    except RouterReplayError as error:
        fail(str(error), error)
    except OSError as error:  # of a file that is written
        fail(f"MRR501: {error}.", error)
    except MemoryError as error:
        fail("MRR902: this input does not fit into memory.", error)
    except KeyboardInterrupt:  # click's own exit code would be 1, which means that traces differ
        raise typer.Exit(INTERRUPTED) from None
    except typer.Exit:  # which is an Exception too
        raise
    except Exception as error:
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else None
        if missing in ("torch", "numpy", "safetensors", "xxhash", "megatron"):
            missing = "megatron-core" if missing == "megatron" else missing
            advice = "router-replay doctor names the packages that are missing."
            fail(f"MRR903: router-replay needs {missing}, which is not installed; {advice}", error)
        fault = "This is a fault of router-replay: no message of its own covers this input"
        fail(f"MRR905: {type(error).__name__}: {error}. {fault}; please report it with the command.", error)


def fail(message: str, cause: BaseException | None = None) -> NoReturn:
    """Print an error on stderr and leave with exit code 2."""
    say(f"error: {printable(message)}")
    raise typer.Exit(BAD_INPUT) from cause


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total) that moves a bar on stderr; nothing is drawn if that is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def emit(text: str, values: Any, *, as_json: bool) -> None:
    """Print the text or the JSON on stdout. A stdout that is closed or full is an error: exit code 1 would be a result."""
    if sys.stdout is None:
        fail("MRR501: stdout is closed.")
    try:
        typer.echo(json.dumps(values, indent=2) if as_json else _shown(text, sys.stdout))
        sys.stdout.flush()
    except OSError as error:
        # The rest of the buffer would fail again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        fail(f"MRR501: cannot write to stdout: {error}.", error)


def columns() -> int | None:
    """Return the width of sentences: the terminal's, at most 100; None in a pipe or a file, where `grep` reads lines."""
    return min(shutil.get_terminal_size().columns, 100) if sys.stdout is not None and sys.stdout.isatty() else None


def say(text: str) -> None:
    """Print a remark on stderr."""
    typer.echo(_shown(text, sys.stderr), err=True)


def size_words(num_bytes: int) -> str:
    """Return "512 bytes", "4.1 kB", "2.0 MB" or "1,234.5 MB"."""
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    return f"{num_bytes / 1e3:.1f} kB" if num_bytes < 1e6 else f"{num_bytes / 1e6:,.1f} MB"


def _shown(text: str, stream: Any) -> str:
    """Return text without control characters; `ü` is escaped where the stream's encoding has no such letter."""
    lines = "\n".join(printable(line) for line in text.split("\n"))
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return lines.encode(encoding, "backslashreplace").decode(encoding)
