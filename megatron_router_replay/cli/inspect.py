"""`router-replay inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_router_replay.cli.output import Json, Step, emit, progress, reporting_errors, size_words
from megatron_router_replay.tables import Table, number_words, percent, printable


def inspect(
    path: Annotated[
        Path, typer.Argument(help="A trace file, or a folder of the ranks' parts or steps.", metavar="PATH")
    ],
    step: Step = None,
    run: Annotated[str | None, typer.Option(help="The run, if several saved that step.", metavar="RUN")] = None,
    as_json: Json = False,
) -> None:
    """Summarize a trace file or folder: shapes, layers, missing routes, expert load. Every byte of a trace is checked."""
    with reporting_errors():
        from megatron_router_replay.store import TraceStore

        files = TraceStore(path, run=run).files()
        # The runs of each step, or the run that was named.
        steps = {
            number: {name: runs[name] for name in sorted(runs) if run in (None, name)} for number, runs in files.items()
        }
        steps = {number: runs for number, runs in sorted(steps.items()) if runs}
        if len(steps) > 1 and step is None:
            values = {"kind": "store", "path": str(path), "steps": [_step(*each) for each in steps.items()]}
            text = _steps_text(values)
        else:
            with progress("reading") as on_rows:
                values = _trace(path, next(iter(steps), None) if step is None else step, run, on_rows)
            text = _trace_text(values)
        emit(text, values, as_json=as_json)


def _step(step: int, runs: dict[str, dict[int, Path]]) -> dict[str, Any]:
    from megatron_router_replay.store.atomic import naming
    from megatron_router_replay.store.file import read_header

    paths, headers = [path for ranks in runs.values() for path in ranks.values()], []
    for path in paths:
        with naming(path, "read"):
            headers.append(read_header(path))
    return {
        "step": step,
        "runs": list(runs),
        "ranks": len({rank for ranks in runs.values() for rank in ranks}),
        "parts": len(paths),
        "num_tokens": max(header.num_tokens for header in headers),
        "layer_numbers": sorted({number for header in headers for number in header.layer_numbers}),
        # A run that is still going on may replace a part between its listing and this line.
        "bytes": sum(path.stat().st_size for path in paths if path.exists()),
    }


def _steps_text(values: dict[str, Any]) -> str:
    steps = values["steps"]
    rows = [
        (
            *(str(value) for value in (step["step"], len(step["runs"]), step["ranks"], step["parts"])),
            f"{step['num_tokens']:,}",
            str(len(step["layer_numbers"])),
            size_words(step["bytes"]),
        )
        for step in steps
    ]
    table = Table(head=("step", "runs", "ranks", "parts", "tokens", "layers", "size"), rows=rows)
    title = f"{printable(values['path'])}: a folder of {len(steps)} steps"
    return f"{title}\n{table.text()}\n--step N summarizes one, --run RUN a run of it"


def _trace(path: Path, step: int | None, run: str | None, on_rows: Any) -> dict[str, Any]:
    import torch

    from megatron_router_replay.diagnostics.fact import imbalance, plain
    from megatron_router_replay.diagnostics.source import block_rows, open_source
    from megatron_router_replay.trace.ids import index_dtype

    source = open_source(path, step=step, run=run)
    load = torch.zeros(len(source.layer_numbers), source.num_experts, dtype=torch.int64)
    routed, has_tokens = 0, False
    versions: set[int] = set()
    size = block_rows(source)
    for start in range(0, source.num_tokens, size):
        block = source.read(start, start + size)
        for layer, routes in zip(load, block.topk_indices[block.replay_mask].unbind(1)):
            layer += torch.bincount(routes.reshape(-1), minlength=source.num_experts)
        routed += int(block.replay_mask.sum())
        has_tokens |= block.token_ids is not None
        if block.weight_version is not None:
            versions |= set(torch.unique(block.weight_version).tolist())
        on_rows(min(start + size, source.num_tokens), source.num_tokens)
    lengths = source.sequence_lengths
    return {
        "kind": "trace",
        "path": str(path),
        "bytes": sum(file.stat().st_size for file in source.files),
        "num_tokens": source.num_tokens,
        "rows_with_route": routed,
        "missing_share": 1 - routed / source.num_tokens if source.num_tokens else 0.0,
        "layer_numbers": list(source.layer_numbers),
        "topk": source.topk,
        "num_experts": source.num_experts,
        "dtype": str(index_dtype(source.num_experts)).removeprefix("torch."),
        "samples": None if lengths is None else len(lengths),
        "sample_lengths": None if not lengths else {"min": min(lengths), "max": max(lengths)},
        "token_ids": has_tokens,
        "weight_versions": sorted(versions - {-1}),
        "imbalance_by_layer": plain(imbalance(load)),
        "unused_experts_by_layer": (load == 0).sum(dim=1).tolist(),
    }


def _trace_text(values: dict[str, Any]) -> str:
    layers, lengths = values["layer_numbers"], values["sample_lengths"]
    missing = values["num_tokens"] - values["rows_with_route"]
    span = f", {lengths['min']:,} to {lengths['max']:,} tokens" if lengths else ""
    facts = {
        "tokens": f"{values['num_tokens']:,}",
        "without a route": f"{missing:,} ({percent(values['missing_share'])})",
        "experts": f"top-{values['topk']} of {values['num_experts']}, stored as {values['dtype']}",
        "MoE layers": f"{len(layers)}: {number_words(layers)}",
        "samples": "unknown" if values["samples"] is None else f"{values['samples']:,}{span}",
        "token ids": "yes" if values["token_ids"] else "no",
        "weight versions": number_words(values["weight_versions"]),
    }
    if uneven := [(value, number) for value, number in zip(values["imbalance_by_layer"], layers) if value is not None]:
        (worst, in_layer), (best, _) = max(uneven), min(uneven)
        facts["busiest expert"] = f"{worst:.2f} times the mean of its layer, in layer {in_layer}; {best:.2f} at least"
        unused = sum(values["unused_experts_by_layer"])
        facts["never chosen"] = f"{unused:,} of {len(layers) * values['num_experts']:,} experts"
    title = f"{printable(values['path'])}: a trace, {size_words(values['bytes'])}, every byte checked"
    return title + "\n" + Table(words=(0, 1), rows=list(facts.items())).text()
