"""Programs that once routed wrongly with every check green, or died of a bare error; each is exact now, or raises ours."""

import copy
import gc
import pickle
import threading
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, ReplayStateError, TraceError
from tests.unit.mcore.tiny_chunk import (
    EXPERTS,
    ROWS,
    Chunk,
    as_map,
    disturb,
    flips,
    non_reentrant,
    num_recomputed,
    plain,
    random_trace,
    reentrant,
    tokens,
    watched,
    wrong_replays,
)

trace = random_trace


# Recomputes


@pytest.mark.parametrize("saved", ["mm", "topk", "gather", "_to_copy"])
@pytest.mark.parametrize("kind", ["freeze", "record", "replay"])
def test_selective_checkpoints_pair_their_operations_though_the_recompute_takes_no_topk(kind, saved):
    operation = getattr(torch.ops.aten, saved).default

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is operation else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    chunk, the_trace = Chunk(), trace(replay_mask=torch.arange(16) % 3 != 0)
    chunk.around = lambda layer, hidden: checkpoint(layer, hidden, use_reentrant=False, context_fn=contexts)
    starts = {
        "freeze": mrr.freeze_recompute,
        "record": mrr.record,
        "replay": lambda model: mrr.replay(model, the_trace),
    }
    with watched(chunk) as seen, starts[kind](chunk) as session:
        losses = []
        for number in range(2):
            if kind != "freeze":
                session.microbatch(ROWS + 8 * number)
            losses.append(chunk(tokens(), number).square().sum())
        disturb(chunk)
        torch.stack(losses).sum().backward()
    assert (num_recomputed(seen), flips(seen)) == (6, 0)


def test_verify_with_several_backwards_at_once():
    chunk, the_trace = Chunk(), trace(16)
    chunk.around = reentrant
    failed = []
    with mrr.replay(chunk, the_trace, verify=True) as session:
        losses = []
        for number, shape in enumerate([(1, 8), (2, 4), (1, 7), (3, 5)]):
            session.microbatch(torch.arange(shape[0] * shape[1]).view(shape))
            losses.append(chunk(tokens(*shape), number).square().sum())
        meet = threading.Barrier(4, timeout=120)
        for router in chunk.routers:  # all four have chosen before the first is compared
            routing = router.routing
            router.routing = lambda *args, routing=routing, **kwargs: (routing(*args, **kwargs), meet.wait())[0]

        def backward(loss):
            try:
                loss.backward()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=backward, args=(loss,)) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed == []
    assert session.report.decisions_verified == 2 * 3 * (8 + 8 + 7 + 15)
    assert session.report.decisions_wrong == 0


# What a session leaves behind


@pytest.mark.parametrize("around", [plain, reentrant, non_reentrant])
def test_a_loss_that_is_kept_does_not_keep_the_closed_session_and_its_trace(around):
    chunk, the_trace = Chunk(), trace()
    chunk.around = around
    session = mrr.replay(chunk, the_trace)
    session.microbatch(ROWS)
    loss = chunk(tokens()).square().sum()
    session.close()
    kept = [weakref.ref(session), weakref.ref(the_trace.topk_indices)]
    del session, the_trace
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
    loss.backward()


def test_a_closed_session_cannot_be_started_again():
    chunk = Chunk()
    session = mrr.record(chunk)
    session.close()
    with pytest.raises(ReplayStateError, match="is closed"):
        session.start()
    assert [router.router_replay for router in chunk.routers] == [None] * 3


def test_a_copy_made_during_a_session_may_have_sessions_of_its_own():
    chunk, the_trace = Chunk(), trace()
    with mrr.freeze_recompute(chunk):
        twin = copy.deepcopy(chunk)
        twin.around = reentrant
        assert mrr.close_sessions(twin) == 0
        with watched(twin) as seen, mrr.freeze_recompute(twin), mrr.replay(twin, the_trace) as session:
            session.microbatch(ROWS)
            loss = twin(tokens()).square().sum()
            disturb(twin)
            loss.backward()
        assert wrong_replays(seen, the_trace) == 0
        with pytest.raises(ReplayStateError, match="under another session"):
            mrr.freeze_recompute(chunk)


def test_a_copy_inside_its_originals_checkpoint_is_not_given_the_originals_routes():
    chunk = Chunk()
    with watched(chunk) as seen:
        session = mrr.freeze_recompute(chunk)
        twin = copy.deepcopy(chunk)  # with the watcher
        scale = torch.ones(1, requires_grad=True)
        loss = reentrant(lambda scale: (twin(tokens(), 1) - chunk(tokens(), 0)).mul(scale).square().mean(), scale)
        disturb(twin)
        session.close()
        loss.backward()
    assert all(torch.equal(*seen[0, layer]) for layer in (1, 2, 3))
    with watched(twin) as live:
        twin(tokens(), 2)
    assert torch.equal(live[2, 1][0], seen[1, 1][-1])


# What is handed in


@pytest.mark.parametrize(
    "rows",
    [
        torch.nested.nested_tensor([torch.arange(4), torch.arange(4)], layout=torch.jagged),
        ROWS.to_sparse(),
        ROWS.to("meta"),
    ],
    ids=["nested", "sparse", "meta"],
)
@pytest.mark.parametrize("start", [mrr.record, lambda chunk: mrr.replay(chunk, trace())], ids=["record", "replay"])
def test_rows_that_are_no_plain_tensor_raise(start, rows):
    chunk = Chunk()
    with pytest.raises(LayoutError, match="must be a plain tensor"):
        start(chunk).microbatch(rows)
    mrr.close_sessions(chunk)


@pytest.mark.parametrize("name", ["token_ids", "padding", "trained"])
@pytest.mark.parametrize("values", ["abc", [[1, 2], [3]], object()], ids=["text", "ragged", "object"])
def test_what_is_no_array_beside_the_rows_raises(name, values):
    chunk = Chunk()
    with pytest.raises(LayoutError, match=f"{name} must be"):
        mrr.record(chunk).microbatch(ROWS, **{name: values})
    mrr.close_sessions(chunk)


def test_token_ids_that_are_not_whole_numbers_raise_and_masks_of_any_kind_work():
    chunk = Chunk()
    with mrr.record(chunk) as recording:
        with pytest.raises(LayoutError, match="token_ids must be integers"):
            recording.microbatch(ROWS, token_ids=tokens() + 0.5)
        recording.microbatch(ROWS, trained=np.ones((2, 4), np.uint16), padding=torch.zeros(2, 4))
        chunk(tokens())


def test_a_share_of_exactly_min_replayed_is_enough():
    chunk = Chunk(num_layers=1)
    for replayed in (7, 28, 55, 56):  # n / 100 * 100 > n in floating point
        the_trace = trace(100, 1, replay_mask=torch.arange(100) < replayed)
        with mrr.replay(chunk, the_trace, min_replayed=replayed / 100) as session:
            session.microbatch(torch.arange(100))
            chunk(tokens(1, 100))


@pytest.mark.parametrize("option", [{"min_replayed": "0.9"}, {"compare_live": "x"}, {"compare_live": 1.5}])
def test_options_of_another_kind_raise(option):
    with pytest.raises(TraceError, match="must be a"):
        mrr.replay(Chunk(), trace(), **option)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_a_static_buffer_that_cannot_hold_the_ids_raises_instead_of_wrapping_them(dtype):
    replay = mrr.RouterReplay()
    replay.set_router_replay_action(mrr.RouterReplayAction.RECORD)
    scores = torch.arange(400.0).repeat(3, 1)
    live = {"default_compute_topk": lambda scores, topk, **groups: scores.topk(topk, dim=1)}
    replay.set_static_buffer(torch.zeros(3, 2, dtype=dtype))
    with pytest.raises(ReplayStateError, match="cannot hold the ids of 400 experts"):
        replay.get_replay_topk(scores, 2, **live)
    replay.set_static_buffer(torch.zeros(3, 2, dtype=torch.int16))
    replay.get_replay_topk(scores, 2, **live)
    assert replay.get_recorded_indices().tolist() == [[399, 398]] * 3
    for buffer in (torch.zeros(3, 2), torch.zeros(3, dtype=torch.int32)):
        with pytest.raises(ReplayStateError, match="must be"):
            replay.set_static_buffer(buffer)


# Unusual values


@pytest.mark.parametrize("kind", [plain, reentrant, non_reentrant])
def test_an_empty_micro_batch_between_others(kind):
    chunk, the_trace = Chunk(), trace()
    chunk.around = kind
    nothing = torch.empty(1, 0, dtype=torch.int64)
    losses = []
    with mrr.replay(chunk, the_trace, verify=True) as session:
        for number in range(2):
            session.microbatch(nothing)
            assert chunk(nothing).shape == (0, 1, 32)
            session.microbatch(ROWS + 8 * number)
            with watched(chunk) as seen:
                losses.append(chunk(tokens(), number).square().sum())
            assert wrong_replays(seen, the_trace) == 0
        disturb(chunk)
        with watched(chunk) as seen:
            torch.stack(losses).sum().backward()
    assert wrong_replays(seen, the_trace) == 0
    assert session.report.microbatches == 4


def test_a_router_whose_logits_are_not_numbers_replays_all_the_same():
    chunk, the_trace = Chunk(), trace()
    chunk.around = lambda layer, hidden: (layer.router(hidden), hidden)[
        1
    ]  # nor shall the next layer's hidden state be NaN
    for router in chunk.routers:
        router.gating = lambda hidden: torch.full((*hidden.shape[:-1], EXPERTS), torch.nan)
    with watched(chunk) as seen, mrr.replay(chunk, the_trace, verify=True) as session:
        session.microbatch(ROWS)
        chunk(tokens(), 0)
    assert (len(seen), wrong_replays(seen, the_trace)) == (3, 0)


def test_gradients_that_are_asked_for_without_a_backward():
    chunk, the_trace = Chunk(), trace()
    chunk.around = non_reentrant
    with watched(chunk) as seen, mrr.replay(chunk, the_trace) as session:
        session.microbatch(ROWS)
        loss = chunk(tokens(), 0).square().sum()
        disturb(chunk)
        torch.autograd.grad(loss, [chunk.embedding])
    assert (num_recomputed(seen), wrong_replays(seen, the_trace)) == (3, 0)


@pytest.mark.parametrize("kind", ["freeze", "replay"])
def test_a_model_under_a_session_cannot_be_pickled(kind):
    chunk = Chunk(num_layers=1)
    del chunk.layers[0].router.gating  # a lambda of the test's
    with (
        pytest.raises(ReplayStateError, match="leave the session first"),
        mrr.freeze_recompute(chunk) if kind == "freeze" else mrr.replay(chunk, trace(num_layers=1)),
    ):
        pickle.dumps(chunk)


def test_a_row_beyond_any_batch_is_refused_by_a_recording():
    chunk = Chunk()
    session = mrr.record(chunk)
    with pytest.raises(LayoutError, match="outside the trace's rows"):
        session.microbatch(torch.full((2, 4), 10**12))
    mrr.close_sessions(chunk)


@pytest.mark.parametrize(("sequences", "num_tokens"), [(1, 8), (1, 7), (2, 8)])
def test_a_router_that_gets_its_tokens_flat_can_tell_whose_they_are_in_one_sequence_alone(sequences, num_tokens):
    chunk, the_trace = Chunk(), trace(8)
    hidden = torch.zeros(num_tokens, chunk.routers[0].weight.shape[1])
    session = mrr.replay(chunk, the_trace)
    session.microbatch(torch.arange(8).view(sequences, -1))
    if (sequences, num_tokens) == (1, 8):
        for layer, router in enumerate(chunk.routers, start=1):
            assert torch.equal(router(input=hidden)[1], as_map(the_trace.layer(layer)))
        session.close()
        return
    with pytest.raises(ReplayStateError, match=rf"routes {num_tokens} tokens, .* = \[{num_tokens}\] on this rank"):
        chunk.routers[0](hidden)
    mrr.close_sessions(chunk)
