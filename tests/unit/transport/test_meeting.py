"""Processes that meet in a store go on as soon as the last one comes, however seldom they look for an error."""

import threading
from datetime import timedelta

import pytest

from megatron_router_replay.transport.group import Connections, open_store
from megatron_router_replay.transport.plan import TransportError

SOON_S = 20
"""For threads on a busy machine; a look takes longer."""


@pytest.fixture
def pair():
    store = open_store("127.0.0.1", is_server=True)
    pair = [
        Connections(store, rank=rank, members=["a", "b"], timeout=timedelta(seconds=SOON_S), group=object())
        for rank in range(2)
    ]
    for each in pair:
        each._look_s = 10 * SOON_S
    yield pair
    for each in pair:
        each._is_over.set()


def test_a_process_that_waits_goes_on_when_the_last_one_comes(pair):
    first, last = pair
    for meeting in range(1, 4):
        thread = threading.Thread(target=first._meet, args=(timedelta(seconds=1), float("inf")))
        thread.start()
        while last._store.add("arrived", 0) < 2 * meeting - 1:  # a client serves one call at a time, and `first` waits
            pass
        last._meet(timedelta(seconds=1), float("inf"))
        thread.join(SOON_S)
        assert not thread.is_alive()


def test_a_process_that_waits_sees_an_error_when_it_looks(pair):
    first, last = pair
    first._look_s = 0.01
    last.fail("MRR603: b failed.")
    with pytest.raises(TransportError, match="MRR603: b failed"):
        first._meet(timedelta(seconds=1), float("inf"))


@pytest.mark.parametrize(("num_members", "seconds"), [(1, 0.01), (32, 0.032), (1024, 1.0), (100_000, 1.0)])
def test_the_store_gets_some_thousand_looks_a_second_at_most_and_each_process_one(num_members, seconds):
    store = open_store("127.0.0.1", is_server=True)
    members = [str(rank) for rank in range(num_members)]
    assert Connections(store, rank=0, members=members, timeout=timedelta(1))._look_s == seconds
