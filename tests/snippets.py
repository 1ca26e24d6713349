"""What the blocks of README.md and docs/ run with: the names and files that a page takes as given, in a folder of its own.

The blocks of a page run in order, in one namespace and one process group, on a real Megatron-Core model.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # every test's process loads this module
    from sybil import Example

PRINTED = {
    "monitoring.md": ["0.98"],
    "debugging.md": ["The traces differ"],
}
"""What the python blocks of a page print, among other things."""


def run_python(example: Example) -> None:
    """Run a python block; its lines have the page's numbers in a traceback."""
    example.namespace["page"] = Path(example.path).name
    lines_above = "\n" * (example.line + example.parsed.line_offset)
    with contextlib.redirect_stdout(example.namespace["printed"]):
        exec(compile(lines_above + example.parsed, example.path, "exec"), example.namespace)


def run_commands(example: Example) -> None:
    """Run the router-replay lines of a bash block; tests/unit/docs checks the others, which would make an environment."""
    from typer.testing import CliRunner

    from megatron_router_replay.cli.commands import app

    for line in example.parsed.splitlines():
        program, *arguments = shlex.split(line, comments=True) or [""]
        if program != "router-replay":
            continue
        result = CliRunner().invoke(app, arguments)
        differs = arguments[0] == "diff" and "other.safetensors" in arguments
        assert result.exit_code == (1 if differs else 0), f"{line}\n{result.stdout}{result.stderr}"
        assert result.stdout, line


def check_printed(example: Example) -> None:
    """Compare the output that a page shows with that of its blocks, but for the margin."""
    shown, printed = (
        "\n".join(line.strip() for line in text.splitlines())
        for text in (example.parsed.strip(), example.namespace["printed"].getvalue())
    )
    assert shown in printed, printed


def enter_folder(namespace: dict[str, Any]) -> Path:
    """Enter a folder of the page's own; a tutorial makes all else by itself."""
    leaving = contextlib.ExitStack()
    folder = Path(leaving.enter_context(tempfile.TemporaryDirectory()))
    leaving.enter_context(contextlib.chdir(folder))
    namespace.update(printed=io.StringIO(), leaving=leaving)
    return folder


def enter_page(namespace: dict[str, Any]) -> None:
    """Fill a page's namespace, in a folder and a process group of its own."""
    from tests.support.one_rank import only_rank

    folder = enter_folder(namespace)
    with contextlib.ExitStack() as undo:  # a page that cannot begin must not spoil those after it
        undo.push(namespace["leaving"])
        namespace["leaving"].enter_context(only_rank())
        namespace.update(given_names(folder))
        write_files(folder, namespace["trace"])
        undo.pop_all()


def leave_page(namespace: dict[str, Any]) -> None:
    """Take the page's folder and process group away; hold what it printed against PRINTED."""
    leaving: contextlib.ExitStack = namespace["leaving"]
    page, printed, on_cpu = namespace.get("page"), namespace["printed"].getvalue(), namespace.get("on_cpu")
    namespace.clear()
    if on_cpu is not None:  # what a tutorial started by itself
        end_tutorial(on_cpu)
    leaving.close()
    for words in PRINTED.get(page, ()):
        assert words in printed, (page, words)


def end_tutorial(on_cpu: contextlib.ExitStack) -> None:
    import torch

    from tests.support.megatron_state import reset_megatron_state

    reset_megatron_state()
    torch.distributed.destroy_process_group()
    on_cpu.close()


def loss_func(loss_mask: Any, token_losses: Any) -> Any:
    loss = (token_losses * loss_mask).sum() / loss_mask.sum()
    return loss, loss.detach()


def given_names(folder: Path) -> dict[str, Any]:
    """Return the names that the pages take as given."""
    import megatron_router_replay as mrr
    from megatron_router_replay.demo import load_response, ranks, write_checkpoint
    from megatron_router_replay.demo.run import make_microbatches, prompt_lengths
    from megatron_router_replay.testing import ParallelSizes, load_qwen3_moe
    from tests.support.schedule import run_schedule

    layout, checkpoint = ParallelSizes(), write_checkpoint(folder / "hf_checkpoint")
    response = load_response()
    layout.initialize()
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    model_chunks = load_qwen3_moe(checkpoint, layout, **recompute)
    trace = mrr.engines.vllm.decode_batch(response, model=checkpoint)

    def train_step(microbatches: Any) -> Any:
        return run_schedule(model_chunks, layout, microbatches, forward_step=ranks.forward_step)

    return {
        "model_chunks": model_chunks,
        "response": response,
        "checkpoint": checkpoint,
        "tokenizer": SimpleNamespace(pad_token_id=ranks.PADDING_TOKEN),
        "loss_func": loss_func,
        "microbatches": make_microbatches(trace, prompt_lengths(response)),
        "trace": trace,
        "num_tokens": trace.num_tokens,
        "train_step": train_step,
        "forward_backward": train_step,
    }


def write_files(folder: Path, trace: Any) -> None:
    """Write the files that the pages' blocks and commands read."""
    import torch

    import megatron_router_replay as mrr
    from megatron_router_replay.store import TraceStore

    mrr.save_trace(trace, folder / "run_a.safetensors")
    routes = trace.topk_indices.clone()
    routes[::9] = torch.arange(trace.topk, dtype=routes.dtype)
    mrr.save_trace(trace._with(topk_indices=routes), folder / "other.safetensors")
    for step in (11, 12):
        TraceStore(folder / "steps", run="a").save(trace, step=step)
