"""A micro-batch of a chunk: the routes of a forward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.mcore.batches.forward_counts import ForwardCounts
from megatron_router_replay.mcore.batches.upload import LayerRoutes
from megatron_router_replay.mcore.core import tape
from megatron_router_replay.mcore.core.streams import current_stream, to_device, wait_stream


class UsedExperts:
    """The experts that the routers of a micro-batch used, narrow and in one tensor from the start.

    Args:
        num_layers: routers of the chunk.
        dtype: of the ids, `index_dtype(num_experts)`.

    Attributes:
        topk_indices: [num_tokens, num_layers, topk] on the routers' device; None: no router has routed yet.
    """

    __slots__ = ("_dtype", "_num_layers", "_stream", "topk_indices")

    def __init__(self, num_layers: int, dtype: torch.dtype) -> None:
        self._num_layers, self._dtype, self._stream = num_layers, dtype, None
        self.topk_indices: Tensor | None = None

    def put(self, position: int, experts: Tensor) -> None:
        """Keep a layer's experts, [num_tokens, topk] of any integer dtype."""
        with tape.hidden_from_selective_checkpoint():
            if self.topk_indices is None:
                num_tokens, topk = experts.shape
                shape = num_tokens, self._num_layers, topk
                with torch.inference_mode(False):  # an inference tensor cannot be written to outside of that mode
                    self.topk_indices = torch.empty(shape, dtype=self._dtype, device=experts.device)
                self._stream = current_stream(experts.device)
            wait_stream(self._stream, self.topk_indices)
            self.topk_indices[:, position] = experts


@dataclass(slots=True, eq=False, kw_only=True)
class Microbatch:
    """A micro-batch of a chunk: the experts of its routers.

    Args:
        shape: (positions, sequences) of the tokens as this rank's routers get them, [s, b, h] without h.
        batch_shape: (b, s) of the tokens as this rank's model gets them.
        counts: added to those of the chunk once the forward has returned.
        num_routers: routers of the chunk that route it.
        routes: the experts that they replay; None: they route live, for a recording.
        live_positions: [num_live] int64, positions of the rows that the live router decides, on the routers' device once the
            forward has begun; None: there are none.
        replay_mask: [num_tokens] bool on the same device, True: the row has a route that is replayed; None: all are.
        rows: [num_tokens] int64, rows of the trace or of a recording as this rank's routers see them, -1: there is none.
        token_ids: [b, s] integers, the tokens that its forward must get, below 0 where they are not known; None: none is.
        batch_rows: [b, s] int64, the rows of the trace that have these tokens; None: the trace has none.
        must_compare: rows by hand that it names again, which only the forward's input_ids can show to be of equal tokens.
        checked_layer: position of the layer that also takes its live top-k, -1: all do; None: none does.
        lengths: [S] int64, tokens of each sample that a recording numbers itself; None: rows were given by hand.
        used: the experts that a recording keeps; None: nothing is recorded.
        digest: of its rows, the same on all pipeline stages.
        is_by_hand: its rows were given by the caller; False: found by its tokens.
        number: of the micro-batches of its chunk.
        routed: positions of the routers that have routed it.
    """

    shape: tuple[int, int]
    batch_shape: tuple[int, int]
    counts: ForwardCounts
    num_routers: int
    routes: LayerRoutes | None = None
    live_positions: Tensor | None = None
    replay_mask: Tensor | None = None
    rows: Tensor | None = None
    token_ids: Tensor | None = None
    batch_rows: Tensor | None = None
    must_compare: int = 0
    checked_layer: int | None = None
    lengths: Tensor | None = None
    used: UsedExperts | None = None
    digest: int = 0
    is_by_hand: bool = False
    number: int = -1
    routed: set[int] = field(default_factory=set)

    @property
    def is_routed(self) -> bool:
        """True if every router has routed it."""
        return len(self.routed) == self.num_routers

    def upload(self, device: Any) -> None:
        """Copy the masks to the routers' device, in the stream of the forward."""
        if self.live_positions is not None:
            self.live_positions = to_device(self.live_positions, device)
        if self.replay_mask is not None:
            self.replay_mask = to_device(self.replay_mask, device)

    def free(self) -> None:
        """Drop its tensors: the graph keeps those of recomputes, and it may stay the current one for long."""
        self.routes = self.live_positions = self.replay_mask = None
        self.rows = self.batch_rows = self.token_ids = self.used = None

    def check_shape(self, where: str, shape: tuple[int, ...]) -> None:
        """Raise unless a router's tokens, [s, b], are those of this micro-batch."""
        expected = self.shape
        # Megatron's [s, b, h]; a router that gets [n, h] has lost the order of the tokens, unless there is one sequence.
        if tuple(shape) != expected and not (len(shape) == 1 and expected[1] == 1 and shape[0] == expected[0]):
            raise ReplayStateError(
                f"MRR201: {where}, micro-batch {self.number}: the router routes tokens of [s, b] = {list(shape)} on "
                f"this rank, the routes are for {list(expected)}: they must have the shape of the tokens of its layers. A "
                "model that inserts positions itself (several embeddings for one token) takes rows [b, s] of these, by "
                "session.microbatch(rows, model)."
            )
