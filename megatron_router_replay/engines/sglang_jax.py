"""sglang-jax's routed experts -> RoutingTrace.

- /generate: `meta_info["routed_experts"]` of each result; a stream has it in its last chunk.
- Completions: with each choice. Dense layers are -1.

Source: sglang-jax at commit cddbf6f, and its captures (tests/unit/data/engine_captures).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_router_replay.engines.assemble import Allocate
from megatron_router_replay.engines.model_info import ModelLike
from megatron_router_replay.engines.srt import Options, Runtime, decode_many, decode_one
from megatron_router_replay.trace import RoutingTrace

_RUNTIME = Runtime(name="sglang-jax", routes_per_choice=True)


def decode(
    result: Any,
    *,
    model: ModelLike,
    token_ids: Any = None,
    start: int = 0,
    prompt_token_ids: Any = None,
    num_tokens: int | None = None,
    allow_surplus_rows: bool = False,
    allow_constant_layers: bool = False,
    weight_version: int | None = None,
    sample_id: str | None = None,
    allocate: Allocate | None = None,
) -> RoutingTrace:
    """Return the routes of one sample: S rows for its S tokens, the last one (and those before `start`) without a route.

    Args:
        result: a response of /generate (or one of its results) or of completions parsed from
            JSON, the chunks of a stream, the base64 string itself, the raw int32 bytes, or an array [rows, layers, topk].
        model: ModelRoutingInfo, or the Hugging Face config as a dict or path.
        token_ids: prompt and output, [S]; its end is compared with the response's output ids. Without it the response's
            counts say how many tokens there are, and the trace carries no ids.
        start: rows that the server was asked to leave out.
        prompt_token_ids: the prompt alone, enough where the response has `output_ids`.
        num_tokens: S, where neither the caller nor the response has ids or counts.
        allow_surplus_rows: drop rows behind the last token.
        allow_constant_layers: believe a layer that sends all tokens to the same experts.
        weight_version, sample_id: stored in the trace.
        allocate: where the memory of topk_indices comes from, such as `transport.TraceMemory().take`; None: new memory.

    Returns:
        [S, MoE layers, topk] with sequence_lengths (S,) and token_ids where known.

    Raises:
        PayloadError: routes are missing, do not fit the tokens or the model, or are damaged.
    """
    options = Options(
        token_ids=token_ids,
        start=start,
        prompt_token_ids=prompt_token_ids,
        num_tokens=num_tokens,
        allow_surplus_rows=allow_surplus_rows,
        allow_constant_layers=allow_constant_layers,
        weight_version=weight_version,
        sample_id=sample_id,
    )
    return decode_one(result, _RUNTIME, model, options, allocate)


def decode_batch(
    result: Any,
    *,
    model: ModelLike,
    token_ids: Sequence[Any] | None = None,
    start: int | Sequence[int] = 0,
    prompt_token_ids: Sequence[Any] | None = None,
    num_tokens: Sequence[int] | None = None,
    sample_ids: Sequence[str] | None = None,
    allow_surplus_rows: bool = False,
    allow_constant_layers: bool = False,
    weight_version: int | None = None,
    allocate: Allocate | None = None,
) -> RoutingTrace:
    """Return the routes of all samples of a response (several prompts, n > 1), or of a list of results, in order.

    Args:
        result: as for `decode`, with several samples, or a list of such results.
        token_ids, prompt_token_ids, num_tokens, sample_ids: one per sample, in order.
        start: one for all, or one per sample.
        others: as for `decode`.

    Raises:
        PayloadError: as for `decode`; a list has another length than the samples.
    """
    return decode_many(
        result,
        _RUNTIME,
        model,
        token_ids=token_ids,
        start=start,
        prompt_token_ids=prompt_token_ids,
        num_tokens=num_tokens,
        sample_ids=sample_ids,
        allow_surplus_rows=allow_surplus_rows,
        allow_constant_layers=allow_constant_layers,
        weight_version=weight_version,
        allocate=allocate,
    )
