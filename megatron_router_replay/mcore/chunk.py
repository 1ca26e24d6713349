"""One model chunk under a session: its routers, and where its forwards begin and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor, nn

from megatron_router_replay.layout import rows_for_router
from megatron_router_replay.mcore.find import FoundRouter, find_routers, unwrap
from megatron_router_replay.mcore.ledger import Ledger, Microbatch
from megatron_router_replay.mcore.router import Choose, SessionRouter, StaysWithItsModel
from megatron_router_replay.torch_private import not_compiled, surroundings

if TYPE_CHECKING:
    from megatron_router_replay.mcore.session import Session

OnInput = Callable[["Chunk", Microbatch, Tensor], None]
"""(chunk, microbatch, input_ids) of each forward that gets input_ids."""


class Chunk(StaysWithItsModel):
    """A model chunk's routers and, where a session queues micro-batches, their ledger.

    Args:
        index: which chunk of the session.
        outermost: the model as the schedule calls it, with its wrappers.
        routers: as `find_routers` returns them.
        rank: this process, for messages.
        choose: how routers choose; None: live.
        queued: forwards need micro-batches.
        mtp: routers of multi-token-prediction layers take part; else they are live, and frozen in recomputes.
        on_input, on_done: called for each forward that gets input_ids, and for each micro-batch that all routers routed.
    """

    def __init__(
        self,
        index: int,
        outermost: nn.Module,
        routers: list[FoundRouter],
        *,
        rank: int,
        choose: Choose | None,
        queued: bool,
        mtp: bool,
        on_input: OnInput,
        on_done: Callable[[Chunk, Microbatch], None],
    ) -> None:
        self.index = index
        self.module = unwrap(outermost)
        self._replays = choose is not None
        taking_part = [found for found in routers if mtp or not found.is_mtp]
        self.ledger: Ledger | None = None
        if queued and taking_part:
            layers = [f"{'MTP ' if found.is_mtp else ''}layer {found.layer_number}" for found in taking_part]
            self.ledger = Ledger(f"rank {rank}, chunk {index}", layers, lambda microbatch: on_done(self, microbatch))
        self.in_trace = [
            SessionRouter(found, position=position, chunk_index=index, choose=choose, ledger=self.ledger)
            for position, found in enumerate(taking_part)
        ]
        # Live in their forwards, whatever the session does; held all the same, for their recomputes.
        self.routers = self.in_trace + [
            SessionRouter(found, position=-1, chunk_index=index, choose=None, ledger=None, beside=self.ledger)
            for found in routers
            if found not in taking_part
        ]
        self._tp_rank, self._tp_size, self._sequence_parallel = 0, 1, False  # how routers share tokens, read once
        if routers:
            router = routers[0].router
            self._tp_rank, self._tp_size = get_pg_rank(router.tp_group), get_pg_size(router.tp_group)
            self._sequence_parallel = bool(router.config.sequence_parallel)
        self._on_input = on_input
        self._handles: list[Any] = []
        self._outermost = outermost
        self._inside = False  # the forward of `module` runs
        self._succeeded: bool | None = None  # how it ended since the outermost one began; None: it was not reached

    def attach(self, session: Session) -> None:
        """Put the session's routers in and watch the chunk's forwards.

        Raises:
            ReplayStateError: a router is driven by someone else.
        """
        for router in self.routers:
            router.attach(session)
        if self.ledger is not None:
            self._handles = [
                self.module.register_forward_pre_hook(self._enter, with_kwargs=True),
                # always_call: also for a forward that raises, which its caller may catch and repeat.
                self.module.register_forward_hook(self._leave, always_call=True),
            ]
            if self._outermost is not self.module:
                self._handles += [
                    # In front of others' hooks: behind one that raises, it would not run.
                    self._outermost.register_forward_pre_hook(self._enter_outermost, prepend=True),
                    self._outermost.register_forward_hook(self._leave_outermost, always_call=True),
                ]

    def detach(self) -> None:
        """Put back what was there and drop all state."""
        for handle in self._handles:
            handle.remove()
        for router in self.routers:
            router.detach()
        if self.ledger is not None:
            self.ledger.clear()

    def router_view(self, values: Tensor) -> Tensor:
        """Return [b, s] values as this rank's routers see their tokens: s-major, and this rank's sequence-parallel part."""
        return rows_for_router(
            values, tp_rank=self._tp_rank, tp_size=self._tp_size, sequence_parallel=self._sequence_parallel
        )

    def router_shape(self, rows: Tensor) -> tuple[int, int]:
        """Return (positions, sequences) of what this rank's routers get for [b, s] rows."""
        num_sequences, length = rows.shape
        return (length // self._tp_size if self._sequence_parallel else length, num_sequences)

    def is_token(self, padding: Tensor | None) -> Tensor | None:
        """Return which rows its routers shall balance: [num_tokens] bool on their device, of padding as they see it."""
        device = self.routers[0].found.router.weight.device
        return None if padding is None else (~padding).to(device, non_blocking=True)

    def problems(self) -> Iterator[str]:
        """Yield what does not match at the end of a session."""
        if self.ledger is not None:
            yield from self.ledger.problems()
        for router in self.routers:
            if not router.attached:
                yield f"{router.found}: router.router_replay was replaced during the session"
        if self.ledger is None:  # else its forwards were missed
            held = {id(router.found.router) for router in self.routers}
            for found in find_routers(self.module):
                if id(found.router) not in held:
                    yield f"{found}: the router was exchanged during the session, which did not reach the new one"

    @not_compiled
    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Hooks are copied with a model. A checkpoint around the whole chunk calls it again: that is no new forward.
        if self.ledger is None or module is not self.module or surroundings().in_backward:
            return
        microbatch = self.ledger.enter()
        self._inside = True
        microbatch.packed = self._replays and kwargs.get("packed_seq_params") is not None
        input_ids = kwargs.get("input_ids", args[0] if args else None)
        # A positional argument of a model that is no language model may be anything else. verl gives later pipeline stages,
        # which embed nothing, its jagged tokens as they are before packing: they say nothing of this forward's positions.
        if isinstance(input_ids, Tensor) and not input_ids.is_floating_point() and not input_ids.is_nested:
            self._on_input(self, microbatch, input_ids)

    @not_compiled
    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # torch passes None for the output of a forward that raised.
        if self.ledger is None or module is not self.module or surroundings().in_backward:
            return
        if output is None and not self._inside:
            self.ledger.fail_next()  # another's hook raised before ours ran, or ours had no micro-batch
        else:
            self.ledger.end(failed=output is None)
        self._inside = False
        self._succeeded = output is not None

    @not_compiled
    def _enter_outermost(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._succeeded = None

    @not_compiled
    def _leave_outermost(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.ledger is None or module is not self._outermost or output is not None or surroundings().in_backward:
            return
        if self._succeeded is None:
            self.ledger.fail_next()
        elif self._succeeded:  # a wrapper raised behind it
            self.ledger.end(failed=True)
