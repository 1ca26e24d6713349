"""Start a session on a model's routers, and end it with its checks.

replay / record / freeze_recompute      find the routers, make the source of their experts, and start a session with it
Session   microbatch, paused            give the rows of a forward by hand; run forwards live
          close                         check hooks and chunks, release the routers, check counts, agree with the group
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from megatron_router_replay.checks import with_checked_options
from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.mcore.core import hooks
from megatron_router_replay.mcore.core.call import RoutingSource
from megatron_router_replay.mcore.core.counts import Counts
from megatron_router_replay.mcore.judge.group_check import GroupCheck
from megatron_router_replay.mcore.judge.report import SessionReport, log_ended
from megatron_router_replay.mcore.model.find import Models, as_chunks, find_routers
from megatron_router_replay.mcore.sessions.microbatches import Microbatches
from megatron_router_replay.mcore.sessions.routers import SessionRouters

_LOG = logging.getLogger(__name__)

S = TypeVar("S", bound="Session")


class Session:
    """A session on a model's routers, until `close()` or the end of a `with` block.

    `record`, `replay` and `freeze_recompute` make and start it. Leaving the block releases the routers in every case; without
    an exception it also checks.

    Args:
        kind: "replay", "record" or "freeze_recompute".
        routers: of its model.
        source: of their experts.
    """

    def __init__(self, kind: str, routers: SessionRouters, source: RoutingSource) -> None:
        self.kind = kind
        self._routers, self._source = routers, source
        self._microbatches = source if isinstance(source, Microbatches) else None  # None: forwards take none
        self._closed = False

    def _start(self) -> Self:
        """Register for the routers; nothing is registered before.

        Raises:
            ReplayStateError: a router has another session, or a RouterReplay with an action; or this session is closed.
        """
        self._check_open()
        try:
            self._routers.register(self._source)
            self._source.begin(self)
        except BaseException:
            self._abandon()
            raise
        _LOG.info("%s session began with %d routers", self.kind, len(self._routers.states))
        return self

    # ---- forwards
    @with_checked_options
    def microbatch(
        self,
        rows: Tensor | Any = None,
        model: nn.Module | None = None,
        *,
        token_ids: Tensor | Any = None,
        padding: Tensor | Any = None,
    ) -> None:
        """Give the rows of the next forward of a model chunk by hand.

        It is for models that get no input_ids, or pack them inside; others find their rows by themselves. Call it
        once, right before each forward of each chunk. A call from the recompute of a checkpointed function does nothing.

        Args:
            rows: integers of the shape of this rank's input_ids, [b, s] ([1, total] when packed), a tensor or a numpy array:
                the trace row of each position, -1 where there is none; in a recording, each row's number. Split over
                context-parallel ranks like input_ids, not over sequence-parallel ranks. With these
                on a GPU, the host waits once here, and with input_ids on a GPU once in the forward, which compares them.
            model: the chunk, as the schedule passes it to the forward step; None: there is only one.
            token_ids: the input_ids, same shape. A replay compares them with the trace now and with the forward's input_ids
                later; a recording stores them. None: the forward's own input_ids.
            padding: bool, same shape, True: counted as padding. False with row -1: counted as live. Both are routed live.

        Raises:
            LayoutError: rows, masks or tokens do not fit each other or the trace; the model is none of the session's chunks.
            ReplayStateError: the session is closed, or takes no micro-batches; or no forward has used the rows given before.
        """
        self._open_microbatches().give(rows, model, token_ids=token_ids, padding=padding)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let forwards inside the block run live.

        It is for an evaluation, or for a reference pass over other tokens.

        They are neither replayed nor recorded, in any thread, and none of their rows is counted; a recompute still takes the
        experts of its forward. `report.forwards` has them, and `verify=True` applies to them.
        Outside of the block, tokens of no sample raise.

        Raises:
            ReplayStateError: the session is closed, or takes no micro-batches.
        """
        microbatches = self._open_microbatches()
        microbatches.num_pauses += 1
        try:
            yield
        finally:
            microbatches.num_pauses -= 1

    def _open_microbatches(self) -> Microbatches:
        """Return the micro-batches of a session that is open.

        Raises:
            ReplayStateError: it is closed, or takes none.
        """
        self._check_open()
        if self._microbatches is None:
            raise ReplayStateError(f"MRR407: a {self.kind} session takes no micro-batches: just run the model.")
        return self._microbatches

    # ---- the end
    @property
    def report(self) -> SessionReport:
        """Return the counts of the session so far, on this rank. On a GPU, reading them waits for the device."""
        self._read()
        report = self._routers.report(self.kind)
        return report if self._microbatches is None else self._microbatches.report(report)

    def _read(self) -> None:
        """Bring counts of a GPU to the host, in one wait."""
        Counts.read([each.counter for each in self._routers.states.values()])
        if self._microbatches is not None:
            self._microbatches.wait_for_copies()  # after the counts: their wait mostly covers this one

    def close(self, *, check: bool = True) -> None:
        """Check and release the routers.

        The end of a `with` block without an exception does so. A second call does nothing. Where torch.distributed is
        initialised, the ranks of the session's `group` exchange a few numbers here, for `record` and `replay`: each of them
        must close its session. If one rank fails, all raise. A rank that leaves its block by an exception publishes that,
        and no rank waits for it.

        Args:
            check: False: only release the routers and publish this to the group, as a block that is left by an exception.

        Raises:
            ReplayStateError: on this rank or another one, a router forwarded more or less often than its chunk,
                nothing ran, a hook was replaced, or a routing map had different experts; no token of the group was replayed,
                or a smaller share than `min_replayed`; pipeline stages had different rows; or another rank failed.
        """
        if self._closed:
            return
        if not check:
            self._abandon()
            return
        try:
            self._check()
        except BaseException:
            # Also if a check itself fails, as on a model that was rebuilt: the routers are free, and no rank waits.
            self._abandon()
            raise

    def _check(self) -> None:
        """Check and release the routers, and agree with the group; see `close`."""
        # These checks read hooks, model and chunks, so the routers must still be registered.
        problems = self._routers.problems()
        if self._microbatches is not None:
            problems += self._microbatches.problems()
        self._release()
        report = self.report
        problems += self._routers.problems_in_counts(report.decisions)
        if self._microbatches is not None:
            problems = self._microbatches.finish(problems)
        if problems and self.kind == "replay":
            # The backward has run: an optimizer.step() inside the block has used these gradients.
            problems.append("A session is checked at the end of its block: call optimizer.step() after it.")
        if problems:
            texts = "\n  ".join(problems)
            raise ReplayStateError(f"MRR419: the {self.kind} session does not add up:\n  {texts}")
        log_ended(report)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abandon()
            name = type(error).__name__
            _LOG.info("%s session was left by %s; the routers are released, nothing was checked", self.kind, name)

    def _abandon(self) -> None:
        """Release the routers without checks. The other ranks learn that this one failed."""
        if not self._closed:
            self._release()
        if self._microbatches is not None:
            self._microbatches.group_check.fail()

    def _release(self) -> None:
        self._closed = True
        self._routers.unregister(self._source)
        self._source.end()

    def _check_open(self) -> None:
        if self._closed:
            raise ReplayStateError(f"MRR407: this {self.kind} session is closed: make a new one.")


def open_session(make: Callable[[GroupCheck], S], group: dist.ProcessGroup | None) -> S:
    """Make and start a session that takes micro-batches; publish a failure to the group."""
    group_check = GroupCheck(group)
    try:
        return make(group_check)._start()
    except BaseException:
        group_check.fail()
        raise


def close_sessions(model_chunks: Models) -> int:
    """End every session on these chunks, without checks.

    Call it if a session was dropped without `close()` (a notebook cell run twice). Until then such a session decides for its
    routers, and its hooks keep the model alive.

    Args:
        model_chunks: the model or its chunks on this rank.

    Returns:
        How many sessions were ended.
    """
    chunks = as_chunks(model_chunks)
    routers = [found.router for chunk in chunks for found in find_routers(chunk)]
    sources = {id(source): source for router in routers for source in hooks.sources_of(router)}
    for source in sources.values():
        if (session := source._session()) is not None:
            session.close(check=False)
        else:  # a freeze lasts longer than its session
            source.end()
    for router in routers:
        for source in hooks.sources_of(router):
            hooks.unregister(router, source)
    return len(sources)
