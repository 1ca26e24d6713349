"""Background threads of a transport: each gives its result to a Future, and none outlives the process's end."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

_JOIN_S = 2.0


class Closable(Protocol):
    """An endpoint that is open while this process runs."""

    def close(self) -> None:
        """End what its threads wait for."""


exiting = threading.Event()
"""Set when the process ends; whoever polls gives up then."""
_open: weakref.WeakSet[Closable] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def run_in_thread(function: Callable[..., T], *args: Any, name: str) -> Future[T]:
    """Run a function in a daemon thread of this name and return its Future.

    Not a ThreadPoolExecutor: the interpreter joins an executor's threads before any atexit function runs, so one that waits
    for a peer would keep the process from ending.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return future


def close_at_exit(endpoint: Closable) -> None:
    """Close an endpoint when the process ends, unless it is gone by then."""
    _open.add(endpoint)


@atexit.register
def _end() -> None:
    """Close what nobody closed, and wait for the threads while they can still end.

    A thread that comes back from C++ while the interpreter shuts down would abort the process.
    """
    exiting.set()
    for endpoint in list(_open):
        endpoint.close()
    deadline = time.monotonic() + _JOIN_S
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
