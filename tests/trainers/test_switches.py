"""Samples that no pass replays, and passes without samples, are errors; an audit logs them."""

import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from megatron.core.pipeline_parallel import schedules

import megatron_router_replay as mrr
from megatron_router_replay.errors import (
    LayoutError,
    PayloadError,
    ReplayStateError,
    RouterReplayError,
    UnsupportedRouterError,
)
from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.trainers import miles, replayer, slime
from tests.support import miles_fork
from tests.trainers import oracle, small_model
from tests.trainers.steps import ARGS, passes, samples

pytestmark = pytest.mark.usefixtures("megatron")

PADDING = {"padding_token_ids": [0]}
OWN = "__import__('megatron.core.pipeline_parallel.schedules', fromlist=['core']).forward_backward_no_pipelining"


def own_schedule(forward_only):
    """Edit a trainer's pass so that it names Megatron-Core's function and runs a schedule past it."""
    call = f"run(get_forward_backward_func(), forward_only={forward_only})"
    return call, call.replace("get_forward_backward_func()", f"{OWN} or get_forward_backward_func()")


def unmarked(name):
    """Edit a trainer's training pass so that its switch says nothing of a replay."""
    switch = {"slime": 'os.environ["ROUTING_REPLAY_STAGE"] = "{}"', "miles": 'routing_replay_manager.stage = "{}"'}[
        name
    ]
    return switch.format("replay_backward"), switch.format("fallthrough") + "  # replay_backward"


TRAINS, PREPARES = "a training pass did not replay them", "a forward-only pass did not replay them"
LEAVING = [
    *((name, (own_schedule(False),), TRAINS) for name in ("slime", "miles")),
    *((name, (unmarked(name),), TRAINS) for name in ("slime", "miles")),
    *((name, (own_schedule(True),), PREPARES) for name in ("slime", "miles")),
]
"""Trainers one of whose passes replays no more, while the function and all of its words are as known."""

KEEPS_QUEUES = (('raise AssertionError("slime\'s own queues of rollout_routed_experts")', "'rollout_routed_experts'"),)
"""slime's replay stays on in an audit; this one has no routes to replay, and no router has a queue."""


def actor_of(name, chunks):
    """Install a trainer's replay and return its actor."""
    {"slime": slime, "miles": miles}[name].init(ARGS)
    module = __import__(f"{name}.backends.megatron_utils.actor", fromlist=["actor"])
    actor = object.__new__(module.MegatronTrainRayActor)
    actor.model = chunks
    return actor


def train(name, chunks):
    """Run a trainer from its rollout to its optimizer; return how many decisions of each pass are wrong."""
    ids, routes = samples()

    def run(schedule, *, forward_only):
        return passes(chunks, seen, ids, schedule, forward_only=forward_only)

    with oracle.watched(chunks, oracle.routes_of_tokens(ids, routes)) as seen:
        actor_of(name, chunks).train_actor({"tokens": ids, "rollout_routed_experts": routes}, run)
    return seen.counts()


@pytest.mark.parametrize("name", ["slime", "miles"])
def test_a_megatron_core_that_cannot_replay_is_refused_before_a_model_is_built(name, trainer, monkeypatch):
    """As each trainer's module installs its replay; an audit takes any."""
    miles_fork.install(monkeypatch, "unknown")
    with pytest.raises(UnsupportedRouterError, match=r"MRR402: .* Is \S+ a fork\?"):
        {"slime": slime, "miles": miles}[name].init(ARGS)
    assert not replayer.is_installed()
    monkeypatch.setenv("MRR_AUDIT", "1")
    {"slime": slime, "miles": miles}[name].init(ARGS)


@pytest.mark.parametrize(("name", "edits", "message"), LEAVING)
def test_a_pass_that_stopped_to_replay_raises_in_its_first_step(name, edits, message, trainer, chunks):
    with pytest.raises(ReplayStateError, match=f"MRR809: samples came in with routes, and {message}: the switch"):
        train(name, chunks)


@pytest.mark.parametrize("name", ["slime"])
@pytest.mark.parametrize("edits", [(*KEEPS_QUEUES, own_schedule(False)), (*KEEPS_QUEUES, unmarked("slime"))])
def test_an_audit_says_that_training_was_not_audited(name, edits, trainer, chunks, monkeypatch, caplog):
    monkeypatch.setenv("MRR_AUDIT", "1")
    train(name, chunks)
    assert f"audit of slime's replay: samples came in with routes, and {TRAINS}" in caplog.text
    monkeypatch.setenv("MRR_AUDIT", "raise")
    with pytest.raises(ReplayStateError, match="MRR811: audit of slime's replay, forward-only pass 1"):
        train(name, chunks)  # which has no routes, and all its decisions are wrong


AUDITS = {None: False, "": False, "0": False, "1": True, "raise": True}
"""What MRR_AUDIT may be, and whether it audits."""


@pytest.mark.parametrize(
    "word", [*AUDITS, "false", "off", "no", "False", "2", "00", " 1", "true", "True", "Raise", "RAISE"]
)
def test_a_word_of_the_audit_that_could_mean_the_opposite_raises(word, trainer, monkeypatch):
    monkeypatch.delenv("MRR_AUDIT", raising=False)
    if word is not None:
        monkeypatch.setenv("MRR_AUDIT", word)
    if word in AUDITS:
        slime.init(ARGS)
        assert replayer.active().audits == AUDITS[word]
        return
    with pytest.raises(
        ReplayStateError, match=f"^MRR806: MRR_AUDIT={word} is none of 0, 1 and raise.*slime's own replay"
    ):
        slime.init(ARGS)


@pytest.mark.parametrize("name", ["slime"])
@pytest.mark.parametrize("edits", [KEEPS_QUEUES])
def test_an_audit_of_all_passes_says_nothing_of_the_switch(name, edits, trainer, chunks, monkeypatch, caplog):
    monkeypatch.setenv("MRR_AUDIT", "1")
    with caplog.at_level(logging.INFO):
        train(name, chunks)
    assert "training pass 2: " in caplog.text
    assert "the switch of" not in caplog.text


@pytest.mark.parametrize("kind", ["forward-only", "training"])
def test_a_marked_pass_that_runs_no_schedule_raises(kind, trainer, chunks):
    replay = replayer.install("SkyRL", None, PADDING)
    replay.enter(chunks, samples)
    message = "MRR809: samples came in with routes, and a marked pass did not replay them"
    with pytest.raises(ReplayStateError, match=message), replay.in_pass("replay"):
        pass
    with oracle.watched(chunks, {}) as seen, replay.in_pass("replay"):
        passes(chunks, seen, samples()[0], schedules.get_forward_backward_func(), forward_only=kind == "forward-only")
    assert replay.metrics["router_replay/rows_replayed"] == 46


@pytest.mark.parametrize("are_trained", [False, True])
def test_samples_of_a_rollout_are_replayed_by_a_training_pass(are_trained, trainer, chunks):
    replay = replayer.install("slime", lambda: True, PADDING)
    replay.enter(chunks, samples, are_trained=are_trained)
    with oracle.watched(chunks, {}) as seen:
        passes(chunks, seen, samples()[0], schedules.get_forward_backward_func(), forward_only=True)
    if not are_trained:
        replay.enter(chunks, samples)
        return
    with pytest.raises(ReplayStateError, match="MRR809: 6 samples came in with routes, and no training pass replayed"):
        replay.enter(chunks, samples)


def test_samples_that_no_pass_replayed_raise_at_the_next_rollout(trainer, chunks):
    replayer.install("slime", lambda: False, {})
    replayer.active().enter(chunks, samples)
    with pytest.raises(ReplayStateError, match="MRR809: 6 samples came in with routes, and no pass replayed them"):
        replayer.active().enter(chunks, samples)


def test_samples_that_are_refused_leave_nothing_of_an_earlier_rollout(trainer, chunks):
    replay = replayer.install("slime", lambda: True, PADDING)
    replay.enter(chunks, samples)
    with oracle.watched(chunks, {}) as seen:
        passes(chunks, seen, samples()[0], schedules.get_forward_backward_func(), forward_only=False)
    assert replay.metrics
    ids, routes = samples()
    with pytest.raises(PayloadError, match="MRR802: samples \\[0\\] have no routes"):
        replay.enter(chunks, lambda: (ids, [None, *routes[1:]]))
    assert replay.metrics == {}
    with pytest.raises(ReplayStateError, match="MRR809: a pass of slime replays, and no samples came in"):
        replay.run(None, model=chunks)
    replay.enter(chunks, samples)  # nothing is left of the refused ones
    assert replay.has_samples


def test_a_session_around_all_passes_replays_the_samples(trainer, chunks):
    replay = replayer.install("Megatron-RL", None, PADDING)
    replay.enter(chunks, samples)
    schedule = schedules.get_forward_backward_func()
    with oracle.watched(chunks, {}) as seen, replay.in_session(chunks):
        passes(chunks, seen, samples()[0], schedule, forward_only=True)
    replay.enter(chunks, samples)  # the first ones were replayed


def test_an_audit_logs_samples_that_do_not_fit_and_raises_errors_that_are_not_ours(
    trainer, chunks, monkeypatch, caplog
):
    def fail():
        raise KeyError("tokens")

    monkeypatch.setenv("MRR_AUDIT", "1")
    replay = replayer.install("slime", lambda: True, PADDING)
    with pytest.raises(KeyError, match="tokens"):
        replay.enter(chunks, fail)
    replay.enter(chunks, lambda: (samples()[0], [None, *samples()[1][1:]]))
    assert "audit of slime's replay: the samples cannot be compared: MRR802: samples [0] have no routes" in caplog.text
    assert not replay.has_samples


def test_samples_without_routes_among_others_are_named(trainer, chunks):
    replayer.install("slime", lambda: True, PADDING)
    ids, routes = samples()
    with pytest.raises(PayloadError, match=r"MRR802: samples \[1, 3\] have no routes, and others have"):
        replayer.active().enter(chunks, lambda: (ids, [None if i in (1, 3) else part for i, part in enumerate(routes)]))


@pytest.mark.parametrize("are_trained", [False, True])
def test_a_session_around_passes_that_do_not_train_leaves_a_rollout_to_be_trained(are_trained, trainer, chunks):
    replay = replayer.install("slime", lambda: False, PADDING)
    replay.enter(chunks, samples, are_trained=are_trained)
    with oracle.watched(chunks, {}) as seen, replay.in_session(chunks):
        schedule = schedules.forward_backward_no_pipelining  # past the hook on Megatron-Core's getter
        passes(chunks, seen, samples()[0], schedule, forward_only=True)
    if not are_trained:
        replay.enter(chunks, samples)
        return
    with pytest.raises(ReplayStateError, match="MRR809: 6 samples came in with routes, and no training pass replayed"):
        replay.enter(chunks, samples)


def test_metrics_go_into_the_dicts_of_a_trainer(trainer):
    replay = replayer.install("slime", lambda: True, PADDING)
    replay.metrics = {"router_replay/agreement": 24.0}
    results = [{}, None, {"loss": 1.0}]
    replay.add_metrics(results)
    assert results == [{"router_replay/agreement": 24.0}, None, {"loss": 1.0, "router_replay/agreement": 24.0}]


@pytest.mark.parametrize("expert", [1, 7])
def test_any_route_in_a_dense_layer_raises(expert, trainer, chunks):
    ids, routes = samples()
    routes[3] = routes[3].clone()
    routes[3][:, 0] = -1  # as trainers fill layer 1, which is dense; engines fill it with 0
    assert replayer.make_trace(chunks, ids, routes, "unrouted").layer_numbers == (2, 3, 4)
    routes[3][2, 0, 1] = expert
    with pytest.raises(LayoutError, match=r"MRR802: sample 3 has routes in layers \[1\], which are dense"):
        replayer.make_trace(chunks, ids, routes, "unrouted")


def test_rows_of_the_moe_layers_alone_and_of_more_experts_than_layers_are_taken(trainer, chunks):
    ids, _ = samples()
    generator = torch.Generator().manual_seed(0)
    routes = [torch.rand(len(part) - 1, 4, oracle.EXPERTS, generator=generator).argsort(dim=2) for part in ids]
    for topk in (oracle.TOPK, 6):
        rows = [part[:, :, :topk].clone() for part in routes]
        for part in rows:
            part[:, 0] = 0  # layer 1 is dense
        whole = replayer.make_trace(chunks, ids, rows, "unrouted")
        alone = replayer.make_trace(chunks, ids, [part[:, 1:] for part in rows], "unrouted")
        assert torch.equal(whole.topk_indices, alone.topk_indices)
    rows[0][-2, 0, 0] = 1
    with pytest.raises(LayoutError, match=r"MRR802: sample 0 has routes in layers \[1\], which are dense"):
        replayer.make_trace(chunks, ids, rows, "unrouted")


@pytest.mark.parametrize("field", ["moe_n_hash_layers", "dsv4_n_hash_layers"])
def test_layers_that_a_table_of_tokens_routes_are_left_out_whatever_an_engine_sends_there(field, trainer, chunks):
    """DeepSeek-V4's first ones; here layer 2, after a dense one."""
    ids, routes = samples()
    setattr(chunks[0].config, field, 2)
    for fill in (0, 5):  # nothing, or one id again and again
        rows = [part.clone() for part in routes]
        for part in rows:
            part[:, 1] = fill
        for columns in ([0, 1, 2, 3], [1, 2, 3], [2, 3]):
            trace = replayer.make_trace(chunks, ids, [part[:, columns] for part in rows], "unrouted")
            assert trace.layer_numbers == (3, 4)
            assert torch.equal(trace.topk_indices[: len(ids[0]) - 1].long(), routes[0][:, 2:])
    rows[1][0, 0, 0] = 7
    with pytest.raises(LayoutError, match=r"MRR802: sample 1 has routes in layers \[1\], which are dense"):
        replayer.make_trace(chunks, ids, rows, "unrouted")


@pytest.mark.parametrize(("is_initialized", "rank", "logs"), [(True, 0, True), (True, 1, False), (False, None, True)])
def test_one_rank_logs_a_pass_that_replayed(is_initialized, rank, logs, trainer, chunks, monkeypatch, caplog):
    """Without a process group there is one rank, and nothing that it could gather."""
    group = SimpleNamespace(is_initialized=lambda: is_initialized, get_rank=lambda: rank)
    replay = replayer.install("slime", lambda: True, PADDING)
    if is_initialized:
        replay.enter(chunks, samples)
    monkeypatch.setattr(replayer, "dist", group)
    if not is_initialized:
        replay.enter(chunks, samples)
    with caplog.at_level(logging.INFO), oracle.watched(chunks, {}) as seen:
        passes(chunks, seen, samples()[0], schedules.get_forward_backward_func(), forward_only=True)
    assert ("router replay: 46 replayed, 6 live, " in caplog.text) == logs


def test_refused_samples_are_not_missed_by_the_next_ones(trainer, chunks):
    replay = replayer.install("slime", lambda: True, PADDING)
    ids, routes = samples()
    with pytest.raises(PayloadError, match="MRR802: samples"):
        replay.enter(chunks, lambda: (ids, [None, *routes[1:]]))
    replay.enter(chunks, samples)
    assert replay.has_samples


def test_samples_of_a_trace_are_replayed_by_any_pass(trainer, chunks):
    replay = replayer.install("slime", lambda: True, PADDING)
    trace = replayer.make_trace(chunks, *samples(), "unrouted")
    replay.enter_trace(lambda: trace)
    with oracle.watched(chunks, {}) as seen:
        passes(chunks, seen, samples()[0], schedules.get_forward_backward_func(), forward_only=True)
    replay.enter_trace(lambda: trace)


def test_metrics_go_into_the_first_result_of_a_step_that_logs(trainer, chunks, monkeypatch):
    monkeypatch.setenv("MRR_AUDIT", "1")  # so that a step may run no forward
    replay = replayer.install("slime", lambda: True, PADDING)
    replay.enter(chunks, samples)

    def step(*results):
        replay.run(lambda **_: None, model=chunks)
        replay.metrics = {"router_replay/agreement": 1.0}
        return results

    added = {"router_replay/agreement": 1.0}
    assert replayer.run_training_step(step, {"loss": 2.0}, {}) == ({"loss": 2.0} | added, {})
    assert replayer.run_training_step(step, {}, {"norm": 1.0}) == ({}, {"norm": 1.0})


def test_trainers_without_the_flag_split_zigzag(trainer):
    flags = [SimpleNamespace(), SimpleNamespace(allgather_cp=False), SimpleNamespace(allgather_cp=True)]
    options = [replayer.install_by_flags("slime", each, lambda: True, {}).options for each in flags]
    assert options == [PADDING, PADDING, {**PADDING, "cp_partition_mode": "contiguous"}]


@pytest.mark.parametrize("pre_process", [False, True])
def test_later_stages_get_tokens_in_marked_passes_alone(pre_process, trainer):
    def given():
        return replayer.give_every_stage_tokens(lambda ids, pre_process: pre_process, None, pre_process)

    replayer.uninstall()
    assert given() == pre_process
    replay = replayer.install("SkyRL", None, {})
    assert given() == pre_process
    replay.kind = "replay"
    assert given()


def test_a_pass_that_replays_without_samples_raises(trainer, chunks):
    replayer.install("slime", lambda: True, PADDING)
    with pytest.raises(ReplayStateError, match="MRR809: a pass of slime replays, and no samples came in"):
        replayer.active().run(None, model=chunks)


def test_a_pass_that_drives_megatrons_replay_and_is_not_ours_raises(trainer):
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    chunks = small_model.build(ParallelSizes(), moe_enable_routing_replay=True)
    before = [list(chunk._forward_pre_hooks) for chunk in chunks]
    try:
        replayer.install("slime", lambda: False, {})
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        with oracle.watched(chunks, {}) as seen, pytest.raises(ReplayStateError, match="MRR810: slime drives its own"):
            passes(chunks, seen, samples()[0], schedules.get_forward_backward_func(), forward_only=True)
        assert [list(chunk._forward_pre_hooks) for chunk in chunks] == before, "its hooks end with the pass"
    finally:
        RouterReplay.global_router_replay_instances.clear()


@pytest.mark.parametrize("name", ["slime", "miles"])
def test_a_rollout_without_routes_is_not_taken_for_a_trainer_that_moved(name, trainer, chunks):
    with pytest.raises(PayloadError, match="MRR802: this rollout has no rollout_routed_experts"):
        actor_of(name, chunks).train_actor({"tokens": samples()[0]}, None)


def enter_on_this_rank(failing):
    """Run on a rank: return the error of samples that cannot be replayed on the ranks `failing`, and of the next ones."""
    rank, replay, errors = torch.distributed.get_rank(), replayer.TrainerReplay("slime", lambda: True, {}), []
    trace = mrr.RoutingTrace(
        topk_indices=torch.zeros(2, 1, 1, dtype=torch.int64), layer_numbers=[1], num_experts=2, sequence_lengths=[2]
    )

    def make(failing):
        if rank in failing:
            raise LayoutError(f"the samples of rank {rank}")
        return trace

    for ranks in (failing, ()):
        try:
            replay.enter_trace(partial(make, ranks))
            errors.append("")
        except RouterReplayError as error:
            errors.append(f"{type(error).__name__}: {error}")
        assert replay.has_samples == (not errors[-1])
    return errors


@pytest.mark.parametrize("failing", [(1,), (0, 1)])
def test_no_rank_takes_samples_that_a_rank_cannot_replay(failing, on_ranks):
    """Else the other ranks wait in the collectives of a pass that this rank never runs."""
    of_another = "PayloadError: MRR802: the samples of ranks [1] cannot be replayed; rank 1: the samples of rank 1"
    own = [f"LayoutError: the samples of rank {rank}" for rank in range(2)]
    expected = [own[0] if 0 in failing else of_another, own[1]]
    assert on_ranks(2, enter_on_this_rank, failing) == [[error, ""] for error in expected]
