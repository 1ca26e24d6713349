"""A finished request's routes -> the shapes that inference engines publish, or a RoutingTrace.

S tokens are prompt and output; row i is the routing of token i. The last sampled token was never forwarded, so S - 1 tokens
have rows (all S where nothing was generated). Rows that were not captured, because the prefix cache had these tokens,
are -1 in what is published (our decoders refuse them by name) and without a route in the trace.
"""

from __future__ import annotations

import base64
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_router_replay.capture.errors import CaptureError
from megatron_router_replay.capture.requests import PromptRoutes, as_int16
from megatron_router_replay.trace import RoutingTrace


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CapturedRoutes:
    """The routes of one finished request.

    Args:
        request_id: the engine's.
        num_tokens: S, prompt and output.
        token_ids: [S] int32, or None where the engine did not say.
        layer_numbers: Megatron's layer_number (from 1) of each MoE layer.
        num_layers: all layers, dense ones included.
        num_experts: experts in each MoE layer.
        prompt: shared by all completions of it.
        generation: [max(S - 1 - num_prompt_tokens, 0), MoE layers, topk], uint8 or int16.
    """

    request_id: Hashable
    num_tokens: int
    token_ids: NDArray[np.int32] | None
    layer_numbers: tuple[int, ...]
    num_layers: int
    num_experts: int
    prompt: PromptRoutes = field(repr=False)
    generation: NDArray[Any] = field(repr=False)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt.rows)

    @property
    def num_missing(self) -> int:
        """Prompt tokens that the prefix cache had, without a route."""
        return int((~self.prompt.written).sum())

    def split(self) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
        """Return (prompt_routed_experts, routed_experts) as vLLM 0.21 sends them, MoE layers only.

        Returns:
            [num_prompt_tokens, MoE layers, topk] int16, the same array for every completion of a prompt, and
            [generated tokens - 1, MoE layers, topk] int16. Both read-only; -1 where nothing was captured.
        """
        return self.prompt.as_int16(), as_int16(self.generation, np.ones(len(self.generation), np.bool_))

    def base64_int32(self, *, start: int = 0) -> str:
        """Return `meta_info["routed_experts"]` as SGLang sends it: base64 of int32 [S - 1 - start, num_layers, topk].

        Args:
            start: leave out the first rows, as `routed_experts_start_len` does; those of a prefix cache, say.

        Raises:
            CaptureError: not 0 <= start <= S - 1.
        """
        num_rows = max(self.num_tokens - 1, 0)
        if not 0 <= start <= num_rows:
            raise CaptureError(f"cannot leave out the first start={start} of {num_rows} rows.")
        prompt, generation = self.split()
        routes = np.concatenate([prompt, generation])[start:num_rows]
        rows = np.zeros((num_rows - start, self.num_layers, prompt.shape[2]), "<i4")
        rows[:, [number - 1 for number in self.layer_numbers]] = routes
        return base64.b64encode(rows.tobytes()).decode("ascii")

    def trace(self, *, weight_version: int | None = None, sample_id: str | None = None) -> RoutingTrace:
        """Return the S tokens of this request as one sample; the last sampled token has no route."""
        prompt, generation = self.split()
        rows = np.full((self.num_tokens, *prompt.shape[1:]), -1, np.int16)
        rows[: len(prompt)] = prompt
        rows[len(prompt) : len(prompt) + len(generation)] = generation
        return RoutingTrace(
            topk_indices=rows,
            layer_numbers=self.layer_numbers,
            num_experts=self.num_experts,
            token_ids=self.token_ids,
            sequence_lengths=(self.num_tokens,),
            sample_ids=None if sample_id is None else (sample_id,),
            weight_version=weight_version,
        )


def vllm_response(completions: Sequence[CapturedRoutes]) -> dict[str, Any]:
    """Return the completions of one prompt as vLLM 0.21 sends them: the prompt's routes once, the generation's per choice.

    Raises:
        CaptureError: none, without token ids, or the completions do not share their prompt's routes.
    """
    if not completions or any(completion.token_ids is None for completion in completions):
        raise CaptureError("a response needs at least one completion, and token_ids in finish() of each.")
    first = completions[0]
    if any(completion.prompt is not first.prompt for completion in completions):
        raise CaptureError(
            "a response of vLLM 0.21 has one prompt's routes, these completions have several: pass prompt_of=... to "
            "add_request for all but the first completion of a prompt."
        )
    choices = []
    for index, completion in enumerate(completions):
        assert completion.token_ids is not None
        choices.append(
            {
                "index": index,
                "token_ids": completion.token_ids[completion.num_prompt_tokens :].tolist(),
                "routed_experts": completion.split()[1],
            }
        )
    assert first.token_ids is not None
    return {
        "prompt_token_ids": first.token_ids[: first.num_prompt_tokens].tolist(),
        "prompt_routed_experts": first.split()[0],
        "choices": choices,
    }
