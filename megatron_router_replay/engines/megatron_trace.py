"""Megatron-Core's own routing trace (`--moe-routing-trace-path`, JSONL) -> RoutingTrace, to compare runs without us in them.

Each rank writes `router_trace_rank<N>.jsonl`, a line a router and forward, in the order in which they ran:

    {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0, "num_tokens": 128, "topk": 2,
     "top_indices": [[12, 45], ...]}

A forward is a run of lines with increasing `layer`; it becomes one sample, its rows in the order in which that rank's router
saw them (s-major, this rank's part under sequence or context parallelism). Whose tokens they are is not in the file, so two
traces can be compared only if the runs had the same data and layout. What the format does not say, and what is done:

- `layer` is an index from 0 into the decoder layers of the model chunk (forward hooks), an index from 0 of the MoE layers
  (the recorder that works with CUDA graphs), or, in traces without "block" (before 0.19), Megatron's layer_number. The
  model's config tells which; a rank that holds a part of the layers needs `layer_numbers`. Chunks of an interleaved pipeline
  all count from 0 and cannot be told apart: such ranks have no trace that can be read.
- A recompute is written as if it were a forward. Where it runs layer by layer it is noticed and refused; a recompute of all
  layers of a rank at once looks like one more forward.
- Hooks see the map of chosen experts, not the order in which they were chosen: columns are sorted by id.
- A router that dropped tokens writes no line. A forward in which all of them did is missing without a trace.
- MTP layers ("block": "mtp") are left out.

Source: Megatron-Core 0.19.2 and main, core.transformer.moe.router_trace; its tracer's own files were read in a test.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_router_replay.checks import shown
from megatron_router_replay.engines.model_info import ModelLike, ModelRoutingInfo, as_model_info
from megatron_router_replay.engines.options import DecodeOptions
from megatron_router_replay.engines.payload import Array, Source, as_array
from megatron_router_replay.engines.reply import is_count
from megatron_router_replay.engines.rows import RowLayout, SampleRows, build_trace
from megatron_router_replay.engines.tokens import SampleTokens
from megatron_router_replay.errors import PayloadError
from megatron_router_replay.trace import RoutingTrace

_ENGINE = "Megatron trace"
_FILE = re.compile(r"router_trace_rank([0-9]{1,9})\.jsonl")


class _Record(NamedTuple):
    """One line: the routes of one router in one forward."""

    step: int
    layer: int
    rank: int
    names_layer_number: bool
    indices: Array


def decode(
    result: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    *,
    model: ModelLike,
    rank: int | None = None,
    step: int | None = None,
    layer_numbers: Sequence[int] | None = None,
    allow_constant_layers: bool = False,
) -> RoutingTrace:
    """Return the routes that one rank's routers chose, a sample for each forward.

    Args:
        result: the folder that `--moe-routing-trace-path` named, one of its files, or the parsed lines of one.
        model: ModelRoutingInfo, or the Hugging Face config as a dict, object or path.
        rank: whose file to read, where the folder has several.
        step: the one training iteration (or inference step) to read; None: all.
        layer_numbers: Megatron's layer_number of each layer that this rank holds, in order; None: all of the model's.
        allow_constant_layers: believe a layer that sends all tokens of a forward to the same experts.

    Returns:
        [tokens of all forwards, layers, topk] with sequence_lengths and sample_ids ("step 3, forward 0"); every row has a
        route, token ids are unknown.

    Raises:
        PayloadError: the file is not such a trace, is cut, has forwards without some layers, or is not of this model.
    """
    info = as_model_info(model)
    lines, source = _lines(result, rank)
    records = [record for line in lines if (record := _record(line, info, source)) is not None]
    if len({record.rank for record in records}) > 1:
        raise source.error(
            f"MRR316: holds lines of the ranks {sorted({r.rank for r in records})[:8]}: decode each by itself."
        )
    if step is not None:
        records = [record for record in records if record.step == step]
    if not records:
        raise source.error("MRR316: holds no route of a decoder layer" + ("." if step is None else f" in step {step}."))
    layers = sorted({record.layer for record in records})
    numbers = _layer_numbers(layers, layer_numbers, info, source, names_layer_number=records[0].names_layer_number)
    samples = [
        SampleRows(
            source=Source(engine=_ENGINE, field="top_indices", sample=name),
            layout=RowLayout(parts=(rows,), columns=tuple(range(len(numbers))), last_row="route"),
            tokens=SampleTokens(num_tokens=len(rows), num_prompt_tokens=None, token_ids=None),
            options=DecodeOptions(allow_constant_layers=allow_constant_layers, sample_id=name),
        )
        for name, rows in _forwards(records, layers, source)
    ]
    return build_trace(samples, model=replace(info, moe_layer_numbers=numbers))


def _lines(result: Any, rank: int | None) -> tuple[Iterator[Any], Source]:
    if not isinstance(result, (str, os.PathLike)):
        source = Source(engine=_ENGINE, field="the lines")
        if not isinstance(result, Iterable):
            raise source.error(f"MRR310: are {type(result).__name__}, expected a folder, a file or a list of lines.")
        return iter(result), source
    path = Path(result)
    if path.is_dir():
        found = {int(match[1]): child for child in path.iterdir() if (match := _FILE.fullmatch(child.name))}
        if rank is None and len(found) == 1:
            rank = next(iter(found))
        if rank not in found:
            raise PayloadError(
                f"MRR316: {_ENGINE}: {path} has the ranks {sorted(found)[:16]}: pass rank=..., or the file of one of them."
                if found
                else f"MRR316: {_ENGINE}: {path} has no router_trace_rank<N>.jsonl."
            )
        path = found[rank]
    source = Source(engine=_ENGINE, field=str(path))
    return _parsed(path, source), source


def _parsed(path: Path, source: Source) -> Iterator[Any]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise source.error(
                        f"MRR310: line {number} is no JSON ({error}): was the run stopped while it wrote?"
                    ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise source.error(f"MRR501: cannot be read: {error}.") from error


def _record(line: Any, model: ModelRoutingInfo, source: Source) -> _Record | None:
    """Return the routes of a line, None for an MTP layer."""
    if not isinstance(line, Mapping) or "top_indices" not in line:
        raise source.error(f"MRR310: has the line {shown(line)}, which has no top_indices.")
    step, layer, rank, num_tokens, topk = (line.get(name) for name in ("step", "layer", "rank", "num_tokens", "topk"))
    if not (is_count(step) and is_count(layer) and is_count(rank) and is_count(num_tokens) and is_count(topk)):
        counts = ", ".join(map(shown, (step, layer, rank, num_tokens, topk)))
        raise source.error(
            f"MRR310: has a line with step, layer, rank, num_tokens, topk {counts}: expected integers of 0 or more."
        )
    block = line.get("block")
    if block is not None and not (isinstance(block, str) and block in ("decoder", "mtp")):
        raise source.error(f"MRR310: has a line of the block {shown(block)}, expected 'decoder' or 'mtp'.")
    if block == "mtp":
        return None
    where = f"step {step}, layer {layer}"
    indices = as_array(line["top_indices"], source=source)
    if num_tokens == 0:  # an empty list has one axis
        indices = np.zeros((0, topk), np.int32)
    if indices.shape != (num_tokens, topk):
        raise source.error(f"MRR310: {where} states {num_tokens} tokens of top-{topk} and has {list(indices.shape)}.")
    if topk != model.topk:
        raise source.error(f"MRR306: {where} is top-{topk}, the model's topk is {model.topk}.")
    return _Record(step=step, layer=layer, rank=rank, names_layer_number=block is None, indices=indices)


def _layer_numbers(
    layers: Sequence[int],
    given: Sequence[int] | None,
    model: ModelRoutingInfo,
    source: Source,
    *,
    names_layer_number: bool,
) -> tuple[int, ...]:
    """Return Megatron's layer_number of each `layer` of the file."""
    if given is not None:
        numbers = tuple(given)
        unknown = [number for number in numbers if number not in model.moe_layer_numbers]
        if len(numbers) != len(layers) or list(numbers) != sorted(set(numbers)) or unknown:
            raise source.error(
                f"MRR316: layer_numbers {list(numbers)} must name, increasing, the {len(layers)} layers of the file "
                f"(its layer {list(layers)}), each an MoE layer of the model: {list(model.moe_layer_numbers)}."
            )
        return numbers
    every = list(model.moe_layer_numbers)
    # A line without "block" (before 0.19) has Megatron's layer_number; later ones count from 0, over all layers or the MoE
    # layers alone: either way a file of all MoE layers has them in the model's order.
    expected = [every] if names_layer_number else [[number - 1 for number in every], list(range(len(every)))]
    if list(layers) not in expected:
        raise source.error(
            f"MRR316: has the layers {list(layers)}, expected {' or '.join(dict.fromkeys(map(str, expected)))} "
            f"for MoE layers {every}. A rank of a pipeline holds a part of them: name these (layer_numbers=..., --layers); "
            "chunks of an interleaved pipeline cannot be told apart."
        )
    return model.moe_layer_numbers


def _forwards(records: Sequence[_Record], layers: Sequence[int], source: Source) -> Iterator[tuple[str, Array]]:
    """Yield (name, [tokens, layers, topk]) of each run of lines over all layers."""
    runs: list[list[_Record]] = []
    for record in records:
        last = runs[-1][-1] if runs else None
        # Routers of one forward come in order, so a layer that is not behind the last one begins the next forward.
        if last is None or record.layer <= last.layer or record.step != last.step:
            runs.append([])
        runs[-1].append(record)
    count: Counter[int] = Counter()
    for run in runs:
        step, seen = run[0].step, [record.layer for record in run]
        if seen != list(layers):
            raise source.error(
                f"MRR316: step {step} has a forward over the layers {seen}, of {list(layers)}. Was it cut, or are "
                "these recomputes? Take the trace without activation recompute, and without CUDA graphs around routers."
            )
        if len({len(record.indices) for record in run}) > 1:
            raise source.error(
                f"MRR316: step {step} has a forward of {[len(r.indices) for r in run]} tokens in its layers."
            )
        yield f"step {step}, forward {count[step]}", np.stack([record.indices for record in run], axis=1)
        count[step] += 1
