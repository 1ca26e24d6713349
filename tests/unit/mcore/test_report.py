"""The report of a session: in text, in a notebook, for a logger, and of several ranks together."""

from dataclasses import fields, replace

import pytest

from megatron_router_replay.mcore.judge.agreement import LiveAgreement
from megatron_router_replay.mcore.judge.rank_evidence import Anomaly
from megatron_router_replay.mcore.judge.report import SessionReport, _add_up
from megatron_router_replay.mcore.judge.sums import Sums

REPLAY = SessionReport(
    kind="replay",
    routers=3,
    microbatches=4,
    rows_replayed=1000,
    rows_live=24,
    rows_padding=226,
    forwards=12,
    recomputes=8,
    decisions={"verified": 20, "wrong": 0},
)
FLIPS = SessionReport(kind="freeze_recompute", decisions={"recomputed": 1024}, flips_of_layer={3: 0, 7: 30, 5: 40})


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


CHOSEN = SessionReport(
    kind="replay",
    routers=2,
    microbatches=1,
    rows_replayed=6,
    rows_live=3,
    rows_padding=1,
    rows_repeated=4,
    forwards=2,
)
AGREEMENT = LiveAgreement(
    layers={
        1: Sums(90, 130, 140, 130, 140),
        2: Sums(90, 140, 140, 140, 140),
        3: Sums(3, 5, 5, 5, 5),
    },
    num_layers=4,
    block=Anomaly(7.5, "sample 3"),
    rows_apart=2,
)


def test_the_text_of_a_replay_has_its_counts():
    report = replace(CHOSEN, rows_replayed=1006, decisions={"verified": 20, "wrong": 0})
    assert str(report).splitlines() == [
        "router replay: 2 routers, 1 micro-batches",
        "  forwards / recomputes           2  / 0",
        "  tokens replayed             1,006  (99.7% of the tokens)",
        "  tokens routed live              3",
        "  padding                         1",
        "  rows named twice                4  (two tokens got one token's routes)",
        "  decisions verified / wrong     20  / 0",
    ]
    assert repr(report) == str(report)
    assert CHOSEN.replayed_share == 6 / 9, "of the rows with a token"


def test_the_numbers_that_a_logger_gets_are_these_and_no_others():
    assert CHOSEN.metrics() == {
        "router_replay/routers": 2.0,
        "router_replay/microbatches": 1.0,
        "router_replay/tokens": 10.0,
        "router_replay/rows_replayed": 6.0,
        "router_replay/rows_live": 3.0,
        "router_replay/rows_padding": 1.0,
        "router_replay/rows_repeated": 4.0,
        "router_replay/segments_ambiguous": 0.0,
        "router_replay/forwards": 2.0,
        "router_replay/recomputes": 0.0,
        "router_replay/replayed_share": 6 / 9,
        "router_replay/padding_share": 0.1,
    }


def test_what_was_not_measured_has_no_number():
    nothing = SessionReport(kind="replay")
    assert (nothing.replayed_share, nothing.padding_share, nothing.decisions) == (None, None, {})
    assert (nothing.tokens, nothing.recompute_flips) == (0, None)
    recording = SessionReport(kind="record", rows_live=4)
    assert (recording.replayed_share, recording.tokens, "tokens" in str(recording)) == (None, 4, False)
    assert "router_replay/replayed_share" not in recording.metrics()
    assert SessionReport(kind="replay", rows_live=3).replayed_share == 0.0, "which is not nothing measured"
    assert "flips" not in str(REPLAY)
    assert not [name for name in REPLAY.metrics() if "flip" in name]
    assert "0  of 5 decisions" in str(SessionReport(kind="freeze_recompute", decisions={"recomputed": 5}))


def test_the_first_line_says_how_the_live_router_agrees_and_a_logger_gets_it():
    report = replace(REPLAY, agreement=AGREEMENT)
    assert report.reduce() == report, "of one process"
    assert str(report).splitlines()[0] == (
        f"{str(REPLAY).splitlines()[0]}; the live router agrees with 96.5% of the trace's routes beyond chance "
        "(2 of 4 layers have enough evidence)"
    )
    assert str(report).splitlines()[1:] == str(REPLAY).splitlines()[1:]
    numbers = {name: value for name, value in report.metrics().items() if name not in REPLAY.metrics()}
    assert numbers == {
        "router_replay/agreement": 275 / 285,
        "router_replay/agreement_least_layer": 130 / 140,
        "router_replay/block_evidence": 7.5,
        "router_replay/rows_apart": 2.0,
    }
    no_row = replace(AGREEMENT, layers={})
    assert "was compared in no row" in str(no_row)
    assert replace(REPLAY, agreement=no_row).metrics() == REPLAY.metrics()
    few = replace(AGREEMENT, layers={3: Sums(3, 5, 5, 5, 5)})
    assert str(few) == "too few routes were compared in any of 4 layers"


def test_a_low_layer_and_wrong_rows_have_lines_of_their_own():
    wrong = Anomaly(75.0, "sample 3, tokens 4 to 90, layer 5: routes of other tokens")
    low = replace(AGREEMENT, layers={5: Sums(90, 10, 140, 10, 140)}, block=wrong)
    headline, *facts = str(replace(REPLAY, agreement=low)).splitlines()
    assert headline.endswith(
        "agrees with 7.1% of the trace's routes beyond chance (1 of 4 layers have enough evidence)"
    )
    assert facts[-2:] == [
        "  least layer                    7%  layer 5: routes of older weights, or of other rows?",
        f"  evidence of wrong rows         75  {wrong.text}",
    ]
    total = summed(*[replace(REPLAY, agreement=low)] * 2)
    assert str(total).splitlines()[-1] == facts[-1], "also of all ranks"


def summed(*reports):
    """Return the report of all ranks, of which each has one of these."""
    total = _add_up(reports)
    assert total == _add_up(reports[::-1]), "in whatever order the ranks are"
    return total


AT = {
    # layout -> (layer number, replica, part) of the first chunk of each rank, and its rows; the rows of the batch are 543
    "one rank": [((1, 0, 0), 543)],
    "PP2": [((1, 0, 0), 543), ((3, 0, 0), 543)],
    "PP2, whose first stage has no experts": [(None, 0), ((3, 0, 0), 543)],
    "a group of the second replicas": [((1, 1, 0), 272), ((1, 1, 0), 271)],
    "PP2 x TP2 x DP2": [((1 + 2 * pp, tp, 0), rows) for pp in (0, 1) for tp in (0, 1) for rows in (272, 271)],
    "CP2 x DP2": [((1, 0, cp), rows) for cp in (0, 1) for rows in (200, 71 + cp)],
}


def at(place, rows):
    measured = None if place is None else replace(AGREEMENT, rows_apart=1, layers={place[0]: Sums(90, 13, 14, 13, 14)})
    return replace(CHOSEN, counted_at=place, rows_replayed=rows, rows_live=0, rows_padding=0, agreement=measured)


@pytest.mark.parametrize("layout", AT)
def test_a_row_of_the_batch_counts_once_in_every_layout(layout):
    total = summed(*(at(*rank) for rank in AT[layout]))
    metrics = total.metrics()
    assert (metrics["router_replay/rows_replayed"], metrics["router_replay/tokens"]) == (543, 543)
    assert total.forwards == 2 * len(AT[layout])
    assert total.microbatches == (2 if "DP2" in layout or layout.startswith("a group") else 1)
    replicas = {place[1] for place, _ in AT[layout] if place}
    layers = [place[0] for place, _ in AT[layout] if place and place[1] == min(replicas)]
    assert total.agreement.layers == {
        n: Sums(*(x * layers.count(n) for x in (90, 13, 14, 13, 14))) for n in set(layers)
    }
    assert total.agreement.rows_apart == len(layers)


def test_agreement_adds_up_over_ranks_that_hold_the_same_layers_and_others():
    other = replace(
        AGREEMENT,
        layers={1: Sums(90, 0, 140, 0, 140), 9: Sums(9, 9, 9, 9, 9)},
        num_layers=2,
        block=Anomaly(9.0, "sample 4"),
        rows_apart=5,
    )
    total = summed(*(replace(REPLAY, agreement=each) for each in (AGREEMENT, other))).agreement
    assert (total.layers[1], sorted(total.layers)) == (Sums(180, 130, 280, 130, 280), [1, 2, 3, 9])
    assert (total.num_layers, total.block, total.by_layer) == (4, (9.0, "sample 4"), {1: 130 / 280, 2: 1.0})
    assert total.rows_apart == 7


def test_counts_of_ranks_are_added_up_and_a_rank_that_did_not_measure_hides_nothing():
    numbers = {each.name: 10 + i for i, each in enumerate(fields(SessionReport)) if str(each.type) == "int"}
    assert len(numbers) == 10
    one = SessionReport(kind="replay", **numbers, flips_of_layer={1: 2, 2: 0}, decisions={"verified": 7})
    other = SessionReport(kind="replay", rows_live=5, flips_of_layer={2: 4}, decisions={"verified": 1, "wrong": 3})
    total = summed(one, other)
    for name, value in numbers.items():
        assert getattr(total, name) == value + {"rows_live": 5, "ranks": 1}.get(name, 0), name
    assert str(replace(one, routers=4, ranks=2, decisions={})).startswith(
        "router replay: 4 routers on 2 ranks, 13 micro-batches"
    )
    assert list(total.flips_of_layer.items()) == [(1, 2), (2, 4)]
    assert (total.kind, total.decisions) == ("replay", {"verified": 8, "wrong": 3})
    neither = summed(SessionReport(kind="replay"), SessionReport(kind="replay"))
    assert (neither.decisions, neither.rows_padding) == ({}, 0)


def test_a_freeze_leaves_rows_out_and_says_that_nothing_was_frozen():
    assert "nothing to freeze" in str(SessionReport(kind="freeze_recompute", forwards=12))
    frozen = SessionReport(kind="freeze_recompute", forwards=12, recomputes=8)
    assert "nothing to freeze" not in str(frozen)
    assert not {name for name in frozen.metrics() if "rows_" in name or "tokens" in name}
    assert frozen.metrics()["router_replay/recomputes"] == 8.0
    assert "router_replay/rows_live" in REPLAY.metrics()


def test_a_number_that_no_session_of_the_kind_measures_is_absent():
    names = {
        kind: {name.removeprefix("router_replay/") for name in SessionReport(kind=kind).metrics()}
        for kind in ("replay", "record", "freeze_recompute")
    }
    counted = {"routers", "microbatches", "forwards", "recomputes"}
    assert names["freeze_recompute"] == counted
    assert names["record"] == counted | {"rows_live", "rows_padding", "tokens"}
    assert names["replay"] == names["record"] | {"rows_replayed", "rows_repeated", "segments_ambiguous"}
