"""SGLang's routed experts -> RoutingTrace, for servers started with `--enable-return-routed-experts`.

`decode` reads a response of /generate (or one of its results) or of an OpenAI endpoint parsed from JSON, the chunks of a
stream, the base64 string itself, the raw int32 bytes, or an array [rows, layers, topk]; `decode_batch` responses with several
samples, and lists of these.

- /generate: `meta_info["routed_experts"]` of each result; a stream has it in its last chunk.
- OpenAI endpoints: `sglext.routed_experts` of the response, of its first result only. A response with several
  choices is refused: the routes of the others are lost.
- Dense layers are zero, but for qwen3_moe, which ignores `mlp_only_layers` and sends ids there; they are dropped.

What no check can see: ids of the right number that are not the engine's, where the reply has none (OpenAI endpoints, a bare
string). /generate states the numbers of prompt and output tokens apart, so ids without BOS are seen there.

Source: SGLang 0.5.7 to 0.5.23, and captures of 0.5.23 (tests/unit/data/engine_captures).
"""

from __future__ import annotations

from megatron_router_replay.engines.srt import Runtime

_DECODER = Runtime(name="SGLang", routes_per_choice=False, ids_on_dense_layers=("qwen3_moe",)).decoder()
decode = _DECODER.decode
decode_batch = _DECODER.decode_batch
