"""vLLM's routed experts -> RoutingTrace, for vLLM 0.14 and later started with `--enable-return-routed-experts`.

What the versions send (S tokens, L hidden layers, Lm of them MoE, topk experts a token):

- 0.14 to 0.20: python objects only, `CompletionOutput.routed_experts` int32 [S - 1, L, topk].
- 0.21: `prompt_routed_experts` [P, Lm, topk] on the response and `routed_experts` [G - 1 or G, Lm, topk] on each choice,
  int16 or nested lists. Models with first_k_dense_replace have L columns, of which the first Lm are the MoE layers
  in order and the rest are zero.
- 0.22 and later: [S - 1 - start, L, topk], uint8 up to 256 experts, else uint16; over HTTP (completions, chat,
  /inference/v1/generate and its stream) base64 of a `.npy` file. Dense layers are zero.

Source: vLLM 0.14 to 0.32, and captures of 0.30.0 (tests/unit/data/engine_captures).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_router_replay.engines.assemble import Allocate, SampleRows, build_trace
from megatron_router_replay.engines.model_info import ModelLike, ModelRoutingInfo, as_model_info
from megatron_router_replay.engines.payload import Array, Source, as_rows, as_token_ids
from megatron_router_replay.engines.tokens import SampleTokens, as_count, get_field, resolve_tokens
from megatron_router_replay.errors import PayloadError
from megatron_router_replay.trace import RoutingTrace

_ENGINE = "vLLM"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """One generated sequence of a response, whatever form the response has."""

    label: str
    routed_experts: Any
    prompt_routed_experts: Any = None
    prompt_token_ids: Any = None
    token_ids: Any = None
    finish_reason: Any = None
    counted_prompt: int | None = None
    counted_output: int | None = None
    shares_prompt: bool = True
    """False: the response's prompt routes are not proven to be of this choice's prompt."""

    @property
    def source(self) -> Source:
        return Source(engine=_ENGINE, field="routed_experts", sample=self.label)


def decode(
    result: Any,
    *,
    model: ModelLike,
    token_ids: Any = None,
    start: int = 0,
    prompt_token_ids: Any = None,
    num_tokens: int | None = None,
    choice: int | None = None,
    version: str | None = None,
    allow_surplus_rows: bool = False,
    allow_constant_layers: bool = False,
    weight_version: int | None = None,
    sample_id: str | None = None,
    allocate: Allocate | None = None,
) -> RoutingTrace:
    """Return the routes of one sample: S rows for its S tokens, the last one (and those before `start`) without a route.

    Args:
        result: a RequestOutput or CompletionOutput, a response or choice parsed from JSON, the chunks of a generate
            stream, the base64 string, the `.npy` bytes, or the array [rows, layers, topk].
        model: ModelRoutingInfo, or the Hugging Face config as a dict or path.
        token_ids: prompt and output, [S]. Compared with the ids that `result` has, needed where it has none.
        start: the request's `routed_experts_prompt_start`.
        prompt_token_ids: the prompt alone, enough where `result` has the output's ids (generate endpoint).
        num_tokens: S, where the ids are not known at all; the trace then cannot prove that it fits its tokens.
        choice: the index of the choice to take of several.
        version: "0.21" for arrays of that version whose response is not at hand; later ones need none.
        allow_surplus_rows: drop rows behind the last token (speculative decoding with a stop string, 0.22 to 0.31).
        allow_constant_layers: believe a layer that sends all tokens to the same experts.
        weight_version, sample_id: stored in the trace.
        allocate: where the memory of topk_indices comes from, such as `transport.TraceMemory().take`; None: new memory.

    Returns:
        [S, MoE layers, topk] with sequence_lengths (S,) and token_ids where known.

    Raises:
        PayloadError: routes are missing, do not fit the tokens or the model, or are damaged.
    """
    info = as_model_info(model)
    choices = _choices(result, batch=False)
    if choice is not None:
        if isinstance(choice, bool) or not 0 <= choice < len(choices):
            raise PayloadError(f"{_ENGINE}: choice={choice!r} of a response with {len(choices)} choices.")
        choices = [choices[choice]]
    if len(choices) != 1:
        raise PayloadError(
            f"{_ENGINE}: the response holds {len(choices)} choices, decode reads one: pass choice=... or use decode_batch."
        )
    sample = _sample(
        choices[0],
        info,
        token_ids=token_ids,
        given_prompt=prompt_token_ids,
        num_tokens=num_tokens,
        start=start,
        split=_is_split(version),
        allow_surplus_rows=allow_surplus_rows,
    )
    sample = replace(
        sample, allow_constant_layers=allow_constant_layers, weight_version=weight_version, sample_id=sample_id
    )
    return build_trace([sample], model=info, allocate=allocate)


def decode_batch(
    result: Any,
    *,
    model: ModelLike,
    token_ids: Sequence[Any] | None = None,
    start: int | Sequence[int] = 0,
    prompt_token_ids: Any = None,
    num_tokens: Sequence[int] | None = None,
    version: str | None = None,
    allow_surplus_rows: bool = False,
    allow_constant_layers: bool = False,
    weight_version: int | None = None,
    sample_ids: Sequence[str] | None = None,
    allocate: Allocate | None = None,
) -> RoutingTrace:
    """Return the routes of all choices of a response, or of a list of responses, behind one another.

    Args:
        result: as for `decode`, or a list of these, as `LLM.generate` returns it.
        token_ids, num_tokens, sample_ids: one per choice, in the order of the choices.
        start: one for all, or one per choice.
        prompt_token_ids: the one prompt of all choices (n > 1 at the generate endpoint).
        others: as for `decode`.

    Returns:
        The samples in order, with sequence_lengths.

    Raises:
        PayloadError: as for `decode`; the lists have another length than the choices.
    """
    info = as_model_info(model)
    choices = _choices(result, batch=True)
    starts = [start] * len(choices) if isinstance(start, int) else list(start)
    for name, values in (
        ("token_ids", token_ids),
        ("start", starts),
        ("num_tokens", num_tokens),
        ("sample_ids", sample_ids),
    ):
        if values is not None and len(values) != len(choices):
            raise PayloadError(f"{_ENGINE}: {len(values)} {name} for {len(choices)} choices: give one a choice.")
    samples = [
        replace(
            _sample(
                item,
                info,
                token_ids=None if token_ids is None else token_ids[i],
                given_prompt=prompt_token_ids,
                num_tokens=None if num_tokens is None else num_tokens[i],
                start=starts[i],
                split=_is_split(version),
                allow_surplus_rows=allow_surplus_rows,
            ),
            allow_constant_layers=allow_constant_layers,
            weight_version=weight_version,
            sample_id=None if sample_ids is None else sample_ids[i],
        )
        for i, item in enumerate(choices)
    ]
    return build_trace(samples, model=info, allocate=allocate)


def _is_split(version: str | None) -> bool:
    return version is not None and version.split(".")[:2] == ["0", "21"]


def _sample(
    choice: _Choice,
    model: ModelRoutingInfo,
    *,
    token_ids: Any,
    given_prompt: Any,
    num_tokens: int | None,
    start: int,
    split: bool,
    allow_surplus_rows: bool,
) -> SampleRows:
    source = choice.source
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise source.error(f"start={start!r} must be an integer of 0 or more.")
    tokens = resolve_tokens(
        source=source,
        token_ids=token_ids,
        given_prompt=given_prompt,
        sent_prompt=choice.prompt_token_ids,
        sent_output=choice.token_ids,
        num_tokens=num_tokens,
        counted_prompt=choice.counted_prompt,
        counted_output=choice.counted_output,
    )
    nothing_generated = tokens.num_prompt_tokens == tokens.num_tokens
    aborted = choice.finish_reason == "abort" and nothing_generated
    if choice.prompt_routed_experts is not None:
        return _split_sample(choice, model, tokens, start=start, allow_surplus_rows=allow_surplus_rows)
    if choice.routed_experts is None and not aborted:
        raise source.error(
            "missing, though the model has MoE layers: it would train on live routes. Start vLLM with "
            "--enable-return-routed-experts; completions and chat streams never carry it (use stream=False or "
            "/inference/v1/generate), nor does HTTP before 0.21."
        )
    rows = _rows(choice.routed_experts, model, tokens, source, allow_surplus_rows)
    columns, filler = _compact_columns(rows, model, source) if split else (None, None)
    if not split and rows is not None and rows.ndim == 3 and rows.shape[0] and model.num_layers != rows.shape[1]:
        _refuse_compact(rows, model, source)
    return SampleRows(
        source=source,
        parts=() if rows is None else (rows,),
        num_tokens=tokens.num_tokens,
        num_prompt_tokens=tokens.num_prompt_tokens,
        token_ids=tokens.token_ids,
        start=start,
        last_token_routed=nothing_generated,
        layer_columns=columns,
        filler_columns=filler,
        allow_surplus_rows=allow_surplus_rows,
        may_be_empty=aborted,
    )


def _split_sample(
    choice: _Choice, model: ModelRoutingInfo, tokens: SampleTokens, *, start: int, allow_surplus_rows: bool
) -> SampleRows:
    """Join the prompt's and the generation's routes of vLLM 0.21."""
    source = replace(choice.source, field="prompt_routed_experts")
    if start:
        raise source.error(f"start={start}, but vLLM 0.21 always sends every row: decode with start=0.")
    if not choice.shares_prompt:
        raise source.error(
            "vLLM 0.21 sends the prompt's routes for the first prompt of a request only, and this choice is not proven "
            "to have that prompt. Send one prompt a request; return_token_ids=true lets choices prove theirs."
        )
    prompt = _rows(choice.prompt_routed_experts, model, tokens, source, allow_surplus_rows)
    assert prompt is not None
    if tokens.num_prompt_tokens is not None and prompt.shape[0] != tokens.num_prompt_tokens:
        raise source.error(f"has {prompt.shape[0]} rows for {tokens.num_prompt_tokens} prompt tokens.")
    generation = _rows(choice.routed_experts, model, tokens, choice.source, allow_surplus_rows)
    parts = tuple(part for part in (prompt, generation) if part is not None and part.shape[0])
    columns: tuple[tuple[int, int], ...] | None = None
    filler: tuple[int, ...] | None = None
    for part in parts:
        columns, filler = _compact_columns(part, model, source)
    if len({part.shape[1:] for part in parts}) > 1:
        raise source.error(f"prompt and generation differ in shape: {[list(part.shape) for part in parts]}.")
    return SampleRows(
        source=choice.source,
        parts=parts,
        num_tokens=tokens.num_tokens,
        num_prompt_tokens=prompt.shape[0],
        token_ids=tokens.token_ids,
        last_token_routed=tokens.num_prompt_tokens == tokens.num_tokens,
        layer_columns=columns,
        filler_columns=filler,
        allow_surplus_rows=allow_surplus_rows,
    )


def _rows(
    value: Any, model: ModelRoutingInfo, tokens: SampleTokens, source: Source, surplus_rows: bool
) -> Array | None:
    if value is None:
        return None
    return as_rows(
        value,
        source=source,
        num_rows=tokens.num_tokens,
        num_columns=model.num_layers,
        width=model.topk + model.num_shared_experts,
        surplus_rows=surplus_rows,
    )


def _compact_columns(
    rows: Array | None, model: ModelRoutingInfo, source: Source
) -> tuple[tuple[tuple[int, int], ...] | None, tuple[int, ...] | None]:
    """Return vLLM 0.21's columns: the MoE layers in order, and behind them zeros if there is a column for each layer."""
    numbers = model.moe_layer_numbers
    if rows is None or rows.ndim != 3 or rows.shape[0] == 0:
        return None, None
    if rows.shape[1] not in (len(numbers), model.num_layers):
        raise source.error(
            f"has {rows.shape[1]} layers, vLLM 0.21 sends the {len(numbers)} MoE layers or, padded, all {model.num_layers}."
        )
    pairs = tuple((number, i) for i, number in enumerate(numbers))
    return pairs, tuple(range(len(numbers), rows.shape[1]))


def _refuse_compact(rows: Array, model: ModelRoutingInfo, source: Source) -> None:
    if rows.shape[1] == len(model.moe_layer_numbers):
        raise source.error(
            f"has {rows.shape[1]} layers, as many as the model has MoE layers, not all {model.num_layers}: vLLM 0.21 "
            'sends these. Pass version="0.21" if it did.'
        )


def _choices(result: Any, *, batch: bool) -> list[_Choice]:
    if isinstance(result, (list, tuple)) and result:
        if all(isinstance(item, Mapping) and "choices" in item for item in result) and _is_stream(result):
            return _merge_stream(result)
        records = all(isinstance(item, Mapping) or _is_record(item) for item in result)
        if records or batch:
            found = [choice for item in result for choice in _choices(item, batch=False)]
            return [replace(choice, label=f"sample {i}, {choice.label}") for i, choice in enumerate(found)]
    if isinstance(result, Mapping) and "choices" in result:
        return _of_response(result, result["choices"])
    if get_field(result, "outputs") is not None and not isinstance(result, Mapping):
        return _of_response(result, result.outputs)
    if isinstance(result, Mapping) or _is_record(result):
        return [_of_choice(result, None, 0, alone=True)]
    if result is None:
        return [_Choice(label="the result", routed_experts=None)]
    return [_Choice(label="the array", routed_experts=result)]


def _is_record(item: Any) -> bool:
    return hasattr(item, "outputs") or hasattr(item, "routed_experts")


def _of_response(response: Any, items: Any) -> list[_Choice]:
    if not isinstance(items, (list, tuple)):
        raise PayloadError(f"{_ENGINE}: the choices of the response are {type(items).__name__}, expected a list.")
    if not items:
        raise PayloadError(f"{_ENGINE}: the response holds no choice.")
    return _prove_prompts([_of_choice(item, response, i, alone=len(items) == 1) for i, item in enumerate(items)])


def _of_choice(item: Any, response: Any, position: int, *, alone: bool) -> _Choice:
    index = get_field(item, "index")
    usage = get_field(response, "usage") if alone else None
    request = get_field(response, "request_id") or get_field(response, "id")
    return _Choice(
        label=f"choice {position if index is None else index}" + (f" of {str(request)[:60]}" if request else ""),
        routed_experts=get_field(item, "routed_experts"),
        prompt_routed_experts=_first(
            get_field(item, "prompt_routed_experts"), get_field(response, "prompt_routed_experts")
        ),
        prompt_token_ids=_first(get_field(item, "prompt_token_ids"), get_field(response, "prompt_token_ids")),
        token_ids=get_field(item, "token_ids"),
        finish_reason=get_field(item, "finish_reason"),
        counted_prompt=as_count(get_field(usage, "prompt_tokens")),
        counted_output=as_count(get_field(usage, "completion_tokens")),
    )


def _prove_prompts(choices: list[_Choice]) -> list[_Choice]:
    """Mark the choices whose prompt is that of the first one; only there do vLLM 0.21's prompt routes belong."""
    if len(choices) == 1 or all(choice.prompt_routed_experts is None for choice in choices):
        return choices
    if any(choice.prompt_token_ids is None for choice in choices):
        # n samples of one prompt look like one sample of n prompts.
        return [replace(choice, shares_prompt=False) for choice in choices]
    prompts = [as_token_ids(choice.prompt_token_ids, source=choice.source) for choice in choices]
    return [
        replace(choice, shares_prompt=np.array_equal(prompt, prompts[0])) for choice, prompt in zip(choices, prompts)
    ]


def _is_stream(chunks: Sequence[Mapping[str, Any]]) -> bool:
    names = {str(chunk.get("request_id") or chunk.get("id")) for chunk in chunks}
    return len(names) == 1 and (len(chunks) > 1 or "usage" in chunks[0])


def _merge_stream(chunks: Sequence[Mapping[str, Any]]) -> list[_Choice]:
    """Join the chunks of one stream: ids follow one another, routes come once, in a choice's last chunk."""
    merged: dict[Any, _Choice] = {}
    ids: dict[Any, list[Any]] = {}
    for chunk in chunks:
        items = chunk["choices"]
        if not isinstance(items, (list, tuple)):
            raise PayloadError(f"{_ENGINE}: the choices of a chunk are {type(items).__name__}, expected a list.")
        for position, item in enumerate(items):
            new = _of_choice(item, chunk, position, alone=False)
            key = str(new.label)
            old = merged.setdefault(key, new)
            if old is not new and old.routed_experts is not None and new.routed_experts is not None:
                raise old.source.error("two chunks of the stream carry routes, expected only the last one.")
            sent = new.token_ids if isinstance(new.token_ids, (list, tuple)) else ()
            ids.setdefault(key, []).extend(sent)
            merged[key] = replace(
                new,
                routed_experts=_first(new.routed_experts, old.routed_experts),
                prompt_token_ids=_first(old.prompt_token_ids, new.prompt_token_ids),
                finish_reason=_first(new.finish_reason, old.finish_reason),
            )
    if not merged:
        raise PayloadError(f"{_ENGINE}: the stream holds no choice.")
    return [replace(choice, token_ids=ids[key]) for key, choice in merged.items()]


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
