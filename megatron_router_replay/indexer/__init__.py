"""Which positions the indexers of sparse attention chose: a value, its code in memory, an engine's replies, a comparison.

In DeepSeek-V3.2 and GLM-5 a token makes a second discrete choice beside that of experts: in each layer an indexer picks the
`index_topk` positions of its sample that it attends to. `PositionTrace` holds these choices as `RoutingTrace` holds routes.

Importing this package loads none of its modules: a session without indexers needs none.
"""

from typing import TYPE_CHECKING

from megatron_router_replay.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_router_replay.indexer.compare import PositionDiff, compare_positions
    from megatron_router_replay.indexer.files import load_positions, save_positions
    from megatron_router_replay.indexer.positions import PositionTrace
    from megatron_router_replay.indexer.sglang import decode_indexer_topk

__all__ = [
    "PositionDiff",
    "PositionTrace",
    "compare_positions",
    "decode_indexer_topk",
    "load_positions",
    "save_positions",
]

_MODULES = {
    "PositionDiff": "compare",
    "PositionTrace": "positions",
    "compare_positions": "compare",
    "decode_indexer_topk": "sglang",
    "load_positions": "files",
    "save_positions": "files",
}

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
