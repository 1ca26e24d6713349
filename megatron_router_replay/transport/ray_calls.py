"""Calls of a Ray transport's mailbox: it is started, asked and found dead here alone."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import ray  # type: ignore[import-not-found, unused-ignore]

from megatron_router_replay.transport.errors import TransportError
from megatron_router_replay.transport.offer import terms
from megatron_router_replay.transport.plan import ParallelLayout
from megatron_router_replay.transport.ray_mailbox import Mailbox
from megatron_router_replay.transport.ray_refs import first_line

POLL_S = 0.05
_NAME_FREE_S = 10.0
"""How long Ray may take to give the name of a mailbox that was closed to the next one."""


class MailboxGoneError(TransportError):
    """The mailbox died with the rollout side, or was closed."""


def start_mailbox(layout: ParallelLayout, name: str, namespace: str | None) -> Any:
    """Return the actor, which ends with this process.

    Raises:
        TransportError: another sender has this name.
    """
    # Without a CPU of its own: it only waits, and a full cluster would never start it.
    options: dict[str, Any] = {"name": name, "num_cpus": 0}
    if namespace is not None:
        options["namespace"] = namespace
    deadline = time.monotonic() + _NAME_FREE_S
    while True:
        try:
            return ray.remote(Mailbox).options(**options).remote(terms(layout))
        except ValueError as error:
            # Ray frees the name of an actor that was killed a little later than it kills it.
            if time.monotonic() > deadline:
                raise TransportError(f"cannot send as {name!r}: {first_line(error)}") from error
            time.sleep(POLL_S)


def own_actor() -> Any:
    """Return the handle of the actor that this code runs in, or None."""
    try:
        return ray.get_runtime_context().current_actor
    except RuntimeError:
        return None


def call(method: Any, *args: Any, timeout: timedelta) -> Any:
    """Call the mailbox.

    Raises:
        MailboxGoneError: it is gone.
        TransportError: time ran out.
    """
    try:
        return ray.get(method.remote(*args), timeout=timeout.total_seconds())
    except ray.exceptions.GetTimeoutError:
        raise TransportError(f"no answer within {timeout.total_seconds():g} s") from None
    except ray.exceptions.RayActorError as error:
        raise MailboxGoneError(f"the rollout side is gone, or closed the transport ({first_line(error)})") from error
