"""`router-replay inspect`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_router_replay.cli.output import (
    Json,
    Out,
    Step,
    bad_input,
    check_out,
    emit,
    numbers,
    printable,
    progress,
)
from megatron_router_replay.tables import Table

if TYPE_CHECKING:
    from megatron_router_replay.store import TraceStore

_MAX_STEPS_SHOWN = 20


def inspect(
    path: Annotated[
        Path, typer.Argument(help="A trace file, or a folder of the ranks' parts or steps.", metavar="PATH")
    ],
    step: Step = None,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Say what a trace file or folder holds: shapes, layers, missing routes, expert load. Every byte is checked.

    Reads all that `convert` writes: trace files, npz files and JSON envelopes.
    """
    with bad_input():
        from megatron_router_replay.store import TraceStore

        check_out(out)
        store = TraceStore(path)
        steps = store.steps() if path.is_dir() else []
        if len(steps) > 1 and step is None:
            values = _steps(store, steps)
            text = _steps_text(values)
        else:
            with progress("reading") as on_rows:
                values = _trace(path, step, on_rows)
            text = _trace_text(values)
    emit(text, values, as_json=as_json, out=out)


def _steps(store: TraceStore, steps: list[int]) -> dict[str, Any]:
    found = []
    for step in steps:
        parts = store.parts(step)
        found.append(
            {
                "step": step,
                "parts": len(parts),
                "ranks": len({part.rank for part in parts}),
                "num_tokens": max((part.num_tokens for part in parts), default=0),
                "layer_numbers": sorted({number for part in parts for number in part.layer_numbers}),
                # A run that is still going on may replace a part between its listing and this line.
                "bytes": sum(part.path.stat().st_size for part in parts if part.path.exists()),
            }
        )
    return {"kind": "store", "path": str(store.root), "steps": found}


def _steps_text(values: dict[str, Any]) -> str:
    steps = values["steps"]
    shown = steps if len(steps) <= _MAX_STEPS_SHOWN else steps[: _MAX_STEPS_SHOWN - 5] + steps[-5:]
    rows = [
        (
            str(step["step"]),
            str(step["ranks"]),
            str(step["parts"]),
            f"{step['num_tokens']:,}",
            str(len(step["layer_numbers"])),
            f"{step['bytes'] / 1e6:,.1f}",
        )
        for step in shown
    ]
    left_out = f", {len(steps) - len(shown)} of them left out here" if len(shown) < len(steps) else ""
    table = Table(name="steps", head=("step", "ranks", "parts", "tokens", "layers", "MB"), rows=rows)
    return (
        f"{printable(values['path'])}: a folder of {len(steps)} steps{left_out}\n"
        + table.text()
        + "\n--step N says more of one"
    )


def _trace(path: Path, step: int | None, on_rows: Any) -> dict[str, Any]:
    import torch

    from megatron_router_replay.cli.files import PayloadOptions, read_any
    from megatron_router_replay.diagnostics import imbalance, open_source
    from megatron_router_replay.diagnostics.metrics import add_load
    from megatron_router_replay.diagnostics.plain import plain_numbers
    from megatron_router_replay.diagnostics.source import block_rows, part_files
    from megatron_router_replay.ids import index_dtype

    begin = time.perf_counter()
    # Trace files are read in blocks, whatever their size; these two kinds cannot be.
    in_memory = path.is_file() and path.suffix in (".npz", ".json")
    with open_source(read_any(path, PayloadOptions()) if in_memory else path, step=step) as source:
        load = torch.zeros(len(source.layer_numbers), source.num_experts, dtype=torch.int64)
        routed, has_tokens = 0, False
        versions: set[int] = set()
        size = block_rows(source)
        for start in range(0, source.num_tokens, size):
            block = source.read(start, start + size)
            add_load(load, block)
            routed += int(block.replay_mask.sum())
            has_tokens |= block.token_ids is not None
            if block.weight_version is not None:
                versions |= set(torch.unique(block.weight_version).tolist())
            on_rows(min(start + size, source.num_tokens), source.num_tokens)
        lengths = source.sequence_lengths
        files = [path] if path.is_file() else part_files(path, step)
        return {
            "kind": "trace",
            "path": str(path),
            "bytes": sum(file.stat().st_size for file in files),
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
            "imbalance_by_layer": plain_numbers(imbalance(load)),
            "unused_experts_by_layer": (load == 0).sum(dim=1).tolist(),
            "seconds": time.perf_counter() - begin,
        }


def _trace_text(values: dict[str, Any]) -> str:
    layers = values["layer_numbers"]
    missing = values["num_tokens"] - values["rows_with_route"]
    lines = [
        f"{printable(values['path'])}: a trace, {values['bytes'] / 1e6:,.1f} MB, every byte checked",
        f"  tokens             {values['num_tokens']:,}",
        f"  without a route    {missing:,} ({values['missing_share']:.2%})",
        f"  experts            top-{values['topk']} of {values['num_experts']}, stored as {values['dtype']}",
        f"  MoE layers         {len(layers)}: {numbers(layers) or 'none'}",
    ]
    if values["samples"] is not None:
        lengths = values["sample_lengths"]
        span = f", {lengths['min']:,} to {lengths['max']:,} tokens" if lengths else ""
        lines.append(f"  samples            {values['samples']:,}{span}")
    lines.append(f"  token ids          {'yes' if values['token_ids'] else 'no'}")
    if values["weight_versions"]:
        lines.append(f"  weight versions    {numbers(values['weight_versions'])}")
    uneven = [(value, number) for value, number in zip(values["imbalance_by_layer"], layers) if value is not None]
    if uneven:
        worst, best = max(uneven), min(uneven)
        lines += [
            "  expert load        busiest expert / mean of its layer (1 = even)",
            f"    most uneven      {worst[0]:.2f} in layer {worst[1]}",
            f"    most even        {best[0]:.2f} in layer {best[1]}",
        ]
        unused = sum(values["unused_experts_by_layer"])
        if unused:
            lines.append(f"    never chosen     {unused:,} of {len(layers) * values['num_experts']:,} experts")
    return "\n".join(lines)
