"""Our hooks on each trainer's functions, rebuilt in a few lines: what runs in every CI, without a checkout."""

import sys
from functools import partial

import numpy as np
import pytest
import torch
from megatron.core.pipeline_parallel import schedules

from megatron_router_replay.errors import PayloadError, ReplayStateError, SeamError, TraceError
from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.trainers import audit, follow, miles, nemo_rl, seams, skyrl, slime, token_layers
from tests.trainers import oracle, rebuilt, small_model
from tests.trainers.slime import Args
from tests.trainers.stand_ins import trainer_imports

pytestmark = pytest.mark.usefixtures("megatron")

SOURCES = {"slime": rebuilt.SLIME, "miles": rebuilt.MILES, "nemo_rl": rebuilt.NEMO_RL, "skyrl": rebuilt.SKYRL}
ARGS = Args(use_rollout_routing_replay=True)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in [each for each in folder.rglob("*") if each.is_dir()]:
        (path / "__init__.py").touch()
    return str(folder)


@pytest.fixture
def trainer(request, tmp_path):
    """Let the trainer of the test's first word be imported."""
    name = request.node.callspec.params["name"] if hasattr(request.node, "callspec") else "slime"
    with trainer_imports(write(tmp_path, SOURCES[name]), (name,)), oracle.process():
        yield name


@pytest.fixture
def chunks():
    return small_model.build(ParallelSizes(), **FULL)


def samples():
    return oracle.rollout(0)


def passes(chunks, seen, schedule, *, forward_only):
    """Run a pass: three micro-batches of two samples, padded on the right."""
    ids, _ = samples()
    batches = [torch.nn.utils.rnn.pad_sequence([ids[i], ids[i + 1]], batch_first=True) for i in (2, 0, 4)]

    def forward_step(iterator, model):
        tokens = next(iterator)
        at = torch.arange(tokens.shape[1]).expand_as(tokens)
        return model(input_ids=tokens, position_ids=at, attention_mask=None, labels=tokens), lambda out: (
            out.sum(),
            0.0,
        )

    for chunk in chunks:
        chunk.train(not forward_only)
    with torch.set_grad_enabled(not forward_only):
        result = schedule(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=chunks[0],
            num_microbatches=3,
            seq_length=16,
            micro_batch_size=2,
            forward_only=forward_only,
        )
    seen.mark()
    return result


def enter_and_run(name, chunks, run, routes):
    """Do what the trainer does from the rollout to its optimizer; return its metrics."""
    ids, _ = samples()
    if name in ("slime", "miles"):
        {"slime": slime, "miles": miles}[name].init(ARGS)
        module = __import__(f"{name}.backends.megatron_utils.actor", fromlist=["actor"])
        me = object.__new__(module.MegatronTrainRayActor)
        me.model = chunks
        data = {"tokens": ids, "rollout_routed_experts": routes}
        metrics = me.train_actor(data, run)
        assert set(data) == {"tokens"}, "as the trainer's own function leaves it"
        return metrics
    if name == "nemo_rl":
        nemo_rl.install()
        from nemo_rl.models.policy.workers import megatron_policy_worker as worker

        lengths = torch.tensor(list(map(len, ids)))
        experts = torch.zeros(6, 16, oracle.LAYERS, oracle.TOPK, dtype=torch.int16)
        for row, part in zip(experts, routes):
            row[: len(part)] = part
        tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        return worker.train(chunks[0], {"input_ids": tokens, "routed_experts": experts, "input_lengths": lengths}, run)
    skyrl.install()
    from skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper import MegatronModelWrapper
    from skyrl.train.trainer import RayPPOTrainer

    reply = {
        "prompt_token_ids": [part[:1].tolist() for part in ids],
        "response_ids": [part[1:].tolist() for part in ids],
        "rollout_expert_indices": [part.numpy().astype(np.uint8) for part in routes],
    }
    batches = []
    for tokens, rows in RayPPOTrainer().convert_to_training_input(reply, []):
        padded = torch.arange(oracle.TOPK).expand(18, rows.shape[1], -1).clone()  # SkyRL's filler
        padded[18 - len(tokens) : 18 - len(tokens) + len(rows)] = torch.as_tensor(rows)
        mask = torch.arange(18) >= 18 - len(tokens)
        values = torch.zeros(18, dtype=torch.int64).masked_scatter(mask, torch.tensor(tokens))
        batches.append(
            {"sequences": values[None], "attention_mask": mask[None], "rollout_expert_indices": padded[None]}
        )
    model = MegatronModelWrapper(chunks)
    model.forward([{**each, "rollout_expert_indices": None} for each in batches], run, replays=False)
    model.forward(batches, run, replays=True)
    return model.forward_backward_mini_batch(batches, run)[0]


@pytest.mark.parametrize("name", SOURCES)
def test_every_decision_is_the_rollouts(name, trainer, chunks):
    ids, routes = samples()
    with oracle.watched(chunks, oracle.routes_of_tokens(ids, routes)) as seen:
        metrics = enter_and_run(name, chunks, partial(passes, chunks, seen), routes)
    live, log_probs, train = seen.counts()
    assert live["no grad"][1] > 0.9 * live["no grad"][0]
    assert log_probs["no grad"] == (138, 0)
    assert (train["train"], train["recompute"], train["live"][1]) == ((138, 0), (138, 0), 0)
    expected = 46 / 46 if name != "nemo_rl" else 46 / 3 / 46  # NeMo-RL adds three micro-batches up
    assert metrics["router_replay/rows_replayed"] / 46 == pytest.approx(expected)


def test_samples_that_no_pass_replayed_raise_at_the_next_rollout(trainer, chunks):
    follow.install("slime", lambda: False, {})
    ids, routes = samples()
    follow.active().enter(chunks, samples)
    with pytest.raises(ReplayStateError, match="MRR809: 6 samples came in with routes, and no pass replayed them"):
        follow.active().enter(chunks, samples)


def test_a_pass_that_replays_without_samples_raises(trainer, chunks):
    follow.install("slime", lambda: True, {})
    with pytest.raises(ReplayStateError, match="MRR809: a pass of slime replays, and no samples came in"):
        follow.active().run(None, model=chunks)


def test_a_pass_that_drives_megatrons_replay_and_is_not_ours_raises(trainer):
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    chunks = small_model.build(ParallelSizes(), moe_enable_routing_replay=True)
    try:
        follow.install("slime", lambda: False, {})
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        with oracle.watched(chunks, {}) as seen, pytest.raises(ReplayStateError, match="MRR810: slime drives its own"):
            passes(chunks, seen, schedules.get_forward_backward_func(), forward_only=True)
    finally:
        RouterReplay.global_router_replay_instances.clear()


def test_rows_that_were_moved_behind_the_driver_raise(trainer):
    ids, routes = samples()
    values = skyrl._with_tokens(
        {
            "prompt_token_ids": [ids[0][:2].tolist()],
            "response_ids": [ids[0][2:].tolist()],
            "rollout_expert_indices": [routes[0].numpy()],
        }
    )[0]
    batch = {
        "sequences": ids[0][None],
        "attention_mask": torch.ones(1, len(ids[0])),
        "rollout_expert_indices": torch.as_tensor(values.astype(np.int16)[[1, 0, 2, 3, 4, 5, 5]])[None],
    }
    with pytest.raises(PayloadError, match=r"sample 0: the routes at position 0, token \d+, carry the id"):
        skyrl._samples([batch])


def test_a_planted_wrong_row_is_found_and_named(trainer, chunks, monkeypatch):
    """The routers run live, and the rollout's routes are theirs but for one row."""
    monkeypatch.setenv("MRR_AUDIT", "1")
    ids, routes = samples()
    own = [oracle.own_routes(chunks, part)[:-1] for part in ids]
    own[3][5, 2] = torch.tensor([each for each in range(oracle.EXPERTS) if each not in own[3][5, 2]][: oracle.TOPK])
    follow.install("slime", lambda: True, {})
    assert isinstance(follow.active(), audit.TrainerAudit)
    follow.active().enter(chunks, lambda: (ids, own))
    monkeypatch.setattr(oracle, "WEIGHTS_MOVE", False)
    with oracle.watched(chunks, {}) as seen:
        passes(chunks, seen, schedules.get_forward_backward_func(), forward_only=False)
    (found,) = follow.active().findings
    # Layers 2 to 4 route 52 tokens, 46 of them with a route, in a forward and a recompute; ten positions are padding.
    assert (found.right, found.wrong, found.recomputed, found.recomputed_wrong) == (137, 1, 138, 1)
    assert found.first.startswith(f"layer 3, sample 3, position 5, token {int(ids[3][5])}: the router used experts [")


def test_an_audit_logs_samples_that_a_replay_refuses(trainer, chunks, monkeypatch, caplog):
    ids, routes = samples()
    short = [routes[0][1:], *routes[1:]]
    for word in ("1", "raise"):
        monkeypatch.setenv("MRR_AUDIT", word)
        follow.install("slime", lambda: True, {})
        if word == "raise":
            with pytest.raises(TraceError, match="sample 0: 5 rows of routes for 7 tokens"):
                follow.active().enter(chunks, lambda: (ids, short))
        else:
            follow.active().enter(chunks, lambda: (ids, short))
            assert "the samples cannot be compared: MRR" in caplog.text


@pytest.mark.parametrize("topk", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_token_ids_travel_with_routes_of_any_topk(topk, dtype):
    ids = torch.tensor([0, 5, 255, 256, 70_000, 151_000])
    routes = torch.arange(6 * 2 * topk).view(6, 2, topk).to(dtype)
    values = token_layers.add(routes[:5], ids, sample=0)
    assert values.shape == (5, 2 + {1: 3, 2: 2}.get(topk, 1), topk)
    for filler in (torch.zeros(topk), torch.arange(topk)):
        filled = torch.cat([values, filler.to(dtype).expand(1, values.shape[1], topk)])
        back = token_layers.remove(filled, ids, sample=0)
        assert torch.equal(back[:5], routes[:5].to(torch.int16))
        assert bool((back[5] == -1).all())


@pytest.mark.parametrize("name", SOURCES)
def test_the_script_names_what_a_checkout_renamed(name, tmp_path, capsys):
    folder = write(tmp_path, SOURCES[name])
    assert seams.main([name, folder]) == 0
    for path in tmp_path.rglob("*.py"):
        path.write_text(
            path.read_text().replace("rollout_routed_experts", "routes").replace("use_router_replay", "replays")
        )
        path.write_text(path.read_text().replace("convert_to_training_input", "convert"))
    capsys.readouterr()
    assert seams.main([name, folder]) >= (1 if name != "miles" else 0)
    assert ("MRR808" in capsys.readouterr().out) == (name != "miles")


def test_a_module_that_is_imported_later_is_checked_then(trainer):
    gone = seams.Seam(
        module="slime.backends.megatron_utils.actor", name="MegatronTrainRayActor.fill", parameters="self"
    )
    seams.hook(gone, None)
    assert "slime.backends.megatron_utils.actor" not in sys.modules
    with pytest.raises(
        SeamError, match=r"MRR808: slime.backends.megatron_utils.actor.MegatronTrainRayActor.fill is gone"
    ):
        __import__("slime.backends.megatron_utils.actor")
