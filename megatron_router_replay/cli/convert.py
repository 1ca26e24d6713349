"""`router-replay convert`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_router_replay.cli.output import Json, Out, Step, bad_input, check_out, emit
from megatron_router_replay.errors import StoreError


class Engine(str, Enum):
    """Whose payload a file holds."""

    vllm = "vllm"
    sglang = "sglang"
    sglang_jax = "sglang_jax"
    megatron = "megatron"
    megatron_trace = "megatron_trace"
    tensorrt_llm = "tensorrt_llm"
    array = "array"


def convert(
    source: Annotated[Path, typer.Argument(help="A payload, trace file, folder, npz or envelope.", metavar="IN")],
    target: Annotated[Path, typer.Argument(help="What to write: .safetensors, .npz or .json.", metavar="OUT")],
    engine: Annotated[
        Engine | None,
        typer.Option(help=f"The payload's engine: {', '.join(each.value for each in Engine)}.", metavar="NAME"),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="The model's Hugging Face config.json or its folder.", metavar="PATH")
    ] = None,
    key: Annotated[
        str,
        typer.Option(help="Where the payload is in the file, as in response.choices or an npz's name.", metavar="KEY"),
    ] = "",
    token_ids: Annotated[
        Path | None, typer.Option(help="JSON list of token ids, one list a sample.", metavar="FILE")
    ] = None,
    axes: Annotated[
        str, typer.Option(help="Of an array: its axes, of token, layer, expert and batch.", metavar="NAMES")
    ] = "token,layer,expert",
    layers: Annotated[
        str, typer.Option(help="Of one rank's megatron_trace: the layer numbers it holds, as 3,4,5.", metavar="NUMBERS")
    ] = "",
    step: Step = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Turn engine payloads, trace files, npz files and JSON envelopes into each other.

    What OUT becomes follows from its ending. An engine's payload (a response saved as JSON, or an array in an npz)
    needs --engine and --model. Megatron-Core's own routing trace (--engine megatron_trace) is a folder, or the file of
    one rank. The trace must fit in memory.
    """
    with bad_input():
        from megatron_router_replay.cli.files import KINDS, PayloadOptions, read_any, write_any

        check_out(out)
        if target.suffix not in KINDS:
            raise StoreError(f"cannot write {target}: its ending must be one of {', '.join(KINDS)}.")
        if target.exists() and not force:
            raise StoreError(f"{target} exists: --force replaces it.")
        if not target.absolute().parent.is_dir():
            raise StoreError(f"cannot write {target}: its folder does not exist.")
        options = PayloadOptions(
            engine=None if engine is None else engine.value,
            model=model,
            key=key,
            token_ids=token_ids,
            axes=axes.split(","),
            layer_numbers=_integers(layers),
        )
        trace = read_any(source, options, step=step)
        write_any(trace, target)
    values: dict[str, Any] = {
        "path": str(target),
        "num_tokens": trace.num_tokens,
        "rows_with_route": int(trace.replay_mask.sum()),
        "layer_numbers": list(trace.layer_numbers),
        "topk": trace.topk,
        "num_experts": trace.num_experts,
    }
    emit(f"{target}: {trace!r}", values, as_json=as_json, out=out)


def _integers(text: str) -> list[int] | None:
    # Not just int(): it takes "1_0", digits of any script, and refuses thousands of digits with an error of its own.
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise StoreError(f"--layers {text!r} must be layer numbers with commas between them, as 3,4,5.")
    return [int(part) for part in parts] or None
