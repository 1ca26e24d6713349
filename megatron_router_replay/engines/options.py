"""What the caller of a decoder says of one sample; the same for every engine."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_router_replay.engines.payload import Array, short_repr
from megatron_router_replay.errors import PayloadError

TokenIds = Sequence[int] | torch.Tensor | Array
"""Token ids of one sample: [n] integers."""

WeightVersion = int | Mapping[str, int]
"""The caller's number for the weights that chose the routes, or its number for each of the engine's names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOptions:
    """The options of `decode` for one sample.

    Args:
        token_ids: prompt and output, [S]. Compared with the ids and counts that the reply has, needed where it has none.
        prompt_token_ids: the prompt alone, enough where the reply has the ids of its output.
        num_tokens: S, where the ids are not known at all; the trace then cannot prove that it fits its tokens.
        start: the token that the first row belongs to: what the request said in `routed_experts_prompt_start` (vLLM) or
            `routed_experts_start_len` (SGLang).
        version: the engine's release, for the payloads that do not say it ("0.21" for arrays of that vLLM).
        allow_surplus_rows: drop rows behind the last token (speculative decoding that ran past a stop: vLLM 0.22 to
            0.31, SGLang up to 0.5.12) instead of refusing them. A lost token can then no longer be told.
        allow_constant_layers: believe a layer that sends all tokens to the same experts.
        weight_version: of the weights that chose the routes, stored with every token; a mapping gives the number of each
            version that the reply names. A reply that names integers is stamped without it.
        sample_id: stored in the trace.

    Raises:
        PayloadError: start or num_tokens is not an integer of 0 or more.
    """

    token_ids: TokenIds | None = None
    prompt_token_ids: TokenIds | None = None
    num_tokens: int | None = None
    start: int = 0
    version: str | None = None
    allow_surplus_rows: bool = False
    allow_constant_layers: bool = False
    weight_version: WeightVersion | None = None
    sample_id: str | None = None

    def __post_init__(self) -> None:
        for name in ("start", "num_tokens"):
            value: Any = getattr(self, name)
            if value is None and name == "num_tokens":
                continue
            try:
                number = -1 if isinstance(value, bool) else operator.index(value)
            except TypeError:
                number = -1
            if number < 0:
                raise PayloadError(f"{name}={short_repr(value)} must be an integer of 0 or more.")
            object.__setattr__(self, name, number)
