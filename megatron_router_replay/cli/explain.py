"""`router-replay explain`."""

from __future__ import annotations

import re
import textwrap
from importlib.resources import files
from typing import Annotated

import typer

from megatron_router_replay.cli.output import fail


def explain(
    code: Annotated[str, typer.Argument(help="The code of an error, as MRR203, or its message.", metavar="CODE")],
) -> None:
    """Print the cause and the fix of an error, by its code."""
    rows = error_rows()
    pasted = re.search(r"MRR\d{3}", code.upper())
    name = pasted[0] if pasted else f"MRR{code}"
    if name not in rows:
        fail(f"MRR901: no error has the code {code}; codes run from {min(rows)} to {max(rows)}.")
    cause, fix = rows[name]
    typer.echo("\n\n".join([name, textwrap.fill(cause, 80), textwrap.fill(f"Fix. {fix}", 80)]))


def error_rows() -> dict[str, tuple[str, str]]:
    """Return code -> the cause and the fix in its row of docs/errors.md, as plain text."""
    # The page ships as package data (a link to docs/errors.md), so that the text has one source.
    page = (files("megatron_router_replay.cli") / "errors.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| <a id=\"mrr\d{3}\"></a>(MRR\d{3}) \| (.*) \| (.*) \|$", page, re.M)
    return {code: (_plain(cause), _plain(fix)) for code, cause, fix in found}


def _plain(markdown: str) -> str:
    """Return a cell without Markdown's marks; a link to a page keeps the page's name."""
    text = re.sub(r"\[([^]]*)\]\(([^)#]*)(#[^)]*)?\)", lambda link: f"{link[1]}: docs/{link[2]}", markdown)
    return text.replace("**", "").replace("`", "")
