"""What a chunk's forward gets is compared with what was queued for it, in whatever form it comes."""

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError
from tests.unit.mcore.tiny_chunk import HIDDEN, VOCAB, Chunk, as_map, random_trace, tokens, watched

IDS = tokens(1, 8)
ROWS = torch.arange(8).view(1, 8)
OTHERS = (IDS + 1) % VOCAB


class Flat(Chunk):
    """Takes [total] tokens of one packed sequence; its routers get [total, hidden]."""

    def forward(self, input_ids, number=0):
        hidden = self.embedding[input_ids]
        for layer in self.layers:
            layer.router(hidden)
        return hidden


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_flat_input_ids_are_compared_position_by_position(dtype):
    chunk, trace = Flat(), random_trace(8, token_ids=IDS[0])
    with mrr.replay(chunk, trace) as session:
        session.microbatch(ROWS)
        chunk(IDS[0].to(dtype))
    with pytest.raises(LayoutError, match="other input_ids than were queued"), mrr.replay(chunk, trace) as session:
        session.microbatch(ROWS)
        chunk(OTHERS[0].to(dtype))
    with (
        pytest.raises(LayoutError, match=r"gets input_ids \[7\], its routing_rows are \[1, 8\]"),
        mrr.replay(chunk, trace) as session,
    ):
        session.microbatch(ROWS)
        chunk(IDS[0, :7].to(dtype))


def test_flat_input_ids_are_recorded():
    chunk = Flat()
    with mrr.record(chunk) as recording:
        recording.microbatch(ROWS)
        chunk(IDS[0])
    assert recording.trace().token_ids.tolist() == IDS[0].tolist()


@pytest.mark.parametrize("by_name", [True, False])
def test_a_single_token_that_differs_is_found_and_one_that_is_not_known_is_not_compared(by_name):
    ids = IDS[0].clone()
    ids[3] = -1  # of a recording that did not see it
    chunk, trace = Chunk(), random_trace(8, token_ids=ids)
    rows = ROWS.clone()
    rows[0, 6] = -1

    def call(input_ids):
        return chunk(input_ids=input_ids) if by_name else chunk(input_ids)

    for position in range(8):
        changed = IDS.clone()
        changed[0, position] = OTHERS[0, position]
        session = mrr.replay(chunk, trace)
        session.microbatch(rows)
        if position in (3, 6):
            call(changed)
            session.close()
            continue
        with pytest.raises(LayoutError, match="micro-batch 0 of chunk 0 got other input_ids"):
            call(changed)
        mrr.close_sessions(chunk)


def test_token_0_is_a_token_as_any_other():
    ids = IDS.clone()
    ids[0, 4] = 0
    chunk, trace = Chunk(), random_trace(8, token_ids=ids[0])
    with pytest.raises(LayoutError, match="got other input_ids"), mrr.replay(chunk, trace) as session:
        session.microbatch(ROWS)
        chunk(torch.where(ids == 0, 1, ids))


def test_tokens_that_the_caller_gives_are_compared_with_the_trace_at_once():
    chunk, trace = Chunk(), random_trace(8, token_ids=IDS[0])
    with mrr.replay(chunk, trace) as session:
        with pytest.raises(LayoutError, match=r"input_ids\[0, 0\] is .* but its routing row 0 was recorded for token"):
            session.microbatch(ROWS, token_ids=OTHERS)
        session.microbatch(ROWS, token_ids=IDS)
        chunk(IDS)
    with mrr.replay(chunk, random_trace(8)) as session:
        with pytest.raises(LayoutError, match="token_ids were given for comparison, but the trace has none"):
            session.microbatch(ROWS, token_ids=IDS)
        session.microbatch(ROWS)
        chunk(IDS)


class OfHiddenStates(Chunk):
    """A later pipeline stage: its forward gets what is no tokens, or tokens as they were before packing."""

    def forward(self, *args, **kwargs):
        hidden = torch.zeros(8, 1, HIDDEN)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


@pytest.mark.parametrize(
    "argument",
    [
        torch.zeros(3, 5),
        torch.nested.nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged),
        None,
        "what a stage may be given",
    ],
    ids=["floats", "nested", "None", "text"],
)
@pytest.mark.parametrize("by_name", [True, False])
def test_what_says_nothing_of_positions_is_not_compared(argument, by_name):
    chunk, trace = OfHiddenStates(), random_trace(8, token_ids=IDS[0])
    with watched(chunk) as seen, mrr.replay(chunk, trace) as session:
        session.microbatch(ROWS)
        chunk(input_ids=argument) if by_name else chunk(argument)
        session.microbatch(ROWS)
        chunk()
    assert torch.equal(seen[0, 2][1], as_map(trace.layer(2)))


@pytest.mark.parametrize(("row", "fits"), [(-2, False), (-1, True), (0, True), (7, True), (8, False)])
def test_rows_lie_in_the_trace_to_the_last(row, fits):
    chunk, trace = Chunk(), random_trace(8)
    rows = ROWS.clone()
    rows[0, 2] = row
    session = mrr.replay(chunk, trace)
    if fits:
        session.microbatch(rows)
        with watched(chunk) as seen:
            chunk(IDS)
        session.close()
        routed = rows[0] >= 0
        assert torch.equal(seen[0, 3][0][routed], as_map(trace.layer(3)[rows[0][routed]]))
        return
    with pytest.raises(LayoutError, match=r"routing_rows reach outside the trace's rows 0\.\.7; no row is -1"):
        session.microbatch(rows)
    mrr.close_sessions(chunk)


@pytest.mark.parametrize(("row", "fits"), [(-2, False), ((1 << 31) - 1, True), (1 << 31, False)])
def test_rows_of_a_recording_lie_below_two_to_the_31(row, fits):
    rows = ROWS.clone()
    rows[0, 2] = row
    chunk = Chunk()
    recording = mrr.record(chunk)
    if fits:
        recording.microbatch(rows)
    else:
        with pytest.raises(LayoutError, match="routing_rows reach outside"):
            recording.microbatch(rows)
    mrr.close_sessions(chunk)


def test_a_row_that_another_rank_routed_raises_and_one_of_a_token_without_a_route_does_not():
    chunk = Chunk()
    known = torch.arange(8) != 5
    ids = torch.where(torch.arange(8) == 6, -1, IDS[0])  # 5 has a token and no route, 6 a route and no token
    with mrr.replay(chunk, random_trace(8, replay_mask=known, token_ids=ids)) as session:
        session.microbatch(ROWS)
        chunk(IDS)
    ids[5] = -1
    session = mrr.replay(chunk, random_trace(8, replay_mask=known, token_ids=ids))
    with pytest.raises(
        LayoutError, match=r"rows that the trace knows nothing of \(row 5, 2 in all\).*recording\.gather"
    ):
        session.microbatch(torch.tensor([[0, 5, 2, 5], [-1, 6, 3, 7]]))
    session.microbatch(torch.tensor([[0, 1, 2, 3], [-1, 6, 4, 7]]))
    mrr.close_sessions(chunk)


@pytest.mark.parametrize("row", range(8))
def test_each_single_trained_row_without_a_route_raises(row):
    chunk, others = Chunk(), torch.arange(8) != row
    session = mrr.replay(chunk, random_trace(8, replay_mask=others))
    with pytest.raises(LayoutError, match=rf"no route \(1 of them, the first is token {row} "):
        session.microbatch(ROWS, trained=torch.ones(1, 8))
    session.microbatch(ROWS, trained=others.view(1, 8))
    mrr.close_sessions(chunk)


@pytest.mark.parametrize("row", [0, 1, 7])
def test_a_row_that_another_rank_routed_may_be_any_and_token_0_is_known(row):
    ids = IDS[0].clone()
    ids[row], ids[4] = -1, 0
    known = (torch.arange(8) != row) & (torch.arange(8) != 4)
    chunk = Chunk()
    session = mrr.replay(chunk, random_trace(8, replay_mask=known, token_ids=ids))
    with pytest.raises(LayoutError, match=rf"knows nothing of \(row {row}, 1 in all\)"):
        session.microbatch(ROWS)
    session.microbatch(torch.where(ROWS == row, -1, ROWS))  # 4 has a token
    mrr.close_sessions(chunk)


@pytest.mark.parametrize(
    "start", [mrr.record, lambda chunk: mrr.replay(chunk, random_trace(8))], ids=["record", "replay"]
)
@pytest.mark.parametrize("position", [0, 7])
def test_each_single_position_that_is_padding_and_has_a_row_raises(start, position):
    chunk = Chunk()
    padding = torch.zeros(1, 8, dtype=torch.bool)
    padding[0, position] = True
    session = start(chunk)
    with pytest.raises(LayoutError, match="says is padding has a routing row"):
        session.microbatch(ROWS, padding=padding)
    with pytest.raises(LayoutError, match="a trained position has"):
        session.microbatch(torch.where(padding, -1, ROWS), trained=padding)
    session.microbatch(torch.where(padding, -1, ROWS), padding=padding, trained=~padding)
    mrr.close_sessions(chunk)


@pytest.mark.parametrize(
    "start", [mrr.record, lambda chunk: mrr.replay(chunk, random_trace(8, token_ids=IDS[0]))], ids=["record", "replay"]
)
def test_rows_of_no_batch_and_values_of_another_shape_than_the_rows_are_refused(start):
    chunk = Chunk()
    session = start(chunk)
    for rows in (ROWS.view(1, 2, 4), ROWS[0, 0]):
        with pytest.raises(LayoutError, match="routing_rows must have the shape of input_ids"):
            session.microbatch(rows)
    for values in ({"token_ids": IDS.t()}, {"padding": ROWS[0] < 0}, {"trained": ROWS[:, :1] >= 0}):
        (name,) = values
        with pytest.raises(LayoutError, match=rf"routing_rows \[1, 8\] and {name} \[.*\] differ in shape"):
            session.microbatch(ROWS, **values)
    mrr.close_sessions(chunk)


def test_the_rows_of_several_micro_batches_are_added_up_by_kind():
    chunk = Chunk()
    rows, padding = ROWS.clone(), torch.zeros(1, 8, dtype=torch.bool)
    rows[0, 5:] = -1
    padding[0, 6:] = True
    with mrr.replay(chunk, random_trace(8)) as session:
        for of_microbatch, known in ((ROWS, None), (rows, padding), (rows, None)):
            session.microbatch(of_microbatch, padding=known)
            chunk(IDS)
    report = session.report
    assert (report.rows_replayed, report.rows_live, report.rows_padding) == (8 + 5 + 5, 0 + 1 + 3, 0 + 2 + 0)
    assert (report.tokens, report.microbatches) == (24, 3)
