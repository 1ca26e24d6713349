"""What inference engines return -> RoutingTrace, without importing an engine.

Each of `vllm`, `sglang`, `sglang_jax`, `megatron`, `tensorrt_llm`, `lmdeploy`, `nemo_gym` and `transformers` is a
`Decoder`: it has `decode` for one sample and `decode_batch` for several, with the same options (`DecodeOptions`). For
example `vllm.decode(output, model="path/of/the/checkpoint")`, or `sglang.decode_batch(response, model=info, token_ids=ids)`.
`array` decodes any array with named axes. `RoutingSegments` joins the turns of a conversation and resumed generations,
`join_prefill_decode` what two servers have routed of one request.

How it reads: `servers` says where an engine has its fields and how its arrays are laid out, `reader` makes replies of
results, `tokens` says whose rows they are and which weights chose them, `payload` knows the wire formats, `rows` how many
rows are legal, `row_check` what a route is, and `decoder` calls them.

Importing this package loads none of its modules: a session needs what a model is, and no decoder.
"""

from typing import TYPE_CHECKING

from megatron_router_replay.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_router_replay.engines import array
    from megatron_router_replay.engines.forward_hooks import transformers
    from megatron_router_replay.engines.model_info import ModelRoutingInfo
    from megatron_router_replay.engines.options import DecodeOptions
    from megatron_router_replay.engines.segments import RoutingSegments, join_prefill_decode
    from megatron_router_replay.engines.servers import (
        lmdeploy,
        megatron,
        nemo_gym,
        sglang,
        sglang_jax,
        tensorrt_llm,
        vllm,
    )

__all__ = [
    "DecodeOptions",
    "ModelRoutingInfo",
    "RoutingSegments",
    "array",
    "join_prefill_decode",
    "lmdeploy",
    "megatron",
    "nemo_gym",
    "sglang",
    "sglang_jax",
    "tensorrt_llm",
    "transformers",
    "vllm",
]

_MODULES = {
    "DecodeOptions": "options",
    "ModelRoutingInfo": "model_info",
    "RoutingSegments": "segments",
    "array": "array",
    "join_prefill_decode": "segments",
    "transformers": "forward_hooks",
}
"""Name -> the module that has it, or that it is; every other public name is one of `servers`."""

__getattr__, __dir__ = lazy_names(__name__, {name: _MODULES.get(name, "servers") for name in __all__})
