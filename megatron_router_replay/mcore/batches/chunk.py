"""One model chunk that takes micro-batches: where its forwards begin and end, and how its routers share tokens."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.layout.split import rows_for_router
from megatron_router_replay.mcore.batches.queue import Queue
from megatron_router_replay.mcore.core import tape
from megatron_router_replay.mcore.model.find import FoundRouter, wrappers


class Chunk:
    """A model chunk and its micro-batches; its hooks stand on the model while the session is open.

    Args:
        index: which chunk of the session.
        outermost: the model as the schedule calls it, with its wrappers.
        replayed_routers: the routers that route micro-batches.
        rank: this process, for messages.
        session: is told of forwards that begin and of micro-batches that all routers routed. It is held weakly, for the hooks
            stand on the model: a session whose handle is dropped shall be gone.
    """

    def __init__(
        self, index: int, outermost: nn.Module, replayed_routers: list[FoundRouter], *, rank: int, session: Any
    ) -> None:
        self.index = index
        self.levels = wrappers(outermost)
        self.replayed_routers = replayed_routers
        self.device = replayed_routers[0].router.weight.device
        self.config: Any = replayed_routers[0].router.config
        self.columns: dict[Any, Any] = {}  # of routes that are fed: see `fed`
        layers = [f"{'MTP ' if found.is_mtp else ''}layer {found.layer_number}" for found in replayed_routers]
        self._session = weakref.proxy(session)
        where = f"rank {rank}, chunk {index}"
        self.queue = Queue(where, layers, session._lacks, lambda done: self._session._on_done(self, done))
        group = replayed_routers[0].router.tp_group
        self._tp_rank, self._tp_size = get_pg_rank(group), get_pg_size(group)
        self._sequence_parallel = bool(self.config.sequence_parallel)
        self._handles: list[Any] = []

    @property
    def module(self) -> nn.Module:
        """The innermost model."""
        return self.levels[-1]

    def router_view(self, values: Tensor, *, split: bool = False) -> Tensor:
        """Return [b, s, ...] values as this rank's routers see their tokens: s-major, this rank's sequence-parallel part.

        Args:
            split: the values are this part already.
        """
        splits = self._sequence_parallel and not split
        return rows_for_router(values, tp_rank=self._tp_rank, tp_size=self._tp_size, sequence_parallel=splits)

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
        return replica, len(ranks) // self._tp_size * parts, min(ranks)

    def router_shape(self, batch_shape: tuple[int, int], *, split: bool = False) -> tuple[int, int]:
        """Return (positions, sequences) of what this rank's routers get for [b, s] tokens."""
        num_sequences, length = batch_shape
        return (length // self._tp_size if self._sequence_parallel and not split else length, num_sequences)

    def add_hooks(self) -> None:
        """Put the hooks on; plain functions, so that a copy of the model has them and not a copy of this object."""
        outermost, module = self.levels[0], self.module
        num_begun = 0  # micro-batches, when the forward that runs began

        @_disable_dynamo
        def call(called: nn.Module, args: tuple[Any, ...]) -> None:
            nonlocal num_begun
            if called in (outermost, module) and not tape.in_recompute():
                num_begun = self.queue.num_begun

        @_disable_dynamo
        def enter(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # A checkpoint around the whole chunk calls it again: that is no new forward.
            if called is module and not tape.in_recompute():
                self._begin(args, kwargs)

        @_disable_dynamo
        def leave(called: nn.Module, args: Any, output: Any) -> None:
            # torch passes None for the output of a forward that raised. A wrapper matters only then: it may raise before the
            # innermost model runs, or behind it.
            if called is module and not tape.in_recompute():
                self.queue.leave(num_begun, failed=output is None)
            elif called is outermost and output is None and not tape.in_recompute():
                self.queue.leave(num_begun, failed=True)

        for level in {id(each): each for each in (outermost, module)}.values():
            self._handles += [
                # In front of all hooks: behind one that raises, it would not run.
                level.register_forward_pre_hook(call, prepend=True),
                # always_call: also for a forward that raises, which its caller may catch and repeat.
                level.register_forward_hook(leave, always_call=True),
            ]
        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the next micro-batch with a forward of the innermost model."""
        if "routing_rows" in kwargs:  # an attached model takes them off
            raise ReplayStateError(
                f"MRR403: {self.queue.where}: the model got routing_rows, which its forward does not take. Call "
                "mrr.attach(model_chunks) after building the model, and again where it is rebuilt."
            )
        input_ids = kwargs.get("input_ids", args[0] if args else None)
        # Stages that embed nothing may get tokens in another layout, before packing. A positional argument of a model that is
        # no language model may be anything.
        embeds = getattr(self.module, "pre_process", True)
        is_ids = isinstance(input_ids, Tensor) and not input_ids.is_floating_point() and not input_ids.is_nested
        tokens = input_ids if embeds and is_ids else None
        if tokens is not None and not self.queue.num_waiting:
            self._session._on_unqueued(self, tokens)
        microbatch = self.queue.enter()
        packing = kwargs.get("packed_seq_params")
        microbatch.packed = packing is not None
        lengths = (getattr(packing, name, None) for name in ("cu_seqlens_q_padded", "cu_seqlens_q"))
        microbatch.cu_seqlens = next((each for each in lengths if each is not None), None)
        self._session._on_forward(self, microbatch, tokens)

    def remove_hooks(self) -> None:
        """Take the hooks off and forget every micro-batch."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.queue.clear()
