"""The actor where a Ray transport's references wait; it never touches routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import ray  # type: ignore[import-not-found, unused-ignore]

from megatron_router_replay.transport.meeting import BELIEVE_S, disagreement
from megatron_router_replay.transport.plan import Place
from megatron_router_replay.transport.ray_refs import TraceRef, first_line
from megatron_router_replay.transport.timing import LegTime, longest

_PING_S = 1.0


class Mailbox:
    """Hands references from the sender to the ranks, and to each the reason why the other failed.

    Its waits end by a result, a failure or a timeout. All its methods run in one event loop, so that none needs a lock. It
    keeps handles of the training ranks that are actors, so it keeps these alive until it ends with the sender.

    Args:
        terms: of the sender, which every receiver must have alike; see `Identity`.
    """

    def __init__(self, terms: Mapping[str, Any]) -> None:
        self._terms = terms
        self._changed = asyncio.Condition()
        self._offers: dict[tuple[int, Place], tuple[dict[str, Any], TraceRef]] = {}
        self._unconfirmed: dict[tuple[int, Place], set[Place]] = {}  # ranks of the TP group that have not fetched yet
        self._leg_times: dict[int, list[Mapping[str, LegTime]]] = {}
        self._failed: str | None = None
        self._actors: dict[Place, Any] = {}  # training ranks that are actors, once they have asked for routes
        self._tokens: dict[Place, str] = {}  # of the receivers that have asked for routes
        self._left: dict[Place, str] = {}  # receivers that were closed, and what they said
        self._watched: dict[Place, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop itself holds tasks weakly

    async def offer(self, step: int, place: Place, offer: dict[str, Any], ref: TraceRef, ranks: int) -> None:
        """Take a part for a place, which `ranks` ranks will fetch."""
        self._offers[step, place] = offer, ref
        self._unconfirmed[step, place] = {place._replace(tp_rank=tp_rank) for tp_rank in range(ranks)}
        self._watch(place)
        for gone in set(self._left) & self._unconfirmed[step, place]:
            self._start(self._believe(gone))
        await self._tell()

    async def take(
        self, step: int, place: Place, timeout_s: float, terms: Mapping[str, Any], token: str, actor: Any = None
    ) -> tuple[str | None, Any]:
        """Return (None, (offer, reference)) when there is one, or (why not, None).

        Args:
            terms: of the receiver.
            token: new for every receiver.
            actor: the rank, if it is one.
        """
        self._tokens[place] = token
        self._left.pop(place, None)
        if (text := disagreement(terms, self._terms, side=1)) is not None:
            await self.fail(f"training side, {place}: {text}")
            return self._failed, None
        key = (step, place._replace(tp_rank=0))
        if actor is not None:
            self._actors[place] = actor
            self._watch(place)
        came = await self._wait(lambda: key in self._offers, timeout_s)
        if self._failed is not None or not came:
            return self._failed or "nothing came from the rollout side in time", None
        return None, self._offers[key]

    async def confirm(self, step: int, place: Place, leg_times: Mapping[str, LegTime]) -> None:
        """Take note that a rank has its part; the reference goes when all of its TP group have."""
        key = (step, place._replace(tp_rank=0))
        self._leg_times.setdefault(step, []).append(leg_times)
        self._unconfirmed[key].discard(place)
        if not self._unconfirmed[key]:
            del self._offers[key]
        await self._tell()

    async def finish(self, step: int, timeout_s: float) -> tuple[str | None, dict[str, LegTime]]:
        """Return (None, the training side's leg times) when every rank has confirmed, or why that does not happen."""
        done = await self._wait(lambda: not any(self._unconfirmed.values()), timeout_s)
        if self._failed is None and not done:
            missing = sorted({place for ranks in self._unconfirmed.values() for place in ranks})
            names = ", ".join(str(place) for place in missing)
            await self.fail(f"{names} did not fetch their routes within {timeout_s:g} s")
        # Whatever happened, nobody waits for this step's ranks any more: those that die now did not break it.
        self._unconfirmed.clear()
        return self._failed, longest(self._leg_times.pop(step, []))

    async def fail(self, text: str) -> None:
        """Let every call raise, now and later; the first failure counts."""
        self._failed = self._failed or text
        self._offers.clear()
        await self._tell()

    async def leave(self, place: Place, token: str, text: str) -> None:
        """Take note that a receiver was closed: if it still owes a fetch, or will, nobody shall wait for it."""
        if self._tokens.setdefault(place, token) != token:
            return  # another one is in its place already
        self._left[place] = text
        self._start(self._believe(place))

    async def _believe(self, place: Place) -> None:
        """Fail if a rank that left owes a fetch and nobody takes its place within seconds."""
        await asyncio.sleep(BELIEVE_S)
        if place in self._left and self._owes(place):
            await self.fail(f"the other side left before it fetched its routes: {self._left[place]}")

    def _owes(self, place: Place) -> bool:
        return any(place in ranks for ranks in self._unconfirmed.values())

    def _start(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _watch(self, part: Place) -> None:
        """Watch the ranks of a part's TP group, as far as they are known, while one of them has not confirmed."""
        for place in self._actors:
            if place._replace(tp_rank=0) == part._replace(tp_rank=0) and place not in self._watched:
                self._watched[place] = asyncio.ensure_future(self._ping(place))

    async def _ping(self, place: Place) -> None:
        try:
            while self._failed is None and self._owes(place):
                # Waits while the rank is busy, and raises when it is dead.
                await self._actors[place].__ray_ready__.remote()
                await asyncio.sleep(_PING_S)
        except ray.exceptions.RayActorError as error:
            await self.fail(f"training side, {place}: its actor died ({first_line(error)})")
        finally:
            del self._watched[place]

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        try:
            async with self._changed:
                waiting = self._changed.wait_for(lambda: self._failed is not None or condition())
                await asyncio.wait_for(waiting, timeout_s)
        except TimeoutError:
            return False
        return True
