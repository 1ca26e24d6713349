"""`router-replay diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_router_replay.cli.output import Json, columns, emit, progress, reporting_errors, say

_LONGEST_NAME = 24
StepOf = typer.Option(help="The step, if it is a folder of several.", metavar="N")
RunOf = typer.Option(help="The run, if several saved that step.", metavar="RUN")


def diff(
    a: Annotated[Path, typer.Argument(help="A trace file, or a folder of the ranks' parts or steps.", metavar="A")],
    b: Annotated[Path, typer.Argument(help="The trace to compare with it.", metavar="B")],
    html: Annotated[
        Path | None, typer.Option(help="Also write a page: a map of layers by positions, and the text.", metavar="FILE")
    ] = None,
    name_a: Annotated[str | None, typer.Option(help="The name of A in texts; else its file's.", metavar="NAME")] = None,
    name_b: Annotated[str | None, typer.Option(help="The name of B.", metavar="NAME")] = None,
    step_a: Annotated[int | None, StepOf] = None,
    step_b: Annotated[int | None, StepOf] = None,
    run_a: Annotated[str | None, RunOf] = None,
    run_b: Annotated[str | None, RunOf] = None,
    common: Annotated[
        bool, typer.Option("--common", help="Rows and layers that only one has do not count as different.", metavar="")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare two traces: where they route tokens to different experts, and the causes that fit.

    Samples are matched by their tokens where both traces have them, else rows by their global numbers, and layers by
    their numbers, so the traces may come from different parallel layouts.

    Exit code 0: the same experts everywhere; 1: they differ; 2: an input cannot be read.
    """
    with reporting_errors():
        from megatron_router_replay.diagnostics import diff_traces
        from megatron_router_replay.diagnostics.trace_diff import diff_text

        names = [a.absolute().stem, b.absolute().stem]
        if names[0] == names[1] or max(map(len, names)) > _LONGEST_NAME:  # each sentence has both names
            names = ["a", "b"]
        names = [name or default for name, default in zip((name_a, name_b), names)]
        with progress("comparing") as on_rows:
            options: dict[str, Any] = {"step_a": step_a, "step_b": step_b, "run_a": run_a, "run_b": run_b}
            found = diff_traces(a, b, name_a=names[0], name_b=names[1], **options, on_rows=on_rows)
        if html is not None:
            from megatron_router_replay.diagnostics.page import save_page

            save_page(found, html)
            say(f"wrote {html}")
        # Two traces with nothing in common are not the same, whatever --common leaves out.
        same = found.same_in_common and bool(found.decisions) if common else found.same
        text = diff_text(found, max_layers=10, hint=" (--json lists all)", width=columns())
        emit(text, found.to_dict() | {"same": same}, as_json=as_json)
    raise typer.Exit(0 if same else 1)
