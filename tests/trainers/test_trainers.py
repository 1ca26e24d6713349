"""slime, miles, NeMo-RL and SkyRL, unedited: each decision of their routers while this package follows their tokens."""

import re
from functools import cache

import pytest

from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.trainers import seams
from tests.functional.mcore.cases import FULL
from tests.support.workers import WorkersError
from tests.trainers import miles, nemo_rl, skyrl, slime
from tests.trainers.oracle import FAULTS, asked, attacked, audited, check_replayed

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
    "slime cp2 contiguous moe": (CP2, MOE, {"allgather_cp": True}),
    "slime dp2 ep2 full": (EP2, FULL, {}),
    "slime dp2 ep2 combined 1f1b": (EP2, {}, {"combined_1f1b": True}),
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


def trainer_of(case):
    return TRAINERS[case.split()[0]]


@pytest.fixture(scope="module")
def unedited(tmp_path_factory):
    """Return the folder of a trainer."""
    return cache(lambda trainer: str(trainer.SOURCE.unedited(tmp_path_factory.mktemp("trainer") / "unedited")))


@pytest.mark.parametrize("case", CASES)
def test_every_decision_is_the_rollouts(case, unedited, on_ranks):
    trainer, (layout, options, flags) = trainer_of(case), CASES[case]
    ranks = on_ranks(layout.world_size, trainer.step, unedited(trainer), layout, options, flags)
    check_replayed(ranks, recomputes=bool(options))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("trainer", [slime, skyrl])
def test_routes_that_were_wrong_before_they_came_in_raise(trainer, fault, unedited, workers_1):
    def run():
        workers_1.run(asked, trainer.step, fault, unedited(trainer), ONE, {}, {})

    if not fault:
        run()
        return
    with pytest.raises(WorkersError, match="the live router agrees with the replayed routes by"):
        run()


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


OWN = [(miles, BSHD, 75), (miles, {"qkv_format": "thd"}, 0), (skyrl, {}, 129), (skyrl, PACKED, 0)]
OWN_IDS = ["miles, padded", "miles, packed", "SkyRL, padded", "SkyRL, packed"]


@pytest.mark.parametrize(("trainer", "flags", "wrong"), OWN, ids=OWN_IDS)
def test_the_audit_counts_what_the_oracle_counts(trainer, flags, wrong, unedited, workers_1):
    ((_, findings),) = workers_1.run(audited, trainer.step_with_own_replay, "1", unedited(trainer), flags)
    # Log-probs, then training in one or two passes.
    assert (findings[0].right, findings[0].wrong) == (138 - wrong, wrong)
    assert sum(each.wrong for each in findings) == 2 * wrong
    assert sum(each.right for each in findings) == 2 * (138 - wrong)
    assert sum(each.not_found for each in findings) == 0
    assert bool(findings[0].first) == bool(wrong)


def test_an_audit_raises_if_it_is_asked_to(unedited, workers_1):
    with pytest.raises(
        WorkersError, match="MRR811: audit of SkyRL's replay, forward-only pass 1: 129 of 138 decisions"
    ):
        workers_1.run(audited, skyrl.step_with_own_replay, "raise", unedited(skyrl), {})


def rows_of_zeros(tokens, routes):
    routes[2][1] = 0
    return tokens, routes


def no_rows(tokens, routes):
    return tokens, [routes[0], routes[1][:0], *routes[2:]]


def shifted_layers(tokens, routes):
    return tokens, [part.roll(1, dims=1) for part in routes]


def a_row_less(tokens, routes):
    return tokens, [routes[0][1:], *routes[1:]]


@pytest.mark.parametrize("attack", [rows_of_zeros, no_rows, shifted_layers, a_row_less])
@pytest.mark.parametrize("trainer", [slime, miles])
def test_routes_that_cannot_be_the_samples_raise(trainer, attack, unedited, workers_1):
    with pytest.raises(WorkersError, match=r"MRR10[23]: sample|MRR802: sample"):
        workers_1.run(attacked, trainer.step, attack, unedited(trainer), ONE, {}, {})


RENAMED = {
    "slime, a function": (slime, "fill_routing_replay", "fill_replay", "fill_routing_replay is gone"),
    "slime, a parameter": (slime, "rollout_data", "rollout", "fill_routing_replay has the parameters"),
    "slime, a switch": (slime, "ROUTING_REPLAY_STAGE", "REPLAY_STAGE", "no longer names ['ROUTING_REPLAY_STAGE']"),
    "slime, a field": (slime, "rollout_routed_experts", "routes", "no longer names ['rollout_routed_experts']"),
    "miles, a function": (miles, "fill_replay_data", "fill_replay", "fill_replay_data is gone"),
    "miles, a switch": (miles, "replay_backward", "in_backward", "no longer names ['replay_backward']"),
    "NeMo-RL, a function": (nemo_rl, "megatron_forward_backward", "run_megatron", "megatron_forward_backward is gone"),
    "NeMo-RL, a switch": (nemo_rl, "use_router_replay", "replays", "without ['use_router_replay']"),
    "SkyRL, a function": (skyrl, "forward_backward_mini_batch", "train", "forward_backward_mini_batch is gone"),
    "SkyRL, a field": (skyrl, "rollout_expert_indices", "experts", "no longer names ['rollout_expert_indices']"),
}
"""Case -> trainer, what is renamed everywhere in it, to what, and what SeamError says."""


@pytest.mark.parametrize("case", RENAMED)
def test_what_a_trainer_renamed_is_named(case, tmp_path, workers_1):
    trainer, old, new, message = RENAMED[case]
    folder = trainer.SOURCE.unedited(tmp_path / "renamed")
    for path in folder.rglob("*.py"):
        text = path.read_text()
        if old in text:
            path.write_text(re.sub(rf"\b{old}\b", new, text))
    with pytest.raises(WorkersError, match=rf"MRR808: .*{re.escape(message)}"):
        workers_1.run(trainer.step, str(folder), ONE, {}, {})
    # The script says the same in seconds.
    assert seams.main([trainer.SOURCE.name, str(folder)]) > 0
