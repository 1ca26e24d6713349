"""`router-replay diff`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_router_replay.cli.output import Json, Out, bad_input, check_out, emit, progress
from megatron_router_replay.errors import StoreError

if TYPE_CHECKING:
    from megatron_router_replay.diagnostics.page import TokenText

_MAX_LAYERS_SHOWN = 10


def diff(
    a: Annotated[Path, typer.Argument(help="A trace file, or a folder of the ranks' parts or steps.", metavar="A")],
    b: Annotated[Path, typer.Argument(help="The trace to compare with it.", metavar="B")],
    html: Annotated[
        Path | None, typer.Option(help="Also write a page: a map of the differences, and tables.", metavar="FILE")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="The tokenizer.json (or its folder) that shows tokens as text on the page.", metavar="FILE"),
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
        token_text = None if tokenizer is None else _token_text(tokenizer)
        from megatron_router_replay.diagnostics import diff_traces, expert_load
        from megatron_router_replay.diagnostics.diff_tables import diff_text

        with progress("comparing") as on_rows:
            found = diff_traces(a, b, name_a=name_a, name_b=name_b, step_a=step_a, step_b=step_b, on_rows=on_rows)
        if html is not None:
            from megatron_router_replay.diagnostics.page import save_page

            loads = {
                name: expert_load(path, step=step, layer_numbers=found.layer_numbers)
                for name, path, step in ((name_a, a, step_a), (name_b, b, step_b))
            }
            # Two traces of one name have one load; it would stand for both.
            save_page(found, html, loads=loads if len(loads) == 2 else None, token_text=token_text)
    # Where nothing could be compared, nothing was found to be the same, whatever --common leaves out.
    same = (found.same_in_common and bool(found.decisions) if common else found.same) and not (
        order and found.decisions_other_order
    )
    text = diff_text(found, max_layers=None if layers else _MAX_LAYERS_SHOWN)
    emit(text, found.to_dict() | {"same": same}, as_json=as_json, out=out)
    raise typer.Exit(0 if same else 1)


def _token_text(path: Path) -> TokenText:
    """Return what turns a token id into its text.

    Raises:
        StoreError: there is no tokenizer, or nothing here that reads it.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise StoreError(f"cannot read the tokenizer {file}: there is no such file.")
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise StoreError("--tokenizer needs the package tokenizers, which transformers brings too.") from None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise StoreError(f"cannot read the tokenizer {file}: {error}.") from error

    def text(token: int) -> str:
        decoded: str = tokenizer.decode([token], skip_special_tokens=False)
        return decoded

    return text
