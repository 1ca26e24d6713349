"""Recomputes of sparse attention are told the positions that their forward chose, from the tape.

In DeepSeek-V3.2 and GLM-5 an indexer chooses which positions a token attends to, a second choice beside that of experts. A
forward writes it on every tape that is being written; a recompute takes it and skips the scoring, which is quadratic.

    DSAttention.forward                        which call this is, by the four lines of `hook`; one that never asks raises
    dsa.fused_qk_topk_naive                    asks: a forward scores and chooses, a recompute is told
    dsa.fwd_fused_indexer_loss_naive           the indexer's loss takes live scores: there a recompute scores too
    DSAttention._get_index_share_topk_holder   a layer without an indexer reads here what an earlier layer chose

The hooks are put in when a freeze first holds such layers, and never before: importing this module does not load `dsa`.

Source: Megatron-Core 0.17.1 to 0.19.2, transformer/experimental_attention_variant/dsa.py.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.mcore.core import hooks, tape
from megatron_router_replay.mcore.core.call import Registrant, RouterCounts
from megatron_router_replay.mcore.core.tape import Entry
from megatron_router_replay.mcore.model.upstream import check_names

DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
TOPK, _LOSS = "fused_qk_topk_naive", "fwd_fused_indexer_loss_naive"
_HOLDER = "_get_index_share_topk_holder"
_NONE = 0xFFFF
"""What stands for -1, no position, in 16 bits."""


class AttentionSource(Registrant, Protocol):
    """What a freeze leaves with the hook."""

    indexer_counter: RouterCounts


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
        recompute_of: the entry that this call repeats; None: it is a forward.
        is_written: a tape is being written.

    Attributes:
        is_asked: Megatron-Core has asked.
        needs_scores: the indexer's loss is computed from the live scores.
        kept: the positions as a tape keeps them.
    """

    __slots__ = ("attention", "is_asked", "is_written", "kept", "needs_scores", "recompute_of")

    def __init__(self, attention: Any, recompute_of: Entry | None, is_written: bool) -> None:
        self.attention, self.recompute_of, self.is_written = attention, recompute_of, is_written
        self.is_asked = self.needs_scores = False
        self.kept: Any = None if recompute_of is None else recompute_of.topk_indices

    def positions(
        self, score: Callable[[], Any], shape: tuple[int, int], num_keys: int
    ) -> tuple[Tensor | None, Tensor]:
        """Return (scores or None, positions [b, sq, k] int64): without a loss, what is told needs no scores.

        Args:
            score: Megatron-Core's scoring and choice, dsa.fused_qk_topk_naive with its arguments.
            shape: (b, sq) of the queries.
            num_keys: positions that can be chosen, of all samples of a packed row.
        """
        self._ask()
        # A forward scores and a recompute recalls: what differs between the two is hidden from a selective checkpoint.
        with tape.hidden_from_selective_checkpoint():
            if self.recompute_of is not None:
                self._check_shape(shape)
                return score()[0] if self.needs_scores else None, decode_positions(self.kept)
            scores, positions = score()
            if self.is_written or getattr(self.attention, "index_share", False):
                self.kept = encode_positions(positions, num_keys)
                positions.router_replay_kept = self.kept  # for the layers that share it
        return scores, positions

    def shared(self, holder: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return what this call reads earlier layers' choices from: in a recompute a dictionary of its own.

        The one that it gets may belong to another micro-batch by now: Megatron-Core keeps it on the config.
        """
        source = self.attention.source_layer
        with tape.hidden_from_selective_checkpoint():
            if self.attention.skip_topk:
                self._ask()
                if self.recompute_of is None and self.is_written and source in holder:
                    kept = getattr(holder[source], "router_replay_kept", None)
                    self.kept = encode_positions(holder[source], _NONE + 1) if kept is None else kept
            if self.recompute_of is None:
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


# ---- the hooks themselves
def install_hooks() -> None:
    """Put the hooks into the loaded `dsa`, once for the process.

    Raises:
        ReplayStateError: a name that they lean on is gone.
    """
    dsa = sys.modules[DSA]
    leant_on = (
        (dsa.DSAttention, "forward", "sparse attention is not told its positions"),
        (dsa, _LOSS, "losses lack scores"),
    )
    check_names(leant_on)
    for owner, name, make in _hooks_of(dsa):
        if not hasattr(getattr(owner, name), "is_hook"):
            original = getattr(owner, name)
            wrapped = update_wrapper(make(original), original)
            wrapped.is_hook = wrapped  # type: ignore[attr-defined]  # functools.wraps copies it to what is put around
            setattr(owner, name, wrapped)
    if _replaced not in hooks.other_hooks:
        hooks.other_hooks.append(_replaced)


def _hooks_of(dsa: Any) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    pairs = [
        (dsa.DSAttention, "forward", _attention_hook),
        (dsa, TOPK, _choice_hook),
        (dsa, _LOSS, _loss_hook),
        (dsa.DSAttention, _HOLDER, _holder_hook),
    ]
    return [each for each in pairs if hasattr(each[0], each[1])]  # no layer shares before 0.19


def _replaced() -> list[str]:
    dsa = sys.modules[DSA]
    found = [(name, getattr(owner, name)) for owner, name, _ in _hooks_of(dsa)]
    return [f"dsa.{name}" for name, function in found if not hooks.is_hook(function)]


def _attention_hook(original: Any) -> Any:
    @_disable_dynamo
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        hold = hooks.registration_of(self)
        if hold is None:
            return original(self, *args, **kwargs)
        recompute_of, holder, is_written = hooks.recompute_or_decide(self, hold)
        if recompute_of is None and holder is None:
            output = original(self, *args, **kwargs)
            if is_written:
                tape.write(Entry(self, None))
            return output
        if recompute_of is not None:
            recompute_of.counter.add(recomputes=1)  # here: torch may end a recompute in the middle of the attention
        choice = Choice(self, recompute_of, is_written)
        outer, _thread.choice = _thread.choice, choice
        try:
            output = original(self, *args, **kwargs)
        finally:
            _thread.choice = outer
        if not choice.is_asked:
            raise ReplayStateError(
                f"MRR414: {tape.layer_of(self)} chose positions without asking: something else than Megatron-Core's "
                f"dsa.{TOPK} decided. Was a fused kernel switched on since the session began?"
            )
        if is_written:
            tape.write(recompute_of or Entry(self, choice.kept, cast("AttentionSource", holder).indexer_counter))
        return output

    return forward


def _choice_hook(original: Any) -> Any:
    signature = inspect.signature(original)

    def fused_qk_topk_naive(*args: Any, **kwargs: Any) -> Any:
        choice = _thread.choice
        if choice is None:
            return original(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        queries, keys = arguments["q"], arguments["k"]  # [sq, b, heads, dim] and [sk, b, dim]
        shape = int(queries.shape[1]), int(queries.shape[0])
        return choice.positions(partial(original, *args, **kwargs), shape, int(keys.shape[0]))

    return fused_qk_topk_naive


def _loss_hook(original: Any) -> Any:
    def fwd_fused_indexer_loss_naive(*args: Any, **kwargs: Any) -> Any:
        if _thread.choice is not None:
            _thread.choice.needs_scores = True
        return original(*args, **kwargs)

    return fwd_fused_indexer_loss_naive


def _holder_hook(original: Any) -> Any:
    def _get_index_share_topk_holder(self: Any, *args: Any, **kwargs: Any) -> Any:
        holder, choice = original(self, *args, **kwargs), _thread.choice
        return holder if choice is None else choice.shared(holder)

    return _get_index_share_topk_holder
