"""The audit counts the wrong decisions of any replay, finds planted ones, and nothing else."""

import os
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from megatron.core.pipeline_parallel import schedules

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError, TraceError
from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.trainers import audit, replayer
from megatron_router_replay.trainers.audit import Findings
from tests.functional.mcore.cases import FULL, MOE
from tests.trainers import oracle, small_model
from tests.trainers.steps import passes, samples

pytestmark = pytest.mark.usefixtures("megatron")


def trace_of(chunks):
    return replayer.make_trace(chunks, *samples(), "unrouted")


def run_passes(chunks, seen, trace):
    """Run a pass of log-probs and a training step inside one audit; return its findings and the oracle's counts."""
    with mrr.audit(chunks, trace, padding_token_ids=[0]) as findings:
        for forward_only in (True, False):
            schedule = schedules.get_forward_backward_func()
            # The two differ in the order of their micro-batches; recomputes are those of the training alone.
            ids = samples()[0][:: -1 if forward_only else 1]
            passes(chunks, seen, ids, schedule, forward_only=forward_only)
    return findings


def check_counts(findings, seen):
    """Check an audit of two passes against hooks that share no code with it."""
    log_probs, train = seen.counts()
    assert findings.compared == log_probs["no grad"][0] + train["no grad"][0] + train["train"][0] == 276
    assert findings.wrong == log_probs["no grad"][1] + train["no grad"][1] + train["train"][1]
    assert (findings.recomputed, findings.recomputed_wrong) == train["recompute"]
    assert findings.not_found == 0


@pytest.mark.parametrize("decides", ["live router", "mrr.replay", "mrr.replay, one wrong row"])
def test_whatever_decides_is_counted_as_an_independent_hook_counts_it(decides, chunks):
    ids, routes = samples()
    trace = trace_of(chunks)
    if "wrong" in decides:
        routes[3][5, 2] = (routes[3][5, 2] + 1) % oracle.EXPERTS
    replaying = (
        mrr.replay(chunks, trace, min_agreement=0.0, padding_token_ids=[0]) if "replay" in decides else nullcontext()
    )
    with oracle.watched(chunks, oracle.routes_of_tokens(ids, routes)) as seen, replaying:
        findings = run_passes(chunks, seen, trace_of(chunks) if "wrong" not in decides else trace_with(chunks, routes))
    check_counts(findings, seen)
    assert findings.recomputed == 138
    wrong = (findings.wrong, findings.recomputed_wrong)
    if decides == "live router":
        assert findings.wrong > 0.9 * findings.compared
    else:
        assert wrong == ((2, 1) if "wrong" in decides else (0, 0))
    if "wrong" in decides:
        used, token = sorted(samples()[1][3][5, 2].tolist()), int(ids[3][5])
        assert str(findings).endswith(
            f"First: layer 3, sample 3, position 5, token {token}: the router used experts {used}, the rollout "
            f"{sorted(routes[3][5, 2].tolist())}"
        )


def trace_with(chunks, routes):
    return replayer.make_trace(chunks, samples()[0], routes, "unrouted")


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
        assert (sum(each.compared for each in found), sum(each.wrong for each in found)) == (138, 1)
        assert (sum(each.recomputed for each in found), sum(each.recomputed_wrong for each in found)) == (138 * i, i)
        assert sum(each.not_found for each in found) == 0
        (first,) = [each.first for each in found if each.first]
        assert first.startswith(f"layer 3, sample 3, position 5, token {token}: the router used experts [")


def test_an_audit_counts_routers_that_run_outside_of_a_forward(trainer, chunks):
    """As in combined 1F1B, where a plan of the layers runs in place of the model's forward."""
    from megatron.core.transformer.moe.router import TopKRouter

    ids, routes = samples()
    router = next(each for each in chunks[0].modules() if isinstance(each, TopKRouter))
    with mrr.audit(chunks, trace_of(chunks)) as findings, torch.no_grad():
        router(torch.zeros(len(ids[0]), 1, router.config.hidden_size))
        chunks[0](ids[0][None], torch.arange(len(ids[0]))[None], None)
        router(torch.zeros(len(ids[0]), 1, router.config.hidden_size))
    assert (findings.compared, findings.without_route) == (3 * (len(ids[0]) - 1), 3)
    assert findings.not_found == 2


def test_a_forward_with_tokens_of_no_sample_is_counted_once(trainer, chunks, caplog):
    ids, _ = samples()
    foreign = torch.tensor([oracle.unused_tokens(0)[: len(ids[0])]])
    with mrr.audit(chunks, trace_of(chunks)) as findings, torch.no_grad():
        chunks[0](ids[0][None], torch.arange(len(ids[0]))[None], None)
        for _ in range(3):
            chunks[0](foreign, torch.arange(foreign.shape[1])[None], None)
    assert (findings.compared, findings.without_route, findings.not_found) == (3 * (len(ids[0]) - 1), 3, 3)
    assert "3 without a route; 3 forwards were not compared. First: layer" in str(findings)
    assert caplog.text.count("audit: a forward is not compared: MRR") == 1


def test_a_forward_that_raises_leaves_no_rows_to_the_next_router(trainer, chunks):
    from megatron.core.transformer.moe.router import TopKRouter

    def fail(*_):
        raise ZeroDivisionError

    ids, _ = samples()
    router = next(each for each in chunks[0].modules() if isinstance(each, TopKRouter))
    handle = chunks[0].module.output_layer.register_forward_pre_hook(fail)
    with mrr.audit(chunks, trace_of(chunks)) as findings, torch.no_grad():
        with pytest.raises(ZeroDivisionError):
            chunks[0](ids[0][None], torch.arange(len(ids[0]))[None], None)
        handle.remove()
        compared = 3 * (len(ids[0]) - 1)
        router(torch.zeros(len(ids[0]), 1, router.config.hidden_size))
    assert (findings.compared, findings.not_found) == (compared, 1)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_recompute_outside_of_a_forward_takes_no_rows_of_one(is_first, trainer, chunks):
    """Router 1 runs under a checkpoint of its own, before or after a pass without gradients."""
    from megatron.core.transformer.moe.router import TopKRouter
    from torch.utils.checkpoint import checkpoint

    ids, _ = samples()
    tokens, positions = ids[0][None], torch.arange(len(ids[0]))[None]
    routes = oracle.own_routes(chunks, ids[0])[:-1]
    trace = replayer.make_trace(chunks, [ids[0]], [routes], "unrouted")
    router = next(each for each in chunks[0].modules() if isinstance(each, TopKRouter))
    hidden = torch.randn(len(ids[0]), 1, router.config.hidden_size, requires_grad=True)
    with mrr.audit(chunks, trace) as findings:
        if not is_first:
            with torch.no_grad():
                chunks[0](tokens, positions, None)
        alone = checkpoint(router, hidden, use_reentrant=True)[0].sum()
        loss = chunks[0](tokens, positions, None).float().sum()
        alone.backward()
        loss.backward()
    assert (findings.wrong, findings.not_found) == (0, 1)
    assert (findings.recomputed, findings.recomputed_wrong) == (3 * (len(ids[0]) - 1), 0)


def test_a_recompute_that_torch_ends_inside_of_its_router_is_not_counted(trainer):
    """Routers alone in non-reentrant checkpoints, which have every saved tensor before a router returns."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

    def alone(router):
        return lambda *args, **kwargs: checkpoint(router, *args, use_reentrant=False, **kwargs)

    chunks = small_model.build(ParallelSizes())
    ids = samples()[0][:2]
    routes = [oracle.own_routes(chunks, tokens)[:-1] for tokens in ids]
    trace = replayer.make_trace(chunks, ids, routes, "unrouted")
    for layer in [module for module in chunks[0].modules() if isinstance(module, MoELayer)]:
        layer.route = alone(layer.router)
    losses = []
    with mrr.audit(chunks, trace) as findings:
        for tokens, stops_early in zip(ids, (True, False)):
            with set_checkpoint_early_stop(stops_early):
                losses.append(chunks[0](tokens[None], torch.arange(len(tokens))[None], None).float().sum())
        for loss in losses:
            loss.backward()
    first, second = (3 * (len(tokens) - 1) for tokens in ids)
    assert first != second
    assert (findings.compared, findings.wrong, findings.not_found) == (first + second, 0, 0)
    assert (findings.recomputed, findings.recomputed_wrong) == (second, 0)


def test_recomputes_of_some_layers_alone_are_compared_with_rows_of_their_own_forwards(trainer):
    """Megatron-Core's recompute_method="block": the first two of four layers run again, of which one has experts."""
    options = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
    chunks = small_model.build(ParallelSizes(), **options)
    ids = samples()[0][:2]
    routes = [oracle.own_routes(chunks, tokens)[:-1] for tokens in ids]
    trace = replayer.make_trace(chunks, ids, routes, "unrouted")
    with mrr.audit(chunks, trace) as findings:
        losses = [chunks[0](each[None], torch.arange(len(each))[None], None).float().sum() for each in ids]
        for loss in losses:
            loss.backward()
    routed = sum(len(tokens) - 1 for tokens in ids)
    assert (findings.compared, findings.wrong, findings.not_found) == (3 * routed, 0, 0)
    assert (findings.recomputed, findings.recomputed_wrong) == (routed, 0)


def test_experts_that_drop_tokens_are_compared_as_they_were_chosen(trainer):
    """Above an expert's capacity, tokens leave the map that a router returns, and it chose that expert all the same."""
    from megatron.core.transformer.moe import router as router_module

    chunks = small_model.build(ParallelSizes(), moe_expert_capacity_factor=1.0, moe_token_drop_policy="position", **MOE)
    ids, routes = samples()
    original = router_module.apply_router_token_dropping
    with oracle.watched(chunks, oracle.routes_of_tokens(ids, routes)) as seen:
        trace = trace_of(chunks)
        with mrr.replay(chunks, trace, min_agreement=0.0, padding_token_ids=[0]):
            exact = run_passes(chunks, seen, trace)
        log_probs, _ = seen.counts()
        live = run_passes(chunks, seen, trace)
    assert log_probs["no grad"][1] > 0, "tokens were dropped"
    assert (exact.compared, exact.wrong, exact.recomputed, exact.recomputed_wrong, exact.not_found) == (
        276,
        0,
        138,
        0,
        0,
    )
    assert live.wrong > 0.9 * live.compared == 0.9 * 276
    assert router_module.apply_router_token_dropping is original


def test_routers_of_a_decoder_that_was_built_twice_are_counted(trainer):
    """As Qwen3-VL's language models are: Megatron-Core lists the RouterReplays of both, and trainers index that list."""
    from megatron.core.transformer.moe.router_replay import RouterReplay
    from megatron.core.transformer.transformer_block import TransformerBlock

    RouterReplay.clear_global_router_replay_instances()
    chunks = small_model.build(ParallelSizes(), moe_enable_routing_replay=True)
    trace = trace_of(chunks)
    with mrr.audit(chunks, trace) as once:
        pass
    language_model = chunks[0].module
    language_model.decoder = TransformerBlock(language_model.config, language_model.transformer_layer_spec)
    with mrr.audit(chunks, trace) as twice:
        pass
    RouterReplay.clear_global_router_replay_instances()
    with mrr.audit(chunks, trace) as cleared:
        pass
    assert [findings.other_routers for findings in (once, twice, cleared)] == [0, 3, 0]
    assert "RouterReplay" not in f"{once}{cleared}"
    assert "3 RouterReplays of other routers" in str(twice)


def test_an_audit_that_raises_leaves_no_hook(chunks):
    def hooks():
        return [list(module._forward_hooks) + list(module._forward_pre_hooks) for module in chunks[0].modules()]

    def fail():
        assert hooks() != before
        raise ZeroDivisionError

    before = hooks()
    with pytest.raises(ZeroDivisionError), mrr.audit(chunks, trace_of(chunks)) as findings:
        fail()
    assert hooks() == before
    assert str(findings) == "nothing was compared, 0 decisions without a route"


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
    assert (findings.compared, findings.wrong, findings.without_route) == (3 * 6, 0, 3 * 2)


def test_rows_of_equal_samples_in_which_routes_or_masks_differ_are_left_out():
    """Of samples 1 and 3: row 1 has two routes, row 3 has one route of two. Samples 0 and 2 have other tokens."""
    generator = torch.Generator().manual_seed(0)
    own = torch.rand(5, 1, 8, generator=generator).argsort(dim=2)[:, :, :1]
    noisy = own.clone()
    noisy[1] = (own[1] + 1) % 8
    tokens, others = torch.arange(1, 7), torch.arange(11, 15)
    trace = mrr.RoutingTrace.from_samples(
        [others, tokens, others + 10, tokens], [own[:3], own, own[2:], noisy], num_experts=8, layer_numbers=[1]
    )
    trace = trace.without_routes(torch.arange(20) == 14 + 3)  # which keeps its experts, so the masks alone differ
    left = audit._comparable(trace).replay_mask.split([4, 6, 4, 6])
    assert [part.tolist() for part in left] == [
        [True, True, True, False],
        [True, False, True, False, True, False],
        [True, True, True, False],
        [True, False, True, False, True, False],
    ]


@pytest.mark.parametrize("wrong", ["wrong", "recomputed_wrong"])
def test_a_wrong_forward_or_a_wrong_recompute_alone_is_an_error(wrong, trainer, chunks, monkeypatch, caplog):
    """A recompute may be wrong where every forward was right."""

    @contextmanager
    def audit_that_finds(*args, **kwargs):
        yield Findings(compared=6, recomputed=6, **{wrong: 1})

    monkeypatch.setattr(audit, "audit", audit_that_finds)
    for word in ("1", "raise"):
        monkeypatch.setenv("MRR_AUDIT", word)
        replay = replayer.install("slime", lambda: True, {})
        replay.enter(chunks, samples)
        raises = pytest.raises(ReplayStateError, match=r"MRR811: audit of slime's replay, training pass 1: .*1 of 6")
        with raises if word == "raise" else nullcontext():
            replay.run(lambda **kwargs: None, model=chunks)
    (record,) = [record for record in caplog.records if "training pass" in record.message]
    assert record.levelname == "WARNING"


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
