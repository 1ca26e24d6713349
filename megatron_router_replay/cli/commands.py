"""All commands as one typer app; each is a module beside this one and imports what it works with when it runs."""

from __future__ import annotations

from inspect import getdoc
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import megatron_router_replay
from megatron_router_replay.cli.convert import convert
from megatron_router_replay.cli.demo import demo
from megatron_router_replay.cli.diff import diff
from megatron_router_replay.cli.doctor import doctor
from megatron_router_replay.cli.inspect import inspect


class _Plain:
    """A command whose usage names arguments without braces, and whose --help has no type."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.strip("{}") for piece in pieces]

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        option.metavar = ""
        return option


class _Command(_Plain, TyperCommand):
    pass


class _Group(_Plain, TyperGroup):
    pass


app = typer.Typer(
    cls=_Group,
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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.", metavar="")
    ] = False,
) -> None:
    """Record and replay which experts a Mixture-of-Experts model uses."""


for command in (demo, doctor, inspect, diff, convert):
    # Lines of a docstring's paragraph are joined: typer would keep each break.
    paragraphs = (getdoc(command) or "").split("\n\n")
    app.command(cls=_Command, help="\n\n".join(" ".join(text.split()) for text in paragraphs))(command)
