"""`router-replay diff`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_router_replay.cli.output import Json, Out, check_out, emit, progress, reporting_errors, say
from megatron_router_replay.errors import StoreError

if TYPE_CHECKING:
    from megatron_router_replay.diagnostics.page import TokenText


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
    name_a: Annotated[str, typer.Option(help="What texts call A; the file's name by default.", metavar="NAME")] = "",
    name_b: Annotated[str, typer.Option(help="What texts call B; the file's name by default.", metavar="NAME")] = "",
    step_a: Annotated[
        int | None, typer.Option(help="The step of A, if it is a folder of several.", metavar="N")
    ] = None,
    step_b: Annotated[
        int | None, typer.Option(help="The step of B, if it is a folder of several.", metavar="N")
    ] = None,
    common: Annotated[
        bool, typer.Option("--common", help="Rows and layers that only one has do not count as different.", metavar="")
    ] = False,
    layers: Annotated[
        bool, typer.Option("--layers", help="List every layer, not only those that differ most.", metavar="")
    ] = False,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Say where two traces route tokens to different experts, and where those routes lie in A.

    Rows and layers are matched by their global numbers, so the traces may come from different parallel layouts.

    Exit code 0: the same experts everywhere; 1: they differ; 2: an input cannot be read.
    """
    with reporting_errors():
        check_out(html)
        check_out(out)
        token_text = None if tokenizer is None else _token_text(tokenizer)
        from megatron_router_replay.diagnostics import diff_traces
        from megatron_router_replay.diagnostics.trace_diff import diff_text

        stem_a, stem_b = _names(a, b)
        name_a, name_b = name_a or stem_a, name_b or stem_b
        with progress("comparing") as on_rows:
            found = diff_traces(a, b, name_a=name_a, name_b=name_b, step_a=step_a, step_b=step_b, on_rows=on_rows)
        if html is not None:
            from megatron_router_replay.diagnostics.page import save_page

            save_page(found, html, token_text=token_text)
            say(f"wrote {html}")
    # Where nothing could be compared, nothing was found to be the same, whatever --common leaves out.
    same = found.same_in_common and bool(found.decisions) if common else found.same
    text = diff_text(found, max_layers=None if layers else 10, hint=" (--layers lists all)")
    emit(text, found.to_dict() | {"same": same}, as_json=as_json, out=out)
    raise typer.Exit(0 if same else 1)


def _names(a: Path, b: Path) -> tuple[str, str]:
    """Return the names of two files or folders; "a" and "b" where they have the same."""
    names = a.absolute().stem, b.absolute().stem
    return names if names[0] != names[1] else ("a", "b")


def _token_text(path: Path) -> TokenText:
    """Return what turns a token id into its text.

    Raises:
        StoreError: there is no tokenizer, or nothing here that reads it.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise StoreError(f"MRR902: cannot read the tokenizer {file}: there is no such file.")
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise StoreError("MRR903: --tokenizer needs the package tokenizers, which transformers brings too.") from None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise StoreError(f"MRR902: cannot read the tokenizer {file}: {error}.") from error

    def text(token: int) -> str:
        decoded: str = tokenizer.decode([token], skip_special_tokens=False)
        return decoded

    return text
