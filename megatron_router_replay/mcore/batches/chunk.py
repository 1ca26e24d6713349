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

from megatron_router_replay.checks import check_withdrawn
from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.layout.split import rows_for_router
from megatron_router_replay.mcore.batches.inputs import ForwardInputs, read_inputs
from megatron_router_replay.mcore.batches.queue import Queue
from megatron_router_replay.mcore.core.counts import Counts
from megatron_router_replay.mcore.model.find import FoundRouter, wrappers

_WITHDRAWN = dict.fromkeys(
    ("routing_rows", "routing_padding", "routing_trained"),
    "the tokens of each forward find its rows; a model that gets embeddings takes session.microbatch(rows, model).",
)
"""Keyword of a model's forward in an earlier version -> its replacement."""

_CACHES = ("inference_context", "inference_params")
"""Keywords of Megatron-Core by which a forward continues the sequences of earlier ones."""


class Chunk:
    """A model chunk and its queue of micro-batches; its hooks are on the model while a session is open.

    Args:
        index: which chunk of the session.
        outermost: the model as the schedule calls it, with its wrappers.
        replayed_routers: the routers that route micro-batches.
        rank: this process, for messages.
        missing: names the rows of a forward for which none were queued, in a message.
    """

    def __init__(
        self, index: int, outermost: nn.Module, replayed_routers: list[FoundRouter], *, rank: int, missing: str
    ) -> None:
        self.index = index
        self.levels = wrappers(outermost)
        self.replayed_routers = replayed_routers
        self.device = replayed_routers[0].router.weight.device
        self.config: Any = replayed_routers[0].router.config
        layers = [f"layer {found.layer_number}" for found in replayed_routers]
        self.queue = Queue(
            f"rank {rank}, chunk {index}", layers, missing, lambda done: self._session.on_done(self, done)
        )
        group = replayed_routers[0].router.tp_group
        self._tp_rank, self._tp_size = int(get_pg_rank(group)), int(get_pg_size(group))
        self._sequence_parallel = bool(self.config.sequence_parallel)
        self.counts = Counts()  # of micro-batches, and of rows by kind
        self._session: Any = None
        self._handles: dict[int, list[Any]] = {}  # level -> its hooks
        self._wrapped: dict[str, Any] = {}  # name -> the session's method on the module
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

    # ---- hooks on the model
    def add_hooks(self, microbatches: Any) -> None:
        """Put the hooks on, which call the session's micro-batches in each forward."""
        # Weakly, so that hooks which a copy of the model keeps do not keep the session.
        self._session = weakref.proxy(microbatches)
        for depth, level in enumerate(self.levels):
            self._hook_level(depth, level)
        self._wrap("forward", lambda inputs: self._session.on_forward(self, inputs), depth=len(self.levels))
        if hasattr(self.module, "build_schedule_plan"):  # its layers run later, outside of a forward of the module
            self._wrap("build_schedule_plan", lambda inputs: self._session.follow(self, inputs))

    def _hook_level(self, depth: int, level: nn.Module) -> None:
        """Put hooks on the module, or on a wrapper around it, that enter and leave its calls in the queue."""
        queue = self.queue

        # Plain functions, so that a copy of the model has them and not a copy of this object.
        @_disable_dynamo
        def enter(called: nn.Module, args: Any) -> None:
            if called is level and self._session.is_new_forward():
                put_last()
                queue.enter(depth)

        @_disable_dynamo
        def leave(called: nn.Module, args: Any, output: Any) -> None:
            # Also if a pause began inside of the call: its routers that ran live are missing then, and that raises.
            if called is level and (self._session.is_new_forward() or queue.is_innermost(depth)):
                queue.leave(depth, failed=False)

        @_disable_dynamo
        def fail(called: nn.Module, args: Any, output: Any) -> None:
            # After `leave`, this finds no call; alone, it runs because the forward or an earlier hook raised.
            if called is level and self._session.is_new_forward():
                queue.leave(depth, failed=True)

        def add() -> list[Any]:
            return [level.register_forward_hook(leave), level.register_forward_hook(fail, always_call=True)]

        def put_last() -> None:
            # A hook that was put on inside the session may raise, too, and only a forward that returned is a success.
            handles = self._handles[depth]
            if next(reversed(level._forward_hooks)) != handles[-1].id:
                for handle in handles[1:]:
                    handle.remove()
                handles[1:] = add()

        # Before all hooks: after one that raises, it would not run.
        self._handles[depth] = [level.register_forward_pre_hook(enter, prepend=True), *add()]

    def _wrap(self, name: str, begin: Callable[[ForwardInputs], None], *, depth: int | None = None) -> None:
        """Wrap a method of the module: `begin` gets the inputs of each call, after every hook on the module.

        Args:
            depth: of the calls, for the queue; None: micro-batches run outside of them.
        """
        module, replaced = self.module, vars(self.module).get(name)
        # The class's method, or one that is bound to this instance: a copy of the model calls it with itself.
        is_method = replaced is None or getattr(replaced, "__self__", None) is module
        method: Any = getattr(type(module), name) if replaced is None else getattr(replaced, "__func__", replaced)

        @_disable_dynamo
        def enter(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            # A copy of the model that was made inside the session is not under it.
            if called is not module or bound is not self._wrapped.get(name) or not self._session.is_new_forward():
                return False
            withdrawn = {name: kwargs[name] for name in _WITHDRAWN if name in kwargs}
            check_withdrawn(type(module).__name__, withdrawn, _WITHDRAWN)
            if not self.queue.has_rows_by_hand and any(kwargs.get(name) is not None for name in _CACHES):
                raise ReplayStateError(
                    f"MRR424: {self.queue.where}: {type(module).__name__} got an inference_context, and its cache has "
                    "the tokens before its input_ids, so their rows cannot be found. Generate inside `session.paused()`."
                )
            if depth is not None:
                self.queue.enter(depth)
            begin(read_inputs(module, args, kwargs))
            return depth is not None

        @_disable_dynamo
        def leave() -> None:
            assert depth is not None, "the call was entered"
            self.queue.leave(depth, failed=False)

        def wrapped(called: nn.Module, *args: Any, **kwargs: Any) -> Any:
            is_entered = enter(called, args, kwargs)
            output = method(called, *args, **kwargs) if is_method else method(*args, **kwargs)
            # Not after an exception, which leaves the call open: the queue finds it there.
            if is_entered:
                leave()
            return output

        wrapped.__name__ = name
        # A bound method: copy.deepcopy binds it to the copy.
        bound = MethodType(wrapped, module)
        self._wrapped[name] = bound
        self._replaced[name] = replaced
        setattr(module, name, bound)

    def remove_hooks(self) -> None:
        """Take the hooks off and forget every micro-batch."""
        for handle in (each for handles in self._handles.values() for each in handles):
            handle.remove()
        for name, bound in self._wrapped.items():
            # A wrapper that was put around ours inside the session keeps it, and ours passes calls on.
            if vars(self.module).get(name) is bound:
                if self._replaced[name] is None:
                    delattr(self.module, name)
                else:
                    setattr(self.module, name, self._replaced[name])
        self._handles, self._wrapped = {}, {}
        self.queue.clear()
