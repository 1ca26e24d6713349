"""A command of `router-replay`, run in this process."""

from __future__ import annotations

import os
import sys
from functools import cache

import typer.testing
from typer.testing import Result

from megatron_router_replay.cli.commands import app

# typer builds the commands from the functions' signatures for each call: four fifths of the time that a small one takes.
typer.testing._get_command = cache(typer.testing._get_command)


def environment() -> dict[str, str]:
    """Return the environment of a process that imports what this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def call(*arguments: object, code: int | None = 0) -> Result:
    """Run `router-replay` in 80 columns; check its exit code, and that an error is one sentence and no traceback."""
    typed = [str(argument) for argument in arguments]
    result = typer.testing.CliRunner().invoke(app, typed, env={"COLUMNS": "80"})
    assert isinstance(result.exception, SystemExit | None), (typed, result.exception)
    assert result.exit_code in ((0, 1, 2) if code is None else (code,)), (typed, result.output, result.stderr)
    assert "fault of router-replay" not in result.output, typed
    if result.exit_code == 2:
        assert result.stdout == ""
        assert result.stderr.startswith(("error: MRR", "Usage:")), typed
    return result
