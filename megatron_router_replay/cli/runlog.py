"""`router-replay verify-run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_router_replay.cli.output import Json, Out, bad_input, check_out, emit


def verify_run(
    log: Annotated[
        Path, typer.Argument(help="The JSON-lines log of a run (diagnostics.runlog.RunLog).", metavar="LOG")
    ],
    other: Annotated[
        Path | None, typer.Argument(help="Another run's, whose routes are compared.", metavar="[OTHER]")
    ] = None,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Add a run's accounting up again, and compare its route checksums with another run's.

    Exit code 0: everything adds up, and the routes are the same; 1: not; 2: a log cannot be read.
    """
    with bad_input():
        from megatron_router_replay.diagnostics.runlog import compare_runs
        from megatron_router_replay.diagnostics.runlog import verify_run as verify

        check_out(out)
        check = verify(log)
        differences = [] if other is None else compare_runs(log, other)
    text = [str(check)]
    if other is not None:
        text += differences or ["the routes of both runs are the same"]
    emit("\n".join(text), check.to_dict() | {"differences": differences}, as_json=as_json, out=out)
    raise typer.Exit(1 if check.problems or differences else 0)
