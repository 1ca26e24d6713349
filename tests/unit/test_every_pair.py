"""Fewer cases than a product has."""

from itertools import combinations, product

from tests.support.every_pair import every_pair

CASES = [case for case in product("ab", (1, 2), ("x", "y")) if case[:2] != ("a", 2)]


def test_each_two_values_that_meet_in_a_case_meet_in_one_that_is_chosen(monkeypatch):
    monkeypatch.delenv("CI_ALL", raising=False)
    chosen = every_pair(CASES)
    assert len(chosen) < len(CASES)
    met = {(places, case[places[0]], case[places[1]]) for case in chosen for places in combinations(range(3), 2)}
    assert len(met) == 11  # 3 of the first two factors, 4 of either with the third
    assert every_pair(CASES) == chosen


def test_a_release_runs_all_of_them(monkeypatch):
    monkeypatch.setenv("CI_ALL", "1")
    assert every_pair(CASES) == CASES
