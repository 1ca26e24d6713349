"""`python -m examples.effect`: measure, and draw the results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.measure import environment
from examples.effect import figures, freeze, rl
from examples.effect.arms import ARMS
from examples.effect.results import columns, load, save
from megatron_router_replay.testing import run_ranks

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
OUT = Path("build/effect")
TIMEOUT_S = 3600.0
Engine = Annotated[str, typer.Option(help="transformers, or vllm (`make venv-vllm`).")]
Python = Annotated[str, typer.Option(help="Python of the environment with vLLM, if another than .venv-vllm's.")]


@app.command()
def gap(engine: Engine = "transformers", python: Python = "", steps: int = 20) -> None:
    """Train with R3, and measure in every step how much of the gap to the engine routing causes."""
    where = environment()
    out = OUT / f"gap_{engine}"
    out.mkdir(parents=True, exist_ok=True)
    run = rl.Run(out=out, arm="r3", seed=0, steps=steps, engine=engine, python=python, measure_every=1, floors=True)
    metrics = run_ranks(1, rl.train, run, timeout_s=TIMEOUT_S)[0]
    names = ("kl_live", "kl", "kl_floor", "kl_floor_engine", "router_agreement", "reward")
    print(save(f"gap_{engine}", {"environment": where, **columns(metrics, names)}))


@app.command(name="freeze")
def freeze_(steps: int = 20) -> None:
    """Train with recompute, live and frozen, and compare the gradients with those of no recompute."""
    where = environment()
    runs = {}
    for name, frozen in (("live", False), ("frozen", True)):
        run = run_ranks(1, freeze.train, frozen, steps, 0, timeout_s=TIMEOUT_S)[0]
        names = ("flips", "error", "router_error", "loss")
        runs[name] = {**run, "steps": columns(run["steps"], names)}
    print(save("freeze", {"environment": where, **runs}))


@app.command(name="rl")
def rl_(
    steps: int = 40,
    seeds: int = 5,
    go_on: Annotated[bool, typer.Option(help="Keep the seeds of results/rl.json, and run those after them.")] = False,
) -> None:
    """Train every arm with every seed."""
    names = ("reward", "kl", "router_agreement", "replayed_agreement", "clipped_share", "grad_norm")
    results = (
        load("rl")
        if go_on
        else {"environment": environment(), "arms": {arm: {name: [] for name in names} for arm in ARMS}}
    )
    for seed in range(len(results["arms"]["off"]["reward"]), seeds):
        of_seed = {}
        for arm in ARMS:
            out = OUT / f"{arm}_{seed}"
            out.mkdir(parents=True, exist_ok=True)
            run = rl.Run(out=out, arm=arm, seed=seed, steps=steps)
            metrics = run_ranks(1, rl.train, run, timeout_s=TIMEOUT_S)[0]
            of_seed[arm] = columns(metrics, names)
            seconds = sum(step["seconds"] for step in metrics)
            print(f"seed {seed}, {arm}: reward {metrics[-1]['reward']:.3f} after {seconds:.0f} s", flush=True)
        for arm, of_arm in of_seed.items():
            for name, values in of_arm.items():
                results["arms"][arm][name].append(values)
        print(save("rl", results), flush=True)  # an interrupted run keeps its whole seeds


@app.command(name="figures")
def figures_() -> None:
    """Draw docs/images/effect_*.svg, and print the tables of docs/effect.md."""
    print(figures.write_all())


if __name__ == "__main__":
    app()
