"""`router-replay explain`."""

from __future__ import annotations

import re
import textwrap
from importlib.resources import files
from typing import Annotated

import typer

from megatron_router_replay.cli.output import fail


def explain(
    code: Annotated[str, typer.Argument(help="The code that the message begins with, as MRR203.", metavar="CODE")],
) -> None:
    """Print the cause and the fix of an error, by its code."""
    sections = error_sections()
    name = code.upper()
    name = name if name.startswith("MRR") else f"MRR{name}"
    if name not in sections:
        fail(f"MRR901: no error has the code {code}; codes run from {min(sections)} to {max(sections)}.")
    paragraphs = [textwrap.fill(" ".join(text.split()), 80) for text in sections[name].split("\n\n")]
    typer.echo("\n\n".join([name, *paragraphs]))


def error_sections() -> dict[str, str]:
    """Return code -> its section of docs/errors.md as plain text: the cause, and the fix."""
    # The page ships as package data (a link to docs/errors.md), so that the text has one source.
    page = (files("megatron_router_replay.cli") / "errors.md").read_text(encoding="utf-8")
    found = re.findall(r"^### (MRR\d{3})\n\n(.*?)(?=\n+#|\Z)", page, re.M | re.S)
    return {code: _plain(text) for code, text in found}


def _plain(markdown: str) -> str:
    """Return a section without Markdown's marks; a link to a page keeps the page's name."""
    text = re.sub(r"\[([^]]*)\]\(([^)#]*)(#[^)]*)?\)", lambda link: f"{link[1]} (docs/{link[2]})", markdown.strip())
    return text.replace("**", "").replace("`", "")
