"""A rank without the hooks: the other ranks name it, and do not hang in their first collective."""

import logging
import re
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.trainers import peers


class _Log(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def come(sleeps, absent, timeout):
    """Run on a rank: wait for all, after `sleeps` seconds of rank 1; return the log's lines and the error."""
    log, store = _Log(), dist.distributed_c10d._get_default_store()
    logging.getLogger(peers.__name__).addHandler(log)
    before, error = store.timeout, None
    peers._met.clear()
    store.set_timeout(timedelta(seconds=timeout))
    dist.barrier()  # on a busy machine a rank may begin later than the other one sleeps
    try:
        with mock.patch.object(peers, "PATIENCE", timedelta(seconds=0.2)):
            if dist.get_rank() == 1:
                time.sleep(sleeps)
            if dist.get_rank() not in absent:
                peers.wait_for_peers("SkyRL")
                peers.wait_for_peers("SkyRL")  # all came before
    except ReplayStateError as raised:
        error = str(raised)
    finally:
        store.set_timeout(before)
        logging.getLogger(peers.__name__).removeHandler(log)
    dist.barrier()
    return log.lines, error


@pytest.mark.slow
def test_a_late_rank_is_named_and_waited_for_and_one_that_never_comes_raises(on_ranks):
    assert on_ranks(2, come, 0, [], 30) == [([], None)] * 2
    (lines, error), other = on_ranks(2, come, 2.5, [], 30)  # a FileStore notices a time-out after a second
    assert (error, other) == (None, ([], None))
    (line,) = lines
    named = "rank 0 is at its first pass that replays, and ranks 1 are not. If they neither load"
    assert line.startswith(f"after 0:00:00.200000, {named}")
    ((line,), error), other = on_ranks(2, come, 0, [1], 1)
    assert other == ([], None)
    assert re.match(rf"MRR809: after 0:00:01, {named}.*let each process of SkyRL import this package", error)
    assert on_ranks(2, come, 0, [], 30) == [([], None)] * 2  # a rank that came before counts anew


def test_a_job_of_one_rank_waits_for_none():
    peers.wait_for_peers("SkyRL")
