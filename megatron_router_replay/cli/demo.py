"""`router-replay demo`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from megatron_router_replay.cli.output import Json, Out, bad_input, check_out, emit
from megatron_router_replay.tables import Table

if TYPE_CHECKING:
    from megatron_router_replay.demo import DemoResult


def demo(as_json: Json = False, out: Out = None) -> None:
    """Replay a real vLLM response in Megatron-Core: 2 processes, pipeline parallel, full recompute, on this CPU."""
    with bad_input():
        check_out(out)
        result = _run()
    emit(_text(result), asdict(result), as_json=as_json, out=out)
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


def _text(result: DemoResult) -> str:
    table = Table(
        name="demo",
        head=("", "without replay", "with replay"),
        words=(0,),
        rows=[
            ("rollout: prompts / tokens generated", "", f"{result.prompts} / {result.tokens_generated}"),
            ("router decisions compared with the engine's", *[f"{result.decisions:,}"] * 2),
            ("  of which differ", f"{result.differ_without_replay:,}", f"{result.differ_with_replay:,}"),
            (
                "router recomputes identical to their forward",
                "",
                f"{result.recomputes_identical} of {result.recomputes_checked}",
            ),
            (
                "mean log-prob gap to the engine (nats)",
                f"{result.logprob_gap_without:.4f}",
                f"{result.logprob_gap_with:.4f}",
            ),
            ("mean k3 KL(engine || trainer) (nats)", f"{result.kl_without:.5f}", f"{result.kl_with:.5f}"),
            ("token positions replayed", "", f"{result.rows_replayed:,}"),
            ("  routed live (last token of each sample)", "", f"{result.rows_live:,}"),
            ("  padding", "", f"{result.rows_padding:,}"),
            ("seconds per step (median)", f"{result.step_seconds_without:.3f}", f"{result.step_seconds_with:.3f}"),
        ],
    )
    return "routes of vLLM 0.30.0 (bf16), replayed in Megatron-Core (fp32, PP2, recompute)\n" + table.text()
