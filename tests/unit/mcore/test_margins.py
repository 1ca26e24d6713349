"""Replay by margin: which decisions the live router takes, by probabilities written out, frozen for the recompute."""

import itertools
import math

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError, TraceError
from megatron_router_replay.mass import mass_lost
from megatron_router_replay.mcore.margins import Margins
from tests.unit.mcore.left_live_trace import AT, by_hand, chosen, whole
from tests.unit.mcore.tiny_chunk import (
    EXPERTS,
    ROWS,
    Chunk,
    as_map,
    disturb,
    flips,
    non_reentrant,
    num_recomputed,
    plain,
    reentrant,
    tokens,
    watched,
)

# Binary fractions, so that margins are exact: the live experts are 0 and 1, with 0.75 together.
SCORES = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).expand(6, 4)
LIVE = torch.tensor([[0, 1]]).expand(6, 2)
ROUTES = torch.tensor([[1, 0], [0, 2], [3, 0], [1, 2], [3, 2], [3, 2]], dtype=torch.uint8)
MARGINS = [0, 0.125, 0.125, 0.375, 0.5, 0.5]
REPLAYED = torch.tensor([True] * 5 + [False])  # the last row is padding, or live already


@pytest.mark.parametrize(
    ("lowest", "highest", "below", "above"),
    [
        (None, 1, [], []),
        (0, None, [], []),
        (None, 0, [], [1, 2, 3, 4]),
        (None, 0.125, [], [3, 4]),  # both bounds are included
        (0.125, 0.375, [], [4]),
        (0.375, None, [1, 2], []),
        (0.2, 0.4, [1, 2], [4]),
        (1, 1, [1, 2, 3, 4], []),
    ],
)
def test_a_decision_is_replayed_between_the_bounds(lowest, highest, below, above):
    margins = Margins.of(lowest, highest)
    chosen = margins.select(3, ROUTES, scores=SCORES, kind="probabilities", live=LIVE, replayed=REPLAYED)
    expected = [[0, 1] if row in below + above else ROUTES[row].tolist() for row in range(6)]
    assert chosen.tolist() == expected  # row 0 names the same experts in another order, and keeps it
    assert chosen.dtype is torch.uint8
    margins.select(3, ROUTES, scores=SCORES, kind="probabilities", live=LIVE, replayed=REPLAYED)
    margins.select(2, ROUTES, scores=SCORES, kind="probabilities", live=LIVE, replayed=~REPLAYED)
    # The last row's margin is 0.5, as that of row 4.
    in_layer_2 = [1, below.count(4), above.count(4)]
    assert margins.counts_of_layer() == {2: in_layer_2, 3: [10, 2 * len(below), 2 * len(above)]}


def test_the_mass_is_that_of_the_experts_in_whatever_order():
    for columns in ([0, 1], [1, 0]):
        lost = mass_lost(SCORES, "probabilities", live=LIVE[:, columns], replayed=ROUTES[:, columns])
        assert lost.tolist() == MARGINS
    # Sums of float32 depend on the order: of these four shares the 24 orders give three sums.
    shares = torch.rand(1, 6, generator=torch.Generator().manual_seed(0))
    orders = torch.tensor(list(itertools.permutations(range(4))))
    shares = shares / shares.sum()
    assert shares.expand(24, 6).gather(1, orders).sum(dim=1).unique().numel() > 1
    lost = mass_lost(shares.expand(24, 6), "probabilities", live=torch.arange(4).expand(24, 4), replayed=orders)
    assert lost.tolist() == [0.0] * 24
    # Logits go through a softmax, whatever their dtype; scores that a bias made negative count as nothing.
    logits = (SCORES.log() + 7).to(torch.bfloat16)
    assert mass_lost(logits, "logits", live=LIVE, replayed=ROUTES).sub(torch.tensor(MARGINS)).abs().max() < 0.01
    biased = torch.tensor([[1.5, 0.5, -1.0, 0.0]])
    assert mass_lost(biased, "probabilities", live=LIVE[:1], replayed=torch.tensor([[0, 2]])).tolist() == [0.25]
    # Held to groups, a live router's experts may have less mass than those of a route: it then disagrees by nothing.
    assert mass_lost(SCORES[:1], "probabilities", live=torch.tensor([[2, 3]]), replayed=LIVE[:1]).tolist() == [0.0]


def test_where_no_margin_can_be_told_the_route_is_replayed():
    scores = torch.full((1, 4), math.nan)
    for bounds in ((0.2, None), (None, 0.2)):
        margins = Margins.of(*bounds)
        chosen = margins.select(1, ROUTES[4:5], scores=scores, kind="logits", live=LIVE[:1], replayed=REPLAYED[:1])
        assert chosen.tolist() == [[3, 2]]


def test_bounds_that_are_none_raise():
    for wrong in (-0.1, 1.1, True, "0.1", math.nan, math.inf):
        with pytest.raises(TraceError, match=r"m.._margin=.* must be a share"):
            Margins.of(wrong, None)
        with pytest.raises(TraceError, match=r"max_margin=.* must be a share"):
            mrr.replay(Chunk(), whole(), max_margin=wrong)
    with pytest.raises(TraceError, match=r"min_margin=0\.3 is above max_margin=0\.2"):
        mrr.replay(Chunk(), whole(), min_margin=0.3, max_margin=0.2)
    assert Margins.of(None, None) is None


@pytest.mark.parametrize("around", [plain, reentrant, non_reentrant])
@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_each_layer_decides_in_its_forward_and_the_recompute_uses_it(around, function):
    bias = function == "sigmoid"
    chunk = Chunk(moe_router_score_function=function)
    chunk.around = around
    generator = torch.Generator().manual_seed(4)
    if bias:
        for router in chunk.routers:  # the bias is in the scores that the router ranks
            router.expert_bias = torch.randn(EXPERTS, generator=generator) / 4
    trace, highest = chosen(), 0.3
    entered = {1: [], 2: [], 3: []}
    for router in chunk.routers:
        router.register_forward_pre_hook(
            lambda router, args: entered[router.layer_number].append(args[0].detach().flatten(0, 1) @ router.weight.t())
        )
    with watched(chunk) as seen, mrr.replay(chunk, trace, max_margin=highest, verify=True) as session:
        session.microbatch(ROWS)
        logits = chunk(tokens())
        first = {layer: of_layer[0].detach() for layer, of_layer in entered.items()}
        biases = [router.expert_bias.clone() if bias else 0 for router in chunk.routers]
        disturb(chunk)  # a recompute that weighs again decides otherwise
        if bias:
            for router in chunk.routers:
                router.expert_bias = -router.expert_bias
        logits.square().mean().backward()
    left = {}
    is_replayed = trace.replay_mask[AT]
    for layer, of_layer in first.items():
        scores = of_layer.sigmoid() + biases[layer - 1] if bias else of_layer
        positive = scores.clamp(min=0)
        share = positive / positive.sum(dim=1, keepdim=True) if bias else of_layer.softmax(dim=1)
        live, routes = as_map(scores.topk(2, dim=1).indices), as_map(trace.layer(layer)[AT])
        margin = (share * live).sum(dim=1) - (share * routes).sum(dim=1)
        taken = ~is_replayed | (margin > highest)
        assert torch.equal(seen[0, layer][0], torch.where(taken.unsqueeze(1), live, routes))
        left[layer] = int((taken & is_replayed).sum())
    assert 0 < sum(left.values()) < 12  # some are replayed and some are not
    assert flips(seen) == 0
    assert num_recomputed(seen) == (0 if around is plain else 3)
    report = session.report
    assert report.left_live_of_layer == left
    assert (report.decisions_weighed, report.decisions_below_margin) == (12, 0)
    assert (report.decisions_above_margin, report.decisions_wrong) == (sum(left.values()), 0)
    assert report.replayed_share == pytest.approx(4 / 8 * (1 - sum(left.values()) / 12))
    assert report.metrics()["router_replay/left_live/layer_2"] == left[2]
    assert f"decisions left live by margin  {sum(left.values()):>2}  of 12 (0 below min_margin," in str(report)


def test_margins_that_leave_everything_live_are_no_replay():
    trace = whole(replay_mask=None)

    def run(**options):
        chunk = Chunk()
        with mrr.replay(chunk, trace, **options) as session:
            session.microbatch(ROWS)
            chunk(tokens())
        return session.report

    # Every row has a route, and random routes disagree nearly everywhere: rows alone would say that all were replayed.
    left = run(max_margin=0.0).decisions_above_margin
    assert 20 <= left < 24
    with pytest.raises(
        ReplayStateError, match=r"were replayed on this rank, less than min_replayed=0\.5 \(live by choice: "
    ):
        run(max_margin=0.0, min_replayed=0.5)
    assert run(min_margin=1.0).decisions_below_margin == left
    with pytest.raises(
        ReplayStateError, match=r"none of 4 tokens was replayed on this rank: 12 of 12 decisions by their ma"
    ):
        disagree_everywhere({})
    assert disagree_everywhere({"min_replayed": 0}).replayed_share == 0.0


def disagree_everywhere(options):
    """Replay experts of which the live router chooses none, in any layer."""
    chunk, rows = Chunk(), torch.arange(4).view(1, 4)
    with by_hand(chunk) as live:
        chunk(tokens(1))
    others = [(~of_layer[0]).nonzero()[:, 1].view(4, EXPERTS - 2)[:, :2] for of_layer in live.values()]
    trace = mrr.RoutingTrace(topk_indices=torch.stack(others, dim=1), layer_numbers=(1, 2, 3), num_experts=EXPERTS)
    with mrr.replay(chunk, trace, max_margin=0.0, **options) as session:
        session.microbatch(rows)
        chunk(tokens(1))
    return session.report


def test_the_comparison_sees_the_routes_that_margins_left_out():
    chunk, trace = Chunk(), whole(replay_mask=None)
    with mrr.replay(chunk, trace, compare_live=True, max_margin=0.0) as session:
        session.microbatch(ROWS)
        chunk(tokens())
    report = session.report
    disagree = [8 - counts[-1] for counts in report.live.overlap_counts.tolist()]
    assert list(report.left_live_of_layer.values()) == disagree
