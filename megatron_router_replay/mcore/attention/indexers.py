"""The layers of a model that attend sparsely: which a session can hold, and those that it holds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_router_replay.errors import UnsupportedRouterError, listed
from megatron_router_replay.mcore.attention.sparse import DSA, TOPK, AttentionSource, install_hooks
from megatron_router_replay.mcore.core import hooks, tape
from megatron_router_replay.mcore.model.find import Walk
from megatron_router_replay.mcore.model.upstream import captured_by_cuda_graphs, megatron_version


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundIndexer:
    """The sparse attention of a layer, which has an indexer or shares an earlier layer's choice.

    Args:
        chunk: index of its model chunk.
        name: its module path in the chunk.
        attention: the module, a DSAttention; or an indexer of an attention that is not known.
        is_mtp: it belongs to a multi-token-prediction layer.
        reason: why its choice cannot be frozen; empty: it can.
    """

    chunk: int
    name: str
    attention: Any
    is_mtp: bool
    reason: str

    def __str__(self) -> str:
        return f"{tape.layer_of(self.attention)} ({self.name})"

    def verdict(self) -> str:
        """Return in words what freeze_recompute does with it."""
        return f"refused by freeze_recompute: {self.reason}" if self.reason else "frozen by freeze_recompute"


def find_indexers(walks: Sequence[Walk]) -> list[FoundIndexer]:
    """Return every sparse attention of a model, in order, and every indexer that belongs to none of them.

    Args:
        walks: the modules of each chunk.
    """
    dsa = sys.modules.get(DSA)
    found, known = [], set()
    for index, walked in enumerate(walks):
        for name, module, mtp_layer in walked:
            if dsa is not None and isinstance(module, dsa.DSAttention):
                known.add(getattr(module, "indexer", None))
                reason = _refusal(module, dsa)
            elif type(module).__name__.endswith("Indexer") and module not in known:
                reason = f"{type(module).__name__} is an indexer of an attention that nobody here has read"
            else:
                continue
            found.append(
                FoundIndexer(chunk=index, name=name, attention=module, is_mtp=mtp_layer is not None, reason=reason)
            )
    return found


def check_indexers(found: Sequence[FoundIndexer]) -> None:
    """Raise unless the choice of every indexer can be frozen.

    Raises:
        UnsupportedRouterError: names the layers, and the config field behind it.
    """
    refused: dict[str, list[str]] = {}
    for each in found:
        if each.reason:
            refused.setdefault(each.reason, []).append(str(each))
    if refused:
        lines = "\n  ".join(f"{listed(where)}: {reason}" for reason, where in refused.items())
        raise UnsupportedRouterError(
            f"MRR401: cannot freeze what indexers of sparse attention choose:\n  {lines}\nfreeze_recompute(..., "
            "indexers=False) leaves them live, so recomputes may attend to other positions than their forward."
        )


class HeldIndexers:
    """The sparse attentions of a frozen model.

    Args:
        walks: the modules of each chunk.
        holder: what the freeze leaves with the hook.

    Raises:
        UnsupportedRouterError: what an indexer chooses cannot be frozen; names the layers, and the config field behind it.
    """

    def __init__(self, walks: Sequence[Walk], holder: AttentionSource) -> None:
        self.holder = holder
        self.found = find_indexers(walks)
        check_indexers(self.found)

    def hold(self) -> None:
        """Let recomputes ask their tapes."""
        if self.found:
            install_hooks()
        for found in self.found:
            hooks.register(found.attention, self.holder)

    def release(self) -> None:
        """Leave them live."""
        for found in self.found:
            hooks.unregister(found.attention, self.holder)

    def exchanged(self, walks: Sequence[Walk]) -> list[str]:
        """Return which attentions the session did not reach: they were built into the model, or changed, meanwhile.

        Args:
            walks: the modules of each chunk now.
        """
        attentions = {found.attention for found in self.found}
        built = [found for found in find_indexers(walks) if attentions and found.attention not in attentions]
        replaced = [found for found in self.found if "forward" in vars(found.attention)]
        asks_nobody = [found for found in self.found if not hasattr(type(found.attention).forward, "is_hook")]
        return [
            *(
                f"{found}: the attention was exchanged during the session, which did not reach the new one"
                for found in built
            ),
            *(f"{found}: forward was replaced on the attention during the session" for found in replaced),
            *(
                f"{found}: the attention got the class {type(found.attention).__name__}, which asks nobody"
                for found in asks_nobody
            ),
        ]


def _refusal(attention: Any, dsa: Any) -> str:
    """Return why what a DSAttention chooses cannot be frozen; empty if it can."""
    if not hasattr(dsa, TOPK):
        return f"Megatron-Core {megatron_version()} has no dsa.{TOPK}, where indexers are told: use 0.17 or later"
    if "forward" in vars(attention) or type(attention).forward is not dsa.DSAttention.forward:
        return "DSAttention.forward is replaced or overridden, and nothing is known of how it chooses"
    kernels = getattr(dsa, "dsa_kernels", None)
    if kernels is not None and kernels.use_fused_dsa_kernels(attention.config):
        return (
            f"dsa_kernel_backend={attention.config.dsa_kernel_backend!r} chooses positions in fused kernels, which ask "
            "nobody; set dsa_kernel_backend='none'"
        )
    captured = captured_by_cuda_graphs(attention.config, {"full", "full_iteration", "attn"})
    return f"a CUDA graph captures the attention ({listed(captured)}) and repeats its positions" if captured else ""
