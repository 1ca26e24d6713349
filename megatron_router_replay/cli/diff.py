"""`router-replay diff`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_router_replay.cli.output import Json, Out, bad_input, check_out, emit, printable, progress, table

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_router_replay.diagnostics import TraceDiff

_MAX_LAYERS_SHOWN = 10


def diff(
    a: Annotated[Path, typer.Argument(help="A trace file, or a folder of the ranks' parts or steps.", metavar="A")],
    b: Annotated[Path, typer.Argument(help="The trace to compare with it.", metavar="B")],
    html: Annotated[
        Path | None, typer.Option(help="Also write a page with figures and tables.", metavar="FILE")
    ] = None,
    name_a: Annotated[str, typer.Option(help="What texts call A.", metavar="NAME")] = "a",
    name_b: Annotated[str, typer.Option(help="What texts call B.", metavar="NAME")] = "b",
    step_a: Annotated[
        int | None, typer.Option(help="The step of A, if it is a folder of several.", metavar="N")
    ] = None,
    step_b: Annotated[
        int | None, typer.Option(help="The step of B, if it is a folder of several.", metavar="N")
    ] = None,
    order: Annotated[
        bool, typer.Option("--order", help="Another order of the same experts counts as different.")
    ] = False,
    common: Annotated[
        bool, typer.Option("--common", help="Rows and layers that only one has do not count as different.")
    ] = False,
    layers: Annotated[
        bool, typer.Option("--layers", help="List every layer, not only those that differ most.")
    ] = False,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Say where two traces route tokens to other experts, and what it looks like.

    Rows and layers are matched by their global numbers, so the traces may come from different parallel layouts.

    Exit code 0: the same experts everywhere; 1: they differ; 2: an input cannot be read.
    """
    with bad_input():
        check_out(html)
        check_out(out)
        from megatron_router_replay.diagnostics import diff_traces

        with progress("comparing") as on_rows:
            found = diff_traces(a, b, name_a=name_a, name_b=name_b, step_a=step_a, step_b=step_b, on_rows=on_rows)
        if html is not None:
            from megatron_router_replay.diagnostics.page import save_page

            loads = {
                name: _load(path, step, found.layer_numbers)
                for name, path, step in ((name_a, a, step_a), (name_b, b, step_b))
            }
            save_page(found, html, loads=loads if len(loads) == 2 else None)
    same = (found.same_in_common and bool(found.decisions) if common else found.same) and not (
        order and found.decisions_other_order
    )
    emit(_text(found, a, b, all_layers=layers), found.to_dict() | {"same": same}, as_json=as_json, out=out)
    raise typer.Exit(0 if same else 1)


def _text(diff: TraceDiff, a: Path, b: Path, *, all_layers: bool) -> str:
    lines = str(diff).splitlines()
    for i, (letter, name, path) in enumerate((("a", diff.name_a, a), ("b", diff.name_b, b))):
        lines[i] = f"{letter}: {printable(path)}" + (f" ({printable(name)})" if name != letter else "")
    rows = _layer_rows(diff)
    shown = rows if all_layers else sorted(rows, key=lambda row: -row[0])[:_MAX_LAYERS_SHOWN]
    shown = [row for row in shown if all_layers or row[0]]
    if shown and diff.rows_compared:
        head = ("layer", "other experts", "same set", "experts in common")
        cells = [row[1] for row in (shown if all_layers else sorted(shown, key=lambda row: row[2]))]
        lines.insert(-1, table(head, cells))
        left_out = sum(1 for row in rows if row[0]) - len(shown)
        if not all_layers and left_out > 0:
            lines.insert(-1, f"  {left_out} more layers differ (--layers lists all)")
    return "\n".join(lines)


def _layer_rows(diff: TraceDiff) -> list[tuple[int, tuple[str, str, str, str], int]]:
    """(decisions that differ, cells, layer number) of every layer."""
    rows = []
    agreement, overlap = diff.agreement_by_layer.tolist(), diff.overlap_by_layer.tolist()
    for i, number in enumerate(diff.layer_numbers):
        different = int(diff.overlap[i, :-1].sum())
        rows.append((different, (f"{number}", f"{different:,}", f"{agreement[i]:.2%}", f"{overlap[i]:.2%}"), number))
    return rows


def _load(path: Path, step: int | None, layer_numbers: tuple[int, ...]) -> Tensor:
    """Return the expert load of these layers."""
    from megatron_router_replay.diagnostics import expert_load, open_source

    load = expert_load(path, step=step)
    with open_source(path, step=step) as source:
        return load[[source.layer_numbers.index(number) for number in layer_numbers]]
