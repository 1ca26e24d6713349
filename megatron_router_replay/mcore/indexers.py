"""Recomputes of sparse attention take the positions that their forward chose, from the tape.

In DeepSeek-V3.2 and GLM-5 an indexer chooses which positions a token attends to, a second choice beside that of experts. A
forward writes it on every tape that is being written; a recompute takes it and skips the scoring, which is quadratic.

    DSAttention.forward                        which call this is, by the four lines of `seam`; one that never asks raises
    dsa.fused_qk_topk_naive                    asks: a forward scores and chooses, a recompute is told
    dsa.fwd_fused_indexer_loss_naive           the indexer's loss takes live scores: there a recompute scores too
    DSAttention._get_index_share_topk_holder   a layer without an indexer reads here what an earlier layer chose

The seams are put in when a model with such layers is frozen, and never before: importing this module does not load `dsa`.

Source: Megatron-Core 0.17.1 to 0.19.2, transformer/experimental_attention_variant/dsa.py.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from megatron_router_replay.errors import ReplayStateError, UnsupportedRouterError, listed
from megatron_router_replay.mcore import seam, tape
from megatron_router_replay.mcore.compat import captured_by_cuda_graphs, megatron_version
from megatron_router_replay.mcore.find import as_chunks, unwrap
from megatron_router_replay.mcore.tape import Entry

_DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
_CHOOSE, _LOSS = "fused_qk_topk_naive", "fwd_fused_indexer_loss_naive"
_HOLDER = "_get_index_share_topk_holder"
_NONE = 0xFFFF
"""What stands for -1, no position, in 16 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundIndexer:
    """The sparse attention of a layer, which has an indexer or shares an earlier layer's choice.

    Args:
        chunk: index of its model chunk.
        name: its module path in the chunk.
        attention: the module, a DSAttention; or an indexer of an attention that is not known.
        reason: why its choice cannot be frozen; empty: it can.
    """

    chunk: int
    name: str
    attention: Any
    reason: str

    def __str__(self) -> str:
        return f"{tape.layer_of(self.attention)} ({self.name})"

    def verdict(self) -> str:
        """Return in words what freeze_recompute does with it."""
        return f"refused by freeze_recompute: {self.reason}" if self.reason else "frozen by freeze_recompute"


def find_indexers(model_chunks: nn.Module | Sequence[nn.Module]) -> list[FoundIndexer]:
    """Return every sparse attention of a model, in order, and every indexer that belongs to none of them."""
    dsa = sys.modules.get(_DSA)
    found, known = [], set()
    for index, chunk in enumerate(as_chunks(model_chunks)):
        for name, module in unwrap(chunk).named_modules():
            if dsa is not None and isinstance(module, dsa.DSAttention):
                known.add(getattr(module, "indexer", None))
                found.append(FoundIndexer(chunk=index, name=name, attention=module, reason=_refusal(module, dsa)))
            elif type(module).__name__.endswith("Indexer") and module not in known:
                reason = f"{type(module).__name__} is an indexer of an attention that nobody here has read"
                found.append(FoundIndexer(chunk=index, name=name, attention=module, reason=reason))
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


def _refusal(attention: Any, dsa: Any) -> str:
    """Return why what a DSAttention chooses cannot be frozen; empty if it can."""
    if not hasattr(dsa, _CHOOSE):
        return f"Megatron-Core {megatron_version()} has no dsa.{_CHOOSE}, where indexers are told: use 0.17 or later"
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


# ---- what a tape keeps
def encode_positions(positions: Tensor, num_keys: int) -> Tensor:
    """Return positions in as few bytes as hold them.

    Args:
        positions: [b, sq, k] integers below num_keys, -1 where there is none.

    Returns:
        [b, sq, k] uint16 if all positions fit beside a mark for -1, else int32.
    """
    if num_keys > _NONE:
        return positions.to(torch.int32)
    return positions.bitwise_and(_NONE).to(torch.uint16)


def decode_positions(kept: Tensor) -> Tensor:
    """Return what was encoded, int64."""
    positions = kept.to(torch.int64)
    return positions.masked_fill_(positions == _NONE, -1) if kept.dtype == torch.uint16 else positions


class Choice:
    """One call of one sparse attention; it asks for its positions exactly once.

    Args:
        attention: the DSAttention.
        again: the entry that this call repeats; None: it is a forward.
        is_written: a tape is being written.

    Attributes:
        is_asked: Megatron-Core has asked.
        needs_scores: the indexer's loss is computed from the live scores.
        kept: the positions as a tape keeps them.
    """

    __slots__ = ("again", "attention", "is_asked", "is_written", "kept", "needs_scores")

    def __init__(self, attention: Any, again: Entry | None, is_written: bool) -> None:
        self.attention, self.again, self.is_written = attention, again, is_written
        self.is_asked = self.needs_scores = False
        self.kept: Any = None if again is None else again.topk_indices

    def positions(self, score: Callable[[], tuple[Tensor, Tensor]], shape: tuple[int, int], num_keys: int) -> Any:
        """Return (scores, positions [b, sq, k] int64); a recompute without a loss has no scores.

        Args:
            score: Megatron-Core's own scoring and choice.
            shape: (b, sq) of the queries.
        """
        self._ask()
        scores = None
        # A forward scores and a recompute recalls: what differs between the two is hidden from a selective checkpoint.
        with tape.unpaired():
            if self.again is None or self.needs_scores:
                scores, positions = score()
            if self.again is not None:
                self._check_shape(shape)
                positions = decode_positions(self.kept)
            elif self.is_written or getattr(self.attention, "index_share", False):
                self.kept = encode_positions(positions, num_keys)
                positions.router_replay_kept = self.kept  # type: ignore[attr-defined]  # for the layers that share it
        return scores, positions

    def shared(self, holder: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return what this call reads earlier layers' choices from: in a recompute a dictionary of its own.

        The one that it gets may belong to another micro-batch by now: Megatron-Core keeps it on the config.
        """
        source = self.attention.source_layer
        if self.attention.skip_topk:
            self._ask()
            if self.again is None and self.is_written and source in holder:
                kept = getattr(holder[source], "router_replay_kept", None)
                self.kept = encode_positions(holder[source], _NONE + 1) if kept is None else kept
        if self.again is None:
            return holder
        return {source: decode_positions(self.kept)} if self.attention.skip_topk else {}

    def _ask(self) -> None:
        if self.is_asked:
            raise ReplayStateError(
                f"MRR414: {tape.layer_of(self.attention)} asked for its positions twice in one call."
            )
        self.is_asked = True

    def _check_shape(self, shape: tuple[int, int]) -> None:
        if tuple(self.kept.shape[:2]) != shape:
            raise ReplayStateError(
                f"MRR413: {tape.layer_of(self.attention)} is recomputed for {list(shape)} tokens, its forward chose "
                f"positions for {list(self.kept.shape[:2])}: a checkpoint must run its function with the same tokens."
            )


class _Thread(threading.local):
    def __init__(self) -> None:
        self.choice: Choice | None = None


_thread = _Thread()


# ---- the seams themselves
def install_seams() -> None:
    """Put the seams into the loaded `dsa`, once for the process.

    Raises:
        ReplayStateError: a name that they lean on is gone.
    """
    dsa = sys.modules[_DSA]
    leant_on = (
        (dsa.DSAttention, "forward", "sparse attention is not told its positions"),
        (dsa, _LOSS, "losses lack scores"),
    )
    tape.check_names(leant_on)
    for owner, name, make in _seams(dsa):
        if not hasattr(getattr(owner, name), "is_seam"):
            original = getattr(owner, name)
            wrapped = update_wrapper(make(original), original)
            wrapped.is_seam = True  # type: ignore[attr-defined]
            setattr(owner, name, wrapped)
    if _replaced not in seam.other_seams:
        seam.other_seams.append(_replaced)


def _seams(dsa: Any) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    seams = [
        (dsa.DSAttention, "forward", _attention_seam),
        (dsa, _CHOOSE, _choice_seam),
        (dsa, _LOSS, _loss_seam),
        (dsa.DSAttention, _HOLDER, _holder_seam),
    ]
    return [each for each in seams if hasattr(each[0], each[1])]  # no layer shares before 0.19


def _replaced() -> list[str]:
    dsa = sys.modules[_DSA]
    return [f"dsa.{name}" for owner, name, _ in _seams(dsa) if not hasattr(getattr(owner, name), "is_seam")]


def _attention_seam(original: Any) -> Any:
    @_disable_dynamo
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        holders = seam.held_by(self)
        if holders is None:
            return original(self, *args, **kwargs)
        again, holder, is_written = seam.repeat_or_decide(self, holders)
        if again is None and holder is None:
            output = original(self, *args, **kwargs)
            if is_written:
                tape.write(Entry(self, None))
            return output
        if again is not None:
            again.counter.add(recomputes=1)  # here: torch may end a recompute in the middle of the attention
        choice = Choice(self, again, is_written)
        outer, _thread.choice = _thread.choice, choice
        try:
            output = original(self, *args, **kwargs)
        finally:
            _thread.choice = outer
        if not choice.is_asked:
            raise ReplayStateError(
                f"MRR414: {tape.layer_of(self)} chose positions without asking: something else than Megatron-Core's "
                f"dsa.{_CHOOSE} decided. Was a fused kernel switched on since the freeze began?"
            )
        if is_written:
            tape.write(again or Entry(self, choice.kept, cast(Any, holder).indexer_counter))
        return output

    return forward


def _choice_seam(original: Any) -> Any:
    def fused_qk_topk_naive(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        choice = _thread.choice
        if choice is None:
            return original(q, k, *args, **kwargs)
        return choice.positions(lambda: original(q, k, *args, **kwargs), (q.shape[1], q.shape[0]), k.shape[0])

    return fused_qk_topk_naive


def _loss_seam(original: Any) -> Any:
    def fwd_fused_indexer_loss_naive(*args: Any, **kwargs: Any) -> Any:
        if _thread.choice is not None:
            _thread.choice.needs_scores = True
        return original(*args, **kwargs)

    return fwd_fused_indexer_loss_naive


def _holder_seam(original: Any) -> Any:
    def _get_index_share_topk_holder(self: Any, *args: Any, **kwargs: Any) -> Any:
        holder, choice = original(self, *args, **kwargs), _thread.choice
        return holder if choice is None else choice.shared(holder)

    return _get_index_share_topk_holder
