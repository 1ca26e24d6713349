"""All commands as one typer app; each is a module beside this one and imports what it works with when it runs."""

from __future__ import annotations

from inspect import getdoc
from typing import Annotated

import typer

import megatron_router_replay
from megatron_router_replay.cli.convert import convert
from megatron_router_replay.cli.demo import demo
from megatron_router_replay.cli.diff import diff
from megatron_router_replay.cli.doctor import doctor
from megatron_router_replay.cli.inspect import inspect

app = typer.Typer(
    help="Record and replay which experts a Mixture-of-Experts model uses.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback that comes through is to be reported as Python prints it
    epilog="Exit codes: 0 fine, or the same; 1 they differ, or something would be refused; 2 bad input.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(megatron_router_replay.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Record and replay which experts a Mixture-of-Experts model uses."""


for command in (demo, doctor, inspect, diff, convert):
    # Lines of a docstring's paragraph are joined: typer would keep each break.
    paragraphs = (getdoc(command) or "").split("\n\n")
    app.command(help="\n\n".join(" ".join(text.split()) for text in paragraphs))(command)
