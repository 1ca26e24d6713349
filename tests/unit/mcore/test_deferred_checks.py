"""What is checked or counted on a GPU is read once, at the end: tensors that say they are there take the same way."""

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


def checks(session):
    return session._microbatches.strategy.checks


def test_rows_that_fit_raise_nothing(session):
    assert checks(session).check_range(ROWS[:1] - 1, 8), "whether some are -1 is not asked"
    for rows in (ROWS[:1], ROWS, ROWS[:1] - 1):
        assert checks(session).check_range(on_a_gpu(rows), 8) is True
    assert checks(session).check_range(on_a_gpu(ROWS[:0]), 8) is False
    session.close()


@pytest.mark.parametrize("bad_first", [True, False])
@pytest.mark.parametrize("row", [-2, 8])
def test_a_row_outside_the_trace_raises_at_the_end_and_names_nothing_else(session, row, bad_first):
    rows = ROWS.clone()
    rows[1, 2] = row
    for given in (rows, ROWS) if bad_first else (ROWS, rows):
        checks(session).check_range(on_a_gpu(given), 8)
    message = r"^MRR202: rows reach outside the trace's rows 0\.\.7; padding is -1\.\n  A session is checked at the end"
    with pytest.raises(LayoutError, match=message):
        session.close()


def test_several_checks_that_failed_are_all_named_with_what_does_not_add_up(session):
    session.microbatch(ROWS)
    checks(session).check(on_a_gpu(torch.tensor(True)), "the first")
    checks(session).check(on_a_gpu(torch.tensor(False)), "the second")
    checks(session).check(on_a_gpu(torch.tensor(True)), "the third")
    with pytest.raises(
        LayoutError, match=r"^the first\n  the third\n  rank 0, chunk 0, micro-batch 0, layer 1: routes"
    ):
        session.close()


def test_a_failed_check_puts_its_rank_at_fault(session):
    checks(session).check(on_a_gpu(torch.tensor(True)), "the first")
    check = SimpleNamespace(finish=lambda numbers: GroupResult(problems=[str(numbers.at_fault)]))
    session._microbatches.group_check = check
    with pytest.raises(LayoutError, match=r"^the first\n  True\n"):
        session.close()


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
