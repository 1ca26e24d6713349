"""The conclusion of a diff from counts and facts that are written by hand."""

from dataclasses import replace

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.diagnostics.conclusion import conclude
from megatron_router_replay.diagnostics.fact import Fact
from tests.unit.store.store_traces import make_trace

ROUNDING = "rounding (another precision, kernel or layout)"
CAPTURED = "or routes that were recorded or captured wrongly: the routes alone"
WEIGHTS = "That fits weights, a config, positions, the attention's mask or its packing, a random mask, "
SOME_PLACES = "different rows in some places"


def diff_of(one, more=None, *, rows=10_000, explained=0, facts=(), topk=2, **values):
    """A diff of three layers.

    Args:
        one, more: by layer, decisions that no match explains and that exchange one expert, or two.
        explained: decisions of the first layer that a match explains.
    """
    base = mrr.diff_traces(make_trace(2, topk=topk), make_trace(2, topk=topk))
    counts = [[0] * (topk - 2) + [n, m, rows - n - m] for n, m in zip(more or (0,) * len(one), one)]
    unexplained = torch.tensor(counts)[:, -topk - 1 :]
    overlap = unexplained.clone()
    overlap[0, 0] += explained
    overlap[0, -1] -= explained
    return replace(
        base,
        layer_numbers=tuple(range(1, len(one) + 1)),
        **{"rows_compared": rows, "rows_alike": rows, "unexplained": unexplained, "overlap_counts": overlap} | values,
        facts=tuple(facts),
    )


def fact_of(kind, layers=(1, 2, 3), decisions=0, rows=(0, 9), **values):
    return Fact(kind=kind, text="", layer_numbers=layers, rows=rows, decisions=decisions, **values)


@pytest.mark.parametrize(
    ("by_layer", "words"),
    [
        ((5, 5, 5), "15 decisions differ, all of them by one expert: too few to show where they begin."),
        ((5, 5, 6), "no place stands out: 0.05 % of decisions differ, all of them by one expert; 5 of 10,000 "),
        ((0, 15, 15), "no place stands out"),
        # After no difference, 13 may come by chance.
        ((0, 16, 13), "layer 2 alone differs, and later layers do not follow"),
        ((0, 16, 14), "something between layer 1 and layer 2, or after every layer, differs"),
        # After 100, three times 121.
        ((100, 363, 400), "no place stands out"),
        ((100, 364, 364), "something between layer 1 and layer 2, or after every layer, differs"),
        ((100, 100, 364), "something between layer 2 and layer 3 differs"),
        ((100, 400, 363), "layer 2 alone differs"),
        ((500, 600, 700), "no place stands out"),
        ((501, 600, 700), "something between the embedding and layer 1, or everywhere, differs"),
        ((16, 13, 13), "layer 1 alone differs"),
        ((16, 14, 14), "no place stands out"),
    ],
)  # fmt: skip
def test_where_differences_begin(by_layer, words):
    assert conclude(diff_of(by_layer)).startswith(f"the traces differ: {words}")


@pytest.mark.parametrize(
    ("one", "more", "words", "not_words"),
    [
        (160, 40, ROUNDING, SOME_PLACES),
        (159, 41, SOME_PLACES, ROUNDING),
        (160, 40, WEIGHTS + ROUNDING, SOME_PLACES),
        (201, 0, WEIGHTS + CAPTURED, ROUNDING),
        (120, 81, WEIGHTS + CAPTURED, ROUNDING),
        (100, 101, WEIGHTS + SOME_PLACES + ", " + CAPTURED, ROUNDING),
        (101, 101, WEIGHTS + CAPTURED, SOME_PLACES),
        (160, 41, WEIGHTS + CAPTURED, SOME_PLACES),
        (80, 20, f"That fits {ROUNDING}, weights or a config that differ a little, positions, ", SOME_PLACES),
        (81, 20, "That fits weights, a config, ", "That fits rounding"),
    ],
)  # fmt: skip
def test_causes_before_the_lowest_layer(one, more, words, not_words):
    text = conclude(diff_of((one, one, one), (more, more, more), rows=1000))
    assert words in text
    assert not_words not in text


@pytest.mark.parametrize(
    ("one", "more", "first", "last"),
    [
        (80, 20, True, False),
        (79, 21, False, False),
        (101, 0, False, True),
        (160, 40, False, True),
        (159, 41, False, False),
        (201, 0, False, False),
        (200, 0, False, True),
        (100, 0, True, False),
        (100, 101, False, False),
    ],
)
def test_causes_between_two_layers(one, more, first, last):
    text = conclude(diff_of((0, one, one), (0, more, more), rows=1000))
    weights = (
        "weights or a config of the experts of layer 1 or of their scores, of the norms, the attention or the router of "
        "layer 2; a random mask or noise there; "
    )
    kernel = "another precision or kernel; "
    fits = f"{kernel * first}{weights}{kernel * last}or routes that were recorded or captured wrongly from there on."
    assert text.endswith(f" That fits {fits}")
    assert "by one expert, and none in the layers below" in text


def test_of_one_chosen_expert_nothing_is_said_of_exchanged_ones():
    text = conclude(diff_of((0, 300, 300), topk=1, rows=1000))
    assert "300 of 1,000 rows differ in layer 2, and none in the layers below" in text


@pytest.mark.parametrize(
    ("one", "more", "rounding"), [((8, 15, 17), (0, 0, 0), True), ((9, 15, 16), (0, 0, 0), False),
                                  ((8, 12, 12), (0, 4, 4), True), ((8, 12, 11), (0, 4, 5), False)]
)  # fmt: skip
def test_rounding_exchanges_one_expert_of_a_few_rows(one, more, rounding):
    text = conclude(diff_of(one, more, rows=40))
    assert "no place stands out" in text
    assert (ROUNDING in text) is rounding


LITTLE = "weights or a config that differ a little"
CONFIG = "weights or a config that differ, a random mask, different rows in some places"


@pytest.mark.parametrize(
    ("one", "more", "rows", "causes"),
    [
        ((5, 5, 5), (0, 0, 0), 40, f"{ROUNDING}, and as well {LITTLE}"),  # a few
        ((5, 5, 6), (0, 0, 0), 40, f"{LITTLE}, and as well {ROUNDING}"),
        ((7, 6, 5), (0, 0, 0), 60, f"{ROUNDING}, and as well {LITTLE}"),  # a tenth
        ((6, 6, 7), (0, 0, 0), 60, f"{LITTLE}, and as well {ROUNDING}"),
        ((4, 4, 3), (1, 1, 2), 400, f"{ROUNDING}, and as well {LITTLE}"),  # a few, and not by one expert
        ((4, 4, 4), (1, 1, 2), 400, CONFIG),
    ],
)
def test_causes_where_no_place_stands_out(one, more, rows, causes):
    assert f"That fits {causes}" in conclude(diff_of(one, more, rows=rows))


@pytest.mark.parametrize(
    ("rest", "explained", "stated"),
    [(15, 50, False), (16, 50, True), (99, 901, False), (100, 900, True), (40, 4000, False)],
)
def test_what_matches_leave_has_a_conclusion_of_its_own_from_a_tenth_on(rest, explained, stated):
    fact = fact_of("row", decisions=explained)
    text = conclude(diff_of((0, 0, rest), explained=explained, facts=[fact]))
    assert text.startswith("the traces differ: rows of one trace lie at other places")
    assert (
        f"These facts leave {rest:,} of the {rest + explained:,} differing decisions unexplained." in text
    ) is stated
    assert ("Something between layer 2 and layer 3 differs: " in text) is stated


@pytest.mark.parametrize(
    ("later", "conclusion"),
    [
        (
            "agree",
            "the experts of layer 1 have different ids and compute the same: a different order in the checkpoint, or ids "
            "that were recorded otherwise, as physical ones; a replay needs the same ids.",
        ),
        (
            "differ",
            "layer 1 has its experts or its router's rows in a different order, and not both",
        ),
        (
            "",
            "experts have different ids: physical ids in place of logical ones, ids that were recorded wrongly, a different "
            "order in the checkpoint, or rows of a router that moved without its experts.",
        ),
    ],
)
def test_experts_under_different_ids(later, conclusion):
    fact = fact_of("names", layers=(1,), decisions=900, later_layers=later)
    text = conclude(diff_of((0, 900, 900), explained=900, facts=[fact]))
    assert conclusion in text
    # Later layers that differ follow from the ids.
    assert ("leave 1,800 of the 2,700" in text) is (later != "differ")


def test_samples_with_different_tokens():
    text = conclude(diff_of((0, 0, 0), explained=500, rows_alike=100, rows_other_token=50))
    assert text == (
        "the traces differ: the samples hold different tokens, and so different routes from there on; the decisions of the "
        "100 rows before agree in every layer."
    )
    text = conclude(diff_of((1, 2, 3), explained=500, rows_alike=100, rows_other_token=50))
    assert "; the decisions of the 100 rows before differ in 2.00 %." in text
    text = conclude(diff_of((0, 0, 0), explained=500, rows_alike=0, rows_other_token=50))
    assert text.endswith("the samples hold different tokens from their first row on, and so different routes.")


@pytest.mark.parametrize(
    ("rows", "layers", "words", "not_words"),
    [
        (899, (1, 2, 3), "899 rows are as unlike as unrelated ones: ", "in every layer"),
        (900, (1, 2, 3), "rows are as unlike as unrelated ones in every layer: different weights, step or request, rows in "
         "a different order, or routes that were recorded or captured wrongly; ", "899"),
        (900, (1, 2), "something between the embedding and layer 1", "as unlike"),
        (800, (2, 3), "something between the embedding and layer 1", "as unlike"),
    ],
)  # fmt: skip
def test_unrelated_rows(rows, layers, words, not_words):
    fact = fact_of("nothing", layers=layers, decisions=rows * len(layers))
    text = conclude(diff_of((0, 0, 0), (950, 950, 950), rows=1000, facts=[fact]))
    assert words in text
    assert not_words not in text


@pytest.mark.parametrize(("rows", "alone"), [(300, True), (299, False)])
def test_unrelated_rows_that_are_three_quarters_of_all_differences_are_the_only_cause(rows, alone):
    fact = fact_of("nothing", decisions=rows * 3)
    text = conclude(diff_of((0, 0, 0), (400, 400, 400), rows=1000, facts=[fact]))
    assert f"{rows} rows are as unlike" in text
    assert ("something between" not in text) is alone


@pytest.mark.parametrize(
    ("rows", "layers", "decisions", "stated"),
    [
        ((2, 9), (1, 2, 3), 800, False),
        ((1, 9), (1, 2, 3), 800, True),
        ((3, 7), (2,), 899, False),
        ((3, 7), (2,), 900, True),  # not smaller than the unrelated ones
        ((2, 10), (1, 2, 3), 800, True),
        ((3, 7), (4,), 800, True),
    ],
)
def test_a_route_that_unrelated_rows_repeat_is_no_cause(rows, layers, decisions, stated):
    unrelated = fact_of("nothing", decisions=900, rows=(2, 9))
    repeated = fact_of("constant", layers=layers, decisions=decisions, rows=rows)
    text = conclude(diff_of((0, 0, 0, 0), (300, 300, 300, 0), rows=1000, facts=[unrelated, repeated]))
    assert ("one route is repeated: a capture that stopped" in text) is stated


@pytest.mark.parametrize(
    ("kind", "by_layer"),
    [("token", (400, 400, 400)), ("first_rows", (400, 400, 400)), ("earlier_expert", (0, 400, 400))],
)
def test_a_clue_of_the_place_leaves_no_more_causes(kind, by_layer):
    assert " That fits weights" in conclude(diff_of(by_layer, rows=1000))
    clue = fact_of(kind, layers=(1,), decisions=400, rows=None, token=7, expert=3)
    assert " That fits " not in conclude(diff_of(by_layer, rows=1000, facts=[clue]))


@pytest.mark.parametrize(("decisions", "sure"), [(269, False), (270, True)])
def test_an_expert_is_sure_from_nine_tenths_of_a_layers_differences_on(decisions, sure):
    clue = fact_of("expert", layers=(1,), decisions=decisions, rows=None, expert=3, verb="gained")
    text = conclude(diff_of((300, 300, 300), rows=1000, facts=[clue]))
    assert ("in a part of these rows" not in text) is sure
    assert (" That fits " not in text) is sure


def test_traces_without_a_common_layer():
    base = mrr.diff_traces(make_trace(3, layer_numbers=(1,)), make_trace(3, layer_numbers=(2,), seed=1))
    assert base.conclusion == "the traces differ: they have no layer in common."
