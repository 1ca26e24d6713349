"""Rows left out by choice: every age worked out by hand, and the choice stays with its rows."""

import numpy as np
import pytest
import torch

from megatron_router_replay import RoutingTrace, concat_traces, merge_traces, save_trace
from megatron_router_replay.errors import StoreError, TraceError
from megatron_router_replay.trace import stale_rows

# Two samples of a partial rollout: the first was begun with weights 3, went on with 5 and 6, and its last token has no route;
# the second was prefilled with 6 and its last token, too, has none.
VERSIONS = [3, 3, 5, 6, 6, 6, 6, 6]
ROUTED = [True, True, True, True, False, True, True, False]


def make(**changes):
    routes = torch.rand(8, 2, 6, generator=torch.Generator().manual_seed(0)).argsort(dim=2)[:, :, :2]
    values = {"token_ids": range(8), "sequence_lengths": (5, 3), "weight_version": VERSIONS, "replay_mask": ROUTED}
    return RoutingTrace(topk_indices=routes, layer_numbers=(2, 4), num_experts=6, **(values | changes))


def rows_of(mask):
    return mask.nonzero()[:, 0].tolist()


def stale(trace, max_age, trainer_version=6):
    return rows_of(stale_rows(trace, max_age=max_age, trainer_version=trainer_version))


def test_a_row_is_stale_when_its_route_is_more_than_max_age_behind():
    assert stale(make(), 0) == [0, 1, 2]
    assert stale(make(), 1) == [0, 1]  # 5 is one behind
    assert stale(make(), 2) == [0, 1]
    assert stale(make(), 3) == []  # 3 is three behind, and not more
    # 0 is a version: that of the weights a run begins with.
    assert stale(make(weight_version=0), 0, trainer_version=0) == []
    assert stale(make(weight_version=0), 0, trainer_version=1) == [0, 1, 2, 3, 5, 6]
    # int32 holds a row's version; the trainer's own is not cut to it.
    assert stale(make(), 2**31, trainer_version=2**31 + 4) == [0, 1]


def test_the_version_of_a_row_without_a_route_says_nothing():
    # RoutingSegments stamps such rows with -1, an engine may stamp the last token with newer weights.
    assert stale(make(weight_version=[3, 3, 5, 6, -1, 6, 6, 9]), 1) == [0, 1]
    # Nor does that of a row that was left out before.
    assert stale(make(weight_version=[-1, 3, 5, 6, 6, 6, 6, 6]).keep([False] + [True] * 7), 2) == [1]


@pytest.mark.parametrize(
    ("changes", "trainer_version", "message"),
    [
        # A trainer that counts from 0 where its engine counts from 1.
        ({}, 5, r"3 routes .* newer than trainer_version=5: .* row 3 \(token 3 of sample 0\) with weight_version=6"),
        ({"weight_version": None}, 6, "the trace has no weight_version"),
        (
            {"weight_version": [3, 3, 5, 6, 6, 6, -1, 6]},
            6,
            r"1 routes are: .* the first is row 6 \(token 1 of sample 1\)",
        ),
        ({"weight_version": [3, 3, 5, 6, 6, 6, -1, 6], "sequence_lengths": None}, 6, r"the first is row 6\. Stamp"),
    ],
)
def test_ages_that_cannot_be_told_raise(changes, trainer_version, message):
    with pytest.raises(TraceError, match=message):
        stale_rows(make(**changes), max_age=1, trainer_version=trainer_version)


@pytest.mark.parametrize("wrong", [-1, 1.0, True, "1", None, np.float32(1)], ids=repr)
def test_ages_are_integers_of_0_or_more(wrong):
    for name in ("max_age", "trainer_version"):
        with pytest.raises(TraceError, match=f"{name}=.* must be an integer of 0 or more"):
            stale_rows(make(), **({"max_age": 1, "trainer_version": 6} | {name: wrong}))


def test_stale_rows_are_left_out_and_nothing_else_moves():
    trace = make()
    kept = trace.keep(~stale_rows(trace, max_age=1, trainer_version=6))
    assert rows_of(kept.left_out) == [0, 1]
    assert rows_of(kept.replay_mask) == [2, 3, 5, 6]
    assert torch.equal(kept.topk_indices, trace.topk_indices)
    assert (kept.token_ids.tolist(), kept.sequence_lengths) == (list(range(8)), (5, 3))
    assert (trace.left_out, trace.replay_mask.tolist()) == (None, ROUTED)


def test_no_choice_gives_a_route_back_and_a_row_without_one_is_not_left_out():
    again = make().keep([False] + [True] * 7).keep([True] * 6 + [False] * 2)
    assert rows_of(again.left_out) == [0, 6]  # row 7 never had a route
    assert rows_of(again.replay_mask) == [1, 2, 3, 5]
    assert repr(again).startswith("RoutingTrace(8 tokens (4 with a route, 2 left out), layers [2, 4]")


def test_a_choice_stays_with_its_rows():
    chosen = make().keep([False, False, True, True, True, True, False, True])
    assert rows_of(chosen[1:7:2].left_out) == [0]
    assert rows_of(chosen[5:8].left_out) == [1]
    assert rows_of(chosen.gather_rows([6, 0, 3, 6]).left_out) == [0, 1, 3]
    assert rows_of(chosen.select_samples([1, 0]).left_out) == [1, 3, 4]
    assert [rows_of(sample.left_out) for sample in chosen] == [[0, 1], [1]]
    for same in (chosen.select_layers([4]), chosen.renumber({2: 7, 4: 1}), chosen.to("cpu")):
        assert rows_of(same.left_out) == [0, 1, 6]
    assert rows_of(concat_traces([make(), chosen]).left_out) == [8, 9, 14]
    assert concat_traces([make(), make()]).left_out is None


def test_a_choice_that_would_be_lost_or_undone_is_refused(tmp_path):
    chosen = make().keep([False] + [True] * 7)
    # A part of other layers would have the route that this one left out; a file would say that it was never there.
    with pytest.raises(TraceError, match="cannot merge part 1 of which 1 rows were left out by choice"):
        merge_traces([make(), chosen])
    with pytest.raises(StoreError, match=r"cannot save .* of which 1 rows were left out by choice.* choose last"):
        save_trace(chosen, tmp_path / "trace")
    assert not list(tmp_path.iterdir())
    # Where every row was kept there is nothing to lose.
    whole = make().keep([True] * 8)
    save_trace(whole, tmp_path / "trace")
    assert merge_traces([whole]).left_out is None
