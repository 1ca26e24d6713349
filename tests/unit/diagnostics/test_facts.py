"""Facts about what two traces cover, and those of a few rows, in the words of a diff."""

import pytest
import torch

import megatron_router_replay as mrr
from tests.unit.store.store_traces import make_trace


def texts(a, b, kind):
    return [fact.text for fact in mrr.diff_traces(a, b).facts if fact.kind == kind]


@pytest.mark.parametrize(
    ("lengths_a", "lengths_b", "text"),
    [
        ((20, 20), (20, 20), None),
        ((10, 30), (30, 10), "the samples of b have the lengths of those of a in a different order."),
        (
            (20, 20),
            (40,),
            "the samples have different lengths: a has 2 samples of 40 rows and b has 1 samples of 40 rows.",
        ),
        (
            (6, 6, 6, 6, 6, 10),
            (7, 6, 7, 7, 7, 6),
            "sample 0 has 6 rows in a and 7 in b; sample 2 has 6 rows in a and 7 in b; sample 3 has 6 rows in a and 7 in b; "
            "sample 4 has 6 rows in a and 7 in b; 1 more samples have different lengths. Samples are matched by their "
            "numbers, and rows of b are numbered as in a.",
        ),
        (
            (6, 6, 6, 6, 16),
            (7, 6, 7, 7, 13),
            "sample 0 has 6 rows in a and 7 in b; sample 2 has 6 rows in a and 7 in b; sample 3 has 6 rows in a and 7 in b; "
            "sample 4 has 16 rows in a and 13 in b. Samples are matched by their numbers, and rows of b are numbered as in "
            "a.",
        ),
    ],
)
def test_samples_of_different_lengths(lengths_a, lengths_b, text):
    trace = make_trace(40)
    facts = mrr.diff_traces(trace.with_samples(lengths_a), trace.with_samples(lengths_b)).facts
    assert [fact.text for fact in facts if fact.kind == "samples" and "none in" not in fact.text] == [text] * bool(text)


def test_a_sample_that_lacks_one_row_is_no_fact():
    """An engine never runs the last token of a sample."""
    trace, mask = make_trace(30).with_samples((10, 10, 10)), torch.ones(30, dtype=torch.bool)
    mask[[9, 18, 19]] = False
    assert texts(trace, trace._with(replay_mask=mask), "samples") == [
        "2 rows of sample 1 have a route in a and none in b."
    ]


@pytest.mark.parametrize(
    ("agree", "reordered", "text"),
    [
        (20, 18, "18 of 20 decisions that agree list their experts in a different order, in layer 3."),
        (20, 17, None),
        (11, 11, "11 of 11 decisions that agree list their experts in a different order, in layer 3."),
        (10, 10, None),
    ],
)
def test_experts_are_sorted_where_nine_tenths_of_most_decisions_are_reordered(agree, reordered, text):
    a = make_trace(20, num_experts=16)
    routes = a.topk_indices.clone()
    routes[:reordered, 1] = routes[:reordered, 1].flip(1)
    routes[agree:, 1] = (routes[agree:, 1].sum(1, keepdim=True) + torch.tensor([1, 9])) % 16
    different = (routes[:, 1].sort(1).values != a.topk_indices[:, 1].sort(1).values).any(1)
    assert int(different.sum()) == 20 - agree
    assert texts(a, a._with(topk_indices=routes), "expert_order") == [text] * bool(text)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([25], "1 of 40 rows hold a different token, first row 25."),
        ([5, 25], "2 of 40 rows hold a different token, first row 5; samples 0..1 differ from position 5 on."),
        ([5, 9, 28], "3 of 40 rows hold a different token, first row 5; samples 0..1 differ from position 5 to 8 on."),
    ],
)
def test_different_tokens_begin_at_a_position_of_each_sample(rows, text):
    a = make_trace(40, token_ids=torch.arange(40), sequence_lengths=(20, 20))
    tokens = a.token_ids.clone()
    tokens[rows] = 99
    assert texts(a, a._with(token_ids=tokens), "tokens") == [text]


def routes_of(num_rows, seed=0, layers=3, experts=16):
    """Routes of two experts, [num_rows, layers, 2], that repeat nothing."""
    layer_numbers = range(1, layers + 1)
    return make_trace(num_rows, layer_numbers=layer_numbers, num_experts=experts, seed=seed).topk_indices.clone()


def unrelated(num_rows, seed=0):
    """Routes that share no expert with `routes_of`."""
    return routes_of(num_rows, seed) + 16


def diff_of(a, b, **values):
    one, other = (
        mrr.RoutingTrace(
            topk_indices=routes, layer_numbers=range(2, 2 + routes.shape[1]), num_experts=32, **values | more
        )
        for routes, more in (part if isinstance(part, tuple) else (part, {}) for part in (a, b))
    )
    return mrr.diff_traces(one, other)


def facts_of(a, b, **values):
    return [(fact.kind, fact.text) for fact in diff_of(a, b, **values).facts]


@pytest.mark.parametrize(("length", "stated"), [(5, False), (6, True)])
def test_a_match_of_six_rows_is_stated(length, stated):
    a = routes_of(40 * length)
    b = a.clone()
    b[3 * length : 4 * length] = a[3 * length + 1 : 4 * length + 1]
    facts = [
        ("row", "rows 18..23 (sample 3) of b match a's rows 19..24 (1 row later), in all layers: 18 of 18 decisions.")
    ]
    assert facts_of(a, b, sequence_lengths=(length,) * 40) == facts * stated


@pytest.mark.parametrize(("length", "stated"), [(7, False), (8, True)])
def test_24_unrelated_decisions_are_stated(length, stated):
    a = routes_of(40 * length)
    b = a.clone()
    b[3 * length : 4 * length] = unrelated(length, seed=9)
    text = "rows 24..31 (sample 3) of b are as unlike a's as unrelated rows, in all layers: 24 of 24 decisions."
    assert facts_of(a, b, sequence_lengths=(length,) * 40) == [("nothing", text)] * stated


def test_the_fact_of_most_decisions_comes_first():
    a = routes_of(500)
    b = a.clone()
    b[200:320] = unrelated(120, seed=9)
    b[400:450] = a[402:452]
    assert facts_of(a, b) == [
        ("nothing", "rows 200..319 of b are as unlike a's as unrelated rows, in all layers: 360 of 360 decisions."),
        ("row", "rows 400..449 of b match a's rows 402..451 (2 rows later), in all layers: 150 of 150 decisions."),
    ]


@pytest.mark.parametrize(("lengths", "where"), [(None, "in 2 regions"), ((90, 160, 250), "of samples 1..2")])
def test_unrelated_rows_of_several_regions_are_one_fact(lengths, where):
    a = routes_of(500)
    b = a.clone()
    b[100:140], b[300:400] = unrelated(40, seed=9), unrelated(100, seed=8)
    text = f"140 rows {where} of b are as unlike a's as unrelated rows, in all layers: 420 of 420 decisions."
    assert facts_of(a, b, sequence_lengths=lengths) == [("nothing", text)]


def test_different_answers_begin_after_the_prompt_of_each_sample():
    a = routes_of(300)
    b = a.clone()
    b[10:100], b[110:200] = unrelated(90, seed=9), unrelated(90, seed=8)
    text = "180 rows of samples 0..1 of b are as unlike a's as unrelated rows, in all layers: 540 of 540 decisions."
    assert facts_of(a, b, sequence_lengths=(100, 100, 100)) == [("nothing", text)]


def test_rows_after_a_different_token_are_not_unrelated():
    a, tokens = routes_of(200), torch.arange(200)
    b = a.clone()
    b[50:100], b[120:200] = unrelated(50, seed=9), unrelated(80, seed=8)
    other = tokens.clone()
    other[50] = 999
    facts = facts_of((a, {"token_ids": tokens}), (b, {"token_ids": other}), sequence_lengths=(100, 100))
    text = "rows 120..199 (sample 1, from position 20) of b are as unlike a's as unrelated rows, in all layers: "
    assert facts[1:] == [("nothing", f"{text}240 of 240 decisions.")]


def test_rows_without_a_route_explain_nothing_and_hide_nothing():
    """They hold filler: here what would match."""
    a, mask = routes_of(200), torch.ones(200, dtype=torch.bool)
    b = a.clone()
    a[:100] = b[:100] = b[100:] = unrelated(100, seed=9)
    mask[:100] = False
    text = "rows 100..199 of b are as unlike a's as unrelated rows, in all layers: 300 of 300 decisions."
    assert facts_of((a, {"replay_mask": mask}), b) == [("nothing", text)]
    mask[:] = True
    mask[100:200:2] = False
    b[101:200:2] = unrelated(50, seed=9)
    b[100:200:2] = a[100:200:2]
    text = "rows 101..199 of b are as unlike a's as unrelated rows, in all layers: 150 of 150 decisions."
    assert facts_of(a, (b, {"replay_mask": mask})) == [("nothing", text)]


def test_a_layer_that_b_alone_has_is_unrelated_to_none():
    a = routes_of(200, layers=4)
    b = a.clone()
    b[100:150, 1] = unrelated(50, seed=9)[:, 1]
    text = "rows 100..149 of b are as unlike a's as unrelated rows, in layer 3: 50 of 50 decisions."
    assert facts_of(a[:, :3], b) == [("nothing", text)]


def test_decisions_that_a_match_explains_are_counted_apart_in_each_layer():
    a = routes_of(200)
    b = a.clone()
    b[50:150] = a[51:151]
    b[:40:5, 0, 0] += 16  # noise
    b[:40:10, 2, 1] += 16
    assert [int(layer[:-1].sum()) for layer in diff_of(a, b).unexplained] == [8, 0, 4]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (0, 0, "agree (0.00 % of decisions differ)"),
        (0, 60, "agree (5.00 % of decisions differ)"),  # a tenth of one layer of two
        (0, 90, "differ (7.50 % of decisions differ)"),
        (30, 150, "agree (12.50 % of decisions differ)"),  # a tenth, and three times as many as before
        (30, 160, "differ (13.33 % of decisions differ)"),
    ],
)
def test_experts_under_different_ids_do_no_harm_where_later_layers_agree(before, after, words):
    """Half of the decisions of later layers are those of the layer that differs."""
    a = routes_of(600, layers=5)
    a[:, 2] = routes_of(600, seed=1, layers=1, experts=32)[:, 0]
    b = a.clone()
    b[:, 2] = (a[:, 2] + 8) % 32
    b[:before, 0, 0] += 16
    b[100 : 100 + after, 3, 0] += 16
    fact = next(text for kind, text in facts_of(a, b) if kind == "names")
    text = "all 600 rows of b name each expert by its id plus 8 (modulo 32), in layer 4, and later layers "
    assert fact == f"{text}{words}: 600 of 600 decisions."


def test_swapped_layers_of_a_part_of_the_rows():
    a = routes_of(400, layers=6)
    b = a.clone()
    b[300:360, [1, 4]] = a[300:360, [4, 1]]
    text = "layers 3, 6 of b match layers 6, 3 of a, in rows 300..359 of b: 120 of 120 decisions."
    assert facts_of(a, b) == [("layer", text)]


def test_the_end_of_a_long_trace_is_searched_with_its_samples(monkeypatch):
    monkeypatch.setattr("megatron_router_replay.diagnostics.window.MAX_ROWS", 400)
    a = routes_of(1400)
    b = a.clone()
    b[1010:1100], b[1110:1200] = unrelated(90, seed=9), unrelated(90, seed=8)
    b[1232:1248], b[1328:1344] = a[1328:1344], a[1232:1248]
    b[1236] = unrelated(1)
    text = "180 rows of samples 10..11 of b are as unlike a's as unrelated rows, in all layers: "
    facts = facts_of(a, b, sequence_lengths=(100,) * 12 + (16,) * 12 + (8,))
    assert [fact for fact in facts if fact[0] != "first_rows"] == [
        ("nothing", f"{text}540 of 540 decisions that were read."),
        ("sample_order", "samples 14 and 20 of b changed places, in all layers: 93 of 96 decisions that were read."),
    ]


def test_a_sample_that_moved_is_found_beside_one_that_has_its_prompt():
    a = routes_of(320)
    a[256:286] = a[192:222]
    b = a.clone()
    b[:64], b[192:256] = a[192:256], a[:64]
    text = "samples 0 and 3 of b changed places, in all layers: 384 of 384 decisions."
    assert facts_of(a, b, sequence_lengths=(64,) * 5) == [("sample_order", text)]


def test_unrelated_rows_after_moved_ones_begin_where_these_end():
    a = routes_of(500)
    b = a.clone()
    b[100:200], b[200:320] = a[103:203], unrelated(120, seed=9)
    assert facts_of(a, b) == [
        ("nothing", "rows 200..319 of b are as unlike a's as unrelated rows, in all layers: 360 of 360 decisions."),
        ("row", "rows 100..199 of b match a's rows 103..202 (3 rows later), in all layers: 300 of 300 decisions."),
    ]


def test_rows_that_moved_are_found_where_many_rows_are_alike():
    a = routes_of(500, experts=4)
    b = a.clone()
    b[200:300] = a[207:307]
    text = "rows 200..299 of b match a's rows 207..306 (7 rows later), in all layers: 300 of 300 decisions."
    assert facts_of(a, b) == [("row", text)]


def test_a_few_unrelated_rows_are_no_other_ids():
    """Most of their experts occur once, so some map of ids fits them."""
    a = make_trace(300, topk=1, num_experts=200).topk_indices.to(torch.int16)
    b = a.clone()
    b[100:140] = make_trace(40, topk=1, num_experts=200, seed=9).topk_indices.to(torch.int16) + 200
    one, other = (mrr.RoutingTrace(topk_indices=ids, layer_numbers=(2, 3, 7), num_experts=400) for ids in (a, b))
    text = "rows 100..139 of b are as unlike a's as unrelated rows, in all layers: 120 of 120 decisions."
    assert [str(fact) for fact in mrr.diff_traces(one, other).facts] == [text]


def test_experts_under_ids_in_no_order():
    a = routes_of(600, experts=32)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1)).to(a.dtype)
    text = "all 600 rows of b name each expert by a different id, in all layers: 1,800 of 1,800 decisions."
    assert facts_of(a, order[a.long()]) == [("names", text)]


def renamed(routes, **names):
    """Give experts of these routes other ids, as x3=5."""
    b = routes.clone()
    for expert, name in names.items():
        b[routes == int(expert[1:])] = name
    return b


def test_two_ids_that_were_exchanged_are_named_with_what_follows():
    a = routes_of(600)
    b = a.clone()
    b[:, 1] = renamed(a[:, 1], x3=5, x5=3)
    text = "all 600 rows of b name expert 3 as 5 and 5 as 3, in layer 3, and later layers"
    assert facts_of(a, b) == [("names", f"{text} agree (0.00 % of decisions differ): 600 of 600 decisions.")]
    holds = ((a[:, 1] == 3).any(1) ^ (a[:, 1] == 5).any(1)).nonzero().flatten()
    # Only rows with one of the two can follow: more than a tenth of them.
    for follow, words in ((len(holds) // 10, "agree"), (len(holds) // 10 + 1, "differ")):
        b[:, 2] = a[:, 2]
        b[holds[:follow], 2, 0] += 16
        (fact,) = (fact for fact in diff_of(a, b).facts if fact.kind == "names")
        assert fact.later_layers == words
        assert fact.text.startswith(f"{text} {words} (")


def test_exchanged_ids_of_all_layers_are_one_fact_and_no_token():
    a = routes_of(600)
    b = renamed(a, x3=5, x5=3)
    tokens = torch.where((a[:, 0] == 3).any(1), 7, 1000 + torch.arange(600))  # the router gives token 7 expert 3
    diff = diff_of(a, b, token_ids=tokens.to(torch.int32))
    assert [str(fact) for fact in diff.facts] == [
        "all 600 rows of b name expert 3 as 5 and 5 as 3, in all layers: 1,800 of 1,800 decisions."
    ]
    assert int(diff.unexplained[:, :-1].sum()) == 0


def test_an_id_that_is_stored_as_another_and_three_that_rotate():
    a = routes_of(600)
    has_5 = (a == 5).any(2, keepdim=True)
    held = int((~((a == 3).any(2) & has_5.squeeze(2))).sum())
    text = f"all 600 rows of b name expert 3 as 5, in all layers: {held:,} of 1,800 decisions."
    assert facts_of(a, torch.where((a == 3) & ~has_5, 5, a)) == [("names", text)]
    text = "all 600 rows of b name expert 3 as 7, 7 as 12 and 12 as 3, in all layers: 1,800 of 1,800 decisions."
    assert facts_of(a, renamed(a, x3=7, x7=12, x12=3)) == [("names", text)]


def test_three_ids_that_rotate_are_named_where_rows_hold_two_of_them():
    """Then one expert gets the id of another, which gets a third: as if the first had got that."""
    a = routes_of(600)
    pairs = (a[:, 1] == 12).any(1).nonzero().flatten()[:20]
    a[pairs, 1, 0], a[pairs, 1, 1] = 7, 12
    b = a.clone()
    b[:, 1] = renamed(a[:, 1], x3=12, x12=7, x7=3)
    fact = next(fact for fact in diff_of(a, b).facts if fact.kind == "names")
    assert "name expert 3 as 12, 7 as 3 and 12 as 7, in layer 3" in fact.text


def test_ids_that_cells_of_one_layer_show_and_rows_of_another_are_one_fact():
    a = routes_of(600, experts=32)
    a[:, 1] = routes_of(600, seed=1, layers=1, experts=12)[:, 0]  # all of them have different ids
    names = {f"x{i}": i + 6 if i < 6 else i - 6 for i in range(12)}
    (fact,) = diff_of(a, renamed(a, **names)).facts
    assert fact.text == "all 600 rows of b name each expert by a different id, in all layers: 1,800 of 1,800 decisions."


@pytest.mark.parametrize(("layers", "facts"), [(3, 3), (4, 1)])
def test_different_ids_of_more_than_three_layers_are_one_fact(layers, facts):
    a = routes_of(600, layers=layers)
    b = torch.stack([renamed(a[:, i], **{f"x{i}": i + 8, f"x{i + 8}": i}) for i in range(layers)], dim=1)
    texts = [text for _, text in facts_of(a, b)]
    assert len(texts) == facts
    if facts == 1:
        assert texts == [
            "all 600 rows of b name a few experts by different ids, not the same in each layer, in all layers: "
            "2,400 of 2,400 decisions."
        ]


def test_ids_of_a_few_layers_and_rows_do_not_hide_each_other():
    a = routes_of(600)
    b = renamed(a, x3=5, x5=3)
    b[500:550] = a[501:551]
    (fact,) = (fact for fact in diff_of(a, b).facts if fact.kind == "names")
    assert "name expert 3 as 5 and 5 as 3, in all layers" in fact.text


@pytest.mark.parametrize(("kept", "named"), [(6, True), (7, False)])  # of 40
def test_an_expert_with_a_different_id_has_it_in_nearly_all_of_its_rows(kept, named):
    """Of twins, rounding exchanges a half."""
    a = routes_of(600)
    a[a == 5] = 20
    rows = (a[:, 0] == 3).any(1).nonzero().flatten()[:40]
    a[(a[:, 0] == 3).any(1), 0] = torch.tensor([6, 7], dtype=a.dtype)
    a[rows, 0, 0], a[rows, 0, 1] = 3, 6
    b = a.clone()
    b[rows[kept:], 0, 0] = 5
    assert [kind for kind, _ in facts_of(a, b) if kind == "names"] == ["names"] * named


def test_rows_at_one_offset_are_one_fact():
    a = routes_of(400)
    b = a.clone()
    for first in (10, 110, 310):
        b[first : first + 60] = a[first - 2 : first + 58]
    b[210:270, 0] = a[208:268, 0]  # in one layer
    text = "240 rows of samples 0..3 of b match a's rows (2 rows earlier), in all layers: 600 of 600 decisions."
    assert facts_of(a, b, sequence_lengths=(100,) * 4) == [("row", text)]


def test_filler_at_the_begin_of_samples_is_one_repeated_route():
    a = routes_of(400)
    b = a.clone()
    for sample in range(4):
        b[100 * sample : 100 * sample + 12] = torch.tensor([30, 31], dtype=a.dtype)
    text = "48 rows of samples 0..3 of b repeat one route, in all layers: 144 of 144 decisions."
    assert facts_of(a, b, sequence_lengths=(100,) * 4) == [("constant", text)]
    # Too few rows, or too few of those that differ, say nothing.
    few = a.clone()
    few[[*range(0, 12), *range(100, 102)]] = torch.tensor([30, 31], dtype=a.dtype)
    few[102:109, :, 0] += 16
    assert facts_of(a, few, sequence_lengths=(100,) * 4) == []


def test_a_route_that_a_router_prefers_is_not_filler():
    """All differing decisions gained expert 3, most of them beside expert 6."""
    a = routes_of(400)
    rows = torch.arange(0, 300, 5)
    a[rows, 0] = torch.tensor([[6, 7 + i % 9] for i in range(60)], dtype=a.dtype)
    b = a.clone()
    b[rows, 0, 1] = 3
    assert [kind for kind, _ in facts_of(a, b, sequence_lengths=(100,) * 4)] == ["expert"]


def one_route_in(num, exchanged=0):
    """Traces of 400 rows: every fifth, `num` in all, has experts 3 and 6 in layer 1 of b; a has expert 6 in some of them."""
    a = routes_of(400)
    a[a == 6] = 20
    rows = torch.arange(0, 5 * num, 5)
    other = torch.tensor([[7 + i % 9, 16 + i % 4] for i in range(num)], dtype=a.dtype)
    a[rows, 0] = other
    a[rows[:exchanged], 0, 1] = 6
    b = a.clone()
    b[rows, 0] = torch.tensor([3, 6], dtype=a.dtype)
    return [kind for kind, _ in facts_of(a, b, sequence_lengths=(100,) * 4)]


@pytest.mark.parametrize(("exchanged", "kind"), [(47, "constant"), (48, "expert")])
def test_a_route_that_exchanges_one_expert_in_four_fifths_of_its_rows_is_not_filler(exchanged, kind):
    assert one_route_in(60, exchanged) == [kind]


@pytest.mark.parametrize(("num", "kinds"), [(11, []), (12, ["constant"])])
def test_a_repeated_route_of_twelve_decisions_is_stated(num, kinds):
    assert one_route_in(num) == kinds
