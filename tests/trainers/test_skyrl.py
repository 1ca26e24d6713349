"""SkyRL, with examples/trainers/skyrl.patch and no other edits."""

import re

import pytest

from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import FULL
from tests.support.workers import WorkersError
from tests.trainers import skyrl
from tests.trainers.oracle import FAULTS, asked, check_replayed

MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
CASES = {
    "single": (ParallelSizes(), {}, {}),
    "single-dynamic-full": (ParallelSizes(), FULL, {"max_tokens": 30}),
    "single-packed-moe": (ParallelSizes(), MOE, {"packs": True}),
    "tp2-full": (ParallelSizes(tp_size=2), FULL, {}),
    "tp2-packed-dynamic": (ParallelSizes(tp_size=2), {}, {"packs": True, "max_tokens": 30}),
    "cp2-packed-moe": (ParallelSizes(cp_size=2), MOE, {"packs": True}),
    "dp2-ep2-packed-moe": (ParallelSizes(ep_size=2), MOE, {"packs": True}),
    "pp2-packed-full": (ParallelSizes(pp_size=2), FULL, {"packs": True}),
}

FORGOTTEN = {
    "the session of log-probs": (("#1 mrr.replay(",), "no session holds this DistributedDataParallel"),
    "the session of training": (("#2 mrr.replay(",), "no session holds this DistributedDataParallel"),
    "the stamp": (("mrr.stamp_batch(", "routes.numpy()"), "were they stamped?"),
    "the filler": (("filler=route_padding",), "bears no seal"),
    "the tokens of log-probs": (("#2 sequences,",), "missing 1 required positional argument: 'sequences'"),
    "the tokens of training": (("#3 sequences,",), "missing 1 required positional argument: 'sequences'"),
    "the tokens of the stamp": (
        ("token_ids=align",),
        "stamped=True compares the seal with the tokens: give token_ids=",
    ),
    "the word of the stamp": (("stamped=True",), "say stamped=True with token_ids="),
}
"""What is left out -> (texts of its added lines, what the user sees)."""


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    return skyrl.SOURCE.edited(tmp_path_factory.mktemp("skyrl") / "edited")


@pytest.mark.parametrize("name", CASES)
def test_every_decision_is_the_rollouts(name, edited, request):
    layout, options, batching = CASES[name]
    workers = request.getfixturevalue(f"workers_{layout.world_size}")
    packs, max_tokens = batching.get("packs", False), batching.get("max_tokens", 0)
    check_replayed(workers.run(skyrl.step, str(edited), layout, options, packs, max_tokens), recomputes=bool(options))


@pytest.mark.parametrize(("packs", "wrong"), [(False, 129), (True, 0)], ids=["padded", "packed"])
def test_skyrls_own_replay_is_wrong_on_padded_batches(packs, wrong, tmp_path, workers_1):
    """Two samples a micro-batch: it lays routes out sample by sample, Megatron's routers see position by position."""
    folder = skyrl.SOURCE.unedited(tmp_path / "unedited")
    ((_, log_probs, train),) = workers_1.run(skyrl.step_with_skyrls_own_replay, str(folder), packs)
    assert log_probs["no grad"] == train["train"] == (138, wrong)


def test_padding_that_was_forgotten_changes_no_decision(tmp_path, workers_1):
    folder = skyrl.SOURCE.edited(tmp_path / "edited", without=("padding=align",))
    ((_, log_probs, train),) = workers_1.run(skyrl.step, str(folder), ParallelSizes(), {})
    assert log_probs["no grad"] == train["train"] == (138, 0)


@pytest.mark.parametrize("fault", FAULTS)
def test_routes_that_were_wrong_before_the_stamp_raise(fault, edited, workers_1):
    if not fault:
        workers_1.run(asked, skyrl.step, fault, str(edited), ParallelSizes(), {})
        return
    with pytest.raises(WorkersError, match="the live router agrees with the replayed routes by"):
        workers_1.run(asked, skyrl.step, fault, str(edited), ParallelSizes(), {})


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_forgotten_line_raises(name, tmp_path, workers_1):
    lines, message = FORGOTTEN[name]
    folder = skyrl.SOURCE.edited(tmp_path / "edited", without=lines)
    with pytest.raises(WorkersError, match=re.escape(message)):
        workers_1.run(skyrl.step, str(folder), ParallelSizes(), {})
