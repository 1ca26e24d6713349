"""LMDeploy's PyTorch engine with `enable_return_routed_experts`: a Response of the pipeline, uint16 [S - 1, L, topk].

A Response has the ids of its output and counts its prompt, so it needs `prompt_token_ids`. A dense layer's columns are memory
that nobody wrote, so they are not looked at. The HTTP server sends a reference into Ray's store, base64 of a pickle, which is
refused: fetch the array in the process that asked.

Source: LMDeploy pull requests 4090 and 4737, and its messages and model agent, read; not run.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_router_replay.engines.decoder import Decoder
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.options import DecodeOptions
from megatron_router_replay.engines.reader import ReplyReader
from megatron_router_replay.engines.registry import register
from megatron_router_replay.engines.reply import Reply
from megatron_router_replay.engines.rows import RowLayout, all_layers
from megatron_router_replay.engines.tokens import SampleTokens


def _rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    return replace(all_layers(reply, model, tokens, options), filler=())  # dense columns are memory that nobody wrote


lmdeploy = register(
    Decoder(
        name="lmdeploy",
        title="LMDeploy",
        read=ReplyReader(
            engine="LMDeploy", counts=(("input_token_len", "prompt"), ("generate_token_len", "output"))
        ).read,
        rows=_rows,
        start="Start the engine with enable_return_routed_experts=True and ask with return_routed_experts=True.",
        request="pipe(prompts, gen_config=GenerationConfig(return_routed_experts=True))",
        sends="`Response.routed_experts` of the pipeline is uint16 and has all layers. Pass `prompt_token_ids` to `decode`.",
        versions="the PyTorch engine with pull requests 4090 and 4737",
        tested="written from its source",
    )
)
"""LMDeploy; see the module."""
