"""Recomputes of sparse attention attend to the positions that their forward chose, read from the attention's own indices."""

from __future__ import annotations

from typing import Any

import pytest

import megatron_router_replay as mrr
from tests.functional.mcore.cases import FULL, MEGATRON
from tests.functional.mcore.dsa_cases import (
    ATTENTION,
    CP2,
    SHARED,
    TP2,
    Chosen,
    Dsa,
    add_noise_in_recompute,
    build,
    same,
    train,
    watched,
)

pytestmark = pytest.mark.skipif(
    MEGATRON < (0, 19), reason="the tiny DSA model is built of Megatron-Core 0.19's classes"
)


def num_different(seen: Chosen) -> int:
    """How many rows of positions a recompute attended to that are not those of its forward."""
    count = 0
    for layer, recomputed in seen["recompute"].items():
        for before, again in zip(seen["forward"][layer], reversed(recomputed), strict=True):
            count += int((before != again).any(dim=2).sum())
    return count


def recompute_exactly(case: Dsa, recompute: dict[str, Any]) -> None:
    """Train without recompute, with one that is not frozen, and with one that is; the weights of indexers change."""
    model, microbatches = build(case)
    expected = train(model, microbatches)
    noisy = Dsa(layout=case.layout, config=case.config | recompute, packed=case.packed)
    model, microbatches = build(noisy)
    add_noise_in_recompute(model)
    with watched(model) as seen:
        live = train(model, microbatches)
    assert num_different(seen) > 0
    assert not same(expected, live)
    with watched(model) as seen, mrr.freeze_recompute(model):
        frozen = train(model, microbatches)
    assert len(seen["recompute"]) == 4
    assert num_different(seen) == 0
    assert same(expected, frozen)


def test_a_replay_leaves_positions_live_and_a_freeze_around_it_keeps_them(megatron):
    model, microbatches = build(Dsa(config=FULL))

    def step(session: Any) -> Chosen:
        with watched(model) as seen:
            train(model, microbatches, lambda n: session.microbatch(microbatches[n]["routing_rows"], model))
        return seen

    with mrr.record(model) as recording:
        step(recording)
    add_noise_in_recompute(model)
    with mrr.replay(model, recording.trace()) as session:
        assert num_different(step(session)) > 0
    with mrr.freeze_recompute(model), mrr.replay(model, recording.trace()) as session:
        seen = step(session)
    assert num_different(seen) == 0
    assert len(seen["recompute"]) == 4
    assert session.report.rows_replayed == 192


FULL_2 = FULL | {"recompute_num_layers": 2}


@pytest.mark.parametrize(
    ("case", "recompute"),
    [
        (Dsa(layout=TP2), FULL),
        (Dsa(layout=TP2, config=SHARED), ATTENTION),
        (Dsa(layout=CP2), ATTENTION),
        (Dsa(layout=CP2, packed=True), FULL),
        (Dsa(config=SHARED, packed=True), FULL_2),
    ],
    ids=["tp2-full", "tp2-shared-core_attn", "cp2-core_attn", "cp2-packed-full", "shared-packed-full-2"],
)
def test_a_recompute_attends_where_its_forward_did(case, recompute, on_ranks):
    on_ranks(case.layout.world_size, recompute_exactly, case, recompute)
