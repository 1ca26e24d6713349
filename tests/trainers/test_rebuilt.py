"""Our hooks on each trainer's functions, rebuilt in a few lines: what runs in every CI, without a checkout."""

import ast
import importlib
import itertools
from functools import partial

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import PayloadError, RouterReplayError, SeamError
from megatron_router_replay.trainers import nemo_rl, replayer, skyrl, token_layers
from tests.trainers import oracle, rebuilt
from tests.trainers.oracle import ATTACKS, MOVES
from tests.trainers.steps import SOURCES, enter_and_run, in_order, passes, samples

pytestmark = pytest.mark.usefixtures("megatron")


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
    live, log_probs, train = in_order(name, seen.counts())
    assert live["no grad"][1] > 0.9 * live["no grad"][0]
    assert log_probs["no grad"] == (138, 0)
    assert (train["train"], train["recompute"], train["live"][1]) == ((138, 0), (138, 0), 0)
    assert metrics["router_replay/rows_replayed"] == 46
    assert metrics["router_replay/replayed_share"] == pytest.approx(46 / 52)


class AddKeyword(ast.NodeTransformer):
    """Add a keyword to functions of a trainer and to its calls of them."""

    def __init__(self, names):
        self.names, self.added = names, []

    def visit_FunctionDef(self, node):
        if node.name in self.names:
            self.added.append(node.name)
            node.args.kwonlyargs.append(ast.arg("newest"))
            node.args.kw_defaults.append(None)
            node.body.insert(0, ast.parse("assert newest == 1").body[0])
        return self.generic_visit(node)

    def visit_Call(self, node):
        if getattr(node.func, "attr", getattr(node.func, "id", None)) in self.names:
            node.keywords.append(ast.keyword("newest", ast.Constant(1)))
        return self.generic_visit(node)


@pytest.mark.parametrize("name", SOURCES)
def test_a_keyword_more_in_every_hooked_function_reaches_it(name, tmp_path, chunks):
    """Trainers' functions get arguments every week."""
    ids, routes = samples()
    known = {
        seam.name.split(".")[-1] for seam in importlib.import_module(f"megatron_router_replay.trainers.{name}").SEAMS
    }
    known.discard("train_actor")  # which has no hook
    adding = AddKeyword(known)
    files = {path: ast.unparse(adding.visit(ast.parse(text))) for path, text in rebuilt.SOURCES[name].items()}
    assert set(adding.added) == known
    with (
        rebuilt.imports(tmp_path, files),
        oracle.process(),
        oracle.watched(chunks, oracle.routes_of_tokens(ids, [part.clone() for part in routes])) as seen,
    ):
        enter_and_run(name, chunks, partial(passes, chunks, seen, ids), ids, routes, more={"newest": 1})
    _, log_probs, train = in_order(name, seen.counts())
    assert log_probs["no grad"] == (138, 0)
    assert (train["train"], train["recompute"]) == ((138, 0), (138, 0))


@pytest.mark.parametrize("name", ["nemo_rl"])
def test_a_step_of_several_passes_has_their_mean_however_its_metrics_are_scaled(name, trainer, chunks):
    """As NeMo-RL's SingleController, which multiplies metrics of micro-batches by one over the number of valid tokens."""
    nemo_rl.install(min_agreement=0.0)
    from nemo_rl.models.policy.workers import megatron_policy_worker as worker

    ids, routes = samples()
    last = torch.arange(oracle.TOPK)  # of NeMo-RL's last rows
    rows = [torch.cat([part, last.expand(1, *part.shape[1:])]) for part in routes]
    filled = [token_layers.add(part.to(torch.int16), own, sample=0) for own, part in zip(ids, rows)]
    lengths = torch.tensor(list(map(len, ids)))
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    data = {"input_ids": pad(ids), "routed_experts": pad(filled), "input_lengths": lengths}
    with oracle.watched(chunks, oracle.routes_of_tokens(ids, routes)) as seen:
        run = partial(passes, chunks, seen, ids)
        for num_chunks in (3, 1):
            metrics = worker.train(chunks[0], data, run, num_chunks)
            assert metrics["router_replay/routers"] == [3.0]
            assert metrics["router_replay/rows_replayed"] == [46.0]
            assert metrics["router_replay/replayed_share"] == [pytest.approx(46 / 52)]
    assert [part["train"] for part in seen.counts()] == [(138, 0)] * 4


OWN_ROUTES = {}
"""Of `ids` in `run_attacked`, by the weights of the model: those of two tests do not differ."""


def run_attacked(name, chunks, monkeypatch, *, attack=list, move=list):
    """Run a trainer, with agreement checked, on long samples with its model's own routes and one attack."""
    monkeypatch.setattr(oracle, "MIN_AGREEMENT", 0.25)
    monkeypatch.setattr(oracle, "WEIGHTS_MOVE", False)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, oracle.VOCAB, (200,), generator=generator) for _ in range(6)]
    weights = tuple(weight.double().sum().item() for weight in chunks[0].parameters())
    if weights not in OWN_ROUTES:
        OWN_ROUTES[weights] = [oracle.own_routes(chunks, part)[:-1] for part in ids]
    routes = attack([part.clone() for part in OWN_ROUTES[weights]])
    with oracle.watched(chunks, {}) as seen:
        enter_and_run(name, chunks, partial(passes, chunks, seen, ids), ids, routes, move=move)


@pytest.mark.parametrize("name", SOURCES)
def test_the_models_own_routes_agree(name, trainer, chunks, monkeypatch):
    run_attacked(name, chunks, monkeypatch)


ATTACKED = [
    *zip(ATTACKS, itertools.cycle(SOURCES)),
    ("late", "megatron_rl"),
    ("exchanged", "roll"),
    ("reversed", "ms_swift"),
]
"""All trainers' samples meet the same trace and the same agreement: each attack comes in through one of them in turn."""


@pytest.mark.parametrize(("attack", "name"), ATTACKED)
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
        rows = torch.arange(len(ids[0]))
        rows, tokens = (each.repeat_interleave(2)[None] for each in (rows, ids[0]))
        session.microbatch(rows, inner, token_ids=tokens)
        model(ids[0][None])
    for handle in handles:
        handle.remove()
    assert sorted(seen) == [2, 3, 4]
    for layer, routing_map in seen.items():
        expected = torch.zeros(len(routes[0]), oracle.EXPERTS, dtype=torch.bool).scatter(
            1, routes[0][:, layer - 1], True
        )
        assert torch.equal(routing_map[: 2 * len(expected)], expected.repeat_interleave(2, dim=0))
