"""A session begins once, is on the model that trains, ends once and leaves nothing; copies of its model are not under it."""

import copy
import gc
import weakref

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.mcore.core import dispatch
from megatron_router_replay.mcore.core.hooks import sources_of
from megatron_router_replay.mcore.sessions import freeze as freeze_module
from tests.unit.mcore.tiny_chunk import (
    ROWS,
    STARTS,
    Chunk,
    disturb,
    disturbed_backward,
    flips,
    forward,
    num_recomputed,
    plain,
    random_trace,
    reentrant,
    tokens,
    watched,
    wrong_replays,
)


def left_over(chunk):
    """Every hook on the chunk or its routers, what is at a router's `router_replay`, and who holds it."""
    on = [hook for each in (chunk, *chunk.routers) for hook in (*each._forward_hooks, *each._forward_pre_hooks)]
    on += [router.router_replay for router in chunk.routers if router.router_replay is not None]
    return on + [holder for router in chunk.routers for holder in sources_of(router)]


def test_a_model_may_be_moved_within_a_session():
    """As a trainer does that keeps a model on the host between steps; here it is on no device when the session begins."""
    chunk = Chunk()
    weights = {name: values.clone() for name, values in chunk.state_dict().items()}
    mask = torch.arange(8) != 3
    trace = random_trace(8, token_ids=tokens().flatten(), sequence_lengths=[4, 4], replay_mask=mask)
    with mrr.replay(chunk.to("meta"), trace) as session, watched(chunk) as seen:
        chunk.to_empty(device="cpu").load_state_dict(weights)
        chunk(tokens(), 0)
    assert (wrong_replays(seen, trace), session.report.rows_replayed) == (0, 7)


@pytest.mark.parametrize("by", ["close", "exception", "close_sessions"])
def test_a_session_that_is_over_takes_nothing_and_cannot_be_begun_again(by):
    chunk = Chunk()
    session = mrr.record(chunk)
    forward(chunk, session)
    if by == "close":
        session.close()
    elif by == "close_sessions":
        mrr.close_sessions(chunk)
    else:
        with pytest.raises(ArithmeticError), session:
            raise ArithmeticError("injected")
    for again in (lambda: session.microbatch(ROWS), session._start, session.__enter__):
        with pytest.raises(ReplayStateError, match=rf"this {session.kind} session is closed: make a new one"):
            again()
    session.close()  # says nothing more
    assert left_over(chunk) == []
    assert session.report.microbatches == 1


@pytest.mark.parametrize("held_before", [False, True])
def test_a_session_on_another_model_than_the_one_that_trains_raises(held_before):
    trains = Chunk()
    if held_before:  # by the session of an earlier step
        mrr.record(trains).close(check=False)
    other = r"other routers ran 3 forwards in training mode: the session was opened on another model than the one that"
    with pytest.raises(ReplayStateError, match=other), mrr.record(Chunk()):
        forward(trains).backward()
        forward(trains.eval())


@pytest.mark.parametrize(
    ("padding", "message"),
    [
        (None, "nothing was replayed on this rank: no forward of the model reached all of its routers"),
        (torch.ones(2, 4), "none of 8 tokens was replayed on this rank, for padding= calls all of them"),
    ],
)
def test_a_replay_of_nothing_or_of_padding_alone_raises_unless_that_is_meant(padding, message):
    def step(least):
        chunk, evaluated = Chunk(), Chunk().eval()
        with mrr.replay(chunk, random_trace(8), min_replayed=least) as session:
            evaluated(tokens())
            if padding is not None:
                session.microbatch(torch.full_like(ROWS, -1), padding=padding)
                chunk(tokens())
        return session.report

    with pytest.raises(ReplayStateError, match=message):
        step(None)
    assert step(0).replayed_share is None


def test_a_freeze_that_nobody_keeps_holds_its_model_and_does_not_keep_it_alive():
    gc.collect()
    num_held = len(dispatch.held_routers)
    chunk = Chunk()
    chunk.around = reentrant
    mrr.freeze_recompute(chunk, ask_every_layer=True)
    gc.collect()
    with watched(chunk) as seen:
        disturbed_backward(chunk, forward(chunk))
    assert num_recomputed(seen) == 3
    assert flips(seen) == 0
    model = weakref.ref(chunk)
    del chunk, seen
    gc.collect()
    assert model() is None
    assert len(dispatch.held_routers) == num_held


def test_a_session_that_is_dropped_without_close_stays_until_close_sessions():
    chunk, start = Chunk(), STARTS["replay"]
    chunk.around = reentrant
    freeze = mrr.freeze_recompute(chunk)
    with pytest.raises(ReplayStateError, match="takes no micro-batches"):
        freeze.microbatch(ROWS)
    session = start(chunk)
    loss = forward(chunk, session)
    for again, kind in ((mrr.freeze_recompute, freeze.kind), (start, session.kind)):
        named = (
            rf"MRR404: .*under another session already, a {kind}\. Leave .*`with` ends with its close.*close_sessions"
        )
        with pytest.raises(ReplayStateError, match=named):
            again(chunk)
    del freeze, session
    gc.collect()
    with pytest.raises(ReplayStateError, match="MRR404"):
        start(chunk)
    assert [mrr.close_sessions(chunk), mrr.close_sessions(chunk)] == [2, 0]
    assert left_over(chunk) == []
    loss.backward()  # its tape knows
    forward(chunk)
    with start(chunk) as session:
        forward(chunk, session)


def test_a_closed_session_and_its_trace_outlive_neither_a_kept_loss_nor_their_model():
    chunk, trace = Chunk(), random_trace()
    chunk.around = reentrant
    session = mrr.replay(chunk, trace)
    loss = forward(chunk, session)
    session.close()
    assert left_over(chunk) == []
    kept = [weakref.ref(session), weakref.ref(trace.topk_indices)]
    del session, trace
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
    loss.backward()
    model = weakref.ref(chunk)
    del chunk, loss
    gc.collect()
    assert model() is None


def test_a_copy_of_a_model_under_a_session_is_not_under_it_and_may_have_its_own():
    chunk, trace = Chunk(), random_trace()
    chunk.around = reentrant
    with watched(chunk) as live:
        chunk(tokens())
    with mrr.replay(chunk, trace) as session:
        twin = copy.deepcopy(chunk)
        assert mrr.close_sessions(twin) == 0
        with watched(twin) as of_twin:
            twin(tokens())
        assert all(torch.equal(of_twin[key][0], live[key][0]) for key in live)
        with watched(chunk) as seen, watched(twin) as of_twin, mrr.freeze_recompute(twin):
            losses = forward(chunk, session), forward(twin)
            disturb(twin)
            disturbed_backward(chunk, *losses)
    assert wrong_replays(seen, trace) == 0
    assert (num_recomputed(of_twin), flips(of_twin)) == (3, 0)


# ---- evaluations inside a session, and the time of its check


def test_an_evaluation_inside_a_session_names_paused():
    chunk = Chunk()
    session = mrr.replay(chunk, random_trace())
    with session.paused():
        chunk(tokens())
    forward(chunk, session)
    with pytest.raises(ReplayStateError, match=r"MRR406: .*reference pass runs inside `with session.paused\(\):`"):
        chunk.eval()(tokens())
    mrr.close_sessions(chunk)


def test_a_replay_that_does_not_add_up_says_that_the_step_comes_after_the_block():
    chunk = Chunk()
    session = mrr.replay(chunk, random_trace())
    session.microbatch(ROWS)
    with pytest.raises(
        ReplayStateError, match=r"MRR419: (.|\n)*no forward used them(.|\n)*call optimizer.step\(\) after it\.$"
    ):
        session.close()
    with pytest.raises(ReplayStateError, match=r"no forward used them$"), mrr.record(chunk) as recording:
        recording.microbatch(ROWS)


# ---- the lines of a freeze


def step(chunk):
    chunk.zero_grad()
    forward(chunk).backward()


@pytest.fixture
def lines(caplog):
    """(level, text) of the lines that were logged since the last call."""
    caplog.set_level("INFO", logger="megatron_router_replay")
    freeze_module._successors.clear()  # of models that earlier tests left

    def taken():
        found = [(each.levelname, each.getMessage()) for each in caplog.records]
        caplog.clear()
        return found

    return taken


def test_a_freeze_logs_a_line_every_n_steps_with_the_counts_since_the_last(lines):
    chunk = Chunk()
    chunk.around = reentrant
    freeze = mrr.freeze_recompute(chunk, ask_every_layer=True)
    lines()
    for number in range(6):
        loss = forward(chunk)
        if number == 3:  # the only step with a change between forward and recompute
            chunk.routers[1].weight.data = -chunk.routers[1].weight.data
        loss.backward()
        freeze.log_every(2)
        logged = [text for _, text in lines()]
        counts = (
            f"step {number + 1}: 6 forwards and 6 recomputes since the last line, {8 * (number == 3)} of 48 decisions"
        )
        flips = " (layer 2: 8)" if number == 3 else ""
        assert logged == ([f"freeze_recompute, {counts} would have flipped{flips}"] if number % 2 else [])
    for wrong in (0, 1.5, True):
        with pytest.raises(mrr.errors.TraceError, match="MRR101: num_steps"):
            freeze.log_every(wrong)
    freeze.close()
    with pytest.raises(ReplayStateError, match="is closed"):
        freeze.log_every(2)


@pytest.mark.parametrize("around", [plain, reentrant])
def test_a_freeze_warns_where_a_rebuilt_model_trains_in_place_of_its_own(around, lines):
    def warnings():
        return [text for level, text in lines() if level == "WARNING"]

    model, rebuilt, reference, other = Chunk(), Chunk(), Chunk(), Chunk(moe_router_topk=3)
    for each in (model, rebuilt, reference, other):
        each.around = around
    freeze = mrr.freeze_recompute(model)
    lines()
    freeze.log_every(1)
    step(model)
    step(rebuilt)  # as a critic does after its actor
    freeze.log_every(1)
    recomputes = 3 * (around is reentrant)
    assert lines() == [
        ("INFO", "freeze_recompute, step 1: 0 forwards and 0 recomputes since the last line"),
        ("INFO", f"freeze_recompute, step 2: 3 forwards and {recomputes} recomputes since the last line"),
    ]
    # None of these trains as the frozen model did.
    with torch.no_grad():
        reference(tokens())
    reference.eval()(tokens())
    reference.train()
    for router in reference.routers:
        router.weight.requires_grad = False
    step(reference)
    step(other)
    freeze.log_every(1)
    assert warnings() == []
    step(rebuilt)
    freeze.log_every(1)
    (warning,) = warnings()
    assert "ran no forward since the last line, and 3 forwards of routers of its layers and sizes trained" in warning
    # A model that no longer exists cannot train next, so the first forward warns.
    del freeze, model
    gc.collect()
    step(rebuilt)
    (warning,) = warnings()
    assert warning.startswith(
        "the frozen model no longer exists, and forwards of routers of its layers and sizes trained"
    )
    step(rebuilt)
    assert warnings() == []


def test_a_model_that_is_rebuilt_and_frozen_again_leaves_nothing_behind(lines):
    for topk in (2, 2, 3, 2):
        chunk = Chunk(moe_router_topk=topk)
        mrr.freeze_recompute(chunk)
        step(chunk)
        del chunk
        gc.collect()
    # The third has other sizes, and the last one took the place of the first two.
    assert [len({topk for _, topk, *_ in each.sizes}) for each in freeze_module._successors] == [1, 1]
    assert [next(iter(each.sizes))[1] for each in freeze_module._successors] == [3, 2]
    rebuilt = Chunk()
    freeze = mrr.freeze_recompute(rebuilt)
    step(rebuilt)
    assert [each.frozen() is freeze._source for each in freeze_module._successors] == [False, True]
    assert [text for level, text in lines() if level == "WARNING"] == []


def test_a_freeze_warns_also_after_a_different_one_was_closed(lines):
    model, critic, rebuilt = Chunk(), Chunk(moe_router_topk=3), Chunk()
    with mrr.freeze_recompute(model) as freeze:
        mrr.freeze_recompute(critic).close()
        step(rebuilt)
        freeze.log_every(1)
    (warning,) = [text for level, text in lines() if level == "WARNING"]
    assert "ran no forward since the last line, and 3 forwards" in warning


def test_a_frozen_model_that_trains_in_a_session_inside_is_not_called_rebuilt(lines):
    actor, critic = Chunk(), Chunk()
    with mrr.freeze_recompute(actor) as freeze:
        for _ in range(2):
            with mrr.record(actor, padding_token_ids=[]):
                step(actor)
            step(critic)
            freeze.log_every(1)
        assert [text for level, text in lines() if level == "WARNING"] == []
        step(critic)  # the actor trains no more
        freeze.log_every(1)
    (warning,) = [text for level, text in lines() if level == "WARNING"]
    assert "ran no forward since the last line, and 3 forwards" in warning


def test_a_freeze_that_close_sessions_ended_warns_of_no_later_model(lines):
    model, later = Chunk(), Chunk()
    mrr.freeze_recompute(model)  # its handle is dropped
    gc.collect()
    step(model)
    assert mrr.close_sessions(model) == 1
    del model
    gc.collect()
    lines()
    step(later)
    assert lines() == []
