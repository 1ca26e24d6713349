"""What a session's report says, in text, in a notebook, to a logger and of several ranks together."""

from dataclasses import fields, replace

import torch
import torch.distributed as dist

from megatron_router_replay.diagnostics.live import LiveReport
from megatron_router_replay.mcore.report import SessionReport, _add_up
from megatron_router_replay.transport.timing import LegReport
from tests.unit.mcore.balanced_chunk import one_rank

__all__ = ["one_rank"]

REPLAY = SessionReport(
    kind="replay",
    ranks=2,
    routers=3,
    microbatches=4,
    tokens=1250,
    rows_replayed=1000,
    rows_live=24,
    rows_padding=226,
    forwards=12,
    recomputes=8,
    decisions_verified=20,
    decisions_wrong=0,
)
FLIPS = SessionReport(
    kind="freeze_recompute", recompute_flips=70, decisions_recomputed=1024, flips_of_layer={3: 0, 7: 30, 5: 40}
)


def test_the_text_of_a_replay():
    assert str(REPLAY).splitlines() == [
        "router replay: 3 routers, 4 micro-batches on 2 ranks",
        "  forwards / recomputes          12  / 8",
        "  tokens replayed             1,000  (97.7% of those with a token)",
        "  tokens routed live             24",
        "  padding                       226",
        "  decisions verified / wrong     20  / 0",
    ]
    assert repr(REPLAY) == str(REPLAY)


def test_the_values_of_a_replay():
    values = REPLAY.to_dict()
    assert (values["ranks"], values["routers"], values["microbatches"], values["tokens"]) == (2, 3, 4, 1250)
    assert values["replayed_share"] == 1000 / 1024, "of the rows with a token"
    assert values["padding_share"] == 226 / 1250
    assert "live" not in values
    assert "leg_times" not in values


def test_flips_have_their_denominator_and_first_layer_in_text_metrics_and_report():
    assert str(FLIPS).splitlines()[-1] == "  recompute flips prevented  70  of 1,024 decisions, first in layer 5"
    metrics = FLIPS.metrics()
    assert (metrics["router_replay/recompute_flips"], metrics["router_replay/decisions_recomputed"]) == (70.0, 1024.0)
    layers = {name: value for name, value in metrics.items() if "/flips/" in name}
    assert layers == {
        "router_replay/flips/layer_3": 0.0,
        "router_replay/flips/layer_5": 40.0,
        "router_replay/flips/layer_7": 30.0,
    }
    assert FLIPS.to_dict()["flips_of_layer"] == {3: 0, 5: 40, 7: 30}


def test_flips_that_were_not_counted_are_not_shown_as_none_found():
    assert "flips" not in str(REPLAY)
    assert not [name for name in REPLAY.metrics() if "flip" in name]
    assert "0  of 5 decisions" in str(SessionReport(kind="freeze_recompute", recompute_flips=0, decisions_recomputed=5))


def test_a_notebook_gets_a_small_table():
    html = REPLAY._repr_html_()
    assert html.startswith("<div><b>router replay: 3 routers, 4 micro-batches on 2 ranks</b><table")
    assert '<td style="text-align:left">tokens replayed</td><td style="text-align:right">1,000</td>' in html
    assert "of 1,024 decisions, first in layer 5" in FLIPS._repr_html_()


CHOSEN = SessionReport(
    kind="replay",
    routers=2,
    microbatches=1,
    tokens=10,
    rows_replayed=6,
    rows_live=3,
    rows_padding=1,
    rows_not_kept=1,
    rows_stale=1,
    rows_trained_live=2,
    decisions_weighed=12,
    decisions_below_margin=2,
    decisions_above_margin=1,
    left_live_of_layer={4: 0, 1: 3},
    forwards=2,
    decisions_counted=18,
    expert_bias="replayed",
    aux_loss="live",
)
LIVE = LiveReport(
    layer_numbers=(1,),
    num_experts=2,
    topk=1,
    rows=torch.tensor([4]),
    mass_live=torch.tensor([0.9]).double(),
    mass_replayed=torch.tensor([0.8]).double(),
    overlap_counts=torch.tensor([[1, 3]]),
    load_live=torch.tensor([[2, 2]]),
    load_replayed=torch.tensor([[1, 3]]),
    tokens=4,
    tokens_agree=3,
)
LEGS = LegReport(line="waited 1.0 s <for> it", numbers={"trainer_wait_s": 1.0})


def test_the_text_of_a_replay_that_leaves_rows_live_by_choice_and_by_margin():
    assert str(CHOSEN).splitlines() == [
        "router replay: 2 routers, 1 micro-batches",
        "  forwards / recomputes           2  / 0",
        "  tokens replayed                 6  (50.0% of those with a token)",
        "  tokens routed live              3  (1 without a route, 1 not kept, 1 too old; trained, of the last two: 2)",
        "  padding                         1",
        "  decisions left live by margin   3  of 12 (2 below min_margin, 1 above max_margin)",
        "  expert-bias decisions          18  expert_bias=replayed",
        "  aux loss                           aux_loss=live",
    ]
    # 6 of 9 tokens, each of them replayed in 9 of 12 decisions.
    assert CHOSEN.replayed_share == 0.5
    only_below = replace(CHOSEN, decisions_above_margin=None, rows_trained_live=None, expert_bias=None)
    assert "2  of 12 (2 below min_margin, 0 above max_margin)" in str(only_below)
    assert str(replace(only_below, decisions_below_margin=None)).count("0  of 12 (0 below min_margin, 0 above") == 1
    assert "(1 without a route, 1 not kept, 1 too old)" in str(only_below)
    assert str(only_below).splitlines()[-2] == "  expert-bias decisions          18"
    for field in ("rows_not_kept", "rows_stale"):
        assert "(2 without a route, " in str(replace(CHOSEN, **{field: 0})), "one of the two is enough to say why"


def test_the_numbers_that_a_logger_gets_are_these_and_no_others():
    assert CHOSEN.metrics("r/") == {
        "r/ranks": 1.0,
        "r/routers": 2.0,
        "r/microbatches": 1.0,
        "r/tokens": 10.0,
        "r/rows_replayed": 6.0,
        "r/rows_live": 3.0,
        "r/rows_padding": 1.0,
        "r/rows_not_kept": 1.0,
        "r/rows_stale": 1.0,
        "r/rows_trained_live": 2.0,
        "r/decisions_weighed": 12.0,
        "r/decisions_below_margin": 2.0,
        "r/decisions_above_margin": 1.0,
        "r/forwards": 2.0,
        "r/recomputes": 0.0,
        "r/decisions_counted": 18.0,
        "r/replayed_share": 0.5,
        "r/padding_share": 0.1,
        "r/rows_without_route": 1.0,
        "r/left_live/layer_1": 3.0,
        "r/left_live/layer_4": 0.0,
    }


def test_what_was_not_measured_has_no_number():
    nothing = SessionReport(kind="replay")
    assert (nothing.replayed_share, nothing.padding_share, nothing.decisions_left_live) == (None, None, 0)
    assert nothing.rows_without_route == 0
    recording = SessionReport(kind="record", tokens=4, rows_live=4)
    assert (recording.replayed_share, recording.rows_without_route) == (None, None)
    assert "tokens" not in str(recording)
    assert "r/replayed_share" not in recording.metrics("r/")
    assert SessionReport(kind="replay", rows_live=3).replayed_share == 0.0, (
        "none of three, which is not nothing measured"
    )
    weighed = SessionReport(kind="replay", rows_replayed=1, decisions_weighed=0)
    assert weighed.replayed_share == 1.0


def test_the_live_router_and_the_legs_are_shown_with_the_counts():
    report = replace(REPLAY, live=LIVE, leg_times=LEGS)
    lines = str(report).splitlines()
    assert lines[:6] == str(REPLAY).splitlines()
    assert lines[6] == "  waited 1.0 s <for> it"
    assert lines[7:] == str(LIVE).splitlines()
    html = report._repr_html_()
    assert "</table><br>waited 1.0 s &lt;for&gt; it" in html
    assert html.endswith(f"{LIVE._repr_html_()}</div>")
    values = report.to_dict()
    assert (values["live"], values["leg_times"]) == (LIVE.to_dict(), {"line": LEGS.line, "trainer_wait_s": 1.0})
    metrics = report.metrics()
    assert metrics["router_replay/transport/trainer_wait_s"] == 1.0
    assert LIVE.metrics("router_replay/live/").items() <= metrics.items()


def test_counts_of_ranks_are_added_up_and_a_rank_that_did_not_measure_hides_nothing():
    numbers = {each.name: 10 + i for i, each in enumerate(fields(SessionReport)) if "int" in str(each.type)}
    numbers = {name: value for name, value in numbers.items() if not name.endswith("_of_layer")}
    assert len(numbers) == 20
    one = SessionReport(
        kind="replay", **numbers, flips_of_layer={1: 2, 2: 0}, left_live_of_layer={5: 1}, aux_loss="live", live=None
    )
    other = SessionReport(kind="replay", ranks=3, tokens=5, flips_of_layer={2: 4}, expert_bias="off")
    for reports in ([one, other], [other, one]):
        total = _add_up(reports)
        for name, value in numbers.items():
            expected = value + {"ranks": 3, "tokens": 5}.get(name, 0)
            assert getattr(total, name) == expected, name
        assert total.flips_of_layer == {1: 2, 2: 4}
        assert list(total.flips_of_layer) == [1, 2]
        assert total.left_live_of_layer == {5: 1}
        assert (total.kind, total.expert_bias, total.aux_loss) == ("replay", "off", "live")
    neither = _add_up([other, other])
    assert (neither.decisions_verified, neither.aux_loss, neither.rows_live) == (None, None, 0)


def test_a_report_of_one_process_is_its_own_sum_without_what_is_a_ranks_own():
    report = replace(REPLAY, live=LIVE, leg_times=LEGS)
    assert report.reduce() == REPLAY


def test_a_report_is_gathered_over_the_groups_that_are_named_or_the_whole_job(one_rank):
    for groups in ((), (dist.group.WORLD,), (dist.group.WORLD, None)):
        assert replace(REPLAY, live=LIVE).reduce(*groups) == REPLAY
