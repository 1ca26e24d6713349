"""A command of `router-replay`, run in this process."""

from __future__ import annotations

from functools import cache

import typer.testing
from typer.testing import Result

from megatron_router_replay.cli import app

# typer builds the commands from the functions' signatures for each call: four fifths of the time that a small one takes.
typer.testing._get_command = cache(typer.testing._get_command)


def run_command(*arguments: object, columns: int) -> Result:
    """Run `router-replay` with these arguments in a terminal of so many columns."""
    arguments_as_typed = [str(argument) for argument in arguments]
    return typer.testing.CliRunner().invoke(app, arguments_as_typed, env={"COLUMNS": str(columns)})
