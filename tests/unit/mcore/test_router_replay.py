"""RouterReplay: Megatron-Core's interface, without what goes wrong in silence; scores by hand, and no model."""

import sys

import pytest
import torch
from megatron.core.transformer.moe import router_replay as upstream
from megatron.core.transformer.moe.router import TopKRouter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import checkpoint as torch_checkpoints

from megatron_router_replay.errors import ReplayStateError, TraceError
from megatron_router_replay.mcore import RouterReplay, RouterReplayAction
from tests.unit.mcore.tiny_chunk import transformer_engine, unknown

has_static_buffers = pytest.mark.skipif(
    not hasattr(upstream.RouterReplay, "set_static_buffer"), reason="Megatron-Core has static buffers since 0.17"
)
TARGET = torch.tensor([[3, 1], [0, 2]])
SCORES = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.4, 0.1, 0.2, 0.3]])


def live_topk(scores, topk, num_groups=None, group_topk=None):
    return torch.topk(scores, k=topk, dim=1)


def route(replay, scores=SCORES, topk=2):
    return replay.get_replay_topk(scores, topk, None, None, live_topk)


def replaying(target):
    replay = RouterReplay()
    replay.set_target_indices(target)
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    return replay


def test_record_keeps_a_copy_not_a_reference():
    replay = RouterReplay()
    assert route(replay)[1].tolist() == [[1, 2], [0, 3]], "live, without an action"
    replay.set_router_replay_action(RouterReplayAction.RECORD)
    _, indices = route(replay)
    indices.zero_()  # Megatron-Core 0.16.1 keeps this very tensor
    assert replay.get_recorded_indices().tolist() == [[1, 2], [0, 3]]


def test_forward_replay_uses_the_target_in_its_column_order_with_the_live_scores():
    replay, scores = replaying(TARGET.to(torch.uint8)), SCORES.clone().requires_grad_()
    values, indices = route(replay, scores)
    assert (indices.dtype, indices.tolist()) == (torch.int64, TARGET.tolist())
    assert torch.equal(values, torch.tensor([[0.2, 0.4], [0.4, 0.2]]))
    (values * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert scores.grad.tolist() == [[0.0, 2.0, 0.0, 1.0], [3.0, 0.0, 4.0, 0.0]], "of the replayed experts alone"
    assert replay.replay_backward_list[0].dtype is torch.uint8, "widened where it is used"
    # A session sorts three columns by the live scores where a top-k with gradients would; a driver's order is kept.
    of_three = torch.tensor([[3, 1, 2], [3, 2, 0]])
    assert route(replaying(of_three), scores, topk=3)[1].tolist() == of_three.tolist()
    assert route(replaying(torch.tensor([[2], [2]])), topk=1)[1].tolist() == [[2], [2]]


def test_backward_replay_takes_the_micro_batches_first_in_first_out():
    replay = RouterReplay()
    for target in (TARGET, TARGET.flip(1), TARGET.flip(0)):
        replay.set_target_indices(target)
    replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    used = [route(replay)[1].tolist() for _ in range(3)]
    assert used == [TARGET.tolist(), TARGET.flip(1).tolist(), TARGET.flip(0).tolist()]
    assert replay.replay_backward_list == []
    with pytest.raises(ReplayStateError, match="REPLAY_BACKWARD without a target"):
        route(replay)


def test_a_recompute_without_a_tape_takes_the_fifo_or_raises():
    replay, used = replaying(TARGET), []

    def routed(leaf):
        used.append(route(replay)[1].tolist())
        return leaf.clone()

    outputs = [unknown(routed, torch.zeros(1, requires_grad=True)) for _ in range(2)]
    with pytest.raises(ReplayStateError, match="no tape of its forward is known"):
        outputs[0].backward()
    replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    outputs[1].backward()
    assert used == [TARGET.tolist()] * 3
    assert replay.replay_backward_list == []


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (None, ReplayStateError, "without a target"),
        # Too few rows would leave tokens without experts, one row would be broadcast, another topk is accepted elsewhere.
        (TARGET[:1], ReplayStateError, "routes 2 tokens to 2 experts"),
        ([[0], [1]], ReplayStateError, "routes 2 tokens to 2 experts"),
        ([[0, 4], [1, 2]], TraceError, "names expert 4 of 4 experts"),
    ],
)
def test_a_target_that_does_not_fit_the_forward_raises_when_it_is_used(target, error, message):
    replay = replaying(TARGET if target is None else target)
    if target is None:
        replay.clear_indices()
    with pytest.raises(error, match=message):
        route(replay)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (transformer_engine, "_checkpoint_hook"),
        (transformer_engine._CheckpointFunction, "forward"),
        (torch_checkpoints, "_recomputation_hook"),
        (TopKRouter, "routing"),
    ],
)
def test_an_action_wraps_what_was_loaded_since_the_one_before(monkeypatch, owner, name):
    replay = replaying(TARGET)
    hook = getattr(owner, name)
    plain = hook.__mro__[1] if isinstance(hook, type) else lambda *args: None
    monkeypatch.setattr(owner, name, plain)
    replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    assert getattr(owner, name) is not plain


def test_a_package_that_is_not_loaded_is_not_missed(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.distributed", None)
    assert route(replaying(TARGET))[1].tolist() == TARGET.tolist()


def test_a_transformer_engine_without_its_names_is_refused(monkeypatch):
    monkeypatch.delattr(transformer_engine, "_CheckpointFunction")
    with pytest.raises(
        ReplayStateError, match=r"MRR402: transformer_engine\.pytorch\.distributed has no _CheckpointFunc"
    ):
        replaying(TARGET)


def test_a_target_that_went_past_the_method_is_checked_where_it_is_used():
    for action in (RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.REPLAY_BACKWARD):
        replay = RouterReplay()
        replay.target_topk_idx = torch.tensor([[0, 1], [2, 2]])
        replay.replay_backward_list.append(torch.tensor([[0, 1], [2, 2]]))
        replay.set_router_replay_action(action)
        with pytest.raises(TraceError, match=r"row 1 of the replay target is \[2, 2\]"):
            route(replay)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_target_that_was_written_to_is_checked_at_its_next_use(mode):
    with mode():
        replay = replaying(TARGET)
        assert route(replay)[1].tolist() == TARGET.tolist()
        replay.target_topk_idx[0, 0] = 7
        with pytest.raises(TraceError, match="names expert 7 of 4 experts"):
            route(replay)
        replay.target_topk_idx.zero_()
        with pytest.raises(TraceError, match="row 0 of the replay target"):
            route(replay)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ([[0, 1], [2, 2]], r"row 1 of the replay target is \[2, 2\]"),
        ([[0, 1, 2], [3, 0, 3]], "row 1 of the replay target"),
        ([[-1, 2], [0, 1]], r"row 0 of the replay target is \[-1, 2\]"),
        *(
            (target, r"must be \[num_tokens, topk\] integers, got ")
            for target in ([0, 1], [[0.0, 1.0]], [[True], [False]], "ids", [[0, 1], [2]], None)
        ),
    ],
)
def test_a_target_that_no_router_could_choose_raises_when_it_is_set(target, message):
    replay = RouterReplay()
    with pytest.raises(TraceError, match=message):
        replay.set_target_indices(target)
    assert (replay.target_topk_idx, replay.replay_backward_list) == (None, [])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64, torch.uint16, torch.uint32, torch.uint64])
def test_a_target_is_a_copy_and_words_that_torch_cannot_sort_are_widened(dtype):
    given, replay = TARGET.to(dtype, copy=True), RouterReplay()
    for form in (given, given.numpy(), given.tolist()):
        replay.set_target_indices(form)
    given.zero_()
    assert [target.tolist() for target in replay.replay_backward_list] == [TARGET.tolist()] * 3
    unsigned = dtype in (torch.uint16, torch.uint32, torch.uint64)
    assert replay.replay_backward_list[0].dtype is (torch.int64 if unsigned else dtype)


def test_the_static_helpers_reach_every_instance_in_order_or_none():
    replays = [RouterReplay(), RouterReplay()]
    with pytest.raises(ValueError, match="1 replay tensors over 2 routers") as raised:  # as Megatron-Core's class
        RouterReplay.set_replay_data([TARGET])
    assert isinstance(raised.value, ReplayStateError)
    with pytest.raises(TraceError):
        RouterReplay.set_replay_data([TARGET, torch.zeros(2, 2, dtype=torch.int64)])
    assert [replay.target_topk_idx for replay in replays] == [None, None]
    RouterReplay.set_replay_data([TARGET, TARGET.flip(1)])
    assert [replay.target_topk_idx.tolist() for replay in replays] == [TARGET.tolist(), TARGET.flip(1).tolist()]
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    for replay in replays:
        route(replay)
    assert [recorded.tolist() for recorded in RouterReplay.get_recorded_data()] == [[[1, 2], [0, 3]]] * 2
    RouterReplay.clear_global_router_replay_action()
    RouterReplay.clear_global_indices()
    for replay in replays:
        assert (replay.router_replay_action, replay.target_topk_idx, replay.recorded_topk_idx) == (None, None, None)
        assert replay.replay_backward_list == []


@has_static_buffers
def test_recording_goes_into_megatron_cores_static_buffer():
    replays = [RouterReplay(), RouterReplay()]
    buffer = torch.full((6, 2, 2), -1, dtype=torch.int16)
    RouterReplay.set_global_static_buffers(buffer)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    for replay in replays:
        route(replay)
    assert buffer[:2, 0].tolist() == buffer[:2, 1].tolist() == [[1, 2], [0, 3]]
    assert (buffer[2:] == -1).all()
    assert replays[0].get_recorded_indices().data_ptr() == buffer.data_ptr()
    RouterReplay.clear_global_static_buffers()
    assert [replay.static_buffer for replay in replays] == [None, None]


@has_static_buffers
@pytest.mark.parametrize(("dtype", "most"), [(torch.uint8, 256), (torch.int8, 128)])
def test_a_static_buffer_holds_the_ids_of_as_many_experts_as_its_dtype(dtype, most):
    replay = RouterReplay()
    replay.set_static_buffer(torch.zeros(1, 1, dtype=dtype))
    replay.set_router_replay_action(RouterReplayAction.RECORD)

    def record(num_experts):
        route(replay, torch.arange(float(num_experts)).unsqueeze(0), topk=1)

    record(most)
    assert replay.recorded_topk_idx.tolist() == [[most - 1]]
    with pytest.raises(ReplayStateError, match=f"is too narrow for the ids of {most + 1} experts"):
        record(most + 1)


@has_static_buffers
def test_a_graph_may_record_into_a_static_buffer_and_do_nothing_else():
    """A graph runs again without Python: it would replay the routes of its capture, or record into memory that is gone."""
    replay = RouterReplay()

    def capture():
        return make_fx(lambda scores: route(replay, scores)[1])(SCORES)

    assert capture()(SCORES.flip(1)).tolist() == [[2, 1], [3, 0]], "routed live, nothing of ours is in it"
    replay.set_router_replay_action(RouterReplayAction.RECORD)
    with pytest.raises(ReplayStateError, match="is captured into a graph"):
        capture()
    buffer = torch.zeros(2, 2, dtype=torch.int64)
    replay.set_static_buffer(buffer)
    capture()(SCORES.flip(1))
    assert buffer.tolist() == [[2, 1], [3, 0]]
    replay.set_target_indices(TARGET)
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    with pytest.raises(ReplayStateError, match="is captured into a graph"):
        capture()
