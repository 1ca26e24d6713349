"""Our hooks on each trainer's functions, rebuilt in a few lines: what runs in every CI, without a checkout."""

import importlib.util
import itertools
import os
import sys
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import schedules

import megatron_router_replay as mrr
from megatron_router_replay.errors import PayloadError, ReplayStateError, RouterReplayError, SeamError, TraceError
from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.trainers import miles, nemo_rl, replayer, seams, skyrl, slime, token_layers
from tests.trainers import oracle, rebuilt, small_model
from tests.trainers.oracle import ATTACKS, MOVES
from tests.trainers.slime import Args
from tests.trainers.sources import check_renames
from tests.trainers.stand_ins import trainer_imports

pytestmark = pytest.mark.usefixtures("megatron")

SOURCES = ["slime", "miles", "nemo_rl", "skyrl"]
ARGS = Args(use_rollout_routing_replay=True)
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
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
    with trainer_imports(write(tmp_path, rebuilt.SOURCES[name]), (name,)), oracle.process():
        yield name


@pytest.fixture
def chunks():
    return small_model.build(ParallelSizes(), **FULL)


def samples():
    return oracle.rollout(0)


def passes(chunks, seen, ids, schedule, *, forward_only, packs=False, parts=((2, 3), (0, 1), (4,), (5,))):
    """Run a pass: micro-batches of two samples or one, padded on the right or packed."""
    batches = [[ids[i] for i in part] for part in parts]

    def forward_step(iterator, model):
        parts, params = next(iterator), None
        tokens = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        at = torch.arange(tokens.shape[1]).expand_as(tokens)
        if packs:
            tokens, at = torch.cat(parts)[None], torch.cat([torch.arange(len(part)) for part in parts])[None]
            ends = torch.tensor([0, *map(len, parts)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            longest = max(map(len, parts))
            params = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
            )
        result = model(input_ids=tokens, position_ids=at, attention_mask=None, labels=tokens, packed_seq_params=params)
        return result, lambda out: (out.sum(), 0.0)

    for chunk in chunks:
        chunk.train(not forward_only)
    with torch.set_grad_enabled(not forward_only):
        result = schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(parts),
            seq_length=16,
            micro_batch_size=2,
            forward_only=forward_only,
        )
    seen.mark()
    return result


def enter_and_run(name, chunks, run, ids, routes, *, move=list, held=None):
    """Run the trainer from the rollout to its optimizer; return its metrics.

    Args:
        move: what happens to each sample's rows on their way from driver to worker, where routes travel apart from tokens.
        held: a list that gets the tensors of routes that the trainer's worker holds.
    """
    held = [] if held is None else held
    if name in ("slime", "miles"):
        {"slime": slime, "miles": miles}[name].init(ARGS)
        module = __import__(f"{name}.backends.megatron_utils.actor", fromlist=["actor"])
        me = object.__new__(module.MegatronTrainRayActor)
        me.model = chunks
        data = {"tokens": ids, "rollout_routed_experts": routes}
        held += routes
        metrics = me.train_actor(data, run)
        assert set(data) == {"tokens"}, "as the trainer's own function leaves it"
        return metrics
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    if name == "nemo_rl":
        nemo_rl.install()
        from nemo_rl.algorithms.grpo import add_grpo_token_loss_masks_and_generation_logprobs
        from nemo_rl.models.policy.workers import megatron_policy_worker as worker

        # A prompt and an answer each, whose last token has the experts 0, 1, ..., topk - 1.
        last = torch.arange(oracle.TOPK)
        rows = [torch.cat([part, last.expand(1, part.shape[1], -1).to(part.dtype)]).to(torch.int8) for part in routes]
        logs = [
            [{"token_ids": each[at], "routed_experts": part[at]} for at in (slice(1), slice(1, None))]
            for each, part in zip(ids, rows)
        ]
        for _ in range(2):  # the second call changes nothing
            add_grpo_token_loss_masks_and_generation_logprobs(logs)
        values = pad(move([torch.cat([message["routed_experts"] for message in log]) for log in logs]))
        held.append(values)
        lengths = torch.tensor(list(map(len, ids)))
        data = {"input_ids": pad(ids), "routed_experts": values, "input_lengths": lengths}
        return worker.train(chunks[0], data, run)
    skyrl.install()
    from skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper import MegatronModelWrapper
    from skyrl.train.trainer import RayPPOTrainer

    reply = {
        "prompt_token_ids": [part[:1].tolist() for part in ids],
        "response_ids": [part[1:].tolist() for part in ids],
        "loss_masks": [[1] * (len(part) - 1) for part in ids],
        "rollout_expert_indices": [part.numpy().astype(np.uint8) for part in routes],
    }
    batches, width = [], max(map(len, ids)) + 2
    tokens, values = zip(*RayPPOTrainer().convert_to_training_input(reply, []))
    for own, rows in zip(tokens, move([torch.as_tensor(each) for each in values])):
        padded = torch.arange(oracle.TOPK).expand(width, rows.shape[1], -1).clone()  # SkyRL's filler
        padded[width - len(own) : width - len(own) + len(rows)] = rows
        mask = torch.arange(width) >= width - len(own)
        sequence = torch.zeros(width, dtype=torch.int64).masked_scatter(mask, torch.tensor(own))
        batches.append(
            {"sequences": sequence[None], "attention_mask": mask[None], "rollout_expert_indices": padded[None]}
        )
        held.append(padded)
    model = MegatronModelWrapper(chunks)
    model.forward([{**each, "rollout_expert_indices": None} for each in batches], run, replays=False)
    model.forward(batches, run, replays=True)
    return model.forward_backward_mini_batch([{**each, "loss_mask": torch.ones(1, 1)} for each in batches], run)[0]


@pytest.mark.parametrize("name", SOURCES)
def test_every_decision_is_the_rollouts(name, trainer, chunks):
    """Also where the trainer's own routes are overwritten after they came in: its layout of routes cannot matter."""
    ids, routes = samples()
    held = []

    def run(schedule, *, forward_only):
        kept = [each.clone() for each in held]
        for each in held:
            each.zero_()
        result = passes(chunks, seen, ids, schedule, forward_only=forward_only)
        for each, values in zip(held, kept):
            each.copy_(values)
        return result

    with oracle.watched(chunks, oracle.routes_of_tokens(ids, [part.clone() for part in routes])) as seen:
        metrics = enter_and_run(name, chunks, run, ids, routes, held=held)
    assert held
    live, log_probs, train = seen.counts()
    assert live["no grad"][1] > 0.9 * live["no grad"][0]
    assert log_probs["no grad"] == (138, 0)
    assert (train["train"], train["recompute"], train["live"][1]) == ((138, 0), (138, 0), 0)
    expected = 46 / 46 if name != "nemo_rl" else 46 / 4 / 46  # NeMo-RL adds four micro-batches up
    assert metrics["router_replay/rows_replayed"] / 46 == pytest.approx(expected)


def run_attacked(name, chunks, monkeypatch, *, attack=list, move=list):
    """Run a trainer, with agreement checked, on long samples with its model's own routes and one attack."""
    monkeypatch.setattr(oracle, "MIN_AGREEMENT", 0.25)
    monkeypatch.setattr(oracle, "WEIGHTS_MOVE", False)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, oracle.VOCAB, (200,), generator=generator) for _ in range(6)]
    routes = attack([oracle.own_routes(chunks, part)[:-1] for part in ids])
    with oracle.watched(chunks, {}) as seen:
        enter_and_run(name, chunks, partial(passes, chunks, seen, ids), ids, routes, move=move)


@pytest.mark.parametrize("name", SOURCES)
def test_the_models_own_routes_agree(name, trainer, chunks, monkeypatch):
    run_attacked(name, chunks, monkeypatch)


# All trainers' samples meet the same trace and the same agreement: each attack comes in through one of them in turn.
@pytest.mark.parametrize(("attack", "name"), zip(ATTACKS, itertools.cycle(SOURCES)))
def test_routes_that_were_wrong_before_they_came_in_raise(name, attack, trainer, chunks, monkeypatch):
    with pytest.raises(RouterReplayError, match="MRR"):
        run_attacked(name, chunks, monkeypatch, attack=ATTACKS[attack])


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", ["nemo_rl", "skyrl"])
def test_rows_that_were_moved_between_driver_and_worker_raise(name, move, trainer, chunks, monkeypatch):
    """Their tokens' ids travel with them, so that a single row is enough."""
    with pytest.raises(PayloadError, match=r"MRR802: sample [0-2]: (the routes at|rows of routes)"):
        run_attacked(name, chunks, monkeypatch, move=MOVES[move])


@pytest.mark.parametrize("name", ["skyrl"])
def test_rows_that_skyrl_fills_a_batch_up_with_run_live(name, trainer, chunks):
    """A copy of the first sample, and a micro-batch of one random token: neither has a route, and nothing is trained."""
    skyrl.install()
    from skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper import MegatronModelWrapper

    ids, routes = samples()
    values = token_layers.add(routes[0], ids[0], sample=0)
    filler, real = torch.arange(oracle.TOPK).to(values.dtype).expand(len(ids[0]), values.shape[1], -1), values.clone()
    real = torch.cat([real, filler[len(real) :]])
    mask, random = torch.ones_like(ids[0]), ids[1][:1].expand(len(ids[0]))
    batches = [
        {"sequences": tokens[None], "attention_mask": mask[None], "rollout_expert_indices": rows[None], **more}
        for tokens, mask, rows, more in (
            (ids[0], mask, filler, {"loss_mask": torch.zeros(1, 3)}),  # before the sample: its rows must not win
            (ids[0], mask, real, {"loss_mask": torch.ones(1, 3)}),
            (random, (mask.cumsum(0) == 1).long(), filler, {"loss_mask": torch.zeros(1, 3)}),
        )
    ]

    def run(schedule, *, forward_only):
        return passes(
            chunks, seen, [ids[0], ids[0], ids[1][:1]], schedule, forward_only=forward_only, parts=((0, 1), (2,))
        )

    with oracle.watched(chunks, oracle.routes_of_tokens(ids[:1], routes[:1])) as seen:
        model = MegatronModelWrapper(chunks)
        model.forward(batches, run, replays=True)
        model.forward_backward_mini_batch(batches, run)
        lost = [{**each, "loss_mask": torch.ones(1, 3)} for each in batches[:1]]
        with pytest.raises(PayloadError, match="MRR802: sample 0: rows of routes were lost"):
            model.forward_backward_mini_batch(lost, run)
        del lost[0]["loss_mask"]  # under another name, nothing would say that the lost routes are trained
        with pytest.raises(SeamError, match=r"forward_backward_mini_batch gets a batch without \['loss_mask'\]"):
            model.forward_backward_mini_batch(lost, run)
    log_probs, train = seen.counts()
    assert log_probs["no grad"] == (36, 0)  # two samples of six rows, in three layers
    assert train["train"] == (36, 0)


def test_samples_that_no_pass_replayed_raise_at_the_next_rollout(trainer, chunks):
    replayer.install("slime", lambda: False, {})
    ids, routes = samples()
    replayer.active().enter(chunks, samples)
    with pytest.raises(ReplayStateError, match="MRR809: 6 samples came in with routes, and no pass replayed them"):
        replayer.active().enter(chunks, samples)


def test_samples_without_routes_among_others_are_named(trainer, chunks):
    replayer.install("slime", lambda: True, {})
    ids, routes = samples()
    with pytest.raises(PayloadError, match=r"MRR802: samples \[1, 3\] have no routes, and others have"):
        replayer.active().enter(chunks, lambda: (ids, [None if i in (1, 3) else part for i, part in enumerate(routes)]))


def test_a_pass_that_replays_without_samples_raises(trainer, chunks):
    replayer.install("slime", lambda: True, {})
    with pytest.raises(ReplayStateError, match="MRR809: a pass of slime replays, and no samples came in"):
        replayer.active().run(None, model=chunks)


def test_a_pass_that_drives_megatrons_replay_and_is_not_ours_raises(trainer):
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    chunks = small_model.build(ParallelSizes(), moe_enable_routing_replay=True)
    try:
        replayer.install("slime", lambda: False, {})
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        with oracle.watched(chunks, {}) as seen, pytest.raises(ReplayStateError, match="MRR810: slime drives its own"):
            passes(chunks, seen, samples()[0], schedules.get_forward_backward_func(), forward_only=True)
    finally:
        RouterReplay.global_router_replay_instances.clear()


def audit_of_live_routers(layout, options, packs):
    """Audit routers that run live; the rollout's routes are theirs but for one row. Return the findings of two passes."""
    from megatron.core.transformer.moe.router import TopKRouter

    chunks = small_model.build(layout, **options)
    ids, _ = oracle.rollout(0)
    used = torch.zeros(oracle.VOCAB, oracle.LAYERS, oracle.TOPK, dtype=torch.int64)
    now = {}

    def enter(index, module, args, kwargs):
        now[index] = kwargs["input_ids"].t().reshape(-1)

    def routed(index, router, args, output):
        used[now[index], router.layer_number - 1] = output[1].nonzero()[:, 1].view(-1, oracle.TOPK)

    with (
        mock.patch.dict(os.environ, MRR_AUDIT="1"),
        mock.patch.object(oracle, "WEIGHTS_MOVE", False),
        oracle.process(),
        oracle.watched(chunks, {}) as seen,
    ):
        replayer.install("slime", lambda: True, {"padding_token_ids": [0]})
        handles = []
        for index, chunk in enumerate(chunks):
            handles.append(chunk.register_forward_pre_hook(partial(enter, index), with_kwargs=True))
            routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
            handles += [router.register_forward_hook(partial(routed, index)) for router in routers]
        run = partial(passes, chunks, seen, ids, schedules.get_forward_backward_func(), packs=packs)
        run(forward_only=True)  # without samples an audit only watches
        for handle in handles:
            handle.remove()
        torch.distributed.all_reduce(used)
        routes = [used[part][:-1] for part in ids]
        routes[3][5, 2] = (routes[3][5, 2] + 1) % oracle.EXPERTS
        replayer.active().enter(chunks, lambda: (ids, routes))
        run(forward_only=True)
        run(forward_only=False)
    return oracle.FINDINGS


AUDITED = {
    "one rank, full": (ParallelSizes(), FULL, False),
    "pp 2, full": (ParallelSizes(pp_size=2), FULL, True),
    "pp 2, moe": (ParallelSizes(pp_size=2), MOE, False),
    "pp 2, vpp 2, full": (ParallelSizes(pp_size=2, vp_size=2), FULL, False),
    "pp 2, vpp 2, moe": (ParallelSizes(pp_size=2, vp_size=2), MOE, True),
}


@pytest.mark.parametrize("case", AUDITED)
def test_a_planted_wrong_row_is_found_and_nothing_else(case, on_ranks):
    layout, options, packs = AUDITED[case]
    token = int(oracle.rollout(0)[0][3][5])
    run = partial(on_ranks, layout.world_size) if layout.world_size > 1 else lambda function, *args: [function(*args)]
    ranks = run(audit_of_live_routers, layout, options, packs)
    for i in range(2):  # forward-only, then training
        found = [findings[i] for findings in ranks]
        # Three layers route 52 tokens, 46 of them with a route, in each forward and recompute.
        assert (sum(each.right for each in found), sum(each.wrong for each in found)) == (137, 1)
        assert (sum(each.recomputed for each in found), sum(each.recomputed_wrong for each in found)) == (138 * i, i)
        assert sum(each.not_found for each in found) == 0
        (first,) = [each.first for each in found if each.first]
        assert first.startswith(f"layer 3, sample 3, position 5, token {token}: the router used experts [")


def test_an_audit_counts_routers_that_run_outside_of_a_forward(trainer, chunks):
    """As in combined 1F1B, where a plan of the layers runs in place of the model's forward."""
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_router_replay.trainers.audit import compared

    ids, routes = samples()
    router = next(each for each in chunks[0].modules() if isinstance(each, TopKRouter))
    with compared(chunks, replayer.make_trace(chunks, ids, routes, "unrouted"), {}) as findings, torch.no_grad():
        router(torch.zeros(len(ids[0]), 1, router.config.hidden_size))
        chunks[0](ids[0][None], torch.arange(len(ids[0]))[None], None)
        router(torch.zeros(len(ids[0]), 1, router.config.hidden_size))
    assert (findings.right + findings.wrong, findings.without_route) == (3 * (len(ids[0]) - 1), 3)
    assert findings.not_found == 2


def test_an_audit_compares_no_route_in_which_equal_samples_differ(trainer, chunks, monkeypatch):
    """An engine's noise: the trainer replays each sample's own route, and its tokens do not say which sample it is."""
    monkeypatch.setenv("MRR_AUDIT", "raise")
    replay = replayer.install("slime", lambda: True, {})
    tokens = torch.arange(1, 9)
    own = oracle.own_routes(chunks, tokens)[:-1]
    noisy = own.clone()
    noisy[4, 2, 0] = min(set(range(oracle.EXPERTS)) - set(own[4, 2].tolist()))
    replay.enter(chunks, lambda: ([tokens, tokens], [noisy, own]))

    def schedule(**kwargs):
        with torch.no_grad():
            chunks[0](tokens[None], torch.arange(8)[None], None)

    replay.run(schedule, model=chunks)
    (findings,) = replay.findings
    assert (findings.right, findings.wrong, findings.without_route) == (3 * 6, 0, 3 * 2)


def test_an_audit_logs_samples_that_a_replay_refuses(trainer, chunks, monkeypatch, caplog):
    ids, routes = samples()
    short = [routes[0][1:], *routes[1:]]
    for word in ("1", "raise"):
        monkeypatch.setenv("MRR_AUDIT", word)
        replayer.install("slime", lambda: True, {})
        if word == "raise":
            with pytest.raises(TraceError, match="sample 0: 5 rows of routes for 7 tokens"):
                replayer.active().enter(chunks, lambda: (ids, short))
        else:
            replayer.active().enter(chunks, lambda: (ids, short))
            assert "the samples cannot be compared: MRR" in caplog.text


def test_a_module_that_waits_is_hooked_once_however_often_it_is_looked_for(tmp_path, monkeypatch):
    (tmp_path / "looked_for.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    seams.hook(seams.Seam("looked_for", "double", "x"), lambda original, x: original(x) + 1)
    for _ in range(2):
        importlib.util.find_spec("looked_for")
    module = importlib.import_module("looked_for")
    del sys.modules["looked_for"]
    assert module.double(3) == 7
    assert "exec_module" not in vars(module.__loader__)
    assert "looked_for" not in seams._finder.waiting


def test_a_method_with_text_at_the_left_margin_is_read(tmp_path, monkeypatch):
    text = 'class Actor:\n    def fill(self, data):\n        """Fill.\n\nqueues of data\n        """\n        return data\n'
    (tmp_path / "margin.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("margin")
    seams.hook(seams.Seam("margin", "Actor.fill", "self data", words="queues"), lambda original, me, data: -data)
    assert module.Actor().fill(3) == -3
    seams.Seam("margin", "Actor.fill", "self data", words="queues").check(seams.source_of(text, "Actor.fill"))


@pytest.mark.parametrize("arguments", [[], ["slime"], ["nobody", "."], ["audit", "."]])
def test_the_check_of_a_checkout_says_how_it_is_called(arguments):
    with pytest.raises(SystemExit, match=r"python -m megatron_router_replay\.trainers\.seams TRAINER FOLDER"):
        seams.main(arguments)


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


def test_a_message_without_tokens_is_joined_with_the_others():
    """As NeMo-RL does: an observation may be empty, and newer NeMo-RLs give every message rows of routes."""
    log = [
        {"token_ids": torch.arange(length), "routed_experts": torch.ones(length, 3, 2, dtype=torch.int16)}
        for length in (2, 0, 3)
    ]
    nemo_rl._add_tokens(log, sample=0)
    values, ids = (torch.cat([message[name] for message in log]) for name in ("routed_experts", "token_ids"))
    assert torch.equal(token_layers.remove(values, ids, sample=0, at_least=5), torch.ones(5, 3, 2, dtype=torch.int16))


@pytest.mark.parametrize("topk", [1, 4])
def test_a_sample_without_tokens_has_no_rows(topk):
    values, ids = torch.zeros(0, 5, topk, dtype=torch.int16), torch.zeros(0, dtype=torch.int64)
    assert token_layers.remove(values, ids, sample=0, at_least=0).shape == (0, {1: 2, 4: 4}[topk], topk)


@pytest.mark.parametrize("name", ["skyrl"])
def test_a_sample_of_skyrl_that_was_never_generated_is_named(name, trainer):
    reply = {"prompt_token_ids": [[1, 2]], "response_ids": [[]], "loss_masks": [[]], "rollout_expert_indices": [None]}
    with pytest.raises(PayloadError, match="MRR802: sample 0 has 2 tokens, and no routes"):
        skyrl._with_tokens(reply, eos_token_id=2)


@pytest.mark.parametrize("name", ["skyrl"])
def test_only_before_an_eos_that_skyrl_appends_may_a_trained_token_of_it_lack_a_row(name, trainer):
    """The engine sampled token 6 last and did not run it; SkyRL appends and trains the EOS, 2."""

    def num_rows(response, rows):
        reply = {"prompt_token_ids": [[4, 5]], "response_ids": [response], "loss_masks": [[1] * len(response)]}
        rows = torch.arange(oracle.TOPK).expand(rows, 2, -1).numpy()
        return len(skyrl._with_tokens(reply | {"rollout_expert_indices": [rows]}, eos_token_id=2)[0])

    assert (num_rows([6, 2], 2), num_rows([6, 2], 3), num_rows([6, 7], 3)) == (2, 3, 3)
    for response, rows in (([6, 2], 1), ([6, 7], 2)):
        with pytest.raises(PayloadError, match=rf"MRR802: sample 0 has 4 tokens, .* with {rows + 1} rows at least"):
            num_rows(response, rows)


@pytest.mark.parametrize("name", ["slime", "miles"])
def test_a_rollout_without_routes_is_not_taken_for_a_trainer_that_moved(name, trainer, chunks):
    {"slime": slime, "miles": miles}[name].init(ARGS)
    module = __import__(f"{name}.backends.megatron_utils.actor", fromlist=["actor"])
    actor = object.__new__(module.MegatronTrainRayActor)
    actor.model = chunks
    with pytest.raises(PayloadError, match="MRR802: this rollout has no rollout_routed_experts"):
        actor.train_actor({"tokens": samples()[0]}, None)


@pytest.mark.parametrize("name", rebuilt.SOURCES)
def test_whatever_a_trainer_renames_is_named(name, tmp_path, capsys):
    check_renames(name, write(tmp_path, rebuilt.SOURCES[name]), capsys)


def test_a_batch_without_a_field_is_named(trainer):
    with pytest.raises(SeamError, match=r"fill_routing_replay gets a batch without \['tokens'\]: it has \['ids'\]"):
        seams.take(slime.FILL, {"ids": []}, "tokens")


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


class Expands(torch.nn.Module):
    """As a vision-language model: one token becomes two positions inside, and the language model gets embeddings."""

    def __init__(self, language_model):
        super().__init__()
        self.language_model, self.config = language_model, language_model.config

    def forward(self, input_ids):
        ids = input_ids.repeat_interleave(2, dim=1)
        at = torch.arange(ids.shape[1]).expand_as(ids)
        hidden = self.language_model.embedding(input_ids=ids, position_ids=at)
        return self.language_model(input_ids=None, position_ids=at, attention_mask=None, decoder_input=hidden)


def test_a_model_that_expands_inside_is_refused_by_name_and_takes_rows_by_hand(chunks):
    from megatron.core.transformer.moe.router import TopKRouter

    model = Expands(chunks[0].module).eval()
    ids, routes = samples()
    trace = replayer.make_trace([model], ids, routes, "unrouted")
    with torch.no_grad(), pytest.raises(RouterReplayError, match="input_ids"), mrr.replay([model], trace):
        model(ids[0][None])
    seen = {}
    handles = [
        each.register_forward_hook(lambda router, args, output: seen.update({router.layer_number: output[1]}))
        for each in model.modules()
        if isinstance(each, TopKRouter)
    ]
    inner = model.language_model
    with torch.no_grad(), mrr.replay([inner], trace, min_agreement=0) as session:
        session.microbatch(torch.arange(len(ids[0])).repeat_interleave(2)[None], inner)
        model(ids[0][None])
    for handle in handles:
        handle.remove()
    assert sorted(seen) == [2, 3, 4]
    for layer, routing_map in seen.items():
        expected = torch.zeros(len(routes[0]), oracle.EXPERTS, dtype=torch.bool).scatter(
            1, routes[0][:, layer - 1], True
        )
        assert torch.equal(routing_map[: 2 * len(expected)], expected.repeat_interleave(2, dim=0))
