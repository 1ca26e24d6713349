"""What inference engines return -> RoutingTrace: one module per engine, none of which imports its engine.

Each module has `decode` for one sample and `decode_batch` for several, with the same options (`DecodeOptions`); its docstring
says which forms of result it reads. For example `vllm.decode(output, model="path/of/the/checkpoint")`, or
`sglang.decode_batch(response, model=info, token_ids=ids)`. `RoutingSegments` joins the turns of a conversation and resumed
generations. `megatron_trace.decode` reads the files of Megatron-Core's own routing trace.

How it reads: `front` is the one decode, `options` what a caller may say, `reply` and `responses` what a response holds,
`tokens` whose rows they are, `weights` who chose them, `payload` the wire formats, `assemble` and `checks` the rows.

Importing this package loads none of its modules: a session needs what a model is, and no decoder.
"""

from typing import TYPE_CHECKING

from megatron_router_replay.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_router_replay.engines import (
        array,
        megatron,
        megatron_trace,
        sglang,
        sglang_jax,
        tensorrt_llm,
        transformers,
        vllm,
    )
    from megatron_router_replay.engines.model_info import ModelRoutingInfo
    from megatron_router_replay.engines.options import DecodeOptions
    from megatron_router_replay.engines.segments import RoutingSegments

__all__ = [
    "DecodeOptions",
    "ModelRoutingInfo",
    "RoutingSegments",
    "array",
    "megatron",
    "megatron_trace",
    "sglang",
    "sglang_jax",
    "tensorrt_llm",
    "transformers",
    "vllm",
]

_CLASSES = {"DecodeOptions": "options", "ModelRoutingInfo": "model_info", "RoutingSegments": "segments"}
"""Class -> the module that has it; every other public name is a module."""

__getattr__, __dir__ = lazy_names(__name__, {name: _CLASSES.get(name, name) for name in __all__})
