"""sglang-jax: as SGLang, but completions have routes with each choice, and dense layers are -1.

Source: sglang-jax at commit cddbf6f, and its captures (tests/unit/data/engine_captures).
"""

from __future__ import annotations

from dataclasses import replace

from megatron_router_replay.engines.decoder import Decoder
from megatron_router_replay.engines.decoders.sglang import READER, START, raw_rows

sglang_jax = Decoder(title="sglang-jax", reader=replace(READER, engine="sglang-jax"), rows=raw_rows, start=START)
"""sglang-jax; see the module."""
