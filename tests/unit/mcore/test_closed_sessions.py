"""A session that is over takes nothing more, and ends once; what is agreed upon at the end cannot be read before."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError
from tests.unit.mcore.tiny_chunk import Chunk, random_trace, tokens

ROWS = torch.arange(8).view(2, 4)
STARTS = {"replay": lambda chunk: mrr.replay(chunk, random_trace(8)), "record": mrr.record}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("by", ["close", "exception", "close_sessions"])
def test_a_session_that_is_over_takes_no_micro_batch_and_cannot_be_started_or_entered_again(start, by):
    chunk = Chunk()
    session = start(chunk)
    session.microbatch(ROWS)
    chunk(tokens())
    if by == "close":
        session.close()
    elif by == "close_sessions":
        mrr.close_sessions(chunk)
    else:
        with pytest.raises(ArithmeticError), session:
            raise ArithmeticError("injected")
    for again in (lambda: session.microbatch(ROWS), session.start, session.__enter__):
        with pytest.raises(ReplayStateError, match=rf"this {session.kind} session is closed: make a new one"):
            again()
    session.close()  # says nothing more
    assert [router.router_replay for router in chunk.routers] == [None] * 3
    assert session.report.microbatches == 1


def test_a_session_that_raised_when_it_was_closed_is_over():
    chunk = Chunk()
    session = mrr.record(chunk)
    session.microbatch(ROWS)
    with pytest.raises(ReplayStateError, match="no forward used them"):
        session.close()
    session.close()
    with pytest.raises(ReplayStateError, match="is closed"):
        session.microbatch(ROWS)


def test_one_of_several_ranks_cannot_tell_the_number_of_rows_while_it_records():
    chunk = Chunk()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        recording = mrr.record(chunk)
        recording.microbatch(ROWS)
        chunk(tokens())
        for read in (recording.trace, recording.gather):
            with pytest.raises(
                ReplayStateError, match="agree on the recording's number of rows when the session is left"
            ):
                read()
        assert recording.trace(num_tokens=9).num_tokens == 9
        mrr.close_sessions(chunk)
    finally:
        dist.destroy_process_group()
