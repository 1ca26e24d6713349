"""sglang-jax's routed experts -> RoutingTrace.

`decode` reads a response of /generate (or one of its results) or of completions parsed from JSON, the chunks of a
stream, the base64 string itself, the raw int32 bytes, or an array [rows, layers, topk]; `decode_batch` responses with
several samples, and lists of these.

- /generate: `meta_info["routed_experts"]` of each result; a stream has it in its last chunk.
- Completions: with each choice. Dense layers are -1.

Source: sglang-jax at commit cddbf6f, and its captures (tests/unit/data/engine_captures).
"""

from __future__ import annotations

from megatron_router_replay.engines.srt import Runtime

_DECODER = Runtime(name="sglang-jax", routes_per_choice=True).decoder()
decode = _DECODER.decode
decode_batch = _DECODER.decode_batch
