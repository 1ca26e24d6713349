"""What a recording says of its rows: of two virtual stages, rows that came twice, not at all; and traces that do not fit."""

import sys

import pytest
import torch

import megatron_router_replay as mrr
from benchmarks.measure import peak_above
from megatron_router_replay.errors import LayoutError, ReplayStateError, TraceError
from megatron_router_replay.mcore.core.hooks import sources_of
from tests.unit.mcore.tiny_chunk import (
    EXPERTS,
    HIDDEN,
    ROWS,
    TOPK,
    VOCAB,
    Chunk,
    as_map,
    disturb,
    random_trace,
    reentrant,
    tokens,
    watched,
    wrong_replays,
)


def virtual_stages():
    """Layers 1 and 2, and layers 3 and 4 of one model."""
    stages = [Chunk(2), Chunk(2, seed=1)]
    for stage in stages:
        stage.config.num_layers = 4
    for number, router in zip((3, 4), stages[1].routers):
        router.layer_number = number
    return stages


def recorded(chunk, *rows, **options):
    with mrr.record(chunk) as recording:
        for number, of_microbatch in enumerate(rows):
            recording.microbatch(of_microbatch, **options)
            chunk(tokens(*of_microbatch.shape), number)
    return recording


def test_layers_stand_in_order_in_one_trace_also_if_the_chunks_do_not():
    stages = virtual_stages()
    with watched(stages[0]) as first, watched(stages[1]) as second, mrr.record(stages[::-1]) as recording:
        for stage in stages:
            recording.microbatch(ROWS, stage)
            stage(tokens())
    trace = recording.trace()
    assert trace.layer_numbers == (1, 2, 3, 4)
    assert (trace.num_experts, bool(trace.replay_mask.all())) == (EXPERTS, True)
    assert (len(first | second), wrong_replays(first | second, trace)) == (4, 0)
    assert trace.token_ids.tolist() == tokens().reshape(-1).tolist()
    assert recording.report.microbatches == 1  # of the first chunk


def test_a_row_that_one_chunk_routed_and_the_other_did_not_raises():
    stages = virtual_stages()
    with mrr.record(stages) as recording:
        recording.microbatch(ROWS, stages[0])
        stages[0](tokens())
        recording.microbatch(ROWS[:, :3], stages[1])
        stages[1](tokens(2, 3))
    with pytest.raises(TraceError, match="row 3 was routed in some of this rank's chunks only"):
        recording.trace()


@pytest.mark.parametrize(
    ("of_first", "of_second", "message"),
    [
        ([0, 1], [1, 0], "row 0 was routed for two different tokens, last in chunk 1"),
        ([0, 1], [0, 1, 2], "chunk 1 recorded samples of other lengths than the first chunk"),
    ],
)
def test_chunks_that_ran_different_micro_batches_raise(of_first, of_second, message):
    """Each chunk numbers the tokens of its forwards: a row would have the routes of two tokens."""
    stages = virtual_stages()
    with mrr.record(stages, padding_token_ids=[]) as recording:
        for stage, seeds in zip(stages, (of_first, of_second)):
            for seed in seeds:
                stage(tokens(seed=seed))
    with pytest.raises(TraceError, match=message):
        recording.trace()


def test_several_chunks_must_be_named():
    stages = virtual_stages()
    session = mrr.record(stages)
    with pytest.raises(LayoutError, match="this rank has 2 model chunks: pass the one that runs"):
        session.microbatch(ROWS)
    with pytest.raises(LayoutError, match="Chunk is none of this session's 2 model chunks"):
        session.microbatch(ROWS, Chunk())
    session.microbatch(ROWS, torch.nn.ModuleDict({"module": stages[1]}).module)
    mrr.close_sessions(stages)


def test_a_row_that_came_twice_must_have_had_the_same_experts():
    chunk = Chunk()
    assert recorded(chunk, ROWS, ROWS).trace().num_tokens == 8
    recording = mrr.record(chunk)
    for number in range(2):
        recording.microbatch(ROWS)
        chunk(tokens(), number)
        disturb(chunk)
    recording.close()
    with pytest.raises(TraceError, match=r"row \d was routed twice, to different experts"):
        recording.trace()


def test_a_row_of_two_tokens_of_one_forward_raises_also_where_they_have_the_same_experts():
    chunk = Chunk()
    chunk.embedding.data[:] = chunk.embedding.data[:1]
    recording = recorded(chunk, torch.tensor([[0, 1, 1, 2]]))
    with pytest.raises(TraceError, match="row 1 was routed for two different tokens, last in chunk 0"):
        recording.trace()


def test_rows_that_were_not_recorded_are_no_routes_and_the_length_may_be_given():
    chunk = Chunk()
    rows = ROWS.clone()
    rows[0, 1] = -1
    recording = recorded(chunk, rows)
    expected = [row not in (1,) for row in range(8)]
    assert recording.trace().replay_mask.tolist() == expected
    longer = recording.trace(num_tokens=10)
    assert longer.replay_mask.tolist() == [*expected, False, False]
    assert longer.token_ids[[1, 8, 9]].tolist() == [-1, -1, -1]
    assert (recording.report.rows_live, recording.report.rows_padding) == (8, 0)
    assert recording.trace(num_tokens=8).num_tokens == 8
    with pytest.raises(TraceError, match="cannot return 7 rows: row 7 was recorded"):
        recording.trace(num_tokens=7)


class Wide(Chunk):
    """300 experts, more than a byte can name; its one layer routes, and has no experts."""

    def __init__(self):
        super().__init__(1, num_moe_experts=300)
        self.routers[0].weight.data = torch.randn(300, HIDDEN, generator=torch.Generator().manual_seed(0))
        self.routers[0].weight.data[256:] *= 3

    def forward(self, input_ids, number=0):
        hidden = self.embedding[input_ids.t()]
        return hidden, self.layers[0].route(hidden)


def test_experts_above_255_are_recorded():
    chunk, maps = Wide(), []
    chunk.routers[0].register_forward_hook(lambda router, args, output: maps.append(output[1]))
    trace = recorded(chunk, ROWS).trace()
    (used,) = maps
    assert used[:, 256:].any()
    assert torch.equal(as_map(trace.layer(1), 300), used.view(4, 2, 300).transpose(0, 1).reshape(8, 300))


def test_a_recording_of_nothing_and_a_stage_without_moe_layers_are_traces():
    trace = recorded(Chunk(), torch.full((2, 4), -1)).trace()
    assert (trace.num_tokens, trace.layer_numbers) == (0, (1, 2, 3))
    chunk = Chunk()
    chunk.layers = torch.nn.ModuleList()
    trace = recorded(chunk, ROWS).trace(num_tokens=8)
    assert (trace.num_tokens, trace.layer_numbers, bool(trace.replay_mask.all())) == (8, (), True)


# Traces that are not of this model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_moe_experts": EXPERTS - 1}, f"layer 1 .* has num_experts={EXPERTS - 1}, the trace {EXPERTS}"),
        ({"moe_router_topk": 3}, "layer 1 .* has topk=3, the trace 2"),
    ],
)
def test_a_trace_of_other_experts_is_refused(options, message):
    chunk = Chunk(**options)
    with pytest.raises(TraceError, match=message):
        mrr.replay(chunk, random_trace(8))
    assert not any(map(sources_of, chunk.routers))


def test_rows_that_were_refused_do_not_lengthen_the_recording():
    chunk = Chunk()
    with mrr.record(chunk) as recording:
        with pytest.raises(LayoutError, match="padding"):
            recording.microbatch(ROWS + 100, padding=torch.ones(2, 4))
        recording.microbatch(ROWS)
        with pytest.raises(ReplayStateError, match="MRR407"):
            recording.microbatch(ROWS + 8)
        chunk(tokens())
    assert recording.trace().num_tokens == 8


def test_rows_by_hand_are_taken_after_a_forward_whose_tokens_were_refused():
    """As the error of a forward without input_ids advises."""
    chunk = Chunk()
    with mrr.record(chunk) as recording:
        with pytest.raises(LayoutError, match="MRR207"):
            chunk(tokens())
        recording.microbatch(ROWS)
        chunk(tokens())
    assert recording.trace().replay_mask.tolist() == [True] * 8


# ---- a recording that numbers tokens itself


def test_one_rank_numbers_tokens_as_they_come_in_each_chunk():
    stages = virtual_stages()
    for stage in stages:
        stage.around = reentrant
    given = [tokens(2, 4), tokens(1, 3) + 1, tokens(2, 1) + 2]
    with (
        watched(stages[0]) as first,
        watched(stages[1]) as second,
        mrr.record(stages, padding_token_ids=[]) as recording,
    ):
        for number, ids in enumerate(given):
            for stage in stages:
                stage(ids, number).sum().backward()
                disturb(stage)
    trace = recording.trace()
    assert trace.token_ids.tolist() == torch.cat([ids.flatten() for ids in given]).tolist()
    rows = torch.arange(13).split([8, 3, 2])
    for number, ids in enumerate(given):
        of_number = {key: maps for key, maps in (first | second).items() if key[0] == number}
        assert [len(maps) for maps in of_number.values()] == [2] * 4
        assert wrong_replays(of_number, trace, rows[number].view(ids.shape)) == 0


@pytest.mark.parametrize("first", ["rows", "none"])
def test_rows_are_for_all_forwards_of_a_recording_or_for_none(first):
    chunk = Chunk()
    with (
        pytest.raises((LayoutError, ReplayStateError), match="MRR406"),
        mrr.record(chunk, padding_token_ids=[]) as recording,
    ):
        if first == "rows":
            recording.microbatch(ROWS)
        chunk(tokens())
        if first == "none":
            recording.microbatch(ROWS + 8)
        chunk(tokens())


# Many rows


def large_recording(chunk, num_forwards, num_rows):
    """A recording as of forwards of many packed tokens; the experts of each row are a function of its number."""
    with mrr.record(chunk, padding_token_ids=[]) as recording:
        chunk(tokens())
    kept = recording._recorded._recorded[0]
    (of_tokens,) = kept
    rows = torch.arange(num_rows)
    routes = ((rows[:, None, None] + torch.arange(len(chunk.layers))[:, None] + torch.arange(TOPK)) % EXPERTS).byte()
    each = of_tokens._replace(
        rows=rows, routes=routes, token_ids=rows.int() % VOCAB, lengths=torch.tensor([num_rows - 7, 7])
    )
    kept[:] = [each] * num_forwards
    return recording, routes


def test_rows_in_any_order_and_with_padding_between_are_placed_whole():
    recording, routes = large_recording(Chunk(), 2, 100)
    (first, second), kept = recording._recorded._recorded[0], recording._recorded._recorded[0]
    order = torch.randperm(100)
    padded = torch.where(order < 90, order, -1)
    kept[:] = [first._replace(rows=padded, routes=routes[order], token_ids=first.token_ids[order]), second]
    trace = recording.trace()
    assert trace.replay_mask.tolist() == [True] * 90 + [False] * 10 + [True] * 100
    assert torch.equal(trace.topk_indices[trace.replay_mask], torch.cat([routes[:90], routes]))
    assert trace.sequence_lengths == (93, 7, 93, 7)


@pytest.mark.parametrize("in_one_forward", [False, True])
def test_rows_that_came_twice_among_others_are_compared_as_sets(in_one_forward):
    recording, routes = large_recording(Chunk(), 1, 100)
    kept = recording._recorded._recorded[0]
    rows, again = torch.arange(100), torch.tensor([97, 3])
    twice = torch.cat([routes, routes[again].flip(2)])
    if in_one_forward:
        kept[:] = [kept[0]._replace(rows=torch.cat([rows, again]), routes=twice, token_ids=None, lengths=None)]
    else:
        values = [(rows, routes), (again, twice[100:])]
        kept[:] = [kept[0]._replace(rows=r, routes=u, token_ids=None, lengths=None) for r, u in values]
    assert torch.equal(recording.trace(num_tokens=100).topk_indices.sort(2).values, routes.sort(2).values)
    kept[-1].routes[-1, 2] = torch.tensor([6, 7]).byte()  # row 3, layer 3: it has 5 and 6
    with pytest.raises(TraceError, match="MRR422: row 3 was routed twice, to different experts"):
        recording.trace(num_tokens=100)


@pytest.mark.parametrize("fault", [[9, 1], [2, 2]])
def test_a_trace_of_a_recording_is_checked(fault):
    recording, routes = large_recording(Chunk(), 1, 100)
    routes[40, 1] = torch.tensor(fault).byte()
    with pytest.raises(TraceError, match=r"MRR103: row 40, layer 2 of topk_indices"):
        recording.trace()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counts of memory are Linux's")
def test_a_trace_takes_the_memory_of_its_result_and_as_much_again_at_most():
    recording, routes = large_recording(Chunk(48), 30, 4096)
    trace = recording.trace()
    result = trace.num_tokens * (48 * TOPK + 1 + 4)
    assert torch.equal(trace.topk_indices[-4096:], routes)
    del trace
    assert 0.9 * result <= peak_above(recording.trace) <= 2 * result
