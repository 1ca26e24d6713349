"""Faults that engines' trackers report: planted into trained models' routes and into captures of real engines, they raise."""

import json
import re
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import megatron_router_replay as mrr
from examples.effect.agreement import (
    BEYOND,
    FAULTS,
    compared,
    flipped,
    least_dose,
    legal_sessions,
    outcome,
    routes_to_damage,
)
from examples.effect.small_moe import SHAPES, TOP_1, TOP_2, TOP_4, TOP_8, top_k, trained
from megatron_router_replay.demo.checkpoint import write_checkpoint
from megatron_router_replay.demo.run import load_response
from megatron_router_replay.testing import ParallelSizes, load_qwen3_moe

STEPS, ALL_STEPS = 40, 150
"""Of training: after few, a top-2 of 8 has few kinds of rows, and int4 weights choose other experts in a top-1 of 16."""
CAPTURES = Path(__file__).parents[2] / "unit/data/engine_captures"
LEAST = {TOP_1: 19, TOP_2: 17, TOP_4: 21, TOP_8: 21}
"""Of 21 faults, so many raise at the dose of their tracker."""


@cache
def network_of(shape, steps):
    """Return a model that no test changes; training takes most of these tests' time."""
    return trained(shape, 0, steps)


@cache
def routes_of(shape):
    """Return live scores, right routes and a foreign model's."""
    return routes_to_damage(network_of(shape, ALL_STEPS if shape is TOP_2 else STEPS))


@pytest.mark.parametrize(
    "shape",
    [shape if shape in (TOP_1, TOP_4) else pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES],
    ids=lambda shape: shape.name,
)
def test_faults_raise_at_the_doses_of_their_trackers(shape):
    routes = scores, right, foreign = routes_of(shape)
    assert len(FAULTS) == 21
    differ = (right.sort(-1).values != top_k(scores, shape).sort(-1).values).any(-1).float().mean()
    assert 0.02 < differ < 0.04
    assert outcome(compared(shape, scores, right)).says == ""
    silent = []
    for fault in FAULTS:
        wrong = fault.plant(right, foreign, fault.dose)
        assert not torch.equal(wrong, right), fault.name
        if outcome(compared(shape, scores, wrong)).says != "raises":
            silent.append(fault.name)
    assert len(FAULTS) - len(silent) >= LEAST[shape], silent
    assert least_dose(FAULTS[0], shape, routes) <= 20, "a stale row is found where it is repeated a few times"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "layouts"),
    [(TOP_1, ["CP4"]), (TOP_2, ["8 micro-batches"])],
    ids=["top-1 of 16", "top-2 of 8"],
)
def test_legal_sessions_do_not_stop(shape, layouts):
    network = network_of(shape, ALL_STEPS)
    sessions = [each for each in legal_sessions(network, seed=0, layouts=layouts) if each[0] not in BEYOND]
    assert len(sessions) == 84
    assert [each for each in sessions if each[-1].says == "raises"] == []
    assert max(each[-1].evidence for each in sessions) > 5, "else the noise would show nothing"


def test_ten_times_as_many_flips_at_near_ties_are_legal():
    scores, *_ = routes_of(TOP_4)
    assert outcome(compared(TOP_4, scores, flipped(scores, TOP_4, 0.3))).says == ""


# ---- captures of real engines, and the models that they served
def demo_reply(folder):
    checkpoint = write_checkpoint(folder)
    return checkpoint, mrr.engines.vllm.decode_batch(load_response(), model=checkpoint)


def sglang_reply(folder):
    """SGLang's routes of four prompts, one of them of 180 tokens."""
    cases = json.loads((CAPTURES / "sglang_0.5.23_qwen3moe_sparse.json").read_text())["cases"]
    routes = np.load(CAPTURES / "sglang_0.5.23_qwen3moe_sparse.npz")
    names = ("batch.0", "batch.1", "batch.2", "n2.1")
    trace = mrr.RoutingTrace.from_samples(
        [cases[name]["prompt_token_ids"] + cases[name]["token_ids"] for name in names],
        [torch.from_numpy(routes[name].astype(np.int64)) for name in names],
        num_experts=8,
        layer_numbers=(1, 2, 3),
        sample_ids=names,
    )
    checkpoint = Path(__file__).parents[2] / "data/checkpoints/qwen3moe_sparse"
    return str(checkpoint), trace


REPLIES = {"vLLM": demo_reply, "SGLang": sglang_reply}


def planted(trace, fault):
    """Plant a fault into the longest sample, or into all."""
    routes = trace.topk_indices.clone()
    sample = max(range(len(trace.sequence_lengths)), key=lambda number: trace.sequence_lengths[number])
    begin = sum(trace.sequence_lengths[:sample])
    stop = begin + trace.sequence_lengths[sample] - 1
    if fault == "a row repeated":
        routes[begin + 5 : stop] = routes[begin + 4]
    elif fault == "lost rows, arange":
        routes[begin + 5 : stop] = torch.arange(trace.topk, dtype=routes.dtype)
    elif fault == "a sample one token late":
        routes[begin + 1 : stop] = routes[begin : stop - 1].clone()
    elif fault == "a batch one token late":
        routes = routes.roll(1, 0)
    elif fault == "two layers exchanged":
        routes = routes[:, [1, 0, 2]]
    elif fault == "physical ids in a layer":
        routes[:, 1] = (routes[:, 1] + 3) % trace.num_experts
    names = ("layer_numbers", "num_experts", "token_ids", "replay_mask", "sequence_lengths", "sample_ids")
    return mrr.RoutingTrace(topk_indices=routes, **{name: getattr(trace, name) for name in names})


def replayed(reply, faults):
    """Run on the rank: what sessions say of a reply with each of these faults."""
    said = {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, trace = REPLIES[reply](folder)
        layout = ParallelSizes()
        layout.initialize()
        (model,) = load_qwen3_moe(checkpoint, layout)
        for fault in faults:
            session = mrr.replay(model, planted(trace, fault), ask_every_layer=True, padding_token_ids=[0])
            with torch.no_grad():
                for sample in trace.samples():
                    tokens = sample.token_ids.long().unsqueeze(0)
                    model(tokens, torch.arange(tokens.shape[1]).unsqueeze(0), None)
            try:
                session.close()
            except mrr.RouterReplayError as error:
                said[fault] = str(error)
            else:
                said[fault] = f"evidence {session.report.agreement.block.evidence:.0f}"
    return said


SAID = {
    "right": r"^evidence \d$",
    "a row repeated": r"sample \d( \('.*'\))?, tokens \d+ to \d+, layers? .*are one and the same row",
    "lost rows, arange": "a filler of lost rows",
    "a sample one token late": r"sample \d.* routes of other tokens",
    "a batch one token late": "less than min_agreement",
    "two layers exchanged": "less than min_agreement|routes of other tokens",
    "physical ids in a layer": "less than min_agreement|routes of other tokens|physical ids",
}


@pytest.mark.parametrize("reply", REPLIES)
def test_faults_in_a_capture_of_a_real_engine_raise(on_ranks, reply):
    (said,) = on_ranks(1, replayed, reply, list(SAID))
    for fault, pattern in SAID.items():
        assert re.search(pattern, said[fault]), (fault, said[fault])
