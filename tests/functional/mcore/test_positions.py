"""Forwards attend to the positions that a session gives them, read from the attention's own indices."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, ReplayStateError, TraceError, UnsupportedRouterError
from megatron_router_replay.indexer import PositionTrace
from megatron_router_replay.mcore.attention.sparse import Question
from megatron_router_replay.testing import ParallelSizes, random_microbatches, run_schedule
from tests.functional.mcore.cases import FULL, MEGATRON
from tests.functional.mcore.dsa_cases import (
    ATTENTION,
    CP2,
    SHARED,
    TP2,
    Chosen,
    Dsa,
    attentions,
    build,
    same,
    train,
    watched,
)
from tests.support.microbatches import pack_microbatch, split_microbatch
from tests.support.tiny_dsa import build_tiny_dsa, dsa_config

pytestmark = pytest.mark.skipif(MEGATRON < (0, 19), reason="where samples begin is told since Megatron-Core 0.19")

ROWS = 192


def change_indexers(model: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    for attention in attentions(model):
        if attention.indexer is not None:
            attention.indexer.linear_wq_b.weight.data.normal_(generator=generator)


def sets(seen: list[Tensor]) -> list[Tensor]:
    return [each.sort(dim=2).values for each in seen]


def num_different(some: dict[int, list[Tensor]], others: dict[int, list[Tensor]]) -> int:
    """How many queries attend to another set of positions."""
    assert some.keys() == others.keys()
    pairs = [pair for layer in some for pair in zip(sets(some[layer]), sets(others[layer]), strict=True)]
    return sum(int((one != other).any(dim=2).sum()) for one, other in pairs)


def reversed_calls(seen: dict[int, list[Tensor]]) -> dict[int, list[Tensor]]:
    return {layer: calls[::-1] for layer, calls in seen.items()}


def recorded(model: Any, microbatches: list[dict[str, Any]]) -> tuple[Any, Any, Chosen, Any]:
    """Return (routes, positions, what the attention got, losses and gradients) of a recorded step."""
    with watched(model) as seen, mrr.record(model, positions=True) as recording:
        step = train(model, microbatches, lambda n: recording.microbatch(microbatches[n]["routing_rows"], model))
    return recording.gather(), recording.gather_positions(), seen, step


def replay_exactly(case: Dsa) -> None:
    """Record a step, change what indexers choose, and replay it."""
    model, microbatches = build(case)
    routes, positions, expected, step = recorded(model, microbatches)
    change_indexers(model)
    with watched(model) as live:
        train(model, microbatches)
    assert num_different(expected["forward"], live["forward"]) > 50
    with watched(model) as seen, mrr.replay(model, routes, positions=positions) as session:
        again = train(model, microbatches, lambda n: session.microbatch(microbatches[n]["routing_rows"], model))
    assert len(seen["forward"]) == 4
    assert num_different(expected["forward"], seen["forward"]) == 0
    if case.config.get("recompute_granularity"):
        assert num_different(reversed_calls(expected["forward"]), seen["recompute"]) == 0
    assert same(step, again)
    tokens = sum(each["tokens"].numel() for each in microbatches)
    num_own = sum(each.indexer is not None for each in attentions(model))
    assert session.report.decisions["positions_replayed"] == tokens * num_own
    assert session.report.decisions["positions_live"] == 0


@pytest.mark.parametrize(
    "case",
    [
        Dsa(),
        Dsa(config=FULL),
        Dsa(config=ATTENTION, packed=True),
        Dsa(config=SHARED | FULL),
        Dsa(config=SHARED | ATTENTION, packed=True),
    ],
    ids=["plain", "full", "packed-core_attn", "shared-full", "shared-packed-core_attn"],
)
def test_a_replay_attends_where_the_recorded_step_did(case, megatron):
    replay_exactly(case)


@pytest.mark.parametrize(
    "case",
    [
        Dsa(layout=TP2, config=FULL),
        Dsa(layout=CP2),
        Dsa(layout=CP2, config=FULL, packed=True),
    ],
    ids=["tp2-full", "cp2", "cp2-packed-full"],
)
def test_over_ranks_a_replay_attends_where_the_recorded_step_did(case, on_ranks):
    on_ranks(2, replay_exactly, case)


def replay_through_a_pipeline(layout: ParallelSizes) -> None:
    """Record and replay with Megatron's schedule; every stage attends to its own layers' positions."""
    layout.initialize()
    stages = [None] if layout.vp_size is None else list(range(layout.vp_size))
    config = dsa_config(layout, **FULL)
    chunks = [build_tiny_dsa(config, vp_stage=stage) for stage in stages]
    microbatches = random_microbatches(4, batch_size=2, sequence_length=32)
    for microbatch, rows in zip(microbatches, torch.arange(256).view(4, 2, 32), strict=True):
        microbatch["routing_rows"] = rows
    model = torch.nn.ModuleList(chunks)

    def step(session: Any) -> Chosen:
        def queue(microbatch: dict[str, Any], chunk: Any) -> None:
            session.microbatch(microbatch["routing_rows"], chunk)

        with watched(model) as seen:
            run_schedule(chunks, layout, microbatches, before_forward=queue)
        return seen

    with mrr.record(chunks, positions=True) as recording:
        expected = step(recording)
    routes, positions = recording.gather(), recording.gather_positions()
    assert positions.layer_numbers == (1, 2, 3, 4)
    change_indexers(model)
    with mrr.replay(chunks, routes, positions=positions) as session:
        seen = step(session)
    assert len(seen["forward"]) == 2
    assert num_different(expected["forward"], seen["forward"]) == 0
    assert num_different(expected["recompute"], seen["recompute"]) == 0
    assert sum(map(len, seen["recompute"].values())) == 8


@pytest.mark.parametrize("layout", [ParallelSizes(pp_size=2), ParallelSizes(pp_size=2, vp_size=2)], ids=["pp2", "vpp2"])
def test_each_stage_of_a_pipeline_attends_to_its_layers_positions(layout, on_ranks):
    on_ranks(2, replay_through_a_pipeline, layout)


def in_samples(seen: Chosen) -> dict[tuple[int, int], list[int]]:
    """Return what each row of plain micro-batches attended to, {(layer, row): positions}."""
    return {
        (layer, row): sorted(int(each) for each in chosen if each >= 0)
        for layer, calls in seen["forward"].items()
        for row, chosen in enumerate(torch.cat([call.flatten(0, 1) for call in calls]))
    }


def replay_in_other_micro_batches(
    layout: ParallelSizes, routes: Any, positions: PositionTrace, expected: dict[tuple[int, int], list[int]]
) -> None:
    """Replay six samples of 32 rows in another order, packed in pairs."""
    model, _ = build(Dsa(layout=layout))
    tokens = torch.cat([each["tokens"] for each in random_microbatches(3, batch_size=2, sequence_length=32)])
    rows = torch.arange(ROWS).view(6, 32)
    pairs = [(4, 0), (3, 5), (1, 2)]
    microbatches = []
    for pair in pairs:
        of_pair = pack_microbatch([torch.nn.functional.pad(tokens[i], (0, 1)) for i in pair])
        of_pair["routing_rows"] = rows[list(pair)].view(1, 64)
        if layout.cp_size > 1:
            from megatron.core import parallel_state

            cp_rank = parallel_state.get_context_parallel_rank()
            of_pair = split_microbatch(of_pair, cp_rank=cp_rank, cp_size=2)
        microbatches.append(of_pair)
    change_indexers(model)
    with watched(model) as seen, mrr.replay(model, routes, positions=positions) as session:
        train(model, microbatches, lambda n: session.microbatch(microbatches[n]["routing_rows"], model))
    num_seen = 0
    for layer, calls in seen["forward"].items():
        for pair, microbatch, call in zip(pairs, microbatches, calls, strict=True):
            for row, chosen in zip(microbatch["routing_rows"][0].tolist(), call[0], strict=True):
                begin = 32 * pair.index(row // 32)
                assert sorted(int(each) - begin for each in chosen if each >= 0) == expected[layer, row]
                num_seen += 1
    assert num_seen == 4 * ROWS // layout.cp_size


def test_positions_go_with_their_samples_into_other_micro_batches(megatron, on_ranks):
    model, microbatches = build(Dsa())
    routes, positions, seen, _ = recorded(model, microbatches)
    replay_in_other_micro_batches(ParallelSizes(), routes, positions, in_samples(seen))
    on_ranks(2, replay_in_other_micro_batches, CP2, routes, positions, in_samples(seen))


def without(positions: PositionTrace, rows: list[int]) -> PositionTrace:
    """Return the trace as if some rows had not been recorded."""
    own = positions.positions_in_sample.clone()
    own[rows] = -1
    known = (own >= 0).nonzero().squeeze(1)
    chosen = torch.full((len(own), len(positions.layer_numbers), positions.topk), -1)
    chosen[known] = positions.rows(known, positions.layer_numbers).long()
    return PositionTrace.from_positions(
        chosen, positions_in_sample=own, layer_numbers=positions.layer_numbers, topk=positions.topk
    )


@pytest.mark.parametrize(("loss", "recompute"), [(0.0, FULL), (0.5, FULL), (0.5, {})])
def test_rows_without_positions_are_left_to_the_indexer(megatron, loss, recompute):
    model, microbatches = build(Dsa(config={"dsa_indexer_loss_coeff": loss} | recompute))
    routes, positions, expected, _ = recorded(model, microbatches)
    unknown = [31, 63, 70, 191]
    routes, positions = routes.keep(~torch.isin(torch.arange(ROWS), torch.tensor(unknown))), without(positions, unknown)
    generator = torch.Generator().manual_seed(3)
    indexer = attentions(model)[0].indexer  # of the first layer, whose live choice is the same in both steps
    indexer.linear_wq_b.weight.data.normal_(generator=generator)
    with watched(model) as live:
        train(model, microbatches)
    with watched(model) as seen, mrr.replay(model, routes, positions=positions) as session:
        train(model, microbatches, lambda n: session.microbatch(microbatches[n]["routing_rows"], model))
    for kind in ("forward", "recompute") if recompute else ("forward",):
        calls = seen[kind] if kind == "forward" else reversed_calls(seen[kind])
        first = in_samples({"forward": {1: calls[1]}})
        replayed, own = in_samples(expected), in_samples(live)
        assert first == {(1, row): (own if row in unknown else replayed)[1, row] for row in range(ROWS)}
    assert any(own[1, row] != replayed[1, row] for row in unknown)
    assert session.report.decisions["positions_live"] == 4 * len(unknown)
    assert session.report.decisions["positions_replayed"] == 4 * (ROWS - len(unknown))
    assert (indexer.linear_wq_b.weight.grad is not None) == (loss > 0)


def test_the_lines_of_the_page_attend_twice_to_the_same(megatron):
    page = (Path(__file__).parents[3] / "docs/indexers.md").read_text()
    lines = re.findall("```text\n(.*?)```", page, flags=re.DOTALL)[0]
    model, microbatches = build(Dsa())
    names: dict[str, Any] = {
        "mrr": mrr,
        "model": model,
        "step": [(each["routing_rows"], each) for each in microbatches],
        "forward": lambda model, batch: train(model, [batch]),
    }
    with watched(model) as seen:
        exec(
            lines.replace("with mrr.replay", "change_indexers(model)\nwith mrr.replay"),
            names | {"change_indexers": change_indexers},
        )
    forwards = seen["forward"]
    assert (
        num_different({n: calls[:3] for n, calls in forwards.items()}, {n: calls[3:] for n, calls in forwards.items()})
        == 0
    )


def test_a_freeze_may_surround_it(megatron):
    model, microbatches = build(Dsa(config=FULL))
    with mrr.freeze_recompute(model):
        routes, positions, expected, step = recorded(model, microbatches)
        change_indexers(model)
        with watched(model) as seen, mrr.replay(model, routes, positions=positions) as session:
            again = train(model, microbatches, lambda n: session.microbatch(microbatches[n]["routing_rows"], model))
        assert num_different(expected["forward"], seen["forward"]) == 0
        assert same(step, again)
        with watched(model) as seen:  # the freeze alone
            train(model, microbatches)
        assert num_different(reversed_calls(seen["forward"]), seen["recompute"]) == 0


def test_what_does_not_fit_raises(megatron):
    model, microbatches = build(Dsa())
    routes, positions, _, _ = recorded(model, microbatches)
    with pytest.raises(LayoutError, match="MRR411: positions= needs a trace"):
        mrr.replay(model, positions=positions)
    with pytest.raises(TraceError, match="MRR114: positions are of 192 rows, routes of 64"):
        mrr.replay(model, routes[:64], positions=positions)
    with pytest.raises(TraceError, match=r"MRR114: 2 rows have routes and no positions, the first is row 3"):
        mrr.replay(model, routes, positions=without(positions, [3, 9]))
    fewer = PositionTrace.from_positions(
        positions.rows(torch.arange(ROWS), [1, 3]),
        positions_in_sample=positions.positions_in_sample,
        layer_numbers=[1, 3],
        topk=positions.topk,
    )
    with pytest.raises(TraceError, match=r"MRR114: positions lack layers \[2, 4\]"):
        mrr.replay(model, routes, positions=fewer)
    sharing, _ = build(Dsa(config=SHARED))
    with pytest.raises(
        TraceError, match=r"MRR114: positions have layers \[2, 4\], which share an earlier layer's choice"
    ):
        mrr.replay(sharing, routes, positions=positions)
    with (
        mrr.record(model) as recording,
        pytest.raises(ReplayStateError, match="MRR407: this session records no positions"),
    ):
        recording.positions()


def test_where_nobody_says_where_samples_begin_it_is_refused(megatron):
    from megatron.core.transformer.experimental_attention_variant import dsa

    def of_0_18(q: Tensor, k: Tensor, weights: Tensor, index_topk: int, mask: Any = None) -> Any: ...

    model, _ = build(Dsa())
    with (
        mock.patch.object(dsa, "fused_qk_topk_naive", of_0_18),
        pytest.raises(UnsupportedRouterError, match=r"MRR401: .* need 0.19 or later"),
    ):
        mrr.record(model, positions=True)
    scores = torch.zeros(4, 1, 1, 1)
    for given in ({}, {"varlen_starts": scores, "varlen_ends": scores, "key_positions": scores}):
        with pytest.raises(UnsupportedRouterError, match="MRR401: layer 1 attends by a mask of its own"):
            Question(of_0_18, given).bounds("layer 1")


def test_a_token_at_another_place_of_its_sample_raises(megatron):
    model, microbatches = build(Dsa())
    routes, positions, _, _ = recorded(model, microbatches)
    microbatch = microbatches[0]  # padded on the left
    for name, padding in (("routing_rows", -1), ("tokens", 0)):
        microbatch[name] = torch.cat([torch.full((2, 1), padding), microbatch[name][:, :-1]], dim=1)
    session = mrr.replay(model, routes, positions=positions)
    session.microbatch(microbatch["routing_rows"], model)
    with pytest.raises(LayoutError, match=r"MRR203: micro-batch 0: .* other places of their samples"):
        train(model, microbatches[:1])
    session.close(verify=False)


def test_an_attention_that_runs_twice_in_a_forward_raises(megatron):
    model, microbatches = build(Dsa())
    attention = attentions(model)[1]
    attention.register_forward_hook(
        lambda module, args, kwargs, output: module.forward(*args, **kwargs), with_kwargs=True
    )
    recording = mrr.record(model, positions=True)
    recording.microbatch(microbatches[0]["routing_rows"], model)
    with pytest.raises(
        ReplayStateError, match=r"MRR407: .*one forward of the model called the indexer of layer 2 twice"
    ):
        train(model, microbatches[:1])
    recording.close(verify=False)


def test_attention_outside_of_the_models_forward_raises(megatron):
    model, microbatches = build(Dsa())
    routes, positions, _, _ = recorded(model, microbatches)
    session = mrr.replay(model, routes, positions=positions)
    session.microbatch(microbatches[0]["routing_rows"], model)
    train(model, microbatches[:1])
    session.microbatch(
        microbatches[1]["routing_rows"], model
    )  # which a call of .forward would begin at its first router
    named = {name: microbatches[0][name] for name in ("position_ids", "labels")}
    with pytest.raises(ReplayStateError, match=r"MRR406: .*indexer of layer 1 runs outside of a forward of the model"):
        model.forward(input_ids=microbatches[0]["tokens"], attention_mask=None, **named)
    session.close(verify=False)


def test_an_attention_that_left_the_model_raises(megatron):
    model, microbatches = build(Dsa())
    routes, positions, _, _ = recorded(model, microbatches)
    attention = attentions(model)[1]
    gone = pytest.raises(
        ReplayStateError, match=r"MRR419[\s\S]*layer 2 \(.*\): the attention was taken out of the model"
    )
    with gone, mrr.replay(model, routes, positions=positions) as session:
        session.microbatch(microbatches[0]["routing_rows"], model)
        train(model, microbatches[:1])
        (owner,) = [each for each in model.modules() if getattr(each, "core_attention", None) is attention]
        owner.core_attention = torch.nn.Identity()  # as a phase with dense attention would


def test_positions_that_were_changed_in_place_raise(megatron):
    model, microbatches = build(Dsa())
    routes, positions, _, _ = recorded(model, microbatches)
    session = mrr.replay(model, routes, positions=positions)
    session.microbatch(microbatches[0]["routing_rows"], model)
    positions.codes.copy_(positions.codes.roll(4))  # codes of other rows are legal ones
    with pytest.raises(TraceError, match="MRR110: codes of the positions were changed in place"):
        train(model, microbatches[:1])
    session.close(verify=False)


def test_padding_is_not_recorded(megatron):
    model, microbatches = build(Dsa())
    rows = microbatches[0]["routing_rows"].clone()
    rows[:, 30:] = -1
    with watched(model) as seen, mrr.record(model, positions=True) as recording:
        recording.microbatch(rows, model)
        train(model, microbatches[:1])
    positions = recording.positions(num_tokens=65)
    real = rows[rows >= 0]
    assert (positions.positions_in_sample >= 0).nonzero().squeeze(1).tolist() == real.tolist()
    expected = in_samples(seen)
    recorded_rows = positions.rows(real, [2])[:, 0].tolist()
    assert [[each for each in row if each >= 0] for row in recorded_rows] == [expected[2, int(row)] for row in real]


def gather_what_one_rank_recorded() -> None:
    """A rank that recorded nothing takes part all the same, so the others do not wait for it."""
    ParallelSizes().initialize()
    model, microbatches = build(Dsa())
    rank = torch.distributed.get_rank()
    with mrr.record(model, positions=True) as recording:
        if rank == 0:
            recording.microbatch(microbatches[0]["routing_rows"], model)
            train(model, microbatches[:1])
    if rank == 1:
        with pytest.raises(TraceError, match="MRR422: no sparse attention"):
            recording.positions(num_tokens=64)
    positions = recording.gather_positions(num_tokens=64)
    assert (positions.positions_in_sample >= 0).all()


def test_a_rank_that_recorded_nothing_gathers_too(on_ranks):
    on_ranks(2, gather_what_one_rank_recorded)


def test_a_row_is_recorded_once(megatron):
    model, microbatches = build(Dsa())
    with mrr.record(model, positions=True) as recording:
        for _ in range(2):
            recording.microbatch(microbatches[0]["routing_rows"], model)
            train(model, microbatches[:1])
            change_indexers(model)
    with pytest.raises(TraceError, match=r"MRR422: row [0-9]+ was recorded twice, with different positions"):
        recording.positions()
