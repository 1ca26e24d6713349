"""Samples of a trainer's micro-batch: tokens [T] and routes [T - 1, layers, topk], by values."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state

import megatron_router_replay as mrr
from megatron_router_replay.errors import PayloadError, ReplayStateError
from megatron_router_replay.trainers import miles, ms_swift, nemo_rl, replayer, roll, slime, token_layers, verl

ROUTES = torch.arange(8).view(1, 8, 1, 1)
"""The route of each position is its number."""


@pytest.mark.parametrize("field", ["text_position_ids", "position_ids"])
def test_ms_swift_cuts_a_packed_row_where_positions_restart(field):
    positions = {
        "position_ids": torch.zeros(3, 1, 8),
        field: torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]]),
    }  # mrope has three
    ids = torch.tensor([[5, 6, 7, 8, 9, 4, 3, 4]])
    batch = {"input_ids": ids, "routed_experts": ROUTES, "seq_lens": torch.tensor([3, 2]), **positions}
    padding = {0}
    samples = ms_swift._samples(batch, padding)
    assert [tokens.tolist() for tokens, _ in samples] == [[5, 6, 7], [8, 9]]
    assert [routes.flatten().tolist() for _, routes in samples] == [[0, 1], [3]]
    assert padding == {0, 3, 4}


def test_ms_swift_takes_no_samples_from_an_evaluation():
    """Which runs its rollout's micro-batches, too, and replays none."""
    trainer = SimpleNamespace(
        args=SimpleNamespace(router_replay_mode="R3"), unwrapped_models=[SimpleNamespace(training=False)]
    )
    batches = iter([{"input_ids": "as they are"}])
    assert ms_swift._replace_data(lambda self, data_iterator: data_iterator, trainer, batches) is batches
    assert list(batches) == [{"input_ids": "as they are"}]


def test_ms_swift_refuses_a_batch_without_routes_and_its_own_recording():
    with pytest.raises(PayloadError, match="MRR802: a micro-batch has no routed_experts"):
        ms_swift._samples({"input_ids": torch.zeros(1, 8)}, set())
    record = SimpleNamespace(name="RECORD")
    with pytest.raises(ReplayStateError, match="MRR806: --router_replay_mode R2"):
        ms_swift._set_action(lambda router_replay_action: None, record)


def test_an_audit_of_ms_swift_compares_each_step_of_a_rollout_with_its_log_probs_alone(monkeypatch):
    """With steps_per_generation=2, and an evaluation between two steps."""
    replay = SimpleNamespace(audits=True, run=lambda forward, **_: (None, None))
    monkeypatch.setattr(ms_swift.replayer, "active", lambda: replay)
    monkeypatch.setattr(ms_swift, "_audited", [])
    monkeypatch.setattr(ms_swift, "_is_trained", [False])
    monkeypatch.setattr(ms_swift, "_is_forward", [True])
    entered = []

    def enter(replay, chunks, batches, are_trained=False):
        if are_trained:
            entered.append([each["input_ids"] for each in batches])

    monkeypatch.setattr(ms_swift, "_enter", enter)

    def log_probs(model, data_iterator):
        raise AssertionError

    def replace(self, data_iterator):
        for name in self.rolled_out:
            ms_swift._compute_logps(log_probs, None, iter([{"input_ids": name}]))
        return data_iterator

    for trains, rolled_out in ((True, "ab"), (False, "e"), (True, ""), (True, "cd"), (False, "e"), (True, "")):
        me = SimpleNamespace(
            args=SimpleNamespace(router_replay_mode="R3"),
            unwrapped_models=[SimpleNamespace(training=trains)],
            wrapped_models=[],
            rolled_out=rolled_out,
        )
        batch = {"input_ids": "ms-swift's own"}
        assert list(ms_swift._replace_data(replace, me, iter([batch]))) == [batch]
    assert entered == [["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"]]


@pytest.mark.parametrize(("rows", "raises"), [([3, 2], False), ([4, 3], False), ([3, 1], True)])
def test_roll_refuses_a_generation_with_fewer_rows_than_it_runs_tokens(rows, raises):
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    batch = SimpleNamespace(batch={"attention_mask": mask})

    def collate(routed_experts):
        return batch

    routes = [torch.zeros(number, 1, 1) for number in rows]
    if raises:
        with pytest.raises(
            PayloadError, match="MRR802: sample 1 has 3 tokens, and 1 rows of routes, with 2 rows at least"
        ):
            roll._collate(collate, routes)
    else:
        assert roll._collate(collate, routes) is batch


def test_rolls_hook_is_set_and_replaces_no_other():
    set_up = {"worker_process_setup_hook": "megatron_router_replay.trainers.roll.install"}
    assert (
        roll.runtime_env({"env_vars": {}}) == roll.runtime_env({"env_vars": {}, **set_up}) == {"env_vars": {}, **set_up}
    )
    assert roll.runtime_env(None) == set_up
    with pytest.raises(
        ReplayStateError, match=r"MRR806: .*hook mine\.hook: call megatron_router_replay\.trainers\.roll\.inst"
    ):
        roll.runtime_env({"worker_process_setup_hook": "mine.hook"})


def test_nemo_rls_padding_is_past_the_lengths_from_the_first_position_on():
    ids = torch.tensor([[5, 6, 2, 9], [7, 8, 4, 3]])
    batch = {"input_ids": ids, "input_lengths": torch.tensor([2, 3])}
    assert nemo_rl._padding_tokens(batch) == [0, 2, 3, 9]


def test_a_row_is_nemo_rls_filler_only_where_every_layer_has_the_first_experts():
    ids = torch.tensor([7, 8, 9])
    routes = torch.tensor([[[0, 1], [3, 2]], [[4, 5], [0, 1]], [[0, 1], [0, 1]]])
    values = token_layers.add(routes.to(torch.int16), ids, sample=0)
    batch = {"input_ids": ids[None], "routed_experts": values[None], "input_lengths": torch.tensor([3])}
    (tokens,), (rows,) = nemo_rl._samples(batch)
    assert tokens.tolist() == [7, 8, 9]
    assert rows.tolist() == [[[0, 1], [3, 2]], [[4, 5], [0, 1]], [[-1, -1], [-1, -1]]]


def test_a_step_of_nemo_rl_has_the_mean_of_its_own_passes_alone(monkeypatch):
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 2)  # whose lists the driver adds up
    monkeypatch.setattr(nemo_rl, "_step", [])
    for shares, expected in (([0.5, 0.75], 0.3125), ([0.25], 0.125)):
        nemo_rl._step += [{"router_replay/replayed_share": share} for share in shares]
        statistics, _ = nemo_rl._add_metrics(lambda: ({"loss": [1.0]}, 1.0))
        assert statistics == {"loss": [1.0], "router_replay/replayed_share": [expected]}


def test_rolls_padding_is_what_the_mask_hides_and_0():
    fields = {"input_ids": torch.tensor([[9, 5, 6], [7, 8, 3]]), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 0]])}
    assert roll._padding_tokens(fields) == [0, 3, 9]


def test_rolls_own_replay_is_as_before_after_a_pass_that_raised():
    strategy = SimpleNamespace(enable_router_replay=True)

    def run():
        with roll._own_replay(strategy, is_on=False):
            assert not strategy.enable_router_replay
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run()
    assert strategy.enable_router_replay, "else later passes of ROLL would run live"


@pytest.mark.parametrize("audits", [False, True])
def test_of_miles_managers_that_of_routers_alone_is_off_and_none_under_an_audit(monkeypatch, audits):
    """Its indexer's replay is a manager of the same class."""
    of_routers, of_indexers = SimpleNamespace(registered=[]), SimpleNamespace(registered=[])
    monkeypatch.setattr(miles, "_manager", lambda: of_routers)
    monkeypatch.setattr(replayer, "_installed", [SimpleNamespace(audits=audits)])
    for manager, is_off in ((of_routers, not audits), (of_indexers, False)):
        miles._register(lambda self, module: self.registered.append(module), manager, "module")
        assert manager.registered == ([] if is_off else ["module"])
        topk = miles._choose_topk(lambda self, old: f"replay of {old}", manager, "top-k")
        assert topk == ("top-k" if is_off else "replay of top-k")


def test_of_verls_equal_sequences_the_longest_one_is_the_recording_of_a_sample(monkeypatch):
    """One was recorded with a padding token at its end, which a sample has, too."""
    routes = torch.tensor([[[0, 1]], [[2, 3]], [[4, 5]]])
    whole = mrr.RoutingTrace(
        topk_indices=torch.cat([routes, routes, torch.tensor([[[6, 7]]])]),
        layer_numbers=(1,),
        num_experts=8,
        token_ids=[5, 6, 7, 5, 6, 7, 0],
        sequence_lengths=(3, 4),
    )
    for trace in (whole, mrr.concat_traces([whole[1], whole[0]])):
        recording = nullcontext()
        recording.gather = lambda *groups, trace=trace: trace
        monkeypatch.setattr(mrr, "record", lambda *_, recording=recording, **__: recording)
        monkeypatch.setattr(replayer, "_installed", [SimpleNamespace(in_pass=lambda kind: nullcontext())])
        for name in ("tensor_model_parallel", "context_parallel", "pipeline_model_parallel"):
            monkeypatch.setattr(parallel_state, f"get_{name}_group", lambda: None)
        monkeypatch.setattr(parallel_state, "is_pipeline_last_stage", lambda **_: True)
        ids = torch.nested.nested_tensor([torch.tensor([5, 6, 7, 0])], layout=torch.jagged)
        output = verl._record([], {"input_ids": ids}, lambda: {"model_output": {}})
        (values,) = output["model_output"]["routed_experts"].unbind()
        assert token_layers.without(values).tolist() == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]


@pytest.mark.parametrize("audits", [False, True])
@pytest.mark.parametrize("trainer", [slime, miles])
def test_samples_come_in_where_a_trainer_would_fill_its_queues(trainer, audits, monkeypatch):
    """Under an audit the trainer fills them too."""
    entered, filled = [], []

    def enter(chunks, samples, *, are_trained):
        entered.append((chunks, are_trained))

    def fill_slimes(self, data_iterator, num_microbatches, rollout_data):
        filled.append(rollout_data)

    def fill_miles(models, rollout_data, data_key):
        filled.append(rollout_data)

    monkeypatch.setattr(replayer, "active", lambda: SimpleNamespace(audits=audits, enter=enter))
    data = {"tokens": [], trainer.FIELD: []}
    if trainer is slime:
        slime._fill(fill_slimes, SimpleNamespace(model="chunks"), iter([]), [1], rollout_data=data)
    else:
        miles._fill(fill_miles, "chunks", {}, "rollout_indexer_topk")
        assert (entered, filled) == ([], [{}])
        filled.clear()
        miles._fill(fill_miles, "chunks", data, data_key=miles.FIELD)
    assert entered == [("chunks", True)]
    assert filled == [data] * audits
    assert (trainer.FIELD in data) == audits
