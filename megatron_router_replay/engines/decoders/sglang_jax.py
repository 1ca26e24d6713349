"""sglang-jax: as SGLang, but completions have routes with each choice, and dense layers are -1.

Source: sglang-jax at commit cddbf6f, and its captures (tests/unit/data/engine_captures).
"""

from __future__ import annotations

from dataclasses import replace

from megatron_router_replay.engines.decoder import Decoder
from megatron_router_replay.engines.decoders.sglang import READER, START, raw_rows
from megatron_router_replay.engines.registry import register

sglang_jax = register(
    Decoder(
        name="sglang_jax",
        title="sglang-jax",
        read=replace(READER, engine="sglang-jax").read,
        rows=raw_rows,
        start=START,
        request="""\
POST /generate
{"text": "The capital of France is", "sampling_params": {"max_new_tokens": 16}, "return_routed_experts": true}""",
        sends="It replies as SGLang does. In completions, each choice has `routed_experts`.",
        versions="commit cddbf6f",
        tested="the same, run",
    )
)
"""sglang-jax; see the module."""
