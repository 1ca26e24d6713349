"""`router-replay demo`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from megatron_router_replay.cli.output import Json, Out, bad_input, check_out, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from megatron_router_replay.demo import DemoResult


def demo(as_json: Json = False, out: Out = None) -> None:
    """Replay a real vLLM response in Megatron-Core: 2 processes, pipeline parallel, full recompute, on this CPU."""
    with bad_input():
        check_out(out)
        result = _run()
    if as_json or out is not None:
        write_json(asdict(result), as_json=as_json, out=out)
    if not as_json:
        from rich.console import Console

        Console().print(_table(result))
    exact = result.differ_with_replay == 0 and result.recomputes_identical == result.recomputes_checked > 0
    raise typer.Exit(0 if exact else 1)


def _run() -> DemoResult:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from megatron_router_replay.demo import run_demo
    from megatron_router_replay.demo.run import STAGES

    progress = Progress(
        TextColumn("{task.description:<42}"), BarColumn(), TimeElapsedColumn(), console=Console(stderr=True)
    )
    with progress:
        task = progress.add_task("", total=len(STAGES))

        def on_stage(stage: str) -> None:
            progress.update(task, description=stage, completed=STAGES.index(stage))

        result = run_demo(on_stage)
        progress.update(task, description="done", completed=len(STAGES))
    return result


def _table(result: DemoResult) -> Table:
    from rich.table import Table

    table = Table(
        title="routes of vLLM 0.30.0 (bf16), replayed in Megatron-Core (fp32, PP2, recompute)", title_justify="left"
    )
    table.add_column("")
    table.add_column("without replay", justify="right")
    table.add_column("with replay", justify="right")
    table.add_row("rollout: prompts / tokens generated", "", f"{result.prompts} / {result.tokens_generated}")
    table.add_row("router decisions compared with the engine's", *[f"{result.decisions:,}"] * 2)
    table.add_row(
        "  of which differ", f"{result.differ_without_replay:,}", f"[bold]{result.differ_with_replay:,}[/bold]"
    )
    table.add_row(
        "router recomputes identical to their forward",
        "",
        f"{result.recomputes_identical} of {result.recomputes_checked}",
    )
    table.add_row(
        "mean log-prob gap to the engine (nats)", f"{result.logprob_gap_without:.4f}", f"{result.logprob_gap_with:.4f}"
    )
    table.add_row("mean k3 KL(engine || trainer) (nats)", f"{result.kl_without:.5f}", f"{result.kl_with:.5f}")
    table.add_row("token positions replayed", "", f"{result.rows_replayed:,}")
    table.add_row("  routed live (last token of each sample)", "", f"{result.rows_live:,}")
    table.add_row("  padding", "", f"{result.rows_padding:,}")
    table.add_row("seconds per step (median)", f"{result.step_seconds_without:.3f}", f"{result.step_seconds_with:.3f}")
    return table
