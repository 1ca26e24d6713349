"""What a trainer may hand to a session, and who else may touch its routers: it works or raises, and never goes unnoticed."""

import copy
import gc
import re
import types

import numpy as np
import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, ReplayStateError, TraceError
from tests.unit.mcore.tiny_chunk import Chunk, as_map, disturb, flips, random_trace, reentrant, tokens, watched

ROWS = torch.arange(8).view(2, 4)
LAYERS = [1, 2, 3]


def trace(num_tokens=8, **options):
    return random_trace(num_tokens, **options)


def wrong(seen, the_trace, rows=ROWS):
    at = rows.t().reshape(-1)
    routed = at >= 0
    return sum(
        int((routing_map[routed] != as_map(the_trace.layer(layer)[at[routed]])).any(dim=1).sum())
        for (_, layer), maps in seen.items()
        for routing_map in maps
    )


@pytest.mark.parametrize("direct", [False, True], ids=["called", "direct forward"])
@pytest.mark.parametrize(
    "rows",
    [ROWS.reshape(-1), ROWS.t(), ROWS.reshape(1, 8), ROWS.reshape(1, 8).t(), ROWS[:1], ROWS[:, :3]],
    ids=["flat", "[s, b]", "[1, b*s]", "[b*s, 1]", "one sequence", "too short"],
)
def test_rows_of_another_shape_than_the_batch_are_refused(rows, direct):
    chunk = Chunk()
    with pytest.raises((LayoutError, ReplayStateError), match="shape"), mrr.replay(chunk, trace()) as session:
        session.microbatch(rows)
        (chunk.forward if direct else chunk)(tokens())


def test_a_direct_forward_may_follow_a_called_one():
    chunk, the_trace = Chunk(), trace(16)
    with watched(chunk) as seen, mrr.replay(chunk, the_trace) as session:
        session.microbatch(ROWS)
        chunk(tokens(), 0)
        session.microbatch(ROWS + 8)
        chunk.forward(tokens(), 1)
    for number, rows in ((0, ROWS), (1, ROWS + 8)):
        of_number = {key: maps for key, maps in seen.items() if key[0] == number}
        assert len(of_number) == 3
        assert wrong(of_number, the_trace, rows) == 0


def test_a_packed_row_may_be_flat():
    chunk, the_trace = Chunk(), trace()
    with watched(chunk) as seen, mrr.replay(chunk, the_trace) as session:
        session.microbatch(torch.arange(8))
        chunk(tokens(1, 8))
    assert wrong(seen, the_trace, torch.arange(8).view(1, 8)) == 0


def test_micro_batches_that_run_in_another_order_than_queued_are_found_by_their_input_ids():
    chunk = Chunk()
    batches = [tokens(seed=1), tokens(seed=2)]
    the_trace = trace(16, token_ids=torch.cat([batch.reshape(-1) for batch in batches]))
    with (
        pytest.raises(LayoutError, match="another order than they were queued"),
        mrr.replay(chunk, the_trace) as session,
    ):
        session.microbatch(ROWS)
        session.microbatch(ROWS + 8)
        chunk(batches[1])


def test_micro_batches_are_named_by_their_number():
    chunk = Chunk()
    with pytest.raises(ReplayStateError) as raised, mrr.replay(chunk, trace()) as session:
        for _ in range(3):
            session.microbatch(ROWS)
        chunk(tokens())
    numbers = re.findall(r"micro-batch (\d), layer 1: routes were queued, but no forward", str(raised.value))
    assert numbers == ["1", "2"]  # 0 ran
    with (
        pytest.raises(ReplayStateError, match="micro-batch 1, layer 1: a forward without routes; 1 micro-batches were"),
        mrr.replay(chunk, trace()) as session,
    ):
        session.microbatch(ROWS)
        chunk(tokens())
        chunk(tokens())


def test_a_square_batch_that_was_transposed_is_found_by_its_input_ids():
    chunk = Chunk()
    batch = tokens(4, 4)
    rows = torch.arange(16).view(4, 4)
    the_trace = trace(16, token_ids=batch.reshape(-1))
    with mrr.replay(chunk, the_trace) as session:
        session.microbatch(rows)
        chunk(batch)
    with pytest.raises(LayoutError, match="moved apart"), mrr.replay(chunk, the_trace) as session:
        session.microbatch(rows.t())
        chunk(batch)


def test_the_copy_of_the_tokens_that_a_caller_passes_is_compared_with_what_the_model_gets():
    chunk = Chunk()
    with pytest.raises(LayoutError, match="other input_ids than were queued"), mrr.record(chunk) as recording:
        recording.microbatch(ROWS, token_ids=tokens(seed=1))
        chunk(tokens(seed=2))


def test_a_row_of_minus_one_is_routed_live_and_counted_so():
    chunk, the_trace = Chunk(), trace()
    rows = ROWS.clone()
    rows[0, 1] = rows[1, 3] = -1
    with watched(chunk) as live:
        chunk(tokens())
    with watched(chunk) as seen, mrr.replay(chunk, the_trace) as session:
        session.microbatch(rows)
        chunk(tokens())
    assert wrong(seen, the_trace, rows) == 0
    unrouted = rows.t().reshape(-1) < 0
    assert torch.equal(seen[0, 1][0][unrouted], live[0, 1][0][unrouted])  # layer 1: behind it hidden states differ
    report = session.report
    assert (report.rows_replayed, report.rows_live, report.rows_padding) == (6, 2, 0)
    assert report.metrics()["router_replay/replayed_share"] == 0.75


def test_known_padding_is_spread_and_has_its_share_in_the_metrics():
    chunk = Chunk()
    rows = ROWS.clone()
    rows[:, 3] = -1
    with watched(chunk) as seen, mrr.replay(chunk, trace()) as session:
        session.microbatch(rows, padding=(rows < 0).numpy())
        chunk(tokens())
    assert session.report.metrics()["router_replay/padding_share"] == 0.25
    (routing_map,) = seen[0, 1]
    assert routing_map[-2:].sum(dim=0).tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("start", [mrr.record, lambda chunk: mrr.replay(chunk, trace())], ids=["record", "replay"])
def test_padding_that_has_a_route_and_trained_positions_without_one_raise(start):
    chunk = Chunk()
    rows = ROWS.clone()
    rows[0, 2] = -1
    session = start(chunk)
    with pytest.raises(LayoutError, match="mask is inverted"):
        session.microbatch(rows, padding=rows >= 0)
    with pytest.raises(LayoutError, match="trained position"):
        session.microbatch(rows, trained=torch.ones(2, 4))
    session.microbatch(rows, trained=(rows >= 0).float())
    chunk(tokens())
    if isinstance(session, mrr.mcore.ReplaySession):
        session.close()
        session = mrr.replay(chunk, trace(replay_mask=torch.arange(8) != 5))
        with pytest.raises(LayoutError, match=r"1 of them, the first is token 3"):
            session.microbatch(ROWS, trained=torch.ones(2, 4))
    session.close()


def test_a_session_that_replays_nothing_raises_also_if_every_row_is_minus_one():
    chunk = Chunk()
    with pytest.raises(ReplayStateError, match="none of 8 tokens was replayed"), mrr.replay(chunk, trace()) as session:
        session.microbatch(torch.full((2, 4), -1))
        chunk(tokens())


def test_less_than_min_replayed_raises_and_just_enough_does_not():
    chunk = Chunk()
    the_trace = trace(replay_mask=torch.arange(8) != 5)

    def run(share):
        with mrr.replay(chunk, the_trace, min_replayed=share) as session:
            session.microbatch(ROWS)
            chunk(tokens())

    run(7 / 8)
    with pytest.raises(ReplayStateError, match=r"87\.5000% of 8 tokens"):
        run(0.9)


def test_an_empty_trace_serves_a_micro_batch_of_padding_alone():
    chunk = Chunk()
    with mrr.replay(chunk, trace(0)) as session:
        session.microbatch(torch.full((2, 4), -1), padding=torch.ones(2, 4, dtype=torch.bool))
        chunk(tokens())
    assert session.report.padding_share == 1.0


@pytest.mark.parametrize("batch", [(2, 4), (1, 8)], ids=["b = 2", "b = 1"])
def test_a_recording_copies_rows_and_tokens_that_the_trainer_reuses(batch):
    chunk = Chunk()
    rows, token_ids = torch.arange(8).view(batch), tokens(*batch)
    expected_tokens = token_ids.reshape(-1).tolist()
    for given in (True, False):
        rows_buffer, tokens_buffer = rows.clone(), token_ids.clone()
        with watched(chunk) as seen, mrr.record(chunk) as recording:
            recording.microbatch(rows_buffer, token_ids=tokens_buffer if given else None)
            chunk(tokens_buffer)
            rows_buffer.fill_(3)
            tokens_buffer.zero_()
        recorded = recording.trace()
        assert recorded.token_ids.tolist() == expected_tokens
        assert wrong(seen, recorded, rows) == 0


def test_rows_that_change_between_queue_and_forward_change_nothing():
    chunk, the_trace = Chunk(), trace()
    rows = ROWS.clone()
    with watched(chunk) as seen, mrr.replay(chunk, the_trace) as session:
        session.microbatch(rows)
        rows.zero_()
        chunk(tokens())
    assert wrong(seen, the_trace) == 0


def test_a_trace_that_changes_between_queue_and_forward_changes_nothing():
    chunk, the_trace, as_queued = Chunk(), trace(), trace()
    with watched(chunk) as seen, mrr.replay(chunk, the_trace) as session:
        session.microbatch(ROWS)
        the_trace.topk_indices.copy_(random_trace(8, seed=6).topk_indices)
        chunk(tokens())
    assert wrong(seen, as_queued) == 0


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.uint32, np.int64])
def test_rows_in_numpy(dtype):
    chunk, the_trace = Chunk(), trace()
    with watched(chunk) as seen, mrr.replay(chunk, the_trace) as session:
        session.microbatch(ROWS.numpy().astype(dtype), token_ids=None)
        chunk(tokens())
    assert wrong(seen, the_trace) == 0
    with mrr.replay(chunk, the_trace) as session, pytest.raises(LayoutError, match="must be integers"):
        session.microbatch("rows")
    with pytest.raises(LayoutError, match="no row is -1"), mrr.replay(chunk, the_trace) as session:
        session.microbatch(ROWS - 2)


# Who else drives the same router


def upstream():
    from megatron.core.transformer.moe import router_replay

    return router_replay


@pytest.mark.parametrize("whose", ["ours", "Megatron's"])
def test_a_router_whose_own_replay_object_is_driven_is_refused_and_an_idle_one_is_not(whose):
    chunk = Chunk()
    module = mrr if whose == "ours" else upstream()
    own = [module.RouterReplay() for _ in chunk.routers]
    for router, replay in zip(chunk.routers, own):
        router.router_replay = replay
    with mrr.freeze_recompute(chunk):
        chunk(tokens())
    own[1].set_router_replay_action(module.RouterReplayAction.RECORD)
    with pytest.raises(ReplayStateError, match="is being driven"):
        mrr.freeze_recompute(chunk)
    assert [router.router_replay for router in chunk.routers] == own  # nothing of the model is held after the refusal
    own[1].clear_router_replay_action()
    with (
        pytest.raises(ReplayStateError, match="is being driven"),
        mrr.freeze_recompute(chunk),
        mrr.record(chunk) as session,
    ):
        session.microbatch(ROWS)
        own[2].set_router_replay_action(module.RouterReplayAction.RECORD)
        chunk(tokens())


def test_another_object_on_a_router_is_noticed_by_the_next_forward_or_at_the_end():
    chunk = Chunk()
    stranger = types.SimpleNamespace(get_replay_topk=lambda scores, topk, *rest: rest[-1](scores, topk))
    with (
        pytest.raises(ReplayStateError, match="replaced during the session by SimpleNamespace"),
        mrr.freeze_recompute(chunk),
    ):
        chunk.routers[1].router_replay = stranger
        chunk(tokens())
    chunk.routers[1].router_replay = None
    with pytest.raises(ReplayStateError, match="replaced during the session"), mrr.freeze_recompute(chunk):
        chunk(tokens())
        chunk.routers[2].router_replay = stranger


def test_a_router_that_changes_during_the_session_raises():
    chunk = Chunk()
    with pytest.raises(ReplayStateError, match="topk 2 -> 3"), mrr.freeze_recompute(chunk):
        chunk.routers[0].topk = 3
        chunk(tokens())
    chunk.routers[0].topk = 2

    class Other(type(chunk.routers[0])):
        def routing(self, *args, **kwargs):
            return super().routing(*args, **kwargs)

    with pytest.raises(ReplayStateError, match="class Other"), mrr.freeze_recompute(chunk):
        chunk.routers[0].__class__ = Other
        chunk(tokens())


def test_a_router_that_stops_asking_during_the_session_raises():
    chunk = Chunk()
    router = chunk.routers[1]
    with pytest.raises(ReplayStateError, match="chose experts without asking"), mrr.freeze_recompute(chunk):
        original = router.routing
        router.routing = lambda logits, padding_mask=None: (logits, logits > 0)
        try:
            chunk(tokens())
        finally:
            router.routing = original


def test_a_lost_session_is_named_by_file_and_line_and_can_be_ended():
    chunk = Chunk()
    mrr.freeze_recompute(chunk)
    mrr.record(chunk)
    with pytest.raises(ReplayStateError, match=r"a record made at .*test_doors\.py:\d+.*close_sessions"):
        mrr.record(chunk)
    assert mrr.close_sessions(chunk) == 2
    assert [router.router_replay for router in chunk.routers] == [None] * 3
    assert mrr.close_sessions(chunk) == 0
    with mrr.record(chunk):
        pass


def test_a_copy_of_a_model_that_is_made_during_a_session_is_not_under_it():
    chunk, the_trace = Chunk(), trace()
    with watched(chunk) as live:
        chunk(tokens())
    with mrr.replay(chunk, the_trace) as session:
        twin = copy.deepcopy(chunk)
        with watched(twin) as of_twin:
            twin(tokens())
        with watched(chunk) as seen:
            session.microbatch(ROWS)
            chunk(tokens())
    assert all(torch.equal(of_twin[key][0], live[key][0]) for key in live)
    assert wrong(seen, the_trace) == 0
    with watched(twin) as after:
        twin(tokens())
    assert all(torch.equal(after[key][0], live[key][0]) for key in live)


# What is no model, no trace, no rows


def test_a_module_that_is_no_model_with_experts_raises_and_a_stage_without_them_does_not():
    for start in (mrr.record, mrr.freeze_recompute, lambda model: mrr.replay(model, trace()), mrr.attach):
        with pytest.raises(LayoutError, match="Linear is no Megatron-Core model with experts"):
            start(torch.nn.Linear(2, 2))
    chunk = Chunk()
    chunk.layers = torch.nn.ModuleList()
    with mrr.replay(chunk, trace()) as session:
        session.microbatch(ROWS)
        chunk(tokens())
    assert session.report.routers == 0
    chunk.config.num_moe_experts = None
    with pytest.raises(LayoutError, match="num_moe_experts=None"):
        mrr.record(chunk)


@pytest.mark.parametrize("chunks", [[], [torch.nn.Linear(1, 1), None]])
def test_a_list_that_holds_no_chunks_raises(chunks):
    with pytest.raises(LayoutError, match="model_chunks must be"):
        mrr.record(chunks)


def test_swapped_arguments_a_path_and_no_trace_at_all(tmp_path):
    chunk, the_trace = Chunk(), trace()
    with pytest.raises(TraceError, match=r"arguments are swapped: replay\(model_chunks, trace\)"):
        mrr.replay(the_trace, chunk)
    with pytest.raises(TraceError, match="cannot replay a dict"):
        mrr.replay(chunk, {})
    mrr.save_trace(the_trace, tmp_path / "routes.safetensors")
    with watched(chunk) as seen, mrr.replay(chunk, tmp_path / "routes.safetensors") as session:
        session.microbatch(ROWS)
        chunk(tokens())
    assert wrong(seen, the_trace) == 0


def test_closing_a_freeze_while_an_evaluated_output_is_kept_is_no_false_alarm():
    chunk = Chunk()
    chunk.around = reentrant
    freeze = mrr.freeze_recompute(chunk)
    kept = chunk(tokens())
    freeze.close()
    del kept
    gc.collect()
    assert [router.router_replay for router in chunk.routers] == [None] * 3


# attach: the forward step needs no session


def test_an_attached_model_queues_its_rows_with_each_forward_and_drops_them_without_a_session():
    chunk, the_trace = Chunk(), trace(16, token_ids=torch.cat([tokens(seed=1).reshape(-1), tokens(seed=2).reshape(-1)]))
    attached = mrr.attach(chunk)
    mrr.attach(chunk)  # anew, not twice
    chunk.around = reentrant
    with watched(chunk) as live:
        chunk(input_ids=tokens(seed=1), routing_rows=ROWS, routing_padding=None)
    with watched(chunk) as seen, mrr.freeze_recompute(chunk), mrr.replay(chunk, the_trace) as session:
        chunk(input_ids=tokens(seed=1), routing_rows=ROWS).sum().backward()
    assert wrong(seen, the_trace) == 0
    assert flips(seen) == 0
    assert session.report.microbatches == 1
    assert not torch.equal(live[0, 1][0], seen[0, 1][0])
    with pytest.raises(LayoutError, match="moved apart"), mrr.replay(chunk, the_trace):
        chunk(input_ids=tokens(seed=1), routing_rows=ROWS.flip(1))
    with pytest.raises(LayoutError, match="trained position"), mrr.replay(chunk, the_trace):
        chunk(input_ids=tokens(seed=1), routing_rows=ROWS * 0 - 1, routing_trained=torch.ones(2, 4))
    with pytest.raises(ReplayStateError, match="a forward without routes"), mrr.replay(chunk, the_trace):
        chunk(input_ids=tokens(seed=1))
    attached.remove()
    mrr.attach(chunk).remove()
    with pytest.raises(TypeError, match="routing_rows"):
        chunk(input_ids=tokens(seed=1), routing_rows=ROWS)


def test_an_attached_model_inside_a_checkpoint_queues_once():
    chunk, the_trace = Chunk(), trace()
    mrr.attach(chunk)
    with watched(chunk) as seen, mrr.replay(chunk, the_trace) as session:
        loss = reentrant(
            lambda scale: (chunk(input_ids=tokens(), routing_rows=ROWS) * scale).sum(),
            torch.ones(1, requires_grad=True),
        )
        loss.backward()
    assert session.report.microbatches == 1
    assert wrong(seen, the_trace) == 0


def test_a_copy_of_an_attached_model_is_attached_too_and_attaching_it_anew_leaves_the_original_as_it_is():
    chunk, the_trace = Chunk(), trace()
    mrr.attach(chunk)
    twin = copy.deepcopy(chunk)
    for again in (False, True):
        if again:
            mrr.attach(twin)
        for model in (twin, chunk):
            with watched(model) as seen, mrr.replay(model, the_trace) as session:
                model(tokens(), routing_rows=ROWS)
            assert wrong(seen, the_trace) == 0
            assert session.report.microbatches == 1
            model(tokens(), routing_rows=ROWS)  # without a session they are dropped


def test_one_of_two_attached_models_may_be_attached_anew():
    one, other = Chunk(), Chunk(seed=1)
    mrr.attach([one, other])
    mrr.attach(one)
    for model in (one, other):
        model(tokens(), routing_rows=ROWS)


def test_rows_that_are_queued_and_passed_to_an_attached_model_as_well_raise_before_they_are_mixed_up():
    chunk, the_trace = Chunk(), trace(16)
    mrr.attach(chunk)
    session = mrr.replay(chunk, the_trace)
    session.microbatch(ROWS)
    with watched(chunk) as seen, pytest.raises(ReplayStateError, match="not both"):
        chunk(tokens(), routing_rows=ROWS)
    mrr.close_sessions(chunk)
    assert not seen  # it is the first forward that raises, not the second, which would get the first one's routes


def test_chunks_that_share_a_router_are_refused_where_micro_batches_are_queued():
    one, other = Chunk(), Chunk(seed=1)
    other.layers[2].router = one.layers[2].router
    for start in (mrr.record, lambda chunks: mrr.replay(chunks, trace(16))):
        with pytest.raises(LayoutError, match="chunk 0 and chunk 1 share a router, layer 3"):
            start([one, other])
    one.around = other.around = reentrant
    with watched(one) as seen, mrr.freeze_recompute([one, other]):
        loss = one(tokens(), 0).square().mean() + other(tokens(), 1).square().mean()
        disturb(one)
        disturb(other)
        loss.backward()
    assert flips(seen) == 0
    assert len(seen[1, 3]) == 2


@pytest.mark.parametrize("when", ["before the session", "between two micro-batches"])
def test_a_trace_on_which_somebody_computes_in_place_is_refused_before_a_router_takes_it(when):
    chunk, the_trace = Chunk(), trace(16)
    the_trace = the_trace.to("cpu")
    with watched(chunk) as seen, pytest.raises(TraceError, match="topk_indices of the trace was changed in place"):
        if when == "before the session":
            the_trace.topk_indices[:, :, 1] = the_trace.topk_indices[:, :, 0]
        with mrr.replay(chunk, the_trace) as session:
            session.microbatch(ROWS)
            chunk(tokens(), 0)
            the_trace.topk_indices[:, :, 1] = the_trace.topk_indices[:, :, 0]  # one expert a token
            session.microbatch(ROWS + 8)
    assert len(seen) == (0 if when == "before the session" else 3)


@pytest.mark.parametrize(("dtype", "highest"), [(torch.uint8, 255), (torch.uint16, 65535)])
def test_rows_in_which_padding_cannot_be_told_from_a_row_are_refused(dtype, highest):
    chunk = Chunk()
    with mrr.replay(chunk, trace(highest + 1)) as session:
        with pytest.raises(LayoutError, match=f"and hold {highest}, which a -1 becomes there"):
            session.microbatch(torch.tensor([[0, 1, 2, -1]]).to(dtype))
        session.microbatch(torch.tensor([[0, 1, 2, highest - 1]]).to(dtype))
        chunk(tokens(1, 4))
