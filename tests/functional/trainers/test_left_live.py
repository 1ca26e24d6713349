"""Partial rollouts on real GPTModels: stale routes and those a mask leaves out are live, by token, under every split."""

import pytest

from tests.functional.trainers.left_live_cases import partial_rollout
from tests.functional.trainers.test_trainers import FULL, LAYOUTS, SELECTIVE

# Six samples of 7, 12, 5, 16, 9 and 3 tokens, all but the last of each with a route: 46. The first three tokens of a sample
# are too old, 17 of them have a route. Token 4 has a route that is not kept in the four samples of more than 5 tokens.
STALE, NOT_KEPT, NO_ROUTE = 17, 4, 6
REPLAYED = 46 - STALE - NOT_KEPT


@pytest.mark.parametrize(
    ("trainer", "layout", "options"),
    [("nemo_rl", "tp2-sp", FULL), ("skyrl", "cp2", SELECTIVE), ("miles_bshd", "pp2", FULL)],
)
def test_a_partial_rollout_replays_what_is_kept_and_fresh_and_nothing_else(trainer, layout, options, workers_2):
    ranks = workers_2.run(partial_rollout, trainer, LAYOUTS[layout], options)
    decisions = {name: sum(rank["decisions"][name] for rank in ranks) for name in ranks[0]["decisions"]}
    live = STALE + NOT_KEPT + NO_ROUTE
    # Each token in three layers, once by those ranks that share it.
    assert (decisions["replayed"], decisions["live"]) == (3 * REPLAYED, 3 * live)
    assert (decisions["replayed wrong"], decisions["live wrong"]) == (0, 0)
    assert decisions["live as the route"] < 3  # random routes, 1 of 1820 sets: a replayed row would be seen
    stages = 2 if layout == "pp2" else 1
    for rank in ranks:
        assert rank["rows"] == tuple(stages * n for n in (REPLAYED, live, STALE + NOT_KEPT))
        assert (rank["flips"], rank["wrong"]) == (0, 0)
        assert rank["recomputes"] > 0
        assert rank["left live"] is None


def test_a_choice_by_token_and_layer_is_counted_over_all_ranks(workers_2):
    ranks = workers_2.run(partial_rollout, "slime", LAYOUTS["tp2-sp"], FULL, True)
    left = sum(rank["decisions"]["replayed wrong"] for rank in ranks)  # what the choice took from the trace
    assert 0 < left < 2 * REPLAYED, "in two of three layers"
    for rank in ranks:
        assert (rank["asked"], rank["left live"]) == (3 * REPLAYED, left)
        assert (rank["decisions"]["live wrong"], rank["flips"], rank["wrong"]) == (0, 0, 0)
