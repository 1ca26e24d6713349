"""Every python block of docs/ runs, page by page, on a real Megatron-Core model; every router-replay line runs too."""

import contextlib
import io
import json
import os
import re
import shlex
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import megatron_router_replay as mrr
from megatron_router_replay.demo import load_response, ranks, write_checkpoint
from megatron_router_replay.demo.run import make_microbatches, prompt_lengths
from megatron_router_replay.testing import ParallelSizes

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
DEMO = Path(mrr.__file__).parent / "demo" / "data"
PAGES = [*sorted(path.name for path in DOCS.glob("*.md") if path.name != "README.md"), "../README.md"]
pytestmark = pytest.mark.slow


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


def test_every_block_is_python_or_bash_that_is_run():
    fenced = [language for page in PAGES for language in re.findall(r"^```(\w*)$", (DOCS / page).read_text(), re.M)]
    assert set(fenced[::2]) <= {"python", "bash", "text"}
    assert set(fenced[1::2]) == {""}


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", (DOCS / page).read_text()):
            assert target.startswith("https://") or ((DOCS / page).parent / target).exists(), (page, target)
        for path in re.findall(r"`((?:examples|tests|benchmarks)/[\w/.]+)`", (DOCS / page).read_text()):
            assert (DOCS.parent / path).exists(), (page, path)


def loss_func(loss_mask: Any, token_losses: Any) -> Any:
    loss = (token_losses * loss_mask).sum() / loss_mask.sum()
    return loss, loss.detach()


def given_names(folder: str) -> dict[str, Any]:
    """What the pages take as given."""
    layout, checkpoint = ParallelSizes(), write_checkpoint(Path(folder) / "hf_checkpoint")
    response = load_response()
    model_chunks = ranks.build(checkpoint, layout)
    trace = mrr.engines.vllm.decode_batch(response, model=checkpoint)
    microbatches = make_microbatches(trace, prompt_lengths(response))

    class NoSession:
        def microbatch(self, *args: Any, **kwargs: Any) -> None:
            """Training without a session."""

    def train_step(*arguments: Any) -> Any:
        session = arguments[0] if len(arguments) == 2 else NoSession()
        return ranks.run_schedule(
            model_chunks, layout, arguments[-1], forward_step=partial(ranks.forward_step, session=session)
        )

    mrr.save_trace(trace, Path(folder) / "other.safetensors")
    return {
        "model_chunks": model_chunks,
        "response": response,
        "checkpoint": checkpoint,
        "loss_func": loss_func,
        "microbatches": microbatches,
        "trace": trace,
        "num_tokens": len(trace),
        "train_step": train_step,
    }


def missing_loggers() -> list[tuple[str, str]]:
    """What docs/monitoring.md imports and is not installed: (package, the module that its recipe takes from)."""
    homes = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
    return [(name, module) for name, module in homes.items() if find_spec(name) is None]


def run_page(page: str, folder: str) -> str:
    """Run a page's python blocks one behind the other, in `folder`; return what they print."""
    printed = io.StringIO()
    before = os.getcwd()
    os.chdir(folder)
    try:
        names = given_names(folder)
        for i, block in enumerate(blocks(page, "python")):
            if any(f"import {name}" in block or f"from {module}" in block for name, module in missing_loggers()):
                continue  # test_metrics_reach_the_loggers skips with the reason
            with contextlib.redirect_stdout(printed):
                exec(compile(block, f"{page}, block {i + 1}", "exec"), names)
    finally:
        os.chdir(before)
    return printed.getvalue()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_the_python_blocks_of_a_page_run(page, workers_1, tmp_path):
    (printed,) = workers_1.run(run_page, page, str(tmp_path), timeout_s=300)
    if page == "rl_trainer.md":
        assert "tokens replayed" in printed
    if page == "../README.md":
        assert "tokens replayed" in printed
    if page == "monitoring.md":
        assert 0.9 < float(printed.split()[0]) <= 1
    if page == "debugging.md":
        assert "the traces differ" in printed
        assert "everything adds up" in printed


@pytest.mark.parametrize("logger", ["tensorboard", "wandb"])
def test_the_recipe_of_a_metrics_logger_writes_what_a_report_holds(logger, tmp_path, monkeypatch):
    pytest.importorskip(logger, reason=f"`make venv-loggers` installs {logger}")
    (recipe,) = [
        block for block in blocks("monitoring.md", "python") if f"import {logger}" in block or f".{logger}" in block
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    report = mrr.mcore.SessionReport(kind="replay", tokens=8, rows_replayed=7, rows_live=1)
    exec(compile(recipe, "monitoring.md", "exec"), {"metrics": report.metrics()})
    if logger == "wandb":
        (folder,) = tmp_path.glob("wandb/offline-run-*")
        (file,) = folder.glob("*.wandb")
        deadline = time.monotonic() + 60
        while b"replayed_share" not in file.read_bytes() and time.monotonic() < deadline:
            time.sleep(0.1)  # W&B's own process writes it a moment after the run was finished
        written = file.read_bytes()
        assert b"router_replay/replayed_share" in written
        assert b"0.875" in written
    else:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read = EventAccumulator(str(tmp_path / "tensorboard"))
        read.Reload()
        (event,) = read.Scalars("router_replay/replayed_share")
        assert (event.step, event.value) == (12, 0.875)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from megatron_router_replay.diagnostics.runlog import RunLog
    from megatron_router_replay.store import TraceStore

    path = tmp_path_factory.mktemp("command_line")
    checkpoint = write_checkpoint(path / "hf_checkpoint")
    content = json.loads((DEMO / "vllm_0.30.0_bf16_response.json").read_text())
    trace = mrr.engines.vllm.decode_batch(content["response"], model=checkpoint)
    (path / "response.json").write_text(json.dumps(content))
    (path / "megatron_config.json").write_text(json.dumps({"num_layers": 4, "num_experts": 8, "moe_router_topk": 2}))
    mrr.save_trace(trace, path / "run_a.safetensors")
    routes = trace.topk_indices.clone()
    routes[::9] = torch.arange(trace.topk, dtype=routes.dtype)
    mrr.save_trace(trace._with(topk_indices=routes), path / "other.safetensors")
    for step in (11, 12):
        TraceStore(path / "steps").save(trace, step=step)
    # A log of metrics alone would not add up: one session, with a micro-batch that was reported.
    rows = torch.arange(8).view(2, 4)
    with RunLog(path / "run.jsonl") as log:
        log.metrics(1, {"loss": 2.5})
        log.begin(step=1)
        log.microbatch(rows, trace)
        log.end(mrr.mcore.SessionReport(kind="replay", microbatches=1, tokens=8, rows_replayed=8, forwards=3))
    return path


@pytest.mark.parametrize(
    "line", [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines() if line]
)
def test_the_commands_run(line, folder, monkeypatch):
    from megatron_router_replay.cli import app

    for words, needed in (("plot", "matplotlib"), ("--html", "jinja2")):
        if words in line:
            pytest.importorskip(needed, reason=f"{words} needs {needed}")
    monkeypatch.chdir(folder)
    program, *arguments = shlex.split(line)
    if program != "router-replay":
        pytest.skip("checked by tests/unit/docs: it would make an environment")
    if arguments[0] == "convert":
        arguments.append("--force")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == (1 if arguments[0] == "diff" and "other.safetensors" in arguments else 0), result.stderr
    assert result.stdout
