"""slime, with examples/trainers/slime.patch and no other edits."""

import re

import pytest

from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import FULL
from tests.support.workers import WorkersError
from tests.trainers import slime
from tests.trainers.oracle import FAULTS, asked, check_replayed

MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
CASES = {
    "single": (ParallelSizes(), {}, {}),
    "single-full": (ParallelSizes(), FULL, {}),
    "single-moe-two-steps": (ParallelSizes(), MOE, {"steps": 2}),
    "tp2-full": (ParallelSizes(tp_size=2), FULL, {}),
    "cp2-moe": (ParallelSizes(cp_size=2), MOE, {}),
    "dp2-ep2-full": (ParallelSizes(ep_size=2), FULL, {}),
    "pp2-full": (ParallelSizes(pp_size=2), FULL, {}),
    "pp2-vpp2-moe": (ParallelSizes(pp_size=2, vp_size=2), MOE, {}),
}

FORGOTTEN = {
    "the stamp": (("mrr.stamp_batch(",), "were they stamped?"),
    "the filler": (("new_full",), "bears no seal"),
    "the session of log-probs": (("replays = ",), "no session holds this DistributedDataParallel"),
    "the session of training": (('timer("actor_train")',), "no session holds this DistributedDataParallel"),
    "the routes of log-probs": (
        ("#2 _feed_routes(args, model, batch)",),
        "a forward without routes; 0 micro-batches were queued",
    ),
    "the routes of training": (
        ("#3 _feed_routes(args, model, batch)",),
        "a forward without routes; 0 micro-batches were queued",
    ),
    "the field of log-probs": (('#1         "rollout_routed_experts",',), "KeyError: 'rollout_routed_experts'"),
    "the field of training": (('#2         "rollout_routed_experts",',), "KeyError: 'rollout_routed_experts'"),
}
"""What is left out -> (texts of its added lines, what the user sees)."""


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    return slime.SOURCE.edited(tmp_path_factory.mktemp("slime") / "edited")


@pytest.mark.parametrize("name", CASES)
def test_every_decision_is_the_rollouts(name, edited, request):
    layout, options, flags = CASES[name]
    workers = request.getfixturevalue(f"workers_{layout.world_size}")
    flags = dict(flags)
    steps = flags.pop("steps", 1)
    check_replayed(workers.run(slime.step, str(edited), layout, options, flags, steps), recomputes=bool(options))


@pytest.mark.parametrize("fault", FAULTS)
def test_routes_that_were_wrong_before_the_stamp_raise(fault, edited, workers_1):
    if not fault:
        workers_1.run(asked, slime.step, fault, str(edited), ParallelSizes(), {}, {})
        return
    with pytest.raises(WorkersError, match="the live router agrees with the replayed routes by"):
        workers_1.run(asked, slime.step, fault, str(edited), ParallelSizes(), {}, {})


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_forgotten_line_raises(name, tmp_path, workers_1):
    lines, message = FORGOTTEN[name]
    folder = slime.SOURCE.edited(tmp_path / "edited", without=lines)
    with pytest.raises(WorkersError, match=re.escape(message)):
        workers_1.run(slime.step, str(folder), ParallelSizes(), {}, {})
