"""One rank of two: with sequence parallelism its routers see their part of each sequence, without it the whole."""

from types import SimpleNamespace

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError
from tests.unit.mcore.tiny_chunk import (
    ROWS,
    Chunk,
    as_map,
    random_trace,
    reentrant,
    tokens,
    watched,
    wrong_replays,
)

pytestmark = pytest.mark.usefixtures("one_rank")
PARTS = {0: [0, 4, 1, 5], 1: [2, 6, 3, 7]}  # the rows of each rank's routers, s-major


def chunk_of(rank, *, sequence_parallel=True):
    """A chunk as it stands on one of two ranks; each layer gets the part of the hidden state that this rank has."""
    chunk = Chunk()
    # Megatron-Core's own config refuses this without the rest of tensor parallelism.
    chunk.config.sequence_parallel = sequence_parallel
    for router in chunk.routers:
        router.tp_group = SimpleNamespace(rank=lambda: rank, size=lambda: 2)

    def around(layer, hidden):
        if hidden.shape[0] == 4 and sequence_parallel:
            hidden = hidden[2 * rank : 2 * rank + 2]
        return reentrant(layer, hidden)

    chunk.around = around
    return chunk


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_records_its_part_and_knows_no_token_of_the_other(rank):
    chunk = chunk_of(rank)
    with watched(chunk) as seen, mrr.record(chunk) as recording:
        recording.microbatch(ROWS)
        chunk(tokens())
    trace = recording.trace(num_tokens=8)
    here = torch.zeros(8, dtype=torch.bool)
    here[PARTS[rank]] = True
    assert torch.equal(trace.replay_mask, here)
    assert torch.equal(trace.token_ids, torch.where(here, tokens().reshape(-1).to(torch.int32), -1))
    assert torch.equal(as_map(trace.layer(2)[PARTS[rank]]), seen[0, 2][0])


@pytest.mark.parametrize("rank", [0, 1])
def test_forwards_of_a_recording_follow_one_another_by_all_their_tokens_on_each_rank(rank):
    """The last row of a forward is on one rank alone."""
    chunk, ids = chunk_of(rank), torch.cat([tokens(), tokens(seed=2)])
    with watched(chunk) as seen, mrr.record(chunk, padding_token_ids=[]) as recording:
        for number in (0, 1):
            chunk(ids[2 * number : 2 * number + 2], number)
    trace = recording.trace()
    rows = torch.tensor(PARTS[rank])
    here = torch.zeros(16, dtype=torch.bool)
    here[torch.cat([rows, rows + 8])] = True
    assert torch.equal(trace.replay_mask, here)
    assert torch.equal(trace.token_ids, torch.where(here, ids.reshape(-1).to(torch.int32), -1))
    assert torch.equal(as_map(trace.layer(2)[rows + 8]), seen[1, 2][0])


def test_without_sequence_parallelism_each_rank_routes_all_tokens():
    chunk, trace = chunk_of(1, sequence_parallel=False), random_trace(8)
    with watched(chunk) as seen, mrr.replay(chunk, trace) as session:
        session.microbatch(ROWS)
        chunk(tokens())
    assert wrong_replays(seen, trace) == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_that_are_named_twice_are_counted_on_the_first_rank_alone(rank):
    """All of them get the rows of whole sequences."""
    chunk = chunk_of(rank)
    with mrr.replay(chunk, random_trace(8, token_ids=tokens().reshape(-1)), min_agreement=0) as session:
        session.microbatch(ROWS % 4)
        chunk(tokens()[:1].repeat(2, 1))
    assert session.report.rows_repeated == (0 if rank else 4)


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_that_are_named_twice_raise_on_each_rank_without_tokens(rank):
    with (
        pytest.raises(LayoutError, match="MRR202: rows by hand name 4 rows"),
        mrr.replay(chunk_of(rank), random_trace(8)) as session,
    ):
        session.microbatch(ROWS % 4)


@pytest.mark.parametrize("starts", [lambda chunk: mrr.replay(chunk, random_trace(8), min_agreement=0), mrr.record])
@pytest.mark.parametrize(("rank", "num_padding"), [(0, 1), (1, 2)])
def test_padding_is_counted_on_the_rank_whose_routers_get_it(rank, num_padding, starts):
    chunk, rows = chunk_of(rank), ROWS.clone()
    rows[1, 1:] = -1
    with starts(chunk) as session:
        session.microbatch(rows, padding=rows < 0)
        chunk(tokens())
    report = session.report
    assert report.rows_padding == num_padding
    assert sorted([report.rows_replayed, report.rows_live]) == [0, 4 - num_padding]


def test_rows_of_one_ranks_part_alone_are_refused():
    chunk = chunk_of(1)
    with (
        pytest.raises(LayoutError, match=r"MRR201: .* gets input_ids \[2, 4\], its routes are for \[2, 2\]"),
        mrr.replay(chunk, random_trace(8)) as session,
    ):
        session.microbatch(ROWS[:, 2:])
        chunk.forward(tokens())
