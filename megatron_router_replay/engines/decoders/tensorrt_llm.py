"""TensorRT-LLM's LLM API with its pull request 18397 (merged): `CompletionOutput.routed_experts` [S - 1, Lm, topk].

Ids are logical, also under expert load balancing; rows of a cached prefix are those of the request that filled it. The last
chunk of a stream holds all tokens: decode that one. Its HTTP server was not seen to send routes: strings are refused, for
their encoding would be a guess.

Source: TensorRT-LLM's RFC 17778 and the merged pull request 18397, read; not run.
"""

from __future__ import annotations

from megatron_router_replay.engines.decoder import Decoder
from megatron_router_replay.engines.reader import ReplyReader
from megatron_router_replay.engines.registry import register
from megatron_router_replay.engines.rows import moe_layers

tensorrt_llm = register(
    Decoder(
        name="tensorrt_llm",
        title="TensorRT-LLM",
        read=ReplyReader(engine="TensorRT-LLM", abort="cancelled").read,
        rows=moe_layers,
        start="Use a release that can return routed experts, and ask for them with each request.",
        sends="`outputs[i].routed_experts` of the LLM API has MoE layers only.",
        versions="the LLM API with pull request 18397 (merged)",
        tested="written from it",
    )
)
"""TensorRT-LLM; see the module."""
