"""The options of a decoder for one sample, the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import torch

from megatron_router_replay.checks import as_integer
from megatron_router_replay.engines.payload import Array
from megatron_router_replay.errors import PayloadError

TokenIds = Sequence[int] | torch.Tensor | Array
"""Token ids of a sample: [n] integers."""

WeightVersion = int | Mapping[str, int]
"""The caller's number for the weights that chose the routes, or its number for each of the engine's names."""

Missing = Literal["raise", "live"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOptions:
    """The options of `decode` for one sample.

    Args:
        token_ids: prompt and output, [S]. Compared with the ids and counts of the reply; needed where it has no ids.
        prompt_token_ids: the prompt alone, enough where the reply has the ids of its output.
        num_tokens: S, where the ids are not known at all; the trace then cannot prove that it fits its tokens.
        start: the token of the first row, as the request set it in `routed_experts_prompt_start` (vLLM) or
            `routed_experts_start_len` (SGLang). Compared with the start that the reply states, and not needed then.
        missing: the treatment of rows that are there without a route: -1, an expert twice, or one row over many tokens that
            differ. "raise", or "live": the
            live router decides these tokens, and the log counts them.
        weight_version: of the weights that chose the routes, stored with every token; a mapping gives the number of each
            version that the reply names. A reply that names integers is stamped without it.
        sample_id: stored in the trace.

    Raises:
        PayloadError: start or num_tokens is not an integer of 0 or more, or missing is another word.
    """

    token_ids: TokenIds | None = None
    prompt_token_ids: TokenIds | None = None
    num_tokens: int | None = None
    start: int = 0
    missing: Missing = "raise"
    weight_version: WeightVersion | None = None
    sample_id: str | None = None

    def __post_init__(self) -> None:
        for name in ("start",) if self.num_tokens is None else ("start", "num_tokens"):
            object.__setattr__(self, name, as_integer(name, getattr(self, name), least=0, error=PayloadError))
        if self.missing not in ("raise", "live"):
            raise PayloadError(f"MRR101: missing={self.missing!r} must be 'raise' or 'live'.")


class SharedOptions(TypedDict, total=False):
    """The fields of `DecodeOptions` that are the same for all samples of a batch."""

    missing: Missing
    weight_version: WeightVersion | None


class SampleOptions(SharedOptions, total=False):
    """The fields of `DecodeOptions`, as keywords of `decode`."""

    token_ids: TokenIds | None
    prompt_token_ids: TokenIds | None
    num_tokens: int | None
    start: int
    sample_id: str | None
