"""What the endpoints of a transport keep in the store under its name; `meeting` is about two of them."""

from __future__ import annotations

import uuid

from megatron_router_replay.transport.meeting import STORE_TIMEOUT, Identity, Store, forget, leave, prefixed, read
from megatron_router_replay.transport.offer import terms
from megatron_router_replay.transport.plan import ParallelLayout, Place


class Registry:
    """What an endpoint keeps in the store under the name of its transport."""

    def __init__(self, store: Store, name: str, layout: ParallelLayout) -> None:
        # Every endpoint has a token of its own, so that a name can be used again at once.
        self.identity = Identity(token=uuid.uuid4().hex, terms=terms(layout))
        self._store = prefixed(store.clone(), name)
        self._store.set_timeout(STORE_TIMEOUT)

    def announce(self) -> None:
        """Say that the sender is here, and with which layout, also to places that it knows nothing of."""
        self._store.set("sender", self.identity.to_json())

    def withdraw(self) -> None:
        """Take the announcement back, unless another sender has made its own."""
        # In one request, so that one made in between stays.
        self._store.compare_set("sender", self.identity.to_json(), "")

    def sender(self) -> Identity | None:
        """Return the sender that is here, or None."""
        text = read(self._store, "sender")
        return None if text is None else Identity.from_json(text)

    def refuse(self, sender: Identity, why: str) -> None:
        """Tell a sender that a receiver cannot work with it."""
        self._store.set(f"refused/{sender.token}", why)

    def refused(self) -> str | None:
        """Return why a receiver cannot work with this sender, or None."""
        text = read(self._store, f"refused/{self.identity.token}")
        return None if text is None else text.decode()

    def forget(self, place: Place, *, side: int) -> None:
        """Take back what an earlier endpoint left here."""
        forget(prefixed(self._store, str(place)), side=side)

    def leave(self, place: Place, *, side: int, why: str) -> None:
        """Leave a note for a peer that was not met."""
        leave(prefixed(self._store, str(place)), side=side, token=self.identity.token, why=why)
