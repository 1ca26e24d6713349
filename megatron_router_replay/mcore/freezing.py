"""Freeze: every recompute of activation checkpointing uses the experts of its forward."""

from __future__ import annotations

from megatron_router_replay.mcore.session import Models, Session


class FreezeSession(Session):
    """Recomputes use the experts of their forward; see `freeze_recompute`."""

    kind = "freeze_recompute"
    queued = False

    def _num_microbatches(self) -> int:
        forwards: dict[int, int] = {}
        for held in self._held.values():
            forwards[held.chunk_index] = max(forwards.get(held.chunk_index, 0), held.counter["forwards"])
        return sum(forwards.values())


def freeze_recompute(model_chunks: Models, *, count_flips: bool = False, verify: bool = False) -> FreezeSession:
    """Let every recompute of activation checkpointing use the experts that its forward chose.

    One line before a training loop, for a whole run: it starts at once, needs no call per step, follows any schedule, and
    keeps `topk` bytes per token and layer (two above 256 experts) inside each checkpoint, as long as its graph. Forwards
    outside checkpoints, as evaluations, keep nothing. `record` and `replay` may run inside it. A backward that runs after
    the session was left still uses its forward's experts (see `tape`).

    Args:
        model_chunks: the model or its chunks on this rank; multi-token-prediction routers are frozen too.
        count_flips: also take the live top-k in every recompute and report how many decisions it would have flipped.
        verify: compare every routing map that leaves a router with what was chosen.

    Raises:
        UnsupportedRouterError: a router's selection cannot be frozen; names the config field.
        LayoutError: the model has no experts, or not all chunks of a virtual pipeline are given.
        ReplayStateError: the model is under another session, or its routers are driven by their own RouterReplay.
    """
    return FreezeSession(model_chunks, mtp=True, verify=verify, flips=count_flips).start()
