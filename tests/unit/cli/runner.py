"""A command of `router-replay`, run in this process."""

from __future__ import annotations

import os
import sys
import tempfile
from functools import cache

import typer.testing
from typer.testing import Result

from megatron_router_replay import cli
from megatron_router_replay.cli.commands import app

# typer builds the commands from the functions' signatures for each call: four fifths of the time that a small one takes.
typer.testing._get_command = cache(typer.testing._get_command)


def environment() -> dict[str, str]:
    """Return the environment of a process that imports what this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def run_command(*arguments: object, columns: int) -> Result:
    """Run `router-replay` with these arguments in a terminal of so many columns."""
    arguments_as_typed = [str(argument) for argument in arguments]
    return typer.testing.CliRunner().invoke(app, arguments_as_typed, env={"COLUMNS": str(columns)})


def call(*arguments: object, code: int = 0) -> Result:
    """Run it in 80 columns; check that it exits with `code`, and that an error is said as one."""
    result = run_command(*arguments, columns=80)
    assert result.exit_code == code, (arguments, result.output, result.stderr, result.exception)
    if code == 2:
        assert result.stdout == ""
        assert result.stderr.startswith(("error: ", "Usage:"))
        assert "Traceback" not in result.stderr
    return result


def run_with_stdout(stdout: int, *arguments: str) -> tuple[int, str]:
    """Run the program in a fork that writes to this descriptor, as a process of its own would; (exit code, stderr)."""
    with tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if not child:
            os.dup2(stdout, 1)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), errors  # noqa: SIM115
            sys.argv = ["router-replay", *arguments]
            code = 1
            try:
                cli.run()
            except SystemExit as leaving:
                code = int(leaving.code or 0)
                sys.stdout.flush()
            finally:
                errors.flush()
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        return status, errors.read()
