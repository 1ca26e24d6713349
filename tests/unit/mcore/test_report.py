"""What a session's report says, in text, in a notebook and to a logger."""

from megatron_router_replay.mcore.report import SessionReport

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
