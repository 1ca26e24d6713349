"""What endpoints keep in the store, read and taken back at the same moment by two of them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megatron_router_replay.transport import ParallelLayout, open_store
from megatron_router_replay.transport.meeting import forget, leave, read
from megatron_router_replay.transport.registry import Registry

LAYOUT = ParallelLayout(stage_layers=((1,),))


class Between:
    """A store whose user is interrupted by others, once, behind the first of its requests that is one of `requests`."""

    def __init__(self, store: Any, requests: set[str], others: Callable[[], None]) -> None:
        self._store, self._requests, self._others = store, requests, others

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def ask(*args: Any) -> Any:
            answer = method(*args)
            if name in self._requests:
                self._requests = set()
                self._others()
            return answer

        return ask


@pytest.fixture(params=["TCPStore", "FileStore"])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    if request.param == "TCPStore":
        store = open_store("127.0.0.1", is_server=True)
    else:
        store = dist.FileStore(str(tmp_path / "store"), 1)
    store.set_timeout(timedelta(seconds=1))  # for a key that is not there
    return store


def test_a_note_that_is_taken_back_while_it_is_read_is_none(store):
    leave(store, side=1, token="a", why="it failed")
    assert read(Between(store, {"check"}, lambda: forget(store, side=1)), "left/1") is None
    assert read(store, "left/1") is None


def test_a_note_is_read_until_it_is_taken_back(store):
    assert read(store, "left/1") is None
    leave(store, side=1, token="a", why="it failed")
    assert b"it failed" in read(store, "left/1")
    assert read(store, "left/0") is None
    forget(store, side=1)
    assert read(store, "left/1") is None
    leave(store, side=1, token="b", why="again")
    assert b"again" in read(store, "left/1")


def test_a_sender_that_withdraws_never_takes_a_later_ones_announcement(store):
    first, second = Registry(store, "routes", LAYOUT), Registry(store, "routes", LAYOUT)
    first.announce()
    # The second announces itself just when the first has looked whose announcement there is.
    first._store = Between(first._store, {"get", "compare_set"}, second.announce)
    first.withdraw()
    assert second.sender().token == second.identity.token
    first._store = second._store
    first.withdraw()
    assert second.sender().token == second.identity.token
    second.withdraw()
    assert second.sender() is None
