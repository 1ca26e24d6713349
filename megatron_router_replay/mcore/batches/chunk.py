"""One model chunk that takes micro-batches: where its forwards begin and end, and how its routers share tokens."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch.distributed as dist
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.layout.split import rows_for_router
from megatron_router_replay.mcore.batches.follow import ForwardInputs, read_inputs
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
        session: is told of forwards that begin and of micro-batches that all routers routed. It is held weakly, so
            that the hooks on the model keep no session that was closed.
    """

    def __init__(
        self, index: int, outermost: nn.Module, replayed_routers: list[FoundRouter], *, rank: int, session: Any
    ) -> None:
        self.index = index
        self.levels = wrappers(outermost)
        self.replayed_routers = replayed_routers
        self.device = replayed_routers[0].router.weight.device
        self.config: Any = replayed_routers[0].router.config
        layers = [f"layer {found.layer_number}" for found in replayed_routers]
        self._session = weakref.proxy(session)
        where = f"rank {rank}, chunk {index}"
        self.queue = Queue(where, layers, session._lacks, lambda done: self._session._on_done(self, done))
        group = replayed_routers[0].router.tp_group
        self._tp_rank, self._tp_size = get_pg_rank(group), get_pg_size(group)
        self._sequence_parallel = bool(self.config.sequence_parallel)
        self._handles: list[Any] = []
        self._wrapped: dict[str, Any] = {}  # name -> what the session put on the module
        self._replaced: dict[str, Any] = {}  # name -> the instance's own method before, None: it had the class's

    @property
    def module(self) -> nn.Module:
        """The innermost model."""
        return self.levels[-1]

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
        return replica, len(ranks) // self._tp_size * parts, min(ranks)

    def router_shape(self, batch_shape: tuple[int, int]) -> tuple[int, int]:
        """Return (positions, sequences) of what this rank's routers get for [b, s] tokens."""
        num_sequences, length = batch_shape
        return (length // self._tp_size if self._sequence_parallel else length, num_sequences)

    def add_hooks(self) -> None:
        """Put the hooks on; plain functions, so that a copy of the model has them and not a copy of this object."""
        outermost, module = self.levels[0], self.module
        num_begun = 0  # micro-batches, when the forward that runs began

        @_disable_dynamo
        def call(called: nn.Module, args: tuple[Any, ...]) -> None:
            nonlocal num_begun
            if called in (outermost, module) and self._follows():
                num_begun = self.queue.num_begun

        @_disable_dynamo
        def leave(called: nn.Module, args: Any, output: Any) -> None:
            # torch passes None for the output of a forward that raised. A wrapper matters only then: it may raise before the
            # innermost model runs, or behind it.
            if called is module and self._follows():
                self.queue.leave(num_begun, failed=output is None)
            elif called is outermost and output is None and self._follows():
                self.queue.leave(num_begun, failed=True)

        for level in {id(each): each for each in (outermost, module)}.values():
            self._handles += [
                # In front of all hooks: behind one that raises, it would not run.
                level.register_forward_pre_hook(call, prepend=True),
                # always_call: also for a forward that raises, which its caller may catch and repeat.
                level.register_forward_hook(leave, always_call=True),
            ]
        self._wrap("forward", self._begin)
        if hasattr(module, "build_schedule_plan"):  # its layers run later, outside of a forward of the module
            self._wrap("build_schedule_plan", self._queue_followed)

    def _follows(self) -> bool:
        """Return whether a call is a new forward of the session: no recompute of the whole chunk, and not paused."""
        return not tape.in_recompute() and not self._session.is_paused

    def _wrap(self, name: str, before: Callable[[tuple[Any, ...], dict[str, Any]], object]) -> None:
        """Call `before` in each call of a method of the module, so after every hook on it."""
        module, replaced = self.module, vars(self.module).get(name)
        # The class's method, or one that is bound to this instance: a copy of the model calls it with itself.
        is_method = replaced is None or getattr(replaced, "__self__", None) is module
        method: Any = getattr(type(module), name) if replaced is None else getattr(replaced, "__func__", replaced)

        @_disable_dynamo
        def see(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # A copy of the model that was made meanwhile is none of the session's.
            if called is module and bound is self._wrapped.get(name) and self._follows():
                before(args, kwargs)

        def wrapped(called: nn.Module, *args: Any, **kwargs: Any) -> Any:
            see(called, args, kwargs)
            return method(called, *args, **kwargs) if is_method else method(*args, **kwargs)

        wrapped.__name__ = name
        # A bound method: copy.deepcopy binds it to the copy.
        bound = MethodType(wrapped, module)
        self._wrapped[name] = bound
        self._replaced[name] = replaced
        setattr(module, name, bound)

    def _unwrap(self) -> None:
        for name, bound in self._wrapped.items():
            # A wrapper that was put around ours meanwhile keeps it, and ours passes calls on.
            if vars(self.module).get(name) is bound:
                if self._replaced[name] is None:
                    delattr(self.module, name)
                else:
                    setattr(self.module, name, self._replaced[name])
        self._wrapped = {}

    def _queue_followed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardInputs:
        """Queue the rows of a forward's tokens, unless rows were queued by hand."""
        inputs = read_inputs(self.module, args, kwargs)
        if not self.queue.has_rows_by_hand:
            self._session._on_unqueued(self, inputs)
        return inputs

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the next micro-batch with a forward of the innermost model."""
        if "routing_rows" in kwargs:  # an attached model takes them off
            raise ReplayStateError(
                f"MRR403: {self.queue.where}: the model got routing_rows, which its forward does not take. Call "
                "mrr.attach(model_chunks) after building the model, and again where it is rebuilt."
            )
        inputs = self._queue_followed(args, kwargs)
        microbatch = self.queue.enter()
        microbatch.cu_seqlens = inputs.bounds
        # Stages that embed nothing may get tokens in another layout, before packing.
        tokens = inputs.input_ids if getattr(self.module, "pre_process", True) else None
        self._session._on_forward(self, microbatch, tokens)

    def remove_hooks(self) -> None:
        """Take the hooks off and forget every micro-batch."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._unwrap()
        self.queue.clear()
