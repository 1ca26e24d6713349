"""Every mode of session on a GPU made of software: no wait, no pageable copy, no launch too many, no race, exact."""

import re
import threading
from functools import cache

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.mcore.model.upstream import TOPK_ORDER_FOLLOWS_GRAD
from tests.support.soft_gpu import SoftGpu
from tests.unit.mcore.gpu_modes import (
    LAYERS,
    MODES,
    NUM,
    ask,
    error_of,
    error_of_a_stale_capture,
    ran_under_another_stream,
)
from tests.unit.mcore.tiny_chunk import ROWS, SCORES, Chunk, random_trace, tokens

OURS = [name for name in MODES if name != "no session" and "Megatron" not in name]
BASE = {"record": "Megatron's record", "freeze": "no session"}
"""The mode with which launches are compared; else Megatron-Core's own replay, with targets on the device beforehand."""

KNOWN_WAITS = {
    **dict.fromkeys(("replay", "some live", "verify", "record", "another stream"), NUM),
    **dict.fromkeys(("rows on the GPU", "trace on the GPU", "trace on the GPU, some live"), 2 * NUM),
}
"""A forward reads its ids, in one wait; rows that are given on the GPU are another."""

ASKED = 7
"""Launches of the one layer that is compared with its live top-k."""

MASKED = 3
"""Launches of that layer where rows do not count."""

MOST = {
    # launches a micro-batch of 3 routers beyond BASE, by mode: (without recompute, with); a block of layers is widened once
    # a forward and once a recompute.
    "replay": (1 + ASKED, 2 + ASKED),
    "another stream": (1 + ASKED, 2 + ASKED),
    "verify": (1 + ASKED + 3 * 5, 2 + ASKED + 6 * 5),
    "some live": (1 + ASKED + MASKED + 3 * 3, 1 + ASKED + MASKED + 3 * 5),
    "drop-in": (0, 0),
    # All layers: a stack, its copy, a sort, two comparisons over all, `and`, an assertion; each layer: one for a tape.
    "drop-in, targets on the GPU": (9, LAYERS + 9),
    "record": (3 + 4, 3 * 2 + 3),
    "freeze": (0, 3 * 2),
}


@pytest.fixture(scope="module")
def asked(gpu_worker):
    """Programs that have run, by mode, kind of recompute and options of the model."""
    programs = cache(lambda name, recompute, options: gpu_worker.run(ask, name, recompute, dict(options))[0])
    return lambda name, recompute, **options: programs(name, recompute, tuple(options.items()))


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        *((name, recompute) for name in OURS for recompute in ("plain", "reentrant")),
        *((name, "non_reentrant") for name in ("replay", "some live", "record", "freeze", "drop-in")),
    ],
)
def test_a_session_waits_only_where_that_is_known_and_is_exact(asked, name, recompute):
    found = asked(name, recompute)
    assert found.pageable == []
    assert len(found.waits) == KNOWN_WAITS.get(name, 0), found.waits
    # For the counts, and for those of agreement.
    assert len(found.at_the_end) <= (1 if name in ("record", "freeze") else 2)
    assert len(found.at_the_start) <= (1 if name.startswith("trace on the GPU") else 0)
    assert found.races == []
    if name != "freeze" or recompute != "plain":
        assert (found.wrong, found.flips) == (0, 0)


@pytest.mark.parametrize("recompute", ["plain", "reentrant"])
@pytest.mark.parametrize("name", MOST)
def test_a_session_launches_no_more_than_megatrons_own_and_what_is_said(asked, name, recompute):
    base = asked(BASE.get(name, "Megatron's replay"), recompute).launches
    assert asked(name, recompute).launches - base <= MOST[name][recompute != "plain"]


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
    ("name", "scores"),
    [("replay", "softmax"), ("replay", "sigmoid in groups"), ("record", "softmax"), ("freeze", "softmax")],
)
def test_columns_are_put_in_order_only_where_a_sum_depends_on_it(asked, name, scores, recompute):
    base = "Megatron's replay" if name == "replay" else "no session"
    top4, base_top4 = (asked(each, recompute, moe_router_topk=4, **SCORES[scores]) for each in (name, base))
    at_top2 = asked(name, recompute).launches - asked(base, recompute).launches
    matters = scores == "softmax"
    in_order = SORTED[name][["plain", "non_reentrant", "reentrant"].index(recompute)] if matters else 0
    # The layer whose agreement is counted takes its live top-k in groups, ten operations, and compares by its ids, four.
    in_groups = 14 if name == "replay" and not matters else 0
    assert (top4.wrong, top4.flips) == (0, 0)
    assert top4.launches - base_top4.launches <= at_top2 + in_order + in_groups


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nothing", "^$"),
        (
            "no route",
            r"87\.5000% of 8 tokens were replayed on this rank, less than min_replayed=1\.0\. An engine",
        ),
        (
            "another token",
            r"batch 0 of chunk 0: input_ids\[1, 2\] is \d+, but its routing row \d+ was recorded for token \d+ \(1 of 6",
        ),
    ],
)
def test_rows_and_ids_on_a_gpu_are_checked_as_on_the_host(gpu_worker, what, message):
    (said,) = gpu_worker.run(error_of, what)
    assert re.search(message, said)


def test_wrong_rows_on_a_gpu_are_named_by_sample_and_token_also_after_a_forward_that_failed(gpu_worker):
    (said,) = gpu_worker.run(error_of_a_stale_capture)
    assert re.search(r"sample 1, tokens 10\d to 16\d, .* are one and the same row", said)


def test_a_session_waits_at_its_end_for_what_ran_under_another_stream(gpu_worker):
    assert gpu_worker.run(ran_under_another_stream) == [[]]


def test_the_capture_of_a_cuda_graph_is_refused(monkeypatch):
    chunk = Chunk()
    session = mrr.replay(chunk, random_trace())
    session.microbatch(ROWS)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ReplayStateError, match="MRR416: a micro-batch that is given is captured into a graph"):
        session.microbatch(ROWS + 8)
    with pytest.raises(ReplayStateError, match="MRR416: layer 1 is captured into a graph"):
        chunk(tokens())
    session.close(check=False)


def test_without_a_session_recomputes_flip(asked):
    assert asked("no session", "reentrant").flips > 0, "else exactness would show nothing"
    assert asked("no session", "reentrant").waits == []


def two_streams(values, side, *, in_order, record=False):
    if in_order:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        values + 1
    if record:
        values.record_stream(side)


def read(values, *, waits):
    copied = values.to("cpu", non_blocking=True)
    if waits:
        torch.cuda.current_stream().record_event().synchronize()
    copied + 1


def written_too_early(values, side):
    staged = torch.empty(4, pin_memory=True)
    staged.to("cuda", non_blocking=True)
    staged.zero_()


PLANTED = {
    # a program with a tensor of the default stream and another stream -> its (waits, pageable uploads, races)
    "read": (lambda values, side: bool(values.sum() > 3), (1, 0, 0)),
    "mask": (lambda values, side: values[values > 0], (1, 0, 0)),
    "pageable": (lambda values, side: torch.ones(4).to("cuda", non_blocking=True), (0, 1, 0)),
    "blocking": (lambda values, side: torch.ones(4).pin_memory().to("cuda"), (1, 0, 0)),
    "two streams": (lambda values, side: two_streams(values, side, in_order=False, record=True), (0, 0, 1)),
    "two streams, in order": (lambda values, side: two_streams(values, side, in_order=True, record=True), (0, 0, 0)),
    "freed": (lambda values, side: two_streams(values, side, in_order=True), (0, 0, 1)),
    "read too early": (lambda values, side: read(values, waits=False), (0, 0, 1)),
    "read after its event": (lambda values, side: read(values, waits=True), (1, 0, 0)),
    "written too early": (written_too_early, (0, 0, 1)),
}


def _planted(name: str) -> tuple[int, int, int]:
    with SoftGpu() as gpu, gpu.logged() as log:
        PLANTED[name][0](torch.ones(4, device="cuda"), torch.cuda.Stream())
    return len(log.waits), len(log.pageable), len(set(gpu.races))


@pytest.mark.parametrize("name", PLANTED)
def test_the_software_gpu_sees_what_a_program_asks(gpu_worker, name):
    assert gpu_worker.run(_planted, name) == [PLANTED[name][1]]


def _backward() -> tuple[bool, float]:
    """Return (whether the backward ran in the caller's thread, a gradient)."""
    threads: list[int] = []
    with SoftGpu():
        x = torch.ones(3, device="cuda", requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: threads.append(threading.get_ident()))
        y.sum().backward()
        return threads == [threading.get_ident()], float(x.grad.sum())


def test_a_backward_runs_in_a_thread_of_the_device_and_gives_real_values(gpu_worker):
    assert gpu_worker.run(_backward) == [(False, 6.0)]
