"""How two endpoints that know a store and a name find each other, today's and not yesterday's.

Each side has a token, new for every endpoint, and a pair of tokens is a connection of its own: what an earlier transport of
the same name left in the store is never taken for this one's. Keys below `<name>/<place>/`:

    here/<side>                    the token of who is there, and its terms
    met/<token 0>/<token 1>/<side> this side has seen the other one; the two meet when both have
    left/<side>                    who went before it met anybody, and why

A note that somebody left may be old: it is believed when it has been there for a few seconds and nobody came instead.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_router_replay.errors import RouterReplayError
from megatron_router_replay.transport.threads import exiting

Store = Any
"""torch.distributed's TCPStore (or FileStore on one machine); torch exports no common type that mypy accepts."""

STORE_TIMEOUT = timedelta(minutes=1)
"""For each request to the store."""
BELIEVE_S = 3.0
"""How long a note of somebody who left must stand, for a name may be in use again at once."""
_POLL_S = 0.05
_LONGEST_POLL_S = 0.5
"""While one side waits for the other to appear, which may take hours, at hundreds of places."""


class MeetingError(RouterReplayError):
    """The other side did not come, left, or wants other terms; the text says which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Who an endpoint is.

    Args:
        token: new for every endpoint.
        terms: JSON values that both sides of a connection must have alike.
    """

    token: str
    terms: Mapping[str, Any]

    def to_json(self) -> str:
        """Return what `from_json` reads."""
        return json.dumps({"token": self.token, "terms": dict(self.terms)})

    @classmethod
    def from_json(cls, text: bytes) -> Identity:
        """Return what `to_json` wrote."""
        return cls(**json.loads(text))


def prefixed(store: Store, name: str) -> Store:
    """Return the part of a store below a name."""
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def read(store: Store, key: str) -> bytes | None:
    """Return a key's value, or None if there is none or it was taken back; never waits for it."""
    # Taken back is empty, never deleted: one deleted between `check` and `get` would be waited for, and end the connection.
    return (bytes(store.get(key)) or None) if store.check([key]) else None


def disagreement(terms: Mapping[str, Any], other: Mapping[str, Any], *, side: int) -> str | None:
    """Return which terms of the two sides differ, in the same words on both; None if none do."""
    sending, receiving = (terms, other) if side == 0 else (other, terms)
    # Through JSON, so that a tuple equals the list that came of it.
    sending, receiving = json.loads(json.dumps(dict(sending))), json.loads(json.dumps(dict(receiving)))
    names = [name for name in {**sending, **receiving} if sending.get(name) != receiving.get(name)]
    if not names:
        return None
    by_side = [", ".join(f"{name}={values.get(name)}" for name in names) for values in (sending, receiving)]
    return f"the two sides disagree: the rollout side has {by_side[0]}; the training side has {by_side[1]}"


def leave(store: Store, *, side: int, token: str, why: str) -> None:
    """Leave a note for a peer that this side never met: one that waits, or comes within seconds, need not wait longer."""
    store.set(f"left/{side}", json.dumps({"token": token, "why": why}))


def forget(store: Store, *, side: int) -> None:
    """Take back the note that an earlier endpoint of this side left: there is a new one now."""
    store.set(f"left/{side}", "")


def meet(
    store: Store, identity: Identity, *, side: int, timeout: timedelta, failure: Callable[[], str | None]
) -> tuple[Identity, Store]:
    """Wait until the other side is there and knows of this one.

    Args:
        store: of this connection's name and place, see `prefixed`.
        side: 0 sends, 1 receives.
        failure: asked all the while; the text that it returns ends the wait, and the other side finds it in a note.

    Returns:
        The other side, and a part of the store that these two have for themselves.

    Raises:
        MeetingError: see there.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    other, seen, left_since = 1 - side, set[str](), 0.0
    pause = _POLL_S
    store.set(f"here/{side}", identity.to_json())
    while True:
        reason = "this process ends" if exiting.is_set() else failure()
        if reason is not None:
            leave(store, side=side, token=identity.token, why=reason)
            raise MeetingError(reason)
        if (text := read(store, f"here/{other}")) is not None:
            peer = Identity.from_json(text)
            first, second = (identity, peer) if side == 0 else (peer, identity)
            pair = prefixed(store, f"met/{first.token}/{second.token}")
            if peer.token not in seen:
                seen.add(peer.token)
                pair.set(str(side), "")
                pause = _POLL_S  # a peer that lives answers soon
            # The token of one that died, or left, is still here, but nobody answers for it.
            if pair.check([str(other)]):
                _check_terms(identity, peer, side=side)
                return peer, pair
        if Identity.from_json(store.get(f"here/{side}")).token != identity.token:
            raise MeetingError("another process took this place under the same name")
        note = read(store, f"left/{other}")
        left_since = 0.0 if note is None else left_since or time.monotonic()
        if note is not None and time.monotonic() - left_since > BELIEVE_S:
            raise MeetingError(f"the other side left before it was met: {json.loads(note)['why']}")
        if time.monotonic() > deadline:
            raise MeetingError(f"nothing came from the other side within {timeout.total_seconds():g} s")
        exiting.wait(pause)
        pause = min(2 * pause, _LONGEST_POLL_S)


def _check_terms(identity: Identity, peer: Identity, *, side: int) -> None:
    """Raise on both sides, for both have met and compare the same terms."""
    if (text := disagreement(identity.terms, peer.terms, side=side)) is not None:
        raise MeetingError(text)
