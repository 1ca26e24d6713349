"""The command line, `router-replay`: one module a command. Exit codes: 0 fine or the same, 1 they differ, 2 bad input.

Importing this package loads none of the commands: `run` can then answer Ctrl-C while they, and torch, are loading.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["run"]

INTERRUPTED = 130
"""As shells report a program that Ctrl-C ended."""


def run() -> None:
    """Run the command that the program's arguments name; leaves by SystemExit."""
    signal.signal(signal.SIGINT, _interrupt)
    if sys.stdout is None:
        # The next file that is opened would get its number. Exit code 1 would mean that two traces differ.
        if sys.stderr is not None:
            print("error: MRR501: cannot write the result: stdout is closed.", file=sys.stderr)
        raise SystemExit(2)
    try:
        from megatron_router_replay.cli.commands import app

        app(prog_name="router-replay")
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise SystemExit(
            f"router-replay needs {error.name}: pip install '.[cli]' in the clone of this package brings it."
        ) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Leave at once while a module is being loaded, else raise KeyboardInterrupt, so that commands clean up.

    Raised inside an import, it comes out of C++ as an abort with a core dump (torch), or as an ImportError that blames
    the installation (numpy). An import has nothing to clean up.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt
