"""One model chunk that takes micro-batches: where its forwards begin and end, and how its routers share tokens."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor, nn

from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.layout.split import rows_for_router
from megatron_router_replay.mcore.batches.forward_counts import ForwardCounts
from megatron_router_replay.mcore.batches.forwards import ModelForwards
from megatron_router_replay.mcore.batches.microbatch import Microbatch
from megatron_router_replay.mcore.model.find import FoundRouter


class Chunk:
    """A model chunk and the micro-batch that it runs; its `forward` is wrapped while a session is open.

    A forward owns its micro-batch: the one that was given by hand right before it, or the one that its tokens find. When it
    raises, nothing is left, and it may be repeated. Layers that run outside of a forward (a schedule plan's) take the
    micro-batch that was given last. Recomputes do not come here: see `tape`.

    Args:
        index: which chunk of the session.
        levels: the model as the schedule calls it, and the models that it wraps, outermost first.
        replayed_routers: the routers that route micro-batches.
        rank: this process, for messages.
        missing: names the rows of a forward that has none, in a message.

    Attributes:
        module: the innermost model.
        where: rank and chunk, for messages.
        given: the micro-batch of the next forward, or of layers to come; None: there is none.
        current: the one that runs, or ran last; None: there was none, or its forward failed.
        num_begun: micro-batches so far, with those of forwards that failed.
        counts: of the forwards that returned.
        digest: of the rows of all micro-batches that ended, in order, and their number.
    """

    def __init__(
        self, index: int, levels: Sequence[nn.Module], replayed_routers: list[FoundRouter], *, rank: int, missing: str
    ) -> None:
        self.index, self.levels, self.module = index, levels, levels[-1]
        self.replayed_routers = replayed_routers
        self.config: Any = replayed_routers[0].router.config
        self.where, self._missing = f"rank {rank}, chunk {index}", missing
        self._layers = [f"layer {found.layer_number}" for found in replayed_routers]
        self.num_begun = 0
        self.given: Microbatch | None = None
        self.current: Microbatch | None = None
        self._is_running = False  # a forward of the module runs
        self._is_done = True  # the current micro-batch was counted
        self.digest = [0, 0]
        group = replayed_routers[0].router.tp_group
        self._tp_rank, self._tp_size = int(get_pg_rank(group)), int(get_pg_size(group))
        self._sequence_parallel = bool(self.config.sequence_parallel)
        self.counts = ForwardCounts()
        self._microbatches: Any = None
        self._forwards = ModelForwards(
            self.levels,
            begin=lambda inputs: self._microbatches.on_forward(self, inputs),
            end=lambda failed: self.leave(failed=failed),
            plan=lambda inputs: self._microbatches.look_up_rows(self, inputs),
            is_new=lambda: bool(self._microbatches.is_new_forward()),
        )

    @property
    def device(self) -> torch.device:
        """The routers' device; read in each forward, because a model may be moved within a session."""
        device: torch.device = self.replayed_routers[0].router.weight.device
        return device

    def router_view(self, values: Tensor) -> Tensor:
        """Return [b, s, ...] values as this rank's routers see their tokens: s-major, this rank's sequence-parallel part."""
        return rows_for_router(
            values, tp_rank=self._tp_rank, tp_size=self._tp_size, sequence_parallel=self._sequence_parallel
        )

    @property
    def sequence_share(self) -> tuple[int, int]:
        """(number of this rank's part, number of parts) of the positions that tensor-parallel ranks share."""
        return (self._tp_rank, self._tp_size) if self._sequence_parallel else (0, 1)

    @property
    def row_sharing(self) -> tuple[int, int, int]:
        """(number of this rank among those with the same rows, number of ranks that share a sequence, lowest of these ranks).

        Tensor-parallel ranks have the same rows without sequence parallelism, and share sequences with it; context-parallel
        ranks share them.
        """
        group: Any = self.replayed_routers[0].router.tp_cp_group
        replica, parts = (0, self._tp_size) if self._sequence_parallel else (self._tp_rank, 1)
        ranks = [0] if group is None else dist.get_process_group_ranks(group)
        cp_size = max(1, len(ranks) // self._tp_size)  # a router may be given no group of both
        return replica, cp_size * parts, min(ranks)

    @property
    def forward_part(self) -> int:
        """Number of this rank among those with parts of the same forwards, by sequence and context parallelism."""
        group: Any = self.replayed_routers[0].router.tp_cp_group
        split = self._tp_rank if self._sequence_parallel else 0
        if group is None:
            return split
        # Tensor-parallel ranks are neighbours in it.
        cp_rank = dist.get_process_group_ranks(group).index(dist.get_rank()) // self._tp_size
        return cp_rank * self._tp_size + split

    def router_shape(self, batch_shape: tuple[int, int]) -> tuple[int, int]:
        """Return (positions, sequences) of what this rank's routers get for [b, s] tokens."""
        num_sequences, length = batch_shape
        return (length // self._tp_size if self._sequence_parallel else length, num_sequences)

    @property
    def stage(self) -> tuple[int, int] | None:
        """(lowest of the ranks that differ in their pipeline stage alone, this rank's stage); None: there is one stage."""
        collection = getattr(self.module, "pg_collection", None)
        group: Any = getattr(collection, "pp", None)
        if collection is None and parallel_state.is_initialized():
            group = parallel_state.get_pipeline_model_parallel_group(check_initialized=False)
        if group is None or group.size() == 1:
            return None
        return min(dist.get_process_group_ranks(group)), group.rank()

    # ---- micro-batches
    def check_none_given(self) -> None:
        """Raise ReplayStateError if the next forward has its micro-batch."""
        if self.given is not None:
            raise ReplayStateError(
                f"MRR407: {self.where}: rows were given for micro-batch {self.given.number}, and no forward has used them. "
                "Call session.microbatch right before each forward. If that forward failed before the model began, repeat "
                "it without giving its rows again."
            )

    def give(self, microbatch: Microbatch) -> None:
        """Keep the micro-batch of the next forward.

        Raises:
            ReplayStateError: it has one.
        """
        self.check_none_given()
        microbatch.number = self.num_begun
        self.given, self.num_begun = microbatch, self.num_begun + 1

    def begin(self, *, is_running: bool) -> Microbatch:
        """Return the micro-batch that was given, which begins.

        Args:
            is_running: a forward of the module runs, until `leave`; False: its layers run by themselves.

        Raises:
            ReplayStateError: none was given, or the last one has not reached every router.
        """
        if missing := self._missing_layers():
            if self.given is not None and not self.given.is_by_hand:
                self.given = None
            raise ReplayStateError(
                f"MRR407: {self._name}: a new forward began, but no forward of its {missing} came. The forwards of a chunk "
                "must run one after another and reach every router."
            )
        if self.given is None:
            self._raise_missing(self._layers[0])
        microbatch, self.given = self.given, None
        microbatch.upload(self.device)  # before anything begins: a forward that finds no memory here may be repeated
        self.current, self._is_running, self._is_done = microbatch, is_running, False
        return microbatch

    def leave(self, *, failed: bool) -> None:
        """End the forward of the module; only one that returned is a success."""
        self._is_running = False
        if failed:
            if self.current is not None:
                self.current.free()
            self.current, self._is_done = None, True
        self._finish_if_routed()

    def microbatch_of(self, position: int) -> Microbatch:
        """Return the micro-batch that the router at this position routes now.

        Raises:
            ReplayStateError: there is none, or the forward called the router before.
        """
        current = self.current
        if current is not None and position not in current.routed:
            return current
        if current is not None and self._is_running:
            raise ReplayStateError(
                f"MRR407: {self._name}: one forward of the model called the router of {self._layers[position]} twice. A "
                "micro-batch has one route for a token in a layer; layers that share a router cannot have different routes."
            )
        if self.given is None:
            self._raise_missing(self._layers[position])
        return self.begin(is_running=False)

    def routed(self, microbatch: Microbatch, position: int) -> None:
        """Note that a router has routed the micro-batch; after the last one it is done, once its forward returns."""
        microbatch.routed.add(position)
        if not self._is_running:
            self._finish_if_routed()

    def _finish_if_routed(self) -> None:
        """Count the current micro-batch and free its tensors, once all of its routers have run."""
        current = self.current
        if current is None or self._is_done or not current.is_routed:
            return
        self._is_done = True
        try:
            self._microbatches.on_done(self, current)
            self.digest = [self.digest[0] + 1, zlib.crc32(current.digest.to_bytes(4), self.digest[1])]
        finally:
            current.free()

    def problems(self) -> Iterator[str]:
        """Yield micro-batches that not every router has routed; forwards that failed do not count."""
        if missing := self._missing_layers():
            yield f"{self._name}: its {missing} was not forwarded"
        if self.given is not None:
            yield (
                f"{self.where}, micro-batch {self.given.number}, {self._layers[0]}: rows were given, but no forward used them"
            )

    @property
    def _name(self) -> str:
        return f"{self.where}, micro-batch {self.num_begun if self.current is None else self.current.number}"

    def _missing_layers(self) -> str:
        """Return the layers that have not routed the current micro-batch, "": there are none."""
        if self.current is None or self.current.is_routed:
            return ""
        return ", ".join(name for position, name in enumerate(self._layers) if position not in self.current.routed)

    def _raise_missing(self, layer: str) -> NoReturn:
        raise ReplayStateError(
            f"MRR406: {self.where}, micro-batch {self.num_begun}, {layer}: a forward without {self._missing}. A trace "
            "with token ids and samples finds them by the forward's input_ids; else call session.microbatch(rows, model) "
            "before each forward of each chunk. An evaluation or a reference pass runs inside `with session.paused():`."
        )

    # ---- the wrapped methods of the model
    def wrap(self, microbatches: Any) -> None:
        """Wrap the methods that begin micro-batches; they call the session's in each forward."""
        # Weakly, so that methods which a copy of the model keeps do not keep the session.
        self._microbatches = weakref.proxy(microbatches)
        self._forwards.wrap()

    def unwrap(self) -> None:
        """Put the methods back, and forget every micro-batch."""
        self._forwards.unwrap()
        self.given, self.current = None, None
