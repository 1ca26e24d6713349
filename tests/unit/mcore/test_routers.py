"""Routers that somebody has wrapped, changed, exchanged or drives himself: exact all the same, or the session says so."""

import dataclasses
import functools
import inspect
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_checkpoints
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.router import TopKRouter
from torch.utils import checkpoint as torch_checkpoints

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.mcore.core import hooks
from megatron_router_replay.mcore.model.upstream import (
    INFERENCE_ROUTERS,
    REQUIRED_SYMBOLS,
    TOPK_FUNCTION,
    TOPK_ORDER_FOLLOWS_GRAD,
)
from tests.unit.mcore.tiny_chunk import (
    AROUND,
    KINDS,
    SCORES,
    STARTS,
    Chunk,
    disturbed_backward,
    flips,
    forward,
    non_reentrant,
    num_recomputed,
    random_trace,
    reentrant,
    tokens,
    transformer_engine,
    watched,
    wrong_replays,
)

# ---- replaced, exchanged, changed


def live_without_asking(logits, padding_mask=None):
    return logits.flatten(0, 1), logits.flatten(0, 1) > 0


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("start", [STARTS["freeze"], STARTS["replay"]])
def test_a_router_whose_method_was_replaced_and_does_not_call_on_raises(start, inside):
    chunk = Chunk()
    session = start(chunk) if inside else None
    chunk.routers[1].routing = live_without_asking
    session = session or start(chunk)
    with pytest.raises(ReplayStateError, match="layer 2: its token dispatcher got a routing map that Meg"):
        forward(chunk, session)
    mrr.close_sessions(chunk)
    forward(chunk)


def test_a_freeze_checks_its_dispatchers_after_a_session_inside_it():
    chunk = Chunk()
    freeze = mrr.freeze_recompute(chunk)
    with mrr.replay(chunk, random_trace()) as session:
        forward(chunk, session)
    chunk.routers[1].routing = live_without_asking
    with pytest.raises(ReplayStateError, match="layer 2: its token dispatcher got a routing map that Meg"):
        forward(chunk)
    freeze.close(check=False)


FUNCTION = "topk_routing_with_score_function"


@pytest.mark.parametrize(("owner", "name"), [(TopKRouter, "routing"), (router_module, FUNCTION)])
@pytest.mark.parametrize("around", [reentrant, non_reentrant])
@pytest.mark.parametrize("kind", ["replay", "freeze"])  # a freeze gets no rows: the checkpoint notices
def test_somebody_who_replaces_the_routing_of_all_routers_is_noticed(monkeypatch, kind, around, owner, name):
    chunk = Chunk()
    chunk.around = around
    session = STARTS[kind](chunk)
    ours = getattr(owner, name)
    wrapper = lambda *args, **kwargs: ours(*args, **kwargs)  # noqa: E731
    if owner is router_module:  # `functools.wraps` copies what is on the function; around the method it is legal
        wrapper = functools.wraps(ours)(wrapper)
    monkeypatch.setattr(owner, name, wrapper)
    with pytest.raises(ReplayStateError, match=rf"outer\.{name} was replaced"):
        forward(chunk, session)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None  # the checkpoint that raised left none
    mrr.close_sessions(chunk)


def routing_without_hooks(router, logits, *args, **kwargs):
    topk = getattr(router_module, FUNCTION).__wrapped__
    return topk(logits.view(-1, logits.shape[-1]), router.topk, router_replay=router.router_replay)


@pytest.mark.parametrize("name", ["routing", FUNCTION])
@pytest.mark.parametrize("fused", [False, True])
def test_somebody_who_takes_a_hook_away_from_a_driven_router_is_noticed(monkeypatch, fused, name):
    chunk = Chunk()
    if fused:  # it requests nothing of a RouterReplay: the checkpoint around it notices
        chunk.around = reentrant
        monkeypatch.setattr(chunk.routers[0].config, "moe_router_fusion", True)
    replay = chunk.routers[0].router_replay = mrr.mcore.RouterReplay()
    replay.set_router_replay_action(mrr.mcore.RouterReplayAction.RECORD)
    if name == "routing":
        monkeypatch.setattr(TopKRouter, name, routing_without_hooks)
    else:
        monkeypatch.setattr(router_module, name, getattr(router_module, name).__wrapped__)
    with pytest.raises(ReplayStateError, match=rf"MRR415: .*outer\.{name} was replaced"):
        forward(chunk)
    replay.clear_router_replay_action()


@pytest.mark.parametrize(
    ("owner", "name", "full_name"),
    [
        (torch_checkpoints, "_checkpoint_hook", r"torch\.utils\.checkpoint\._checkpoint_hook"),
        (torch_checkpoints, "_recomputation_hook", "torch.*_recomputation_hook"),
        (torch_checkpoints.CheckpointFunction, "forward", r"torch.*CheckpointFunction\.forward"),
        (megatron_checkpoints.CheckpointFunction, "forward", r"megatron.*CheckpointFunction\.forward"),
        (transformer_engine, "_checkpoint_hook", "transformer_engine.*_checkpoint_hook"),
        (transformer_engine, "_recomputation_hook", "transformer_engine.*_recomputation_hook"),
        (transformer_engine, "_CheckpointFunction", r"transformer_engine.*_CheckpointFunction\.forward"),
        (transformer_engine._CheckpointFunction, "forward", r"transformer_engine.*_CheckpointFunction\.forward"),
    ],
)
def test_somebody_who_replaces_one_kind_of_checkpoint_is_noticed(monkeypatch, owner, name, full_name):
    with (
        pytest.raises(ReplayStateError, match=rf"MRR415: {full_name} was replaced during a session"),
        mrr.freeze_recompute(Chunk()),
    ):
        monkeypatch.setattr(owner, name, staticmethod(lambda *args, **kwargs: None))


@pytest.mark.parametrize(
    ("kind", "module", "names"),
    [
        ("reentrant", torch_checkpoints, ["CheckpointFunction"]),
        ("non-reentrant", torch_checkpoints, ["_checkpoint_hook", "_recomputation_hook"]),
        ("Transformer Engine's reentrant", transformer_engine, ["_CheckpointFunction"]),
        ("by hooks", transformer_engine, ["_checkpoint_hook", "_recomputation_hook"]),
    ],
)
def test_a_recompute_of_a_checkpoint_that_was_replaced_in_the_session_names_it(monkeypatch, kind, module, names):
    """Its recompute finds no tape, and MRR412 would speak of an unknown kind of checkpoint."""
    chunk = Chunk()
    chunk.around = KINDS[kind][0]
    message = rf"MRR415: {module.__name__}\.{names[0]}"
    with pytest.raises(ReplayStateError, match=message), mrr.freeze_recompute(chunk):
        for name in names:
            put_original_back(monkeypatch, getattr(module, name), module, name)
        disturbed_backward(chunk, forward(chunk))


def put_original_back(monkeypatch, wrapped, module, name):
    """Undo what `checkpoints.install` did to a hook, or to an autograd function's forward."""
    if not issubclass(wrapped, torch.autograd.Function):
        monkeypatch.setattr(module, name, wrapped.__mro__[1])
        return
    cells = inspect.getclosurevars(wrapped.forward).nonlocals
    monkeypatch.setattr(wrapped, "forward", staticmethod(cells["forward"]))


def test_a_package_whose_checkpoints_come_inside_a_session_replaces_none(monkeypatch):
    """Its recomputes raise, if it has any, as those of an unknown checkpoint."""
    loaded = types.ModuleType("transformer_engine.pytorch.distributed")
    chunk = Chunk()
    with mrr.replay(chunk, random_trace()) as session:
        monkeypatch.setitem(sys.modules, loaded.__name__, loaded)
        forward(chunk, session)
    assert session.report.replayed_share == 1


class PassesOn(TopKRouter):
    def routing(self, *args, **kwargs):
        return super().routing(*args, **kwargs)


def exchange_class(chunk):
    chunk.routers[0].__class__ = PassesOn
    forward(chunk)


def exchange_router(chunk):
    chunk.layers[1].router = Chunk().layers[1].router


def exchange_router_and_run(chunk):
    exchange_router(chunk)
    forward(chunk)


def exchange_dispatcher(chunk):
    chunk.layers[1].token_dispatcher = Chunk().layers[1].token_dispatcher


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (exchange_class, "the router got the class PassesOn during the session"),
        (exchange_router_and_run, "layer 2: .* did not make for this router. Was the router exchanged"),
        (exchange_router, r"layer 2 .*router.* was exchanged during the session"),
        (exchange_dispatcher, r"layer 2 .*dispatcher.* was exchanged during the session"),
    ],
)
def test_a_router_or_dispatcher_that_is_exchanged_during_the_session_raises(change, message):
    chunk = Chunk()
    with pytest.raises(ReplayStateError, match=message), mrr.freeze_recompute(chunk):
        change(chunk)


def test_a_router_that_changes_its_topk_during_a_replay_raises():
    chunk = Chunk()
    session = mrr.replay(chunk, random_trace(8))
    chunk.routers[0].topk = 3
    with pytest.raises(ReplayStateError, match="layer 1 routes 8 tokens to 3 experts each"):
        forward(chunk, session)
    mrr.close_sessions(chunk)


# ---- driven by somebody


@pytest.mark.parametrize("whose", ["ours", "Megatron's"])
def test_a_router_whose_own_replay_object_is_driven_is_refused(whose):
    from megatron.core.transformer.moe import router_replay

    chunk = Chunk()
    module = mrr.mcore if whose == "ours" else router_replay
    own = [module.RouterReplay() for _ in chunk.routers]
    for router, replay in zip(chunk.routers, own):
        router.router_replay = replay
    with mrr.freeze_recompute(chunk):
        forward(chunk)
    own[1].set_router_replay_action(module.RouterReplayAction.RECORD)
    with pytest.raises(ReplayStateError, match="is being driven"):
        mrr.freeze_recompute(chunk)
    assert [router.router_replay for router in chunk.routers] == own  # nothing of the model is held after the refusal
    own[1].clear_router_replay_action()
    with pytest.raises(ReplayStateError, match="is being driven"), mrr.record(chunk) as session:
        own[2].set_router_replay_action(module.RouterReplayAction.RECORD)
        forward(chunk, session)


# ---- names of torch and Megatron-Core that nobody promised


@pytest.mark.parametrize(
    ("owner", "name", "loss"), REQUIRED_SYMBOLS, ids=lambda each: each if isinstance(each, str) else ""
)
def test_a_private_name_that_is_gone_fails_at_install(monkeypatch, owner, name, loss):
    monkeypatch.delattr(owner, name)
    with pytest.raises(ReplayStateError) as raised:
        hooks.install()
    monkeypatch.undo()
    assert str(raised.value).startswith(f"MRR402: {owner.__name__} has no {name}, so {loss}: use a tested version")
    hooks.install()
    with mrr.freeze_recompute(Chunk()):
        pass


def test_a_second_install_puts_no_hook_around_a_hook():
    hooked = [
        (TopKRouter, "routing"),
        (router_module, TOPK_FUNCTION),
        *((each, "forward") for each in INFERENCE_ROUTERS),
    ]
    before = [vars(owner)[name] for owner, name in hooked]
    hooks.install()
    assert [vars(owner)[name] for owner, name in hooked] == before


def test_what_is_leant_on_is_what_is_used():
    names = {name for _, name, _ in REQUIRED_SYMBOLS}
    sources = [path.read_text() for path in Path(hooks.__file__).parents[1].rglob("*.py")]
    private = re.compile(r"torch\._(?:C|ops)\.(?:_autograd\.)?(?!_autograd\b)(_\w+)")
    used = {name for source in sources for name in private.findall(source)}
    assert used - names == set()
    assert not [name for name in names if not any(name in source for source in sources)]


# ---- captured into a graph


def test_a_router_that_is_traced_is_refused():
    chunk = Chunk()
    trace = torch.fx.experimental.proxy_tensor.make_fx(lambda hidden: chunk.routers[0](hidden)[0])
    with pytest.raises(ReplayStateError, match=r"layer 1 .*is captured into a graph"), mrr.freeze_recompute(chunk):
        trace(torch.ones(4, 2, 8))


@pytest.mark.parametrize("transform", [torch.func.vjp, lambda route, hidden: torch.func.vmap(route)(hidden[None])])
def test_a_router_inside_a_transform_of_torch_func_is_refused(transform):
    chunk = Chunk()
    refused = pytest.raises(ReplayStateError, match=r"MRR416: layer 1 runs inside a transform of torch\.func")
    with refused, mrr.freeze_recompute(chunk):
        transform(lambda hidden: chunk.layers[0](hidden).sum(), torch.ones(4, 2, 8))


# ---- moe_router_fusion=True: Megatron-Core's routing function asks, and fuses nothing


def test_fused_routers_ask_the_unfused_function_that_was_there_before(monkeypatch):
    chunk, trace = Chunk(), random_trace()
    router = chunk.routers[1]
    router.config = dataclasses.replace(router.config)  # of this router alone
    router.config.moe_router_fusion = True
    assert [each.unfused for each in mrr.explain(chunk)] == [False, True, False]
    before, calls = getattr(router_module, FUNCTION), []

    def theirs(*args, **kwargs):
        calls.append(kwargs["fused"])
        return before(*args, **kwargs)

    monkeypatch.setattr(router_module, FUNCTION, theirs)
    chunk.around = reentrant
    with watched(chunk) as seen, mrr.freeze_recompute(chunk):
        with mrr.replay(chunk, trace, verify=True) as session:
            disturbed_backward(chunk, forward(chunk, session))
        disturbed_backward(chunk, forward(chunk, number=1))
    assert (num_recomputed(seen), flips(seen)) == (6, 0)
    assert wrong_replays({key: maps for key, maps in seen.items() if key[0] == 0}, trace) == 0
    assert calls == [False] * 12
    assert (session.report.decisions["verified"], session.report.decisions["wrong"]) == (48, 0)


# ---- hash layers: DeepSeek-V4's router as Megatron-LM's dev branch has it, a table of token ids selects and asks nobody


def hashed_chunk(says_so=True):
    chunk = Chunk()
    router = chunk.routers[0]
    if says_so:  # miles' has the table alone
        router.is_hash_layer = True
    router.tid2eid = torch.stack([(torch.arange(32) + k) % 8 for k in range(2)], dim=1)

    def by_table(self, logits, *args, **kwargs):
        routing_map = torch.zeros(logits.shape[0] * logits.shape[1], 8, dtype=torch.bool)
        routing_map = routing_map.scatter(1, self.tid2eid[self.ids.t().reshape(-1)], True)
        return torch.softmax(logits.view(-1, 8), -1) * routing_map, routing_map

    router.ids = tokens()
    router.routing = types.MethodType(by_table, router)
    return chunk


@pytest.mark.parametrize(("layers", "says_so"), [((2, 3), True), ((1, 2, 3), True), ((2, 3), False)])
def test_a_hash_layer_is_left_alone_and_the_rest_is_replayed(layers, says_so):
    chunk = hashed_chunk(says_so)
    trace = random_trace(8).select_layers(layers)  # an engine may send routes, or zeros, of the hash layer
    chunk.around = reentrant
    explanation = mrr.explain(chunk)
    assert explanation.replayable
    assert "a table of token ids routes it" in str(explanation[0])
    with watched(chunk) as seen, mrr.freeze_recompute(chunk), mrr.replay(chunk, trace, verify=True) as session:
        disturbed_backward(chunk, forward(chunk, session))
    assert (num_recomputed(seen), flips(seen), session.report.decisions["wrong"]) == (3, 0, 0)
    assert wrong_replays({key: maps for key, maps in seen.items() if key[1] > 1}, trace) == 0


# ---- the order of an expert in its row: since Megatron-Core 0.18 a top-k without gradients leaves a row unsorted


@pytest.mark.version
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("topk", [3, 5])
def test_sessions_give_the_losses_and_gradients_of_live_routing_to_the_last_bit(topk, scores, around):
    """Bits of three columns depend on their order, which a recording without gradients has otherwise than a step has."""
    chunk = Chunk(moe_router_topk=topk, **scores)
    chunk.around = around

    def trained(session=None):
        chunk.zero_grad()
        loss = forward(chunk, session)
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in chunk.parameters())]

    live = trained()
    with mrr.freeze_recompute(chunk):
        assert all(map(torch.equal, live, trained()))
    with torch.no_grad(), mrr.record(chunk) as recording:
        forward(chunk, recording)
    trace = recording.trace()
    # A reentrant forward runs without gradients too, in the order given; a top-k in groups is always sorted.
    if TOPK_ORDER_FOLLOWS_GRAD and around is not reentrant and "moe_router_num_groups" not in scores:
        trace = dataclasses.replace(trace, topk_indices=trace.topk_indices.flip(2))
    for kept in (trace, trace.without_routes(torch.arange(8) % 2 == 1)):
        with mrr.replay(chunk, kept) as session:
            assert all(map(torch.equal, live, trained(session)))
