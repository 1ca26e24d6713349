"""slime, miles, NeMo-RL and SkyRL, each with its patch of examples/trainers and no other edits."""

import re
from functools import cache

import pytest

from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import FULL
from tests.support.workers import WorkersError
from tests.trainers import miles, nemo_rl, skyrl, slime
from tests.trainers.oracle import FAULTS, asked, check_replayed

TRAINERS = {"slime": slime, "miles": miles, "nemo_rl": nemo_rl, "skyrl": skyrl}

MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
ONE, TP2, CP2 = ParallelSizes(), ParallelSizes(tp_size=2), ParallelSizes(cp_size=2)
EP2, PP2, VPP2 = ParallelSizes(ep_size=2), ParallelSizes(pp_size=2), ParallelSizes(pp_size=2, vp_size=2)
BSHD = {"qkv_format": "bshd"}
PACKED, DYNAMIC, SHORT = {"packs": True}, {"dynamic": True}, {"max_tokens": 30}
CASES = {
    "slime": (ONE, {}, {}),
    "slime full": (ONE, FULL, {}),
    "slime moe two steps": (ONE, MOE, {"steps": 2}),
    "slime tp2 full": (TP2, FULL, {}),
    "slime cp2 moe": (CP2, MOE, {}),
    "slime dp2 ep2 full": (EP2, FULL, {}),
    "slime pp2 full": (PP2, FULL, {}),
    "slime pp2 vpp2 moe": (VPP2, MOE, {}),
    "miles": (ONE, {}, {}),
    "miles full": (ONE, FULL, {}),
    "miles bshd moe": (ONE, MOE, BSHD),
    "miles tp2 full": (TP2, FULL, {}),
    "miles tp2 bshd": (TP2, {}, BSHD),
    "miles cp2 moe": (CP2, MOE, {}),
    "miles cp2 bshd full": (CP2, FULL, BSHD),
    "miles dp2 ep2 moe": (EP2, MOE, {}),
    "miles pp2 full": (PP2, FULL, {}),
    "miles pp2 vpp2 moe": (VPP2, MOE, {}),
    "nemo_rl": (ONE, {}, {}),
    "nemo_rl dynamic full": (ONE, FULL, DYNAMIC),
    "nemo_rl packed moe": (ONE, MOE, PACKED),
    "nemo_rl tp2 full": (TP2, FULL, {}),
    "nemo_rl tp2 packed": (TP2, {}, PACKED),
    "nemo_rl cp2 packed moe": (CP2, MOE, PACKED),
    "nemo_rl dp2 ep2 packed full": (EP2, FULL, PACKED),
    "nemo_rl pp2 full": (PP2, FULL, {}),
    "nemo_rl pp2 packed moe": (PP2, MOE, PACKED),
    "skyrl": (ONE, {}, {}),
    "skyrl dynamic full": (ONE, FULL, SHORT),
    "skyrl packed moe": (ONE, MOE, PACKED),
    "skyrl tp2 full": (TP2, FULL, {}),
    "skyrl tp2 packed dynamic": (TP2, {}, PACKED | SHORT),
    "skyrl cp2 packed moe": (CP2, MOE, PACKED),
    "skyrl dp2 ep2 packed moe": (EP2, MOE, PACKED),
    "skyrl pp2 packed full": (PP2, FULL, PACKED),
}

UNSTAMPED, NO_SEAL = "were they stamped?", "bears no seal"
NO_SESSION = "no session holds this DistributedDataParallel"
NO_ROUTES = "a forward without routes; 0 micro-batches were queued"
NO_FIELD = "KeyError: 'rollout_routed_experts'"
NO_EXPERTS = "say num_experts=, or model="
NO_TOKENS, NO_WORD = (
    "stamped=True compares the seal with the tokens: give token_ids=",
    "say stamped=True with token_ids=",
)
FORGOTTEN = {
    "slime the stamp": ("mrr.stamp_batch(", UNSTAMPED),
    "slime the filler": ("new_full", NO_SEAL),
    "slime the session of log-probs": ("replays = ", NO_SESSION),
    "slime the session of training": ('timer("actor_train")', NO_SESSION),
    "slime the routes of log-probs": ("#2 _feed_routes(args, model, batch)", NO_ROUTES),
    "slime the routes of training": ("#3 _feed_routes(args, model, batch)", NO_ROUTES),
    "slime the field of log-probs": ('#1         "rollout_routed_experts",', NO_FIELD),
    "slime the field of training": ('#2         "rollout_routed_experts",', NO_FIELD),
    "miles the stamp": ("mrr.stamp_batch(", "must be Tensor, not numpy.ndarray"),
    "miles the session of log-probs": ("replays = ", NO_SESSION),
    "miles the session of training": ('timer("actor_train")', NO_SESSION),
    "miles the routes of log-probs": ("#2 _feed_routes(model, batch)", NO_ROUTES),
    "miles the routes of training": ("#3 _feed_routes(model, batch)", NO_ROUTES),
    "miles the field of log-probs": ('#1         "rollout_routed_experts",', NO_FIELD),
    "miles the field of training": ('#2         "rollout_routed_experts",', NO_FIELD),
    "miles the row of the last token": (
        "F.pad(r, (0, 0",
        "routes are of [1, 14] tokens, token_ids has the shape [1, 16]",
    ),
    "nemo_rl the stamp": ("mrr.stamp(", UNSTAMPED),
    "nemo_rl the routes": ("mrr.microbatch(", "layer axis does not match a supported payload layout"),
    "nemo_rl the experts of training": ("#1 num_experts=self", NO_EXPERTS),
    "nemo_rl the experts of log-probs": ("#3 num_experts=self", NO_EXPERTS),
    "nemo_rl the filler": ("filler=range", NO_SEAL),
    "nemo_rl the tokens of the stamp": ("token_ids=", NO_TOKENS),
    "nemo_rl the word of the stamp": ("stamped=True", NO_WORD),
    "nemo_rl the session": ("    with (", NO_SESSION),
    "skyrl the session of log-probs": ("#1 mrr.replay(", NO_SESSION),
    "skyrl the session of training": ("#2 mrr.replay(", NO_SESSION),
    "skyrl the stamp": ("mrr.stamp_batch(", "routes.numpy()", UNSTAMPED),
    "skyrl the filler": ("filler=route_padding", NO_SEAL),
    "skyrl the tokens of log-probs": ("#2 sequences,", "missing 1 required positional argument: 'sequences'"),
    "skyrl the tokens of training": ("#3 sequences,", "missing 1 required positional argument: 'sequences'"),
    "skyrl the tokens of the stamp": ("token_ids=align", NO_TOKENS),
    "skyrl the word of the stamp": ("stamped=True", NO_WORD),
}
"""What is left out: texts of its added lines, and what the user sees."""


def trainer_of(case):
    return TRAINERS[case.split()[0]]


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """Return the folder of a trainer with its patch."""
    return cache(lambda trainer: str(trainer.SOURCE.edited(tmp_path_factory.mktemp("trainer") / "edited")))


@pytest.mark.parametrize("case", CASES)
def test_every_decision_is_the_rollouts(case, edited, on_ranks):
    trainer, (layout, options, flags) = trainer_of(case), CASES[case]
    ranks = on_ranks(layout.world_size, trainer.step, edited(trainer), layout, options, flags)
    check_replayed(ranks, recomputes=bool(options))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("trainer", [slime, skyrl])
def test_routes_that_were_wrong_before_the_stamp_raise(trainer, fault, edited, workers_1):
    def run():
        workers_1.run(asked, trainer.step, fault, edited(trainer), ONE, {}, {})

    if not fault:
        run()
        return
    with pytest.raises(WorkersError, match="the live router agrees with the replayed routes by"):
        run()


@pytest.mark.parametrize("case", FORGOTTEN)
def test_a_forgotten_line_raises(case, tmp_path, workers_1):
    trainer, (*lines, message) = trainer_of(case), FORGOTTEN[case]
    folder = trainer.SOURCE.edited(tmp_path / "edited", without=lines)
    with pytest.raises(WorkersError, match=re.escape(message)):
        workers_1.run(trainer.step, str(folder), ONE, {}, {})


def test_padding_that_was_forgotten_changes_no_decision(tmp_path, workers_1):
    folder = skyrl.SOURCE.edited(tmp_path / "edited", without=("padding=align",))
    ((_, log_probs, train),) = workers_1.run(skyrl.step, str(folder), ONE, {}, {})
    assert log_probs["no grad"] == train["train"] == (138, 0)


@pytest.mark.parametrize(
    ("trainer", "flags", "wrong"),
    [(miles, BSHD, 75), (miles, {"qkv_format": "thd"}, 0), (skyrl, {}, 129), (skyrl, PACKED, 0)],
    ids=["miles, padded", "miles, packed", "SkyRL, padded", "SkyRL, packed"],
)
def test_a_trainers_own_replay_is_wrong_on_padded_batches(trainer, flags, wrong, tmp_path, workers_1):
    """It lays routes out sample by sample, Megatron's routers see position by position; one packed row is right."""
    folder = trainer.SOURCE.unedited(tmp_path / "unedited")
    ((_, log_probs, *train),) = workers_1.run(trainer.step_with_own_replay, str(folder), flags)
    assert log_probs["no grad"] == (138, wrong)
    assert tuple(map(sum, zip(*(part["train"] for part in train)))) == (138, wrong)
