"""NVIDIA Dynamo's chat endpoint over vLLM workers: `nvext.engine_data`, which a request asks for by name.

    "nvext": {"engine_data": {"prompt_token_ids": [...], "completion_token_ids": [...], "routed_experts": {...}}}

Routes are a dict of raw bytes with shape, dtype and start (`payload.parse_tensor`), or what vLLM sends: rows and layers are
vLLM's. The response has one choice: engine_data is of the first alone.

Source: dynamo, components/src/dynamo/vllm/handlers.py (pull requests 9651, 10529), and its clients; read, not run.
"""

from __future__ import annotations

from megatron_router_replay.engines.decoder import Decoder
from megatron_router_replay.engines.decoders.vllm import rows_of_vllm
from megatron_router_replay.engines.reader import FIELDS, ReplyReader
from megatron_router_replay.engines.registry import register

dynamo = register(
    Decoder(
        name="dynamo",
        title="Dynamo",
        read=ReplyReader(
            engine="Dynamo",
            fields=FIELDS | {"output_token_ids": ("completion_token_ids",)},
            inside=("nvext", "engine_data"),
            keep_all="Send one choice a request.",
        ).read,
        rows=rows_of_vllm,
        start="Start the vLLM workers with --enable-return-routed-experts and ask for them with "
        '"nvext": {"extra_fields": ["engine_data"]}.',
        request="""\
POST /v1/chat/completions
{"model": "MODEL", "messages": [...], "nvext": {"extra_fields": ["engine_data"]}}""",
        sends="`nvext.engine_data` has `routed_experts`, `prompt_token_ids` and `completion_token_ids` of the one choice.",
        versions="pull requests 9651 and 10529 (merged)",
        tested="written from its source",
    )
)
"""Dynamo; see the module."""
