"""python -m examples.grpo: one run (`train`), or off, r2 and r3 side by side (`compare`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from examples.grpo.compare import compare as compare_runs
from examples.grpo.loop import read_metrics
from examples.grpo.plot import plot_runs
from examples.grpo.run import run as run_training
from examples.grpo.settings import Settings
from megatron_router_replay.testing import ParallelSizes

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Folder for metrics, checkpoints, weights.")] = Path("build/grpo/run"),
    replay: Annotated[str, typer.Option(help="off | r2 | r3")] = "r3",
    fill_missing: Annotated[bool, typer.Option(help="With r3: r2's route where the engine sent none.")] = False,
    engine: Annotated[str, typer.Option(help="transformers | vllm (needs `make venv-vllm`)")] = "transformers",
    experts: Annotated[str, typer.Option(help="Of the embedded engine: native | contiguous | batched")] = "native",
    transport: Annotated[
        str,
        typer.Option(
            help="How routes reach the training ranks. local: rank 0 hands them over. distributed: rollout workers, "
            "processes of their own, send them over torch.distributed. ray: the workers are Ray actors; Ray is started."
        ),
    ] = "local",
    rollout_workers: Annotated[
        int | None,
        typer.Option(
            help="That share a rollout's prompts; 2, with local 1 (there they are shares that are taken in turn: with the "
            "same number, a run has the same numbers whatever the transport).",
            show_default=False,
        ),
    ] = None,
    steps: int = 30,
    prompts: int = 8,
    per_prompt: int = 8,
    updates: Annotated[int, typer.Option(help="Gradient steps per rollout.")] = 4,
    per_microbatch: Annotated[
        int, typer.Option(help="Samples packed into a micro-batch; more: less accumulation.")
    ] = 8,
    lr: float = 2e-3,
    clip: float = 0.2,
    kl_coef: float = 1e-3,
    recompute: Annotated[str, typer.Option(help="none | full | block | selective")] = "none",
    tp: int = 1,
    pp: int = 1,
    vpp: Annotated[int, typer.Option(help="Model chunks per pipeline stage.")] = 1,
    ep: int = 1,
    cp: int = 1,
    dp: Annotated[int, typer.Option(help="Data-parallel copies of the smallest such layout.")] = 1,
    checkpoint_every: int = 10,
    resume: bool = False,
    save_routes: Annotated[
        Path | None, typer.Option(help="File for the last rollout's routes, a trace of all its tokens and layers.")
    ] = None,
    seed: int = 0,
) -> None:
    """Train, on as many processes as the layout needs."""
    settings = Settings(
        out=out,
        replay=replay,
        fill_missing=fill_missing,
        engine=engine,
        experts=experts,
        transport=transport,
        rollout_workers=rollout_workers or (1 if transport == "local" else 2),
        layout=ParallelSizes(tp_size=tp, pp_size=pp, vp_size=vpp if vpp > 1 else None, ep_size=ep, cp_size=cp),
        steps=steps,
        prompts=prompts,
        per_prompt=per_prompt,
        updates=updates,
        per_microbatch=per_microbatch,
        lr=lr,
        clip=clip,
        kl_coef=kl_coef,
        recompute=recompute,
        checkpoint_every=checkpoint_every,
        resume=resume,
        save_routes=save_routes,
        seed=seed,
        progress=True,
    )
    metrics = run_training(settings, dp=dp)
    print(f"{out}/metrics.jsonl: reward {metrics[0]['reward']:.3f} -> {metrics[-1]['reward']:.3f}")


@app.command()
def compare(
    out: Annotated[Path, typer.Option(help="Folder for the runs, summary.json and curves.png.")] = Path(
        "build/grpo/compare"
    ),
    steps: int = 30,
    updates: Annotated[int, typer.Option(help="Gradient steps per rollout.")] = 4,
    lr: float = 2e-3,
) -> None:
    """Train off, r2 and r3 from the same start; then off and r3 with lr = 0."""
    compare_runs(out, steps=steps, updates=updates, lr=lr)
    print(f"{out}/curves.png, {out}/summary.json, metrics of each run under {out}/")


@app.command()
def plot(
    picture: Annotated[Path, typer.Argument(help="The PNG to write.")],
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; each is named for its folder.")],
) -> None:
    """Draw the curves of several runs side by side."""
    plot_runs({run.name: read_metrics(run / "metrics.jsonl") for run in runs}, picture, title="GRPO")


if __name__ == "__main__":
    app()
