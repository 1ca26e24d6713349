"""Recomputes of real models use the experts of their forward, whatever happens to the logits in between."""

import contextlib
from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import (
    FULL,
    MOE,
    MTP_RECOMPUTE,
    Case,
    add_noise_in_recompute,
    alive_entries,
    build,
    flips,
    left_over,
    model_inputs,
    moe_routers,
    random_trace,
    run,
    watched,
)

FULL_2 = FULL | {"recompute_num_layers": 2}
SINGLE = Case(config=FULL)
VPP2 = ParallelSizes(pp_size=2, vp_size=2)


def start(kind: str, chunks: list[Any], trace: mrr.RoutingTrace) -> Any:
    if kind == "freeze":
        return mrr.freeze_recompute(chunks, verify=True)
    if kind == "record":
        return mrr.record(chunks, verify=True)
    mask = torch.arange(trace.num_tokens) % 2 == 0  # every second row is live
    values = {"layer_numbers": trace.layer_numbers, "num_experts": trace.num_experts, "replay_mask": mask}
    return mrr.replay(chunks, mrr.RoutingTrace(topk_indices=trace.topk_indices, **values), verify=True)


def noise_flips_nothing(case: Case, kind: str) -> None:
    """Run one step with noisy recomputes; without a session the same noise flips routes."""
    _, chunks, microbatches = build(case)
    add_noise_in_recompute(chunks)
    with watched(chunks) as seen, start(kind, chunks, random_trace(case)) as session:
        run(chunks, case, microbatches, session if session.queued else None)
        assert seen["recompute"]
        assert flips(seen) == 0
        assert alive_entries(chunks) == []
    assert session.report.decisions["wrong"] == 0
    assert (session.report.rows_live > 0) == (kind != "freeze")
    if not case.fused:  # live routing would need Transformer Engine
        with watched(chunks) as seen:
            run(chunks, case, microbatches)
        assert flips(seen) > 0


@pytest.mark.version
@pytest.mark.parametrize("kind", ["freeze", "record", "replay"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_noise_between_forward_and_recompute_flips_nothing(kind, fused, megatron):
    noise_flips_nothing(Case(config=FULL if fused else FULL_2, fused=fused), kind)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (Case(layout=ParallelSizes(pp_size=2), config=FULL), "freeze"),
        (Case(layout=VPP2, config=MOE), "record"),
        (Case(layout=VPP2, config=MOE, fused=True), "replay"),
        (Case(layout=ParallelSizes(tp_size=2), config=FULL), "replay"),
    ],
    ids=["pp2-full", "vpp2-moe", "vpp2-moe-fused", "tp2-full"],
)
def test_over_ranks_noise_flips_nothing(case, kind, on_ranks):
    on_ranks(2, noise_flips_nothing, case, kind)


@pytest.mark.version
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["record", "replay"])
def test_an_mtp_router_that_stays_live_is_frozen_in_recomputes(kind, frozen, megatron):
    case = Case(config={"mtp_num_layers": 1, "num_layers": 2} | MTP_RECOMPUTE, num_microbatches=2)
    _, chunks, microbatches = build(case)
    (router,) = moe_routers(chunks, mtp=True)
    add_noise_in_recompute(chunks, mtp=True)
    maps: list[torch.Tensor] = []
    router.register_forward_hook(lambda module, args, output: maps.append(output[1].clone()))
    with contextlib.ExitStack() as stack:
        if frozen:
            stack.enter_context(mrr.freeze_recompute(chunks))
        session = stack.enter_context(start(kind, chunks, random_trace(case, (1, 2))))
        run(chunks, case, microbatches, session)
    assert len(maps) == 4  # forward and recompute in turns
    assert all(torch.equal(*maps[i : i + 2]) for i in (0, 2))
    assert kind == "replay" or session.trace().layer_numbers == (1, 2)


# Of the recomputes of three forwards: whose each is, in the order in which they come. Autograd runs the youngest first.
ORDERS = {"one backward for all": (2, 1, 0), "last first": (2, 0, 1), "twice through one graph": (0, 0, 1, 2)}


@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_backwards_finds_its_own_micro_batch(order, megatron):
    case = Case(config=FULL, num_microbatches=3)
    _, (model,), microbatches = build(case)
    add_noise_in_recompute([model])
    with watched([model]) as seen, mrr.replay(model, random_trace(case)) as session:
        losses = []
        for microbatch in microbatches:
            session.microbatch(microbatch["routing_rows"])
            # Without labels: the backward of Megatron's cross entropy works in place and cannot run twice.
            logits = model(input_ids=microbatch["tokens"], position_ids=microbatch["position_ids"], attention_mask=None)
            logits.div_(0.7)  # in place, as verl does
            losses.append(logits.square().sum())
        if order == "one backward for all":
            torch.stack(losses).sum().backward()
        else:
            for position, i in enumerate(ORDERS[order]):
                losses[i].backward(retain_graph=ORDERS[order][position + 1 :].count(i) > 0)
    assert len(seen["recompute"]) == 4
    assert flips(seen, owner=list(ORDERS[order])) == 0


def test_one_freeze_serves_a_whole_run_and_keeps_nothing(megatron):
    """Training steps, evaluations, a dropped graph and a failed forward, under one freeze_recompute."""
    _, (model,), microbatches = build(SINGLE)
    add_noise_in_recompute([model])
    freeze = mrr.freeze_recompute(model, count_flips=True)

    def fail(*_: Any) -> None:
        raise ArithmeticError("injected")

    for options in ({}, {"forward_only": True}):
        run([model], SINGLE, microbatches, **options)
        assert alive_entries([model]) == []
    output = model(**model_inputs(microbatches[0]))
    assert len(alive_entries([model])) == 4  # a forward that waits for its backward: four layers
    del output
    assert alive_entries([model]) == []
    handle = model.decoder.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        model(**model_inputs(microbatches[0]))
    handle.remove()
    with watched([model]) as seen:
        run([model], SINGLE, microbatches)
    assert flips(seen) == 0
    assert alive_entries([model]) == []
    freeze.close()
    assert left_over([model]) == []
    with watched([model]) as unfrozen:  # the same noise shows how many flips each step was spared, about
        run([model], SINGLE, microbatches)
    assert freeze.report.recompute_flips / 2 == pytest.approx(flips(unfrozen), rel=0.25)


@pytest.mark.parametrize("kind", ["record", "freeze"])
def test_a_backward_after_its_session_was_left_is_exact(kind, megatron):
    _, (model,), microbatches = build(SINGLE)
    add_noise_in_recompute([model])
    with watched([model]) as seen:
        with start(kind, [model], random_trace(SINGLE)) as session:
            if session.queued:
                session.microbatch(microbatches[0]["routing_rows"])
            loss = model(**model_inputs(microbatches[0])).sum()
        loss.backward()
    del loss
    assert (len(seen["recompute"]), flips(seen), alive_entries([model])) == (4, 0, [])


def test_a_checkpoint_around_model_and_loss_is_exact(megatron):
    """Megatron's checkpoint around model and loss, with full recompute inside it."""
    from megatron.core.tensor_parallel import checkpoint

    _, (model,), microbatches = build(SINGLE)
    add_noise_in_recompute([model])
    scale = torch.ones(1, requires_grad=True)

    def forward(scale: torch.Tensor) -> torch.Tensor:
        return scale * model(microbatches[0]["tokens"], microbatches[0]["position_ids"], None).sum()

    with watched([model]) as seen, mrr.freeze_recompute(model):
        inside = checkpoint(forward, False, scale)
        beside = model(microbatches[1]["tokens"], microbatches[1]["position_ids"], None).sum()
        (inside + beside).backward()
    # Autograd runs the youngest first: the plain micro-batch, then of the other the outer recompute and the inner ones.
    assert len(seen["recompute"]) == 4
    assert flips(seen, owner=[1, 0, 0]) == 0


@pytest.mark.parametrize("frozen", [False, True])
def test_near_ties_kill_a_checkpointed_run_unless_its_recompute_is_frozen(frozen, megatron):
    """Flips in a non-reentrant recompute: other numbers of tokens an expert, other shapes, a dead run."""
    from torch.utils.checkpoint import CheckpointError, checkpoint

    case = Case(num_microbatches=2)
    _, (model,), microbatches = build(case)
    for layer in model.decoder.layers:  # as FSDP and others use it
        forward = layer.forward
        layer.forward = lambda *args, forward=forward, **kwargs: checkpoint(
            forward, *args, use_reentrant=False, **kwargs
        )
    add_noise_in_recompute([model])
    if not frozen:
        with pytest.raises(CheckpointError, match="different metadata"):
            run([model], case, microbatches)
        return
    with watched([model]) as seen, mrr.freeze_recompute(model) as freeze:
        run([model], case, microbatches)
    assert (flips(seen), freeze.report.recomputes) == (0, 8)
