"""Checks and counts of values on a GPU are read once, at the end: tensors that say they are there take the same way."""

from types import SimpleNamespace

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError
from megatron_router_replay.mcore.core.counts import Counts
from megatron_router_replay.mcore.sessions.group_check import GroupResult
from tests.unit.mcore.tiny_chunk import ROWS, Chunk, random_trace


class OnAGpu(torch.Tensor):
    """Lies on the CPU and says that it does not."""

    device = torch.device("cuda", 0)


def on_a_gpu(values):
    return torch.as_tensor(values).as_subclass(OnAGpu)


@pytest.fixture
def session():
    chunk = Chunk()
    yield mrr.replay(chunk, random_trace(8), min_replayed=0)
    mrr.close_sessions(chunk)


def check_range(session, rows):
    return session._microbatches.strategy.checks.check_range(on_a_gpu(rows), 8)


def test_rows_that_fit_raise_nothing(session):
    for rows in (ROWS[:1], ROWS, ROWS[:1] - 1):
        assert check_range(session, rows) is True
    assert check_range(session, ROWS[:0]) is False
    session.close()


@pytest.mark.parametrize("row", [-2, 8])
def test_a_row_outside_the_trace_raises_at_the_end(session, row):
    for rows in (ROWS, ROWS.index_fill(1, torch.tensor(2), row), ROWS):
        check_range(session, rows)
    message = r"^MRR202: rows reach outside the trace's rows 0\.\.7; padding is -1\.\n  A session is checked at the end"
    with pytest.raises(LayoutError, match=message):
        session.close()


def test_all_failed_checks_are_named(session):
    session.microbatch(ROWS)
    for fails, name in ((True, "the first"), (False, "the second"), (True, "the third")):
        session._microbatches.strategy.checks.check(on_a_gpu(torch.tensor(fails)), name)
    message = r"^the first\n  the third\n  rank 0, chunk 0, micro-batch 0, layer 1: routes"
    with pytest.raises(LayoutError, match=message):
        session.close()


def test_a_failed_check_alone_puts_its_rank_at_fault(session):
    told = []
    finish, fail = lambda numbers: told.append(numbers) or GroupResult(), lambda: None
    session._microbatches.group_check = SimpleNamespace(finish=finish, fail=fail)
    session._microbatches.strategy.checks.check(on_a_gpu(torch.tensor(True)), "the first")
    with pytest.raises(LayoutError, match=r"^the first"):
        session.close()
    assert [numbers.at_fault for numbers in told] == [True]


# ---- counts


def test_what_the_host_knows_is_added_at_once_and_the_rest_when_it_is_read():
    first, second = Counts(), Counts()
    first.add(a=2, b=torch.tensor(True))
    first.add(a=on_a_gpu(5), c=on_a_gpu(True))
    second.add(a=on_a_gpu(False))
    assert (first["a"], first["b"], first["c"], second["a"]) == (2, 1, 0, 0)
    Counts.read([first, second])
    assert (first["a"], first["b"], first["c"], second["a"]) == (7, 1, 1, 0)
    assert (first.positive, second.positive) == (["a", "b", "c"], [])
    Counts.read([first])
    assert first["a"] == 7, "read once"


def test_many_counts_are_added_up_where_they_are():
    tally = Counts()
    for number in range(1000):
        tally.add(a=on_a_gpu(number), b=on_a_gpu(number % 2 == 0))
        assert len(tally._pending) < 300
    Counts.read([tally])
    assert (tally["a"], tally["b"]) == (499_500, 500)
