"""Files of every kind that holds routes -> RoutingTrace, by content and ending. Nothing is unpickled."""

from __future__ import annotations

from pathlib import Path

from megatron_router_replay import engines
from megatron_router_replay.cli.json_files import load_payload, load_token_ids
from megatron_router_replay.diagnostics.source import open_source
from megatron_router_replay.engines.registry import registered
from megatron_router_replay.errors import StoreError
from megatron_router_replay.store import load_trace
from megatron_router_replay.trace import RoutingTrace


def engine_names() -> list[str]:
    """Return whose payload a file may hold."""
    return [decoder.name for decoder in registered() if decoder.reads_files]


def read_any(
    path: Path,
    *,
    engine: str = "",
    model: Path | None = None,
    key: str = "",
    token_ids: Path | None = None,
    step: int | None = None,
) -> RoutingTrace:
    """Return the trace in a file or folder.

    Args:
        engine, model: whose payload it is, and the model's config.json or its folder; not given: it holds a trace.
        key: dotted path of the payload in a JSON file.
        token_ids: JSON file with one list of ids a sample.
        step: of a folder with several.

    Raises:
        StoreError: the file cannot be read, holds a payload whose engine and model were not given, or a trace although they
            were.
        PayloadError: the payload does not fit the model.
    """
    if not path.exists():
        raise StoreError(f"MRR902: cannot read {path}: there is no such file or folder.")
    if engine and engine not in engine_names():
        raise StoreError(f"MRR901: --engine {engine} is none of {', '.join(engine_names())}.")
    if path.suffix == ".json" and path.is_file():
        return _from_payload(path, engine, model, key, token_ids)
    given = {"--engine": engine, "--model": model, "--key": key, "--token-ids": token_ids}
    # It would be read as the trace that it is, whatever the options say.
    if unused := [name for name, value in given.items() if value]:
        raise StoreError(
            f"MRR901: {path} is read as a trace, which holds its model and tokens itself: leave {', '.join(unused)} "
            "out. They are for an engine's payload, in a .json file."
        )
    if path.is_file():
        return load_trace(path)
    source = open_source(path, step=step)
    whole = source.read(0, source.num_tokens)
    # A block of rows has no samples; these are all rows.
    return whole._with(sequence_lengths=source.sequence_lengths, sample_ids=source.sample_ids)


def _from_payload(path: Path, engine: str, model: Path | None, key: str, token_ids: Path | None) -> RoutingTrace:
    content = load_payload(path, key)
    if not engine or model is None:
        raise StoreError(
            f"MRR901: {path} is no trace, so it may be an engine's payload: give --engine and --model (the model's "
            "config.json)."
        )
    ids = None if token_ids is None else load_token_ids(token_ids)
    decoded: RoutingTrace = getattr(engines, engine).decode_batch(content, model=model, token_ids=ids)
    return decoded
