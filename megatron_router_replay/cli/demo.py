"""`router-replay demo`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from megatron_router_replay.cli.output import Json, emit, reporting_errors, say
from megatron_router_replay.tables import Table

if TYPE_CHECKING:
    from megatron_router_replay.demo import DemoResult

NEXT = """\
next, with a model of yours:
  router-replay doctor         is this environment ready?
  mrr.explain(model_chunks)    can each of the model's routers be replayed?
  docs/first_hour.md           this demo, line by line: decode, replay, compare"""


def demo(as_json: Json = False) -> None:
    """Replay a real vLLM response in Megatron-Core: 2 processes, pipeline parallel, full recompute, on this CPU."""
    with reporting_errors():
        from megatron_router_replay.demo import run_demo

        result = run_demo(say)
        emit(_text(result), asdict(result), as_json=as_json)
    exact = result.differ_with_replay == 0 and result.recomputes_identical == result.recomputes_checked > 0
    if exact:
        say(f"\n{NEXT}")
    raise typer.Exit(0 if exact else 1)


def _text(result: DemoResult) -> str:
    recomputes = f"{result.recomputes_identical} of {result.recomputes_checked}"
    gaps = f"{result.logprob_gap_without:.4f}", f"{result.logprob_gap_with:.4f}"
    table = Table(
        head=("", "without replay", "with replay"),
        words=(0,),
        rows=[
            ("rollout: samples / tokens generated", "", f"{result.samples} / {result.tokens_generated}"),
            ("router decisions compared with the engine's", *[f"{result.decisions:,}"] * 2),
            ("  of which differ", f"{result.differ_without_replay:,}", f"{result.differ_with_replay:,}"),
            ("router recomputes identical to their forward", "", recomputes),
            ("mean log-prob gap to the engine (nats)", *gaps),
            ("mean k3 KL(engine || trainer) (nats)", f"{result.kl_without:.5f}", f"{result.kl_with:.5f}"),
            ("token positions replayed", "", f"{result.rows_replayed:,}"),
            ("  routed live (last token of each sample)", "", f"{result.rows_live:,}"),
            ("  padding", "", f"{result.rows_padding:,}"),
        ],
    )
    return "routes of vLLM 0.30.0 (bf16), replayed in Megatron-Core (fp32, PP2, recompute)\n" + table.text()
