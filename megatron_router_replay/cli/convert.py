"""`router-replay convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_router_replay.cli.output import Json, Out, Step, check_out, emit, reporting_errors
from megatron_router_replay.errors import StoreError


def convert(
    source: Annotated[Path, typer.Argument(help="A payload (.json), or a folder of the ranks' parts.", metavar="IN")],
    target: Annotated[Path, typer.Argument(help="The trace file to write, .safetensors.", metavar="OUT")],
    engine: Annotated[str, typer.Option(help="The payload's engine, as mrr.engines calls it.", metavar="NAME")] = "",
    model: Annotated[
        Path | None, typer.Option(help="The model's Hugging Face config.json or its folder.", metavar="PATH")
    ] = None,
    key: Annotated[
        str,
        typer.Option(help="Where the payload is in a JSON file, as in response.choices.", metavar="KEY"),
    ] = "",
    token_ids: Annotated[
        Path | None, typer.Option(help="JSON list of token ids, one list a sample.", metavar="FILE")
    ] = None,
    step: Step = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.", metavar="")] = False,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Turn an engine's payload, or a folder of ranks' parts, into one trace file.

    A payload, a response saved as JSON, needs --engine and --model. The trace must fit in memory.
    """
    with reporting_errors():
        from megatron_router_replay.cli.files import read_any
        from megatron_router_replay.store import save_trace

        check_out(out)
        if target.suffix != ".safetensors":
            raise StoreError(f"MRR501: cannot write {target}: a trace file ends in .safetensors.")
        if target.exists() and not force:
            raise StoreError(f"MRR901: {target} exists: --force replaces it.")
        if not target.absolute().parent.is_dir():
            raise StoreError(f"MRR501: cannot write {target}: its folder does not exist.")
        trace = read_any(
            source,
            engine=engine,
            model=model,
            key=key,
            token_ids=token_ids,
            step=step,
        )
        save_trace(trace, target)
    values: dict[str, Any] = {
        "path": str(target),
        "num_tokens": trace.num_tokens,
        "rows_with_route": int(trace.replay_mask.sum()),
        "layer_numbers": list(trace.layer_numbers),
        "topk": trace.topk,
        "num_experts": trace.num_experts,
    }
    emit(f"{target}: {trace!r}", values, as_json=as_json, out=out)
