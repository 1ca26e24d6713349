"""What inference engines return -> RoutingTrace, without importing an engine.

Each file in `decoders/` is an engine, `mrr.engines.vllm` or `mrr.engines.sglang`. It has `decode` for one sample and
`decode_batch` for several, with the same options (`DecodeOptions`), as in `vllm.decode(output, model="the/checkpoint")` or
`sglang.decode_batch(response, model=info, token_ids=ids)`. `register` adds an engine of your own. `array` decodes any array
with named axes. `RoutingSegments` joins the turns of a conversation and resumed generations, `join_prefill_decode` what two
servers have routed of one request.

How it reads: a file in `decoders/` says where an engine has its fields and how its arrays are laid out, `reader` makes
replies of results, `tokens` says whose rows they are and which weights chose them, `payload` knows the wire formats, `rows`
how many rows are legal, `row_check` what a route is, and `decoder` calls them.

Importing this package loads no decoder: a session needs what a model is, and nothing else from here.
"""

from typing import TYPE_CHECKING

from megatron_router_replay.engines.registry import FILES, find
from megatron_router_replay.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_router_replay.engines import array
    from megatron_router_replay.engines.decoder import Decoder
    from megatron_router_replay.engines.model_info import ModelRoutingInfo
    from megatron_router_replay.engines.options import DecodeOptions
    from megatron_router_replay.engines.registry import register
    from megatron_router_replay.engines.segments import RoutingSegments, join_prefill_decode

__all__ = [
    "DecodeOptions",
    "Decoder",
    "ModelRoutingInfo",
    "RoutingSegments",
    "array",
    "join_prefill_decode",
    "register",
]

_load, _names = lazy_names(
    __name__,
    {
        "DecodeOptions": "options",
        "Decoder": "decoder",
        "ModelRoutingInfo": "model_info",
        "RoutingSegments": "segments",
        "array": "array",
        "join_prefill_decode": "segments",
        "register": "registry",
    },
)


def __getattr__(name: str) -> "Decoder":
    """Return the engine of a name, or load another public name."""
    decoder = None if name.startswith("_") else find(name)
    loaded: Decoder = _load(name) if decoder is None else decoder
    return loaded


def __dir__() -> list[str]:
    return sorted([*_names(), *FILES])
