"""Which rows are left to the live router by choice: every age worked out by hand, and the choice stays with its rows."""

import numpy as np
import pytest
import torch

from megatron_router_replay import RoutingTrace, concat_traces, merge_traces, save_trace
from megatron_router_replay.engines import RoutingSegments
from megatron_router_replay.errors import PayloadError, StoreError, TraceError
from megatron_router_replay.store import encode_envelope
from megatron_router_replay.store.npz import save_npz
from megatron_router_replay.transport.prefetching import prefetch

# Two samples of a partial rollout: the first was begun with weights 3, went on with 5 and 6, and its last token has no route;
# the second was prefilled with 6 and its last token, too, has none.
VERSIONS = [3, 3, 5, 6, 6, 6, 6, 6]
ROUTED = [True, True, True, True, False, True, True, False]


def make(**changes):
    routes = torch.rand(8, 2, 6, generator=torch.Generator().manual_seed(0)).argsort(dim=2)[:, :, :2]
    values = {"token_ids": range(8), "sequence_lengths": (5, 3), "weight_version": VERSIONS, "replay_mask": ROUTED}
    return RoutingTrace(topk_indices=routes, layer_numbers=(2, 4), num_experts=6, **(values | changes))


@pytest.mark.parametrize(
    ("max_age", "stale"),
    [
        (0, [1, 1, 1, 0, 0, 0, 0, 0]),  # of trainer_version 6
        (1, [1, 1, 0, 0, 0, 0, 0, 0]),  # 5 is one behind
        (2, [1, 1, 0, 0, 0, 0, 0, 0]),
        (3, [0, 0, 0, 0, 0, 0, 0, 0]),  # 3 is three behind, and not more
    ],
)
def test_a_row_is_stale_when_its_route_is_more_than_max_age_behind(max_age, stale):
    trace = make()
    limited = trace.limit_age(max_age, trainer_version=6, stale="live")
    assert limited.left_live.tolist() == [2 * s for s in stale]
    assert limited.left_live.dtype is torch.uint8
    assert limited.replay_mask.tolist() == [routed and not s for routed, s in zip(ROUTED, stale)]
    # Nothing else moves: the rows, the tokens and the samples are those of the trace.
    assert torch.equal(limited.topk_indices, trace.topk_indices)
    assert (limited.token_ids.tolist(), limited.sequence_lengths) == (list(range(8)), (5, 3))
    assert trace.left_live is None
    assert trace.replay_mask.tolist() == ROUTED


def test_stale_routes_raise_or_are_replayed_where_asked_for():
    trace = make()
    with pytest.raises(
        TraceError, match=r"2 rows .* row 0 \(token 0 of sample 0\), of weight_version=3, 3 versions behind"
    ):
        trace.limit_age(2, trainer_version=6, stale="raise")
    assert trace.limit_age(3, trainer_version=6, stale="raise").replay_mask.tolist() == ROUTED
    assert trace.limit_age(0, trainer_version=6, stale="replay") is trace
    with pytest.raises(TraceError, match="stale='drop' must be one of 'replay', 'live', 'raise'"):
        trace.limit_age(2, trainer_version=6, stale="drop")


@pytest.mark.parametrize("stale", ["replay", "live", "raise"])
def test_ages_that_cannot_be_told_raise_whatever_becomes_of_stale_rows(stale):
    def limit(trace=None, max_age=1, trainer_version=6):
        (make() if trace is None else trace).limit_age(max_age, trainer_version=trainer_version, stale=stale)

    # A trainer that counts from 0 where its engine counts from 1.
    newer = r"3 rows .* newer than trainer_version=5: the first is row 3 \(token 3 of sample 0\) with weight_version=6"
    with pytest.raises(TraceError, match=newer):
        limit(trainer_version=5)
    with pytest.raises(TraceError, match="the trace has no weight_version"):
        limit(make(weight_version=None))
    with pytest.raises(
        TraceError, match=r"1 rows have a route without a weight version, the first is row 6 \(token 1 of sam"
    ):
        limit(make(weight_version=[3, 3, 5, 6, 6, 6, -1, 6]))
    with pytest.raises(TraceError, match=r"first is row 6\. Stamp"):
        limit(make(weight_version=[3, 3, 5, 6, 6, 6, -1, 6], sequence_lengths=None))
    for wrong in (-1, 1.0, True, "1", None, torch.tensor(1.0), np.float32(1)):
        with pytest.raises(TraceError, match=r"max_age=.*must be"):
            limit(max_age=wrong)
        with pytest.raises(TraceError, match=r"trainer_version=.*must be"):
            limit(trainer_version=wrong)


def test_the_version_of_a_row_without_a_route_says_nothing():
    # RoutingSegments stamps such rows with -1, an engine may stamp the last token with newer weights.
    trace = make(weight_version=[3, 3, 5, 6, -1, 6, 6, 9])
    assert trace.limit_age(1, trainer_version=6, stale="live").left_live.tolist() == [2, 2, 0, 0, 0, 0, 0, 0]


def test_numbers_of_any_integer_type_are_versions():
    trace = make()
    for six in (np.int64(6), torch.tensor(6)):
        assert trace.find_stale(1, trainer_version=six).tolist() == [True, True] + [False] * 6
    # 0 is a version: that of the weights a run begins with.
    first = make(weight_version=0)
    assert first.find_stale(0, trainer_version=0).tolist() == [False] * 8
    assert first.find_stale(0, trainer_version=1).tolist() == ROUTED
    # int32 holds a row's version; the trainer's own is not cut to it.
    assert trace.find_stale(2**31, trainer_version=2**31 + 4).tolist() == [True, True] + [False] * 6


def test_the_first_choice_names_the_reason_and_no_choice_gives_a_route_back():
    kept = make().keep([False, True, True, True, True, True, True, True])
    assert kept.left_live.tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    both = kept.limit_age(2, trainer_version=6, stale="live")
    assert both.left_live.tolist() == [1, 2, 0, 0, 0, 0, 0, 0]
    again = both.keep([True] * 6 + [False] * 2)
    assert again.left_live.tolist() == [1, 2, 0, 0, 0, 0, 1, 0]  # row 7 never had a route: nobody left it out
    assert again.replay_mask.tolist() == [False, False, True, True, False, True, False, False]
    assert repr(again).startswith("RoutingTrace(8 tokens (3 with a route, 3 left live by choice)")
    # A row that was not kept needs no version.
    unknown = make(weight_version=[-1, 3, 5, 6, 6, 6, 6, 6]).keep([False] + [True] * 7)
    assert unknown.limit_age(2, trainer_version=6, stale="live").left_live.tolist() == [1, 2, 0, 0, 0, 0, 0, 0]


def test_a_choice_stays_with_its_rows():
    chosen = (
        make().keep([True, True, True, True, True, True, False, True]).limit_age(1, trainer_version=6, stale="live")
    )
    assert chosen.left_live.tolist() == [2, 2, 0, 0, 0, 0, 1, 0]
    assert chosen[1:7:2].left_live.tolist() == [2, 0, 0]
    assert chosen.slice_rows(5, 8).left_live.tolist() == [0, 1, 0]
    assert chosen.gather_rows([6, 0, 3, 6]).left_live.tolist() == [1, 2, 0, 1]
    assert chosen.select_samples([1, 0]).left_live.tolist() == [0, 1, 0, 2, 2, 0, 0, 0]
    assert chosen.truncate_samples([1, 2]).left_live.tolist() == [2, 0, 1]
    assert [sample.left_live.tolist() for sample in chosen] == [[2, 2, 0, 0, 0], [0, 1, 0]]
    assert chosen.select_layers([4]).left_live.tolist() == chosen.left_live.tolist()
    assert chosen.renumber({2: 7, 4: 1}).left_live.tolist() == chosen.left_live.tolist()
    assert chosen.to("cpu").left_live.tolist() == chosen.left_live.tolist()
    joined = concat_traces([make(), chosen])
    assert joined.left_live.tolist() == [0] * 8 + [2, 2, 0, 0, 0, 0, 1, 0]
    assert concat_traces([make(), make()]).left_live is None
    (routes,) = prefetch(chosen, [torch.tensor([[6, -1, 0, 3]])])
    assert routes.trace.left_live[routes.routing_rows[0, [0, 2, 3]]].tolist() == [1, 2, 0]


def test_a_choice_that_would_be_lost_or_undone_is_refused(tmp_path):
    chosen = make().keep([False] + [True] * 7)
    # A part of other layers would have the route that this one left out; a file would say that it was never there.
    with pytest.raises(TraceError, match="cannot merge part 1 of which 1 rows were left live by choice"):
        merge_traces([make(), chosen])
    for save in (save_trace, save_npz):
        with pytest.raises(StoreError, match=r"cannot save .* of which 1 rows were left live by choice"):
            save(chosen, tmp_path / "trace")
        assert not list(tmp_path.iterdir())
    with pytest.raises(TraceError, match="choose in the trace where it is replayed"):
        encode_envelope(chosen)
    # A later turn has a route for every row of the earlier ones, and would fill in what was left out.
    with pytest.raises(PayloadError, match="cannot append a segment of which 1 rows were left live by choice"):
        RoutingSegments().append(chosen)
    # Where every row was kept there is nothing to lose.
    whole = make().keep([True] * 8)
    assert encode_envelope(whole) == encode_envelope(make())
    assert merge_traces([whole]).left_live is None
