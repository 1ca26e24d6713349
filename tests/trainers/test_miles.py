"""miles, with examples/trainers/miles.patch and no other edits."""

import re

import pytest

from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import FULL
from tests.support.workers import WorkersError
from tests.trainers import miles
from tests.trainers.oracle import check_replayed

MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
BSHD = {"qkv_format": "bshd"}
CASES = {
    "single": (ParallelSizes(), {}, {}),
    "single-full": (ParallelSizes(), FULL, {}),
    "single-bshd-moe": (ParallelSizes(), MOE, BSHD),
    "tp2-full": (ParallelSizes(tp_size=2), FULL, {}),
    "tp2-bshd": (ParallelSizes(tp_size=2), {}, BSHD),
    "cp2-moe": (ParallelSizes(cp_size=2), MOE, {}),
    "cp2-bshd-full": (ParallelSizes(cp_size=2), FULL, BSHD),
    "dp2-ep2-moe": (ParallelSizes(ep_size=2), MOE, {}),
    "pp2-full": (ParallelSizes(pp_size=2), FULL, {}),
    "pp2-vpp2-moe": (ParallelSizes(pp_size=2, vp_size=2), MOE, {}),
}

FORGOTTEN = {
    "the stamp": (("mrr.stamp_batch(",), "must be Tensor, not numpy.ndarray"),
    "the session of log-probs": (("replays = ",), "no session holds this DistributedDataParallel"),
    "the session of training": (('timer("actor_train")',), "no session holds this DistributedDataParallel"),
    "the routes of log-probs": (
        ("#2 _feed_routes(model, batch)",),
        "a forward without routes; 0 micro-batches were queued",
    ),
    "the routes of training": (
        ("#3 _feed_routes(model, batch)",),
        "a forward without routes; 0 micro-batches were queued",
    ),
    "the field of log-probs": (('#1         "rollout_routed_experts",',), "KeyError: 'rollout_routed_experts'"),
    "the field of training": (('#2         "rollout_routed_experts",',), "KeyError: 'rollout_routed_experts'"),
    "the row of the last token": (("F.pad(r, (0, 0",), "routes are of [1, 14] tokens, token_ids has the shape [1, 16]"),
}
"""What is left out -> (texts of its added lines, what the user sees)."""


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    return miles.SOURCE.edited(tmp_path_factory.mktemp("miles") / "edited")


@pytest.mark.parametrize("name", CASES)
def test_every_decision_is_the_rollouts(name, edited, request):
    layout, options, flags = CASES[name]
    workers = request.getfixturevalue(f"workers_{layout.world_size}")
    check_replayed(workers.run(miles.step, str(edited), layout, options, flags), recomputes=bool(options))


@pytest.mark.parametrize(("layout", "wrong"), [("bshd", 75), ("thd", 0)])
def test_miles_own_replay_is_wrong_on_padded_batches(layout, wrong, tmp_path, workers_1):
    """It lays routes out sample by sample, Megatron's routers see position by position; one packed row is right."""
    folder = miles.SOURCE.unedited(tmp_path / "unedited")
    flags = {"qkv_format": layout, "enable_mtp_training": False}
    ((_, log_probs, *train),) = workers_1.run(miles.step_with_miles_own_replay, str(folder), flags)
    assert log_probs["no grad"] == (138, wrong)
    assert (sum(part["train"][0] for part in train), sum(part["train"][1] for part in train)) == (138, wrong)


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_forgotten_line_raises(name, tmp_path, workers_1):
    lines, message = FORGOTTEN[name]
    folder = miles.SOURCE.edited(tmp_path / "edited", without=lines)
    with pytest.raises(WorkersError, match=re.escape(message)):
        workers_1.run(miles.step, str(folder), ParallelSizes(), {}, {})
