"""The command line, `router-replay`: one module for each command.

Exit codes: 0 fine, or the same; 1 they differ, or something is missing; 2 bad input.
"""

from __future__ import annotations

__all__ = ["run"]


def run() -> None:
    """Run the command that the program's arguments name; leave by SystemExit."""
    try:
        from megatron_router_replay.cli.commands import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise SystemExit(
            f"router-replay needs {error.name}: pip install '.[cli]' in the clone of this package brings it."
        ) from None
    app(prog_name="router-replay")
