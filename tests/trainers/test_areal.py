"""AReaL, unedited: its routes end before its trainer, and the two classes of its page replay them."""

import pytest

from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import FULL, MOE
from tests.trainers import areal
from tests.trainers.oracle import check_replayed

CASES = {
    "one rank": (ParallelSizes(), {}),
    "full": (ParallelSizes(), FULL),
    "tp2 full": (ParallelSizes(tp_size=2), FULL),
    "cp2 moe": (ParallelSizes(cp_size=2), MOE),
    "pp2 full": (ParallelSizes(pp_size=2), FULL),
    "dp2 ep2 moe": (ParallelSizes(ep_size=2), MOE),
}


@pytest.fixture(scope="module")
def unedited(tmp_path_factory):
    return str(areal.SOURCE.unedited(tmp_path_factory.mktemp("trainer") / "unedited"))


@pytest.mark.parametrize("case", CASES)
def test_every_decision_is_the_rollouts(case, unedited, on_ranks):
    layout, options = CASES[case]
    check_replayed(on_ranks(layout.world_size, areal.step, unedited, layout, options), recomputes=bool(options))


def test_its_own_trajectories_have_no_routes(unedited, workers_1):
    (trajectories,) = workers_1.run(areal.dropped, unedited)
    assert all("input_ids" in fields and "routed_experts" not in fields for fields in trajectories)


def test_an_interrupted_generation_has_more_rows_than_tokens_and_no_routes_here(unedited, workers_1):
    ((num_rows, routes),) = workers_1.run(areal.interrupted, unedited)
    assert num_rows == 3 + 6  # each request's own, where 7 tokens have 6
    assert routes.tolist() == [[[-1] * 6] * 2]
