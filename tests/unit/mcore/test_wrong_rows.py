"""Wrong rows: named by sample and token, with the cause that the trace shows, and left out of the next replay."""

import re

import numpy as np
import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay import checks
from megatron_router_replay.mcore.sessions.blocks import EVIDENCE, Block
from megatron_router_replay.mcore.sessions.wrong_rows import cause_of, moved_by, names_of
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
    session.close(verify=False)
    session, _ = replay(trace)
    assert not [name for name in session.report.metrics() if "wrong" in name]


def small_trace(routes, **options):
    return mrr.RoutingTrace(topk_indices=routes, layer_numbers=range(1, routes.shape[1] + 1), num_experts=64, **options)


def test_rows_are_named_by_the_first_of_their_samples():
    trace = small_trace(torch.rand(30, 2, 64).topk(2).indices, sequence_lengths=[10, 20])
    assert names_of(trace, np.arange(4, 8)) == "sample 0, tokens 4 to 7"
    assert names_of(trace, np.arange(4, 18)) == "sample 0, tokens 4 to 9 and 1 more sample"
    assert names_of(small_trace(trace.topk_indices), np.arange(4, 8)) == "rows 4 to 7 of the trace"


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
