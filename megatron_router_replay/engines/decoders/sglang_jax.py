"""sglang-jax: as SGLang, but completions have routes with each choice, and dense layers are -1.

Source: sglang-jax at commit cddbf6f, and its captures (tests/unit/data/engine_captures).
"""

from __future__ import annotations

from dataclasses import replace

from megatron_router_replay.engines.decoders.sglang import raw_rows, sglang, with_generate

# Its endpoints count every token, so no count is fixed.
sglang_jax = replace(sglang, title="sglang-jax", rows=raw_rows, complete=with_generate)
"""sglang-jax; see the module."""
