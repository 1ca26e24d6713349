"""Facts that differing decisions share, and the cause that the conclusion takes from each."""

import pytest
import torch

import megatron_router_replay as mrr

ROWS, LAYERS, EXPERTS = 400, (1, 2, 3), 16
SAMPLES = (40,) * 10


def routes_of(seed=0, rows=ROWS):
    """Routes [rows, 3, 2] that never name experts 3 to 5 and 14 to 15, which the tests exchange."""
    generator = torch.Generator().manual_seed(seed)
    free = torch.tensor([i for i in range(EXPERTS) if i not in (3, 4, 5, 14, 15)])
    return free[torch.rand(rows, len(LAYERS), len(free), generator=generator).topk(2).indices]


def diff_of(a, b, **values):
    one, other = (
        mrr.RoutingTrace(
            topk_indices=ids, layer_numbers=LAYERS, num_experts=EXPERTS, **({"sequence_lengths": SAMPLES} | values)
        )
        for ids in (a, b)
    )
    return mrr.diff_traces(one, other, name_a="Monday", name_b="Tuesday")


def changed(rows, layer=1, *, gains=3, slot=1):
    a = routes_of()
    b = a.clone()
    b[rows, layer, slot] = gains
    return a, b


def texts(diff, kind):
    return [fact.text for fact in diff.facts if fact.kind == kind]


EVERY_TENTH = torch.arange(0, ROWS, 10)


def test_an_expert_that_all_differing_decisions_gained_is_named_with_its_cause():
    diff = diff_of(*changed(EVERY_TENTH))
    assert texts(diff, "expert") == ["expert 3 of layer 2 was gained in 40 of 40 differing decisions."]
    assert (
        "layer 2 of Tuesday prefers expert 3, which noise does not: that expert's bias or its row of the router differs"
        in diff.conclusion.replace("Layer", "layer")
    )
    a, b = changed(EVERY_TENTH)
    diff = diff_of(b, a)
    assert texts(diff, "expert") == ["expert 3 of layer 2 was lost in 40 of 40 differing decisions."]
    assert "avoids expert 3, which noise does not" in diff.conclusion


@pytest.mark.parametrize(("others", "sure"), [(4, True), (5, False), (80, False), (90, False)])
def test_the_cause_of_an_expert_is_open_where_a_tenth_of_the_decisions_did_not_move_it(others, sure):
    a, b = changed(EVERY_TENTH)
    # Near-ties of noise: as many gain an expert as lose it.
    for i, row in enumerate(torch.arange(1, ROWS, 4)[:others].tolist()):
        if row % 10:
            (a if i % 2 else b)[row, 1, 1] = 14 + i // 2 % 2
    diff = diff_of(a, b)
    (fact,) = [fact for fact in diff.facts if fact.kind == "expert"]
    is_sure = fact.decisions >= 0.9 * diff.different_by_layer[1]
    assert fact.text.startswith(
        f"expert 3 of layer 2 was gained in 40 of {diff.different_by_layer[1]} differing decisions"
    )
    assert ("in a part of these rows" in diff.conclusion) is not is_sure
    assert sure is is_sure


@pytest.mark.parametrize(("rows", "named"), [(11, False), (12, False), (21, True)])
def test_a_few_decisions_name_no_expert(rows, named):
    # 4.5 standard deviations of 21 coins are 20.6.
    assert bool(texts(diff_of(*changed(EVERY_TENTH[:rows])), "expert")) is named


def test_an_expert_that_noise_gives_and_takes_is_not_named():
    a, b = changed(EVERY_TENTH)
    a[EVERY_TENTH[:20]], b[EVERY_TENTH[:20]] = b[EVERY_TENTH[:20]], a[EVERY_TENTH[:20]]
    assert texts(diff_of(a, b), "expert") == []


def test_an_expert_that_a_part_smaller_than_a_quarter_gained_is_not_named():
    a, b = changed(EVERY_TENTH)
    rest = torch.arange(ROWS)[torch.arange(ROWS) % 10 > 0]
    for others, named in ((rest[:120], True), (rest[:121], False)):
        one, other = a.clone(), b.clone()
        for i, row in enumerate(others.tolist()):  # which gain experts 4, 5, 14 and 15, 30 or 31 times each
            (one if i % 2 else other)[row, 1, 1] = (4, 5, 14, 15)[i // 2 % 4]
        assert bool(texts(diff_of(one, other), "expert")) is named


def test_an_expert_that_came_with_another_one_is_not_named():
    """Routes of another row exchange several experts."""
    a, b = changed(EVERY_TENTH)
    b[EVERY_TENTH[:9], 1, 0] = 4  # 31 of 40 exchange one
    assert texts(diff_of(a, b), "expert") == []
    a, b = changed(EVERY_TENTH)
    b[EVERY_TENTH[:8], 1, 0] = 4  # 32
    assert texts(diff_of(a, b), "expert")


def test_rows_with_equal_routes_are_one_decision():
    """A group has its prompt in every sample: it is no evidence of many rows."""
    a, b = changed(EVERY_TENTH)
    a[EVERY_TENTH], b[EVERY_TENTH] = a[0].clone(), b[0].clone()
    assert texts(diff_of(a, b), "expert") == []


def tokens_of(rare):
    ids = torch.arange(ROWS) % 50 + 100
    ids[rare] = 7
    return ids.to(torch.int32)


def test_a_token_whose_rows_alone_differ_is_named():
    rare = torch.tensor([13, 77, 150])
    a, b = changed(rare, layer=0)
    diff = diff_of(a, b, token_ids=tokens_of(rare))
    assert texts(diff, "token") == [
        "3 of the 3 rows with token 7 differ in layer 1, by 1 of 2 experts; of the other 397 rows 0 differ."
    ]
    words = "its embedding, the router of layer 1, or routes of these rows that were captured wrongly."
    assert f"rows with token 7 differ before any layer: {words}" in diff.conclusion
    # A fourth row of that token agrees: less than nine tenths differ.
    assert texts(diff_of(a, b, token_ids=tokens_of(torch.tensor([13, 77, 150, 200]))), "token") == []
    # Nine of ten are nine tenths; the token 0 is one too.
    many = torch.arange(11, ROWS, 40)
    ids = tokens_of(many)
    for token in (7, 0):
        known = torch.where(ids == 7, token, ids)
        (text,) = texts(diff_of(*changed(many[:9], layer=0), token_ids=known), "token")
        assert text.startswith(f"9 of the 10 rows with token {token} differ in layer 1")
    # Two rows with equal routes, such as a prompt's, are one.
    a, b = changed(rare, layer=0)
    a[rare], b[rare] = a[13].clone(), b[13].clone()
    assert texts(diff_of(a, b, token_ids=tokens_of(rare)), "token") == []
    # One row alone may differ by chance.
    assert texts(diff_of(*changed(rare[:1], layer=0), token_ids=tokens_of(rare[:1])), "token") == []
    # In a layer above, the embedding is no cause.
    assert texts(diff_of(*changed(rare, layer=1), token_ids=tokens_of(rare)), "token") == []


def test_a_token_is_named_also_where_its_rows_exchange_more_than_all_others():
    rare, others = torch.tensor([13, 150]), torch.arange(5, ROWS, 9)
    a, b = changed(others, layer=0)
    b[rare, 0] = torch.tensor([4, 5])
    ids = tokens_of(rare)
    (text,) = texts(diff_of(a, b, token_ids=ids), "token")
    count = sum(row not in (13, 150) for row in others.tolist())
    assert text == (
        "2 of the 2 rows with token 7 differ in layer 1, by 2 of 2 experts; "
        f"of the other 398 rows {count} differ, by 1 at most."
    )
    b[others[0], 0] = torch.tensor([14, 15])  # as far as those of the token
    assert texts(diff_of(a, b, token_ids=ids), "token") == []


def test_first_rows_that_agree_where_others_differ_are_stated(monkeypatch):
    rows = torch.arange(ROWS)
    others = rows[rows % 40 > 0]
    a, b = changed(others[:195], layer=0)  # a half: ten first rows agree by chance once in 1,000
    assert texts(diff_of(a, b), "first_rows") == []
    a, b = changed(others, layer=0, gains=15)
    b[others[::2], 0, 1] = 14
    diff = diff_of(a, b)
    assert texts(diff, "first_rows") == [
        "the first rows of all 10 samples agree in every layer, and 33.33 % of the decisions of other rows differ."
    ]
    assert (
        "row that attends to no other row agrees: positions, the attention's queries or keys, or its mask differ"
        in (diff.conclusion)
    )
    with monkeypatch.context() as patch:
        patch.setattr(
            "megatron_router_replay.diagnostics.window.MAX_ROWS", 350
        )  # rows 50 to 399, which begin in sample 1
        assert texts(diff_of(a, b), "first_rows") == [
            "the first rows of all 8 samples agree in every layer, and 33.33 % of the decisions of other rows differ."
        ]
    # Samples that begin with one token have one first row, whose agreement is chance.
    a[rows % 40 == 0], b[rows % 40 == 0] = a[0].clone(), a[0].clone()
    b[others[::9]] = a[others[::9]]
    assert texts(diff_of(a, b), "first_rows") == []
    b[rows % 40 == 0, 0, 1] = 14
    assert texts(diff_of(a, b), "first_rows") == []


def test_an_expert_that_rows_used_before_they_differ_is_named():
    a = routes_of()
    used = torch.arange(3, ROWS, 13)  # 31 rows
    a[used, 0, 0] = 4
    b = a.clone()
    b[used, 1, 1] = torch.where(torch.arange(len(used)) % 2 == 0, 14, 15)
    diff = diff_of(a, b)
    assert texts(diff, "earlier_expert") == [
        "31 of 31 rows that differ first in layer 2 used expert 4 of layer 1, as 7.75 % of all rows did."
    ]
    assert "expert 4 of layer 1 seems to compute something different: its weights." in diff.conclusion.replace(
        "Exp", "exp"
    )
    # A lower layer that differs has a cause of its own.
    b[0, 0, 1] = 5
    assert texts(diff_of(a, b), "earlier_expert") == []
    # Of few rows, nothing is stated.
    for rows, stated in ((11, False), (12, True)):
        b = a.clone()
        b[used[:rows], 1, 1] = torch.where(torch.arange(rows) % 2 == 0, 14, 15)
        assert bool(texts(diff_of(a, b), "earlier_expert")) is stated


@pytest.mark.parametrize(("others", "named"), [(45, True), (48, False)])
def test_an_earlier_expert_was_used_by_two_fifths_of_the_rows_that_differ(others, named):
    """31 of 76 rows are more than two fifths, 31 of 79 are fewer."""
    a = routes_of()
    used = torch.arange(3, ROWS, 13)
    a[used, 0, 0] = 4
    b = a.clone()
    unused = torch.tensor(sorted(set(range(ROWS)) - set(used.tolist())))[:others]
    rows = torch.cat([used, unused])
    b[rows, 1, 1] = torch.tensor([3, 5, 14, 15]).repeat(20)[: len(rows)]  # no expert was gained by all
    assert bool(texts(diff_of(a, b), "earlier_expert")) is named


@pytest.mark.parametrize(("used", "named"), [(138, True), (139, False)])
def test_an_earlier_expert_was_used_by_far_more_of_these_rows_than_of_all(used, named):
    """43 rows that used it differ: of 138 that used it, these are 9.04 standard deviations above the mean; of 139, 8.99."""
    a = routes_of()
    a[:used, 0, 0] = 4
    b = a.clone()
    b[:43, 1, 1] = torch.tensor([3, 5, 14, 15]).repeat(11)[:43]
    assert bool(texts(diff_of(a, b), "earlier_expert")) is named


@pytest.mark.parametrize(("experts", "facts"), [((3, 3, 3), 1), ((3, 4, 3), 2)])
def test_layers_that_prefer_one_expert_are_one_fact(experts, facts):
    a = routes_of()
    b = a.clone()
    for layer, expert in enumerate(experts):
        b[EVERY_TENTH + layer, layer, 1] = expert
    diff = diff_of(a, b)
    stated = [fact for fact in diff.facts if fact.kind == "expert"]
    assert [(fact.expert, fact.verb) for fact in stated] == [(3, "gained"), (4, "gained")][:facts]
    if facts == 1:
        assert texts(diff, "expert") == ["expert 3 of layers 1..3 was gained in 120 of 120 differing decisions."]
        assert (
            "ayers 1..3 of Tuesday prefer expert 3, which noise does not: that expert's bias or its row of the router "
            in (diff.conclusion)
        )


def test_experts_of_many_layers_are_one_fact(monkeypatch):
    monkeypatch.setattr("megatron_router_replay.diagnostics.clues._MOST_EXPERTS", 2)
    a = routes_of()
    b = a.clone()
    for layer, expert in enumerate((3, 4, 5)):
        b[EVERY_TENTH + layer, layer, 1] = expert
    diff = diff_of(a, b)
    assert texts(diff, "expert") == [
        "an expert of each of layers 1..3 was gained or lost in 120 of 120 differing decisions: expert 3 of layer 1 was "
        "gained, 4 of layer 2 was gained, ..."
    ]
    assert (
        "ayers 1..3 of Tuesday prefer or avoid an expert of each, which noise does not: biases or rows of these "
        in (diff.conclusion)
    )


def test_rows_of_a_token_that_hold_a_preferred_expert_are_no_fact_of_the_token():
    a, b = changed(EVERY_TENTH, layer=0)
    rare = EVERY_TENTH[:12]
    assert [fact.kind for fact in diff_of(a, b, token_ids=tokens_of(rare)).facts] == ["expert"]
    assert [
        fact.kind for fact in diff_of(*changed(EVERY_TENTH[:11], layer=0), token_ids=tokens_of(EVERY_TENTH[:11])).facts
    ] == ["token"]
