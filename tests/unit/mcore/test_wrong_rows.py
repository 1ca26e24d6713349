"""Wrong rows: named by sample and token, with the cause that the trace shows, and left out of the next replay."""

import re

import numpy as np
import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay import checks
from megatron_router_replay.mcore.judge.blocks import EVIDENCE, Block
from megatron_router_replay.mcore.judge.causes import cause_of, moved_by
from megatron_router_replay.mcore.judge.places import ComparedPlaces, names_of
from tests.unit.mcore.tiny_chunk import VOCAB, Chunk

LENGTHS = [200, 300, 300]


def recorded(chunk):
    """A trace of three samples, as the chunk routes them live."""
    ids = torch.randint(VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    with mrr.record(chunk) as recording:
        recording.microbatch(torch.arange(len(ids)).unsqueeze(0))
        chunk(ids.unsqueeze(0))
    trace = recording.trace()
    return with_routes(trace, trace.topk_indices, sequence_lengths=LENGTHS, sample_ids=["req-3", "req-8", "req-17"])


def with_routes(trace, routes, **others):
    names = ("layer_numbers", "num_experts", "token_ids", "sequence_lengths", "sample_ids")
    return mrr.RoutingTrace(topk_indices=routes, **({name: getattr(trace, name) for name in names} | others))


def replay(trace, **options):
    """Replay all samples in one row, all layers compared; return the session, closed, and its error."""
    session = mrr.replay(chunk := Chunk(), trace, ask_every_layer=True, **options)
    session.microbatch(torch.arange(trace.num_tokens).unsqueeze(0))
    chunk(trace.token_ids.long().unsqueeze(0))
    try:
        session.close()
    except mrr.RouterReplayError as error:
        return session, str(error)
    return session, ""


def stale(routes):
    routes[600:667] = routes[599]


def foreign(routes):
    routes[600:667] = torch.tensor([6, 7])


def filler(routes):
    routes[600:667] = torch.arange(2)


def another_sample(routes):
    routes[500:600] = routes[200:300].clone()


def late(routes):
    routes[540:700] = routes[533:693].clone()


def throughout(routes):
    routes[500:] = routes[599]


def one_layer(routes):
    routes[500:600, 1] = routes[200:300, 1].clone()


SAID = {
    # fault -> where, and its cause
    stale: (
        r"sample 2 \('req-17'\), tokens 10\d to 16\d, layers 1, 2, 3: routes",
        r"6\d of these 6\d rows are one and the same row, that of the token before",
    ),
    foreign: (
        r"sample 2 \('req-17'\), tokens 10\d to 16\d, ",
        "are one and the same row: a stale capture in the engine",
    ),
    filler: (r"sample 2 \('req-17'\), tokens 10\d to 16\d, ", "experts 0 to 1 of every layer: a filler of lost rows"),
    another_sample: (
        r"sample 2 \('req-17'\), tokens \d to 9\d, ",
        r"they are the routes of sample 1 \('req-8'\), tokens \d to 9\d",
    ),
    late: (r"sample 2 \('req-17'\), tokens 4\d to \d+, ", "they fit the tokens 7 places before them"),
    throughout: (
        r"sample 2 \('req-17'\), tokens \d to 29\d, ",
        r"(29\d|300) of these (29\d|300) rows are one and the same row: a stale capture",
    ),
    one_layer: (r"sample 2 \('req-17'\), tokens \d to 9\d, layer 2: ", "the other layers of these tokens are right"),
}


@pytest.mark.parametrize("fault", SAID, ids=lambda fault: fault.__name__)
def test_an_error_names_sample_and_tokens_and_the_next_replay_leaves_them_out(fault):
    right = recorded(Chunk())
    routes = right.topk_indices.clone()
    fault(routes)
    session, error = replay(with_routes(right, routes))
    where, cause = SAID[fault]
    assert re.search(where, error), error
    assert re.search(cause, error), error
    wrong = session.report.wrong_rows
    differs = (routes != right.topk_indices).flatten(1).any(1)
    assert wrong.shape == (right.num_tokens,)
    assert (wrong & differs).sum() >= 0.9 * differs.sum()
    assert (wrong & ~differs).sum() <= 0.1 * right.num_tokens
    session, error = replay(with_routes(right, routes).without_routes(wrong))
    assert error == ""
    assert session.report.rows_live == int(wrong.sum())
    assert not session.report.wrong_rows.any()


def test_a_session_may_warn_of_wrong_routes_in_place_of_raising(monkeypatch):
    monkeypatch.setattr(checks, "_warned", set())
    right = recorded(Chunk())
    routes = right.topk_indices.clone()
    stale(routes)
    with pytest.warns(RuntimeWarning, match="tokens 10\\d to 16\\d.*are one and the same row"):
        session, error = replay(with_routes(right, routes), wrong_routes="warn")
    assert error == ""
    assert session.report.wrong_rows[605:660].all()
    assert session.report.metrics()["router_replay/block_evidence"] >= EVIDENCE
    session, error = replay(with_routes(right, routes), min_agreement=0)
    assert error == ""
    assert session.report.agreement is not None, "every layer is compared"
    assert not session.report.wrong_rows.any(), "and nothing is judged"
    with pytest.raises(mrr.RouterReplayError, match="MRR101: wrong_routes='ignore' must be 'raise' or 'warn'"):
        mrr.replay(Chunk(), right, wrong_routes="ignore")


def test_a_mask_is_none_while_the_session_is_open_and_no_number():
    trace = recorded(Chunk())
    session = mrr.replay(Chunk(), trace)
    assert session.report.wrong_rows is None
    session.close(check=False)
    session, _ = replay(trace)
    assert not [name for name in session.report.metrics() if "wrong" in name]


def small_trace(routes, **options):
    return mrr.RoutingTrace(topk_indices=routes, layer_numbers=range(1, routes.shape[1] + 1), num_experts=64, **options)


def test_rows_are_named_by_the_first_of_their_samples():
    trace = small_trace(torch.rand(30, 2, 64).topk(2).indices, sequence_lengths=[10, 20])
    assert names_of(trace, np.arange(4, 8)) == "sample 0, tokens 4 to 7"
    assert names_of(trace, np.arange(4, 18)) == "sample 0, tokens 4 to 9 and 1 more sample"
    three = small_trace(trace.topk_indices, sequence_lengths=[10, 5, 15], sample_ids=["a", "b", "c"])
    assert names_of(three, np.arange(9, 16)) == "sample 0 ('a'), tokens 9 to 9 and 2 more samples"
    assert names_of(three, np.arange(10, 15)) == "sample 1 ('b'), tokens 0 to 4"
    assert names_of(small_trace(trace.topk_indices), np.arange(4, 8)) == "rows 4 to 7 of the trace"


def places(*parts, trace=None):
    """Take (micro-batch, shape, s-major rows of the trace) of each part."""
    of_parts = [((0, number), shape, None if rows is None else torch.tensor(rows)) for number, shape, rows in parts]
    return ComparedPlaces.of(of_parts, rank=0, trace=trace)


def test_places_without_rows_of_the_trace_are_named_by_position():
    two = places((4, (3, 2), None), (5, (4, 1), None))
    assert list(two.sequences()) == [("0.4.0", 0, 3), ("0.4.1", 3, 6), ("0.5.0", 6, 10)]
    assert two.name(Block(9.0, 2, 5)) == "chunk 0, micro-batch 4, sequence 0, positions 2 to 2"
    assert two.name(Block(9.0, 3, 5)) == "chunk 0, micro-batch 4, sequence 1, positions 0 to 1"
    assert two.name(Block(9.0, 6, 10)) == "chunk 0, micro-batch 5, sequence 0, positions 0 to 3"
    assert len(two.trace_rows(Block(9.0, 6, 10))) == 0
    assert two.versions() is None


def test_places_are_rows_of_the_trace_only_if_all_are_known():
    versions = torch.tensor([7, 8, 9, 9, 9, 9], dtype=torch.int32)
    trace = small_trace(torch.rand(6, 1, 64).topk(2).indices, weight_version=versions)
    known, unknown = (4, (2, 2), [0, 2, 1, -1]), (5, (2, 1), None)
    assert places(known, trace=None).rows is None, "rows of no trace"
    assert places(known, unknown, trace=trace).rows is None
    assert places(trace=trace).rows is None
    one = places(known, trace=trace)
    assert one.rows.tolist() == [0, 1, 2, -1], "sequence after sequence"
    assert one.versions().tolist() == [7, 8, 9, -1]
    assert one.trace_rows(Block(9.0, 0, 4)).tolist() == [0, 1, 2]
    assert one.name(Block(9.0, 0, 4)) == "rows 0 to 2 of the trace"
    assert one.name(Block(9.0, 3, 4)) == "chunk 0, micro-batch 4, sequence 1, positions 1 to 1", (
        "of a row without a place"
    )


def random_routes(num=200):
    return torch.rand(num, 3, 64, generator=torch.Generator().manual_seed(0)).topk(2).indices


def test_a_row_repeats_if_three_of_four_fifths_of_a_block_do():
    repeats = "are one and the same row"
    routes = random_routes()
    routes[100:103] = routes[50]
    assert repeats in cause_of(small_trace(routes), np.arange(100, 103))
    assert cause_of(small_trace(routes), np.arange(100, 102)) == "", "two rows are too few"
    routes[103] = routes[50]
    assert cause_of(small_trace(routes), np.arange(100, 105)).startswith(f"4 of these 5 rows {repeats}")
    assert repeats not in cause_of(small_trace(routes), np.arange(100, 106))


def test_the_token_before_a_repeated_row_is_of_the_trace():
    routes = random_routes()
    routes[1:9] = routes[0]
    assert "that of the token before them" in cause_of(small_trace(routes), np.arange(1, 9))
    routes[-1] = routes[0]
    assert "before them" not in cause_of(small_trace(routes), np.arange(9)), "none is before the first"


@pytest.mark.parametrize(
    ("begin", "source", "num", "said"),
    [
        (100, 0, 50, "rows 0 to 49"),
        (0, 150, 50, "rows 150 to 199"),
        (100, 20, 30, "rows 20 to 69"),
        (100, 20, 29, None),  # less than 0.6 of them
        (100, 160, 40, "rows 160 to 199"),  # the last ten would be past the end
        (30, 0, 30, "rows 0 to 49"),
    ],
)
def test_a_copied_block_is_told_up_to_the_ends_of_the_trace(begin, source, num, said):
    routes = random_routes()
    routes[begin : begin + num] = routes[source : source + num].clone()
    cause = cause_of(small_trace(routes), np.arange(begin, begin + 50))
    assert cause == ("" if said is None else f"they are the routes of {said} of the trace")


def test_a_copied_block_may_begin_with_rows_of_its_own():
    routes = random_routes()
    routes[120:150] = routes[40:70]
    assert cause_of(small_trace(routes), np.arange(100, 150)) == "they are the routes of rows 20 to 69 of the trace"


@pytest.mark.parametrize("num_different", [3, 4])
def test_a_copied_block_has_four_different_rows(num_different):
    routes = random_routes()
    routes[20:32] = routes[20 + torch.arange(12) % num_different]
    routes[100:112] = routes[20:32]
    cause = cause_of(small_trace(routes), np.arange(100, 112))
    assert cause == ("they are the routes of rows 20 to 31 of the trace" if num_different == 4 else "")


def test_a_cause_is_said_of_most_rows_or_not_at_all():
    routes = torch.rand(200, 3, 64, generator=torch.Generator().manual_seed(0)).topk(2).indices
    rows = np.arange(100, 150)
    assert cause_of(small_trace(routes), rows) == ""
    routes[100:125] = routes[20:45]
    assert cause_of(small_trace(routes), rows) == "", "half of them"
    routes[100:135] = routes[20:55]
    assert cause_of(small_trace(routes), rows) == "they are the routes of rows 20 to 69 of the trace"


@pytest.mark.parametrize("moved", [-3, 5, 100])
def test_a_stream_that_moved_is_told_by_its_number_of_tokens(moved):
    first = np.random.default_rng(0).integers(0, 64, 400)
    experts = np.stack([np.roll(first, moved), np.full(400, 63)], 1)
    said = moved_by(experts, first, Block(99.0, 150, 250), 0, 400)
    assert said == f"they fit the tokens {abs(moved)} places {'before' if moved > 0 else 'after'} them"
    assert moved_by(experts, np.zeros(400, int), Block(99.0, 150, 250), 0, 400) == "", "all tokens fit alike"


FIRST = np.random.default_rng(0).integers(0, 64, 400)


def said_of_moved(moved, first, stop, experts=None, begin=0, end=400):
    experts = np.roll(FIRST, moved) if experts is None else experts
    return moved_by(experts[:, None], FIRST, Block(99.0, first, stop), begin, end)


@pytest.mark.parametrize("moved", [1, -1, 128, -128])
def test_a_stream_is_searched_for_up_to_128_tokens_away(moved):
    places = "1 place" if abs(moved) == 1 else "128 places"
    assert f"{places} {'before' if moved > 0 else 'after'}" in said_of_moved(moved, 150, 250)
    assert said_of_moved(129 if moved > 0 else -129, 150, 250) == "", "too far away"
    assert said_of_moved(0, 150, 250) == "", "their own tokens"


def test_a_stream_that_moved_fits_tokens_of_its_own_sequence():
    assert "8 places before" in said_of_moved(8, 0, 16), "half of its rows, eight at least"
    assert said_of_moved(8, 0, 15) == ""
    assert "8 places before" in said_of_moved(8, 100, 116, begin=100)
    assert said_of_moved(9, 100, 116, begin=100) == "", "seven rows"
    assert "8 places after" in said_of_moved(-8, 384, 400)
    assert "8 places after" in said_of_moved(-8, 284, 300, end=300)
    assert said_of_moved(-9, 284, 300, end=300) == "", "seven rows"
    assert "15 places before" in said_of_moved(15, 0, 30)
    assert said_of_moved(16, 0, 30) == "", "less than half"
    assert said_of_moved(1, 1, 20, end=9) == "", "in a short sequence, by one place alone"
    assert "1 place before" in said_of_moved(1, 0, 20, end=9), "by one place before or after"


@pytest.mark.parametrize(("num", "is_said"), [(75, True), (76, False), (100, False)])
def test_a_stream_that_moved_fits_clearly_better_than_by_any_other_number_of_tokens(num, is_said):
    first = np.arange(400)
    by_9 = np.where(first < 150 + num, np.roll(first, 9), -2)
    experts = np.stack([np.roll(first, 5), by_9], 1)
    assert bool(moved_by(experts, first, Block(99.0, 150, 250), 0, 400)) == is_said


@pytest.mark.parametrize(("num", "is_said"), [(60, True), (59, False)])
def test_a_stream_that_moved_fits_most_rows(num, is_said):
    experts = np.where(np.arange(400) < 150 + num, np.roll(FIRST, 5), 64)
    assert bool(said_of_moved(5, 150, 250, experts)) == is_said
