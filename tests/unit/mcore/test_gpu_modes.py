"""Every mode of session on a GPU made of software: no wait, no pageable copy, no launch too many, no race, exact."""

import re
import threading
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from megatron_router_replay.mcore.model.upstream import TOPK_ORDER_FOLLOWS_GRAD
from tests.support.soft_gpu import SoftGpu
from tests.support.workers import GlooWorkers
from tests.unit.mcore.gpu_modes import (
    LIVE_MODES,
    MODES,
    NUM,
    ask,
    ask_top4,
    captured,
    ran_under_another_stream,
    targets_on_the_gpu,
    told_late,
)
from tests.unit.mcore.tiny_chunk import SCORES

OURS = [name for name in MODES if name != "no session" and "Megatron" not in name]
BASE = {"record": "Megatron's record", "freeze": "no session"}
"""Beside which launches are counted; else Megatron-Core's own replay, whose targets are on the device already."""

KNOWN_WAITS = {"rows on the GPU": NUM}
"""The trace is on the host, which must read the rows: once a micro-batch, whatever is queued beside them."""

COMPARED = 9
"""Launches a micro-batch whose trace holds token ids: other ids, known ids, both, how many; the first one's place and ids."""

ASKED = 18
"""Launches of the one layer that takes its live top-k: this one, and the counts of its agreement. The end adds them up: 2."""

MASKED = 5
"""Launches of that layer where rows do not count: their share, and their counts set to 0."""

MOST = {
    # launches a micro-batch of 3 routers beyond BASE, by mode: (without recompute, with); a block of layers is widened once
    # a forward and once a recompute.
    "replay": (1 + COMPARED + ASKED, 2 + COMPARED + ASKED),
    "another stream": (1 + COMPARED + ASKED, 2 + COMPARED + ASKED),
    "verify": (1 + COMPARED + ASKED + 3 * 5, 2 + COMPARED + ASKED + 6 * 5),
    "some live": (1 + COMPARED + ASKED + MASKED + 3 * 3, 1 + COMPARED + ASKED + MASKED + 3 * 5),
    "drop-in": (0, 0),
    "record": (3 + 4, 3 * 2 + 3),
    "freeze": (0, 3 * 2),
}


@pytest.fixture(scope="module")
def gpu_worker() -> Iterator[GlooWorkers]:
    with GlooWorkers(1) as workers:
        yield workers


@pytest.fixture(scope="module")
def asked(gpu_worker):
    return cache(lambda name, recompute: gpu_worker.run(ask, name, recompute)[0])


@pytest.fixture(scope="module")
def asked_top4(gpu_worker):
    return cache(lambda name, recompute, scores: gpu_worker.run(ask_top4, name, recompute, SCORES[scores])[0])


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        *((name, recompute) for name in OURS for recompute in ("plain", "reentrant")),
        *((name, "non_reentrant") for name in ("replay", "some live", "record", "freeze", "drop-in")),
    ],
)
def test_a_session_waits_only_where_that_is_known_and_is_exact(asked, name, recompute):
    found = asked(name, recompute)
    assert found["pageable"] == []
    assert len(found["waits"]) == KNOWN_WAITS.get(name, 0), found["waits"]
    # For what was counted, and for what the router was asked.
    assert len(found["at_the_end"]) <= (1 if name in ("record", "freeze") else 2)
    assert len(found["at_the_start"]) <= (1 if name.startswith("trace on the GPU") else 0)
    assert found["races"] == []
    if name != "freeze" or recompute != "plain":
        assert (found["wrong"], found["flips"]) == (0, 0)


@pytest.mark.parametrize("recompute", ["plain", "reentrant"])
@pytest.mark.parametrize("name", MOST)
def test_a_session_launches_no_more_than_megatrons_own_and_what_is_said(asked, name, recompute):
    base = asked(BASE.get(name, "Megatron's replay"), recompute)["launches"]
    assert asked(name, recompute)["launches"] - base <= MOST[name][recompute != "plain"]


def test_a_session_counts_agreement_with_no_more_launches_than_kept_rows_took(asked):
    """With rows kept and counted at the end it was 141 more: five layers, of which the first micro-batch has three."""
    launches = [asked(name, "plain")["all_launches"] for name in ("replay", "replay without agreement")]
    assert 0 < launches[0] - launches[1] <= 5 * ASKED + 10


SORTED = {
    # launches of 3 routers of top-4 that put columns in the order of a live top-k, since Megatron-Core 0.18: (without a
    # checkpoint, in a non-reentrant one, in a reentrant one, whose forward has no gradients).
    "replay": (3 * 3, 3 * (3 + 2), 3 * 3),
    "record": (0, 0, 3 * 3),
    "freeze": (0, 0, 3 * 3),
}


@pytest.mark.skipif(not TOPK_ORDER_FOLLOWS_GRAD, reason="before 0.18 the live top-k is always sorted")
@pytest.mark.parametrize("recompute", ["plain", "non_reentrant", "reentrant"])
@pytest.mark.parametrize(
    ("name", "scores"), [*(("replay", scores) for scores in SCORES), ("record", "softmax"), ("freeze", "softmax")]
)
def test_columns_are_put_in_order_only_where_a_sum_depends_on_it(asked, asked_top4, name, scores, recompute):
    base = "Megatron's replay" if name == "replay" else "no session"
    top4, base_top4 = (asked_top4(each, recompute, scores) for each in (name, base))
    at_top2 = asked(name, recompute)["launches"] - asked(base, recompute)["launches"]
    matters = scores in ("softmax", "sigmoid")
    in_order = SORTED[name][["plain", "non_reentrant", "reentrant"].index(recompute)] if matters else 0
    # The layer that is asked whether it agrees takes its live top-k, which in groups is nine operations more.
    in_groups = 9 if name == "replay" and scores == "sigmoid in groups" else 0
    assert (top4["wrong"], top4["flips"]) == (0, 0)
    assert top4["launches"] - base_top4["launches"] <= at_top2 + in_order + in_groups


def test_routes_that_are_all_there_take_no_live_topk(asked):
    for recompute in ("plain", "reentrant"):
        all_routed = asked("trace on the GPU, all routed", recompute)["launches"]
        # A where in each router, and the top-k of the two that are not asked; the asked one takes its top-k in both modes.
        assert all_routed <= asked("trace on the GPU", recompute)["launches"] - (3 + 2)


@pytest.mark.parametrize("num_layers", [1, 6])
def test_targets_on_the_gpu_are_copied_by_layer_and_checked_in_one_stack(gpu_worker, num_layers):
    ((launches, waits, wrong),) = gpu_worker.run(targets_on_the_gpu, num_layers)
    assert (
        launches <= num_layers + 10
    )  # ten for all layers: a stack, a sort, two comparisons of ids, what asserts on them
    assert (waits, wrong) == ([], 0)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nothing", "^$"),
        ("no route", r"87\.5000% of 8 tokens were replayed on this rank, less than min_replayed=1\.0"),
        (
            "another token",
            r"batch 0 of chunk 0: input_ids\[1, 2\] is \d+, but its routing row \d+ was recorded for token \d+ \(1 of 6",
        ),
        (
            "another token queued",
            r"MRR203: input_ids\[1, 2\] is \d+, but its routing row \d+ was recorded for token \d+ \(1 of 6",
        ),
    ],
)
def test_what_only_the_device_knows_raises_when_the_session_is_left(gpu_worker, what, message):
    (said,) = gpu_worker.run(told_late, what)
    assert re.search(message, said)


def test_a_session_waits_at_its_end_for_what_ran_under_another_stream(gpu_worker):
    assert gpu_worker.run(ran_under_another_stream) == [[]]


@pytest.mark.parametrize(("what", "who"), [("microbatch", "a micro-batch that is queued"), ("router", "layer 1")])
def test_what_a_cuda_graph_captures_is_refused_before_cuda_fails(gpu_worker, what, who):
    (said,) = gpu_worker.run(captured, what)
    assert said.startswith(f"MRR416: {who} is captured into a graph")


def test_without_a_session_recomputes_flip(asked):
    assert asked("no session", "reentrant")["flips"] > 0, "else exactness would show nothing"
    assert asked("no session", "reentrant")["waits"] == []
    assert "no session" in LIVE_MODES


def _planted(what: str) -> tuple[list[str], list[str], list[str], int]:
    """Return (waits, pageable uploads, races, kernels) of a program with one fault."""
    with SoftGpu() as gpu, gpu.logged() as log:
        values = torch.ones(4, device="cuda")
        side = torch.cuda.Stream()
        if what == "read":
            bool(values.sum() > 3)
        elif what == "mask":
            values[values > 0]
        elif what == "pageable":
            torch.ones(4).to("cuda", non_blocking=True)
        elif what == "blocking":
            torch.ones(4).pin_memory().to("cuda")
        elif what == "two streams":
            with torch.cuda.stream(side):
                values + 1
        elif what == "two streams, in order":
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                values + 1
            values.record_stream(side)
        elif what == "freed":
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                values + 1
            del values
        elif what == "read too early":
            values.to("cpu", non_blocking=True) + 1
        elif what == "read behind its event":
            copied = values.to("cpu", non_blocking=True)
            torch.cuda.current_stream().record_event().synchronize()
            copied + 1
        elif what == "written too early":
            staged = torch.empty(4, pin_memory=True)
            staged.to("cuda", non_blocking=True)
            staged.zero_()
        return log.waits, log.pageable, gpu.races, log.kernels


@pytest.mark.parametrize(
    ("what", "waits", "pageable", "races"),
    [
        ("read", 1, 0, 0),
        ("mask", 1, 0, 0),
        ("pageable", 0, 1, 0),
        ("blocking", 1, 0, 0),
        ("two streams", 0, 0, 1),
        ("two streams, in order", 0, 0, 0),
        ("freed", 0, 0, 1),
        ("read too early", 0, 0, 1),
        ("read behind its event", 1, 0, 0),
        ("written too early", 0, 0, 1),
    ],
)
def test_the_software_gpu_sees_what_a_program_asks(gpu_worker, what, waits, pageable, races):
    ((its_waits, its_pageable, its_races, _),) = gpu_worker.run(_planted, what)
    assert (len(its_waits), len(its_pageable), len(set(its_races))) == (waits, pageable, races)


def _backward() -> tuple[bool, float]:
    """Return (whether the backward ran in a thread of its own, a gradient)."""
    threads: list[int] = []
    with SoftGpu():
        x = torch.ones(3, device="cuda", requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: threads.append(threading.get_ident()))
        y.sum().backward()
        return threads == [threading.get_ident()], float(x.grad.sum())


def test_a_backward_runs_in_a_thread_of_the_device_and_gives_real_values(gpu_worker):
    assert gpu_worker.run(_backward) == [(False, 6.0)]
