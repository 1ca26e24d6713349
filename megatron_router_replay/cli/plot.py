"""`router-replay plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_router_replay.cli.output import Json, bad_input, emit, printable, progress
from megatron_router_replay.errors import StoreError, TraceError


def plot(
    a: Annotated[Path, typer.Argument(help="A trace file or folder, or the JSON-lines log of a run.", metavar="A")],
    b: Annotated[Path | None, typer.Argument(help="A trace to compare with it.", metavar="[B]")] = None,
    out: Annotated[Path, typer.Option(help="The folder for the PNG files.", metavar="FOLDER")] = Path("."),
    name_a: Annotated[str, typer.Option(help="What figures call A.", metavar="NAME")] = "a",
    name_b: Annotated[str, typer.Option(help="What figures call B.", metavar="NAME")] = "b",
    metric: Annotated[
        list[str] | None, typer.Option(help="Of a run: a metric to draw; may be given several times.", metavar="NAME")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw figures as PNG: of one trace its expert load, of two their differences too, of a run its curves."""
    with bad_input():
        if a.suffix == ".jsonl":
            if b is not None:
                raise StoreError(f"{a} is the log of a run: it is drawn alone.")
            figures = _curves(a, metric)
        else:
            figures = _figures(a, b, name_a, name_b)
        from megatron_router_replay.diagnostics.plot import save_png

        out.mkdir(parents=True, exist_ok=True)
        written = [str(save_png(figure, out / f"{name}.png")) for name, figure in figures.items()]
    emit("\n".join(map(printable, written)), {"files": written}, as_json=as_json)


def _figures(a: Path, b: Path | None, name_a: str, name_b: str) -> dict[str, Any]:
    from megatron_router_replay.diagnostics import diff_traces, expert_load, open_source
    from megatron_router_replay.diagnostics import plot as draw

    if b is None:
        load = expert_load(a)
        with open_source(a) as source:
            layers = source.layer_numbers
        return {
            "load": draw.plot_load({name_a: load}, layers),
            "load_map": draw.plot_load_map(load, layers, name=name_a),
        }
    with progress("comparing") as on_rows:
        diff = diff_traces(a, b, name_a=name_a, name_b=name_b, on_rows=on_rows)
    loads = {name: expert_load(path, layer_numbers=diff.layer_numbers) for name, path in ((name_a, a), (name_b, b))}
    # Two traces of one name have one load; it would stand for both.
    return draw.diff_figures(diff, loads if len(loads) == 2 else None)


def _curves(path: Path, wanted: list[str] | None) -> dict[str, Any]:
    from megatron_router_replay.diagnostics import plot as draw
    from megatron_router_replay.diagnostics.runlog import read_run

    by_step: dict[int, dict[str, float]] = {}
    for record in read_run(path):
        if record["event"] == "metrics":
            by_step.setdefault(record["step"], {}).update(record["values"])
    names = sorted({name for values in by_step.values() for name in values})
    chosen = wanted or names[:8]  # more curves in one figure cannot be told apart
    missing = [name for name in chosen if name not in names]
    if missing or not by_step:
        raise TraceError(f"{path} has no metrics {missing or ''}; it has: {', '.join(names) or 'none'}.")
    steps = sorted(by_step)
    return {"curves": draw.plot_curves(steps, {name: [by_step[step].get(name) for step in steps] for name in chosen})}
