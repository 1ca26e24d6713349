"""slime, miles, NeMo-RL, SkyRL, ROLL and ms-swift, unedited: each decision of their routers while routes follow tokens."""

import inspect
import os
import re
import sys
from collections import Counter
from functools import cache, partial
from types import SimpleNamespace
from unittest import mock

import pytest
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.trainers import seams
from tests.functional.mcore.cases import FULL
from tests.support.families import routing_options
from tests.support.workers import WorkersError
from tests.trainers import miles, ms_swift, nemo_rl, roll, skyrl, slime, vlms
from tests.trainers.oracle import asked, audited, check_replayed, tracked
from tests.trainers.sources import Source, check_renames

TRAINERS = {"slime": slime, "miles": miles, "nemo_rl": nemo_rl, "skyrl": skyrl, "roll": roll, "ms_swift": ms_swift}

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
    "miles cp2 contiguous full": (CP2, FULL, {"allgather_cp": True}),
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
    "roll": (ONE, {}, {}),
    "roll dynamic full": (ONE, FULL, DYNAMIC),
    "roll packed moe": (ONE, MOE, PACKED),
    "roll tp2 full": (TP2, FULL, {}),
    "roll tp2 packed": (TP2, {}, PACKED),
    "roll cp2 moe": (CP2, MOE, {}),
    "roll cp2 packed full": (CP2, FULL, PACKED),
    "roll dp2 ep2 full": (EP2, FULL, {}),
    "roll dp2 ep2 packed full": (EP2, FULL, PACKED),
    "roll pp2 full": (PP2, FULL, {}),
    "roll pp2 dynamic": (PP2, {}, DYNAMIC),
    "roll pp2 packed moe": (PP2, MOE, PACKED),
    # Megatron-Core's schedule takes a multiple of two micro-batches.
    "roll pp2 vpp2 full": (VPP2, FULL, {"size": 1}),
    "ms_swift": (ONE, {}, {}),
    "ms_swift full": (ONE, FULL, {}),
    "ms_swift packed moe": (ONE, MOE, PACKED),
    "ms_swift tp2 full": (TP2, FULL, {}),
    "ms_swift tp2 packed": (TP2, {}, PACKED),
    "ms_swift cp2 moe": (CP2, MOE, {}),
    "ms_swift cp2 packed full": (CP2, FULL, PACKED),
    "ms_swift dp2 ep2 packed full": (EP2, FULL, PACKED),
    "ms_swift pp2 full": (PP2, FULL, {}),
    "ms_swift pp2 packed moe": (PP2, MOE, PACKED),
}


MTP_TRAINED = {"enable_mtp_training": True}
RECIPES = {
    "slime Moonlight": (TP2, {}),
    "skyrl Moonlight": (ONE, PACKED),
    "nemo_rl Qwen3-MoE, Qwen3-VL": (CP2, PACKED),
    "miles Qwen3-MoE, Qwen3-VL": (EP2, {}),
    "miles Qwen3.5, Qwen3.6": (TP2, MTP_TRAINED),
    "miles GLM-4.7-Flash": (ONE, MTP_TRAINED),
    "miles GLM-5": (TP2, {}),
    "miles DeepSeek-V3, V3.2": (ONE, {"allgather_cp": True}),
    "miles Kimi-K2, K2.5": (TP2, {}),
    "miles JoyAI": (EP2, {}),
    "miles Nemotron-3-Nano": (TP2, {}),
    "miles Nemotron-3-Super": (ONE, {}),
    "miles DeepSeek-V4": (ONE, BSHD),
}
"""Trainer and family of public recipes -> layout and flags; with full recompute, and MTP where the recipe trains it."""


def trainer_of(case):
    return TRAINERS[case.split()[0]]


@pytest.fixture(scope="module")
def unedited(tmp_path_factory):
    """Return the folder of a trainer."""
    return cache(lambda trainer: str(trainer.SOURCE.unedited(tmp_path_factory.mktemp("trainer") / "unedited")))


@pytest.mark.parametrize("case", CASES)
def test_every_decision_is_the_rollouts(case, unedited, on_ranks):
    trainer, (layout, options, flags) = trainer_of(case), CASES[case]
    if trainer is ms_swift and layout.cp_size > 1 and ms_swift.bridge() is None:
        pytest.skip("ms-swift splits a batch over context-parallel ranks with mcore_bridge, which is not installed.")
    ranks = on_ranks(layout.world_size, trainer.step, unedited(trainer), layout, options, flags)
    check_replayed(ranks, recomputes=bool(options))


@pytest.mark.parametrize("case", RECIPES)
def test_every_decision_of_a_recipes_model_is_the_rollouts(case, unedited, on_ranks):
    trainer, (layout, flags) = trainer_of(case), RECIPES[case]
    options = FULL | routing_options(case.split(maxsplit=1)[1])
    mtp = "enable_mtp_training" in flags
    if mtp and "mtp_kwargs" not in inspect.signature(GPTModel.forward).parameters:
        pytest.skip(
            "miles gives labels of MTP layers by mtp_kwargs, as its Megatron-LM of the branch miles-main takes them"
        )
    if not mtp:
        options.pop("mtp_num_layers", None)
    if "Nemotron" in case:
        # The rollout has routes for layers 2 to 4; the stack of 0.16 has no full recompute.
        options = {name: value for name, value in options.items() if name not in FULL} | MOE | {"pattern": "MEEE"}
    ranks = on_ranks(layout.world_size, trainer.step, unedited(trainer), layout, options, flags)
    check_replayed(ranks, recomputes=True, mtp=mtp)


VLMS = {
    "slime cp2 full": (CP2, FULL, {}, vlms.of_slime),
    "miles full": (ONE, FULL, {}, vlms.of_megatron_bridge),
    "miles tp2 full": (TP2, FULL, {}, vlms.of_megatron_bridge),
    "nemo_rl moe": (ONE, MOE, {}, vlms.of_megatron_bridge),
    "nemo_rl packed full": (ONE, FULL, PACKED, vlms.of_megatron_bridge),
    "nemo_rl tp2 packed moe": (TP2, MOE, PACKED, vlms.of_megatron_bridge),
    "nemo_rl pp2 packed full": (PP2, FULL, PACKED, vlms.of_megatron_bridge),
    "nemo_rl cp2 packed moe": (CP2, MOE, PACKED, vlms.of_megatron_bridge),
    "skyrl full": (ONE, FULL, {}, vlms.of_megatron_bridge),
    "skyrl pp2 full": (PP2, FULL, {}, vlms.of_megatron_bridge),
    "roll packed full": (ONE, FULL, PACKED, vlms.of_roll),
    "roll tp2 packed moe": (TP2, MOE, PACKED, vlms.of_roll),
    "roll cp2 packed moe": (CP2, MOE, PACKED, vlms.of_roll),
    "ms_swift packed full": (ONE, FULL, PACKED, vlms.of_mcore_bridge),
    "ms_swift tp2 packed": (TP2, {}, PACKED, vlms.of_mcore_bridge),
    "ms_swift cp2 packed full": (CP2, FULL, PACKED, vlms.of_mcore_bridge),
    "ms_swift cp2 moe": (CP2, MOE, {}, vlms.of_mcore_bridge),
}
"""Multimodal models with an image: trainer -> layout, recompute, flags, model."""


def skip_without(vlm):
    """Skip a test of a multimodal model that cannot be built here."""
    if vlm is vlms.of_mcore_bridge and ms_swift.bridge() is None:
        pytest.skip("mcore_bridge is not installed.")
    if vlm is vlms.of_megatron_bridge:
        if "MEGATRON_BRIDGE_DIR" not in os.environ:
            pytest.skip("MEGATRON_BRIDGE_DIR does not name a checkout of Megatron-Bridge")
        if "padding_mask" not in inspect.signature(GPTModel._postprocess).parameters:
            pytest.skip("this Megatron-Core is older than that of Megatron-Bridge")


@pytest.mark.parametrize("case", VLMS)
def test_every_decision_of_a_multimodal_model_is_the_rollouts(case, unedited, on_ranks):
    trainer, (layout, options, flags, vlm) = trainer_of(case), VLMS[case]
    skip_without(vlm)
    ranks = on_ranks(layout.world_size, trainer.step, unedited(trainer), layout, options | {"vlm": vlm}, flags)
    check_replayed(ranks, recomputes=bool(options))


@pytest.mark.parametrize(("trainer", "name"), list(zip(TRAINERS.values(), ["slime", "miles", "NeMo-RL", "SkyRL"])))
def test_a_trainers_own_start_installs_before_it_builds_the_model(trainer, name, unedited, workers_1):
    assert workers_1.run(trainer.start, unedited(trainer)) == [name]


def imported(trainer, folder):
    """Run a trainer in whose process nothing but a line in its own files installs the hooks."""
    module = f"megatron_router_replay.trainers.{trainer.SOURCE.name}"
    del sys.modules[module]  # so that the line imports it
    seams._finder.waiting.clear()
    with mock.patch.object(trainer, trainer.SOURCE.name, SimpleNamespace(install=lambda: None)):
        counts = trainer.step(folder, ONE, FULL, {})
    assert module in sys.modules
    return counts


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("file", [0, 1], ids=["driver", "worker"])
@pytest.mark.parametrize("trainer", [nemo_rl, skyrl], ids=["nemo_rl", "skyrl"])
def test_a_line_anywhere_in_a_file_that_the_page_names_is_enough(trainer, file, is_first, workers_1, tmp_path):
    folder = str(trainer.SOURCE.importing(tmp_path / "edited", file=file, is_first=is_first))
    check_replayed(workers_1.run(imported, trainer, folder), recomputes=True)


@pytest.mark.parametrize("trainer", [slime, miles])
def test_metrics_reach_a_trainers_own_tracker(trainer, unedited, workers_1, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    workers_1.run(tracked, trainer.step, unedited(trainer), str(tmp_path))
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    assert events.Scalars("train/router_replay/rows_replayed")[0].value == pytest.approx(46)
    assert events.Scalars("train/router_replay/replayed_share")[0].value == pytest.approx(46 / 52)


@pytest.mark.parametrize(
    "attack", ["", "late", "exchanged", "no first row", "no rows", "two rows of zeros", "shifted layers"]
)
@pytest.mark.parametrize("trainer", TRAINERS.values(), ids=TRAINERS)
def test_routes_that_were_wrong_before_they_came_in_raise(trainer, attack, unedited, workers_1):
    def run():
        workers_1.run(asked, trainer.step, attack, unedited(trainer), ONE, {}, {})

    # NeMo-RL fills a sample without rows as it fills messages without routes: its tokens are live.
    if not attack or (attack == "no rows" and trainer is nemo_rl):
        run()
        return
    known = r"MRR(103|302|80[26]): sample|MRR419: the replay session"
    # These two compare numbers of rows, too, before they take samples.
    known += {roll: "|Expected reduction dim", ms_swift: "|expected same length or one less"}.get(trainer, "")
    with pytest.raises(WorkersError, match=known):
        run()


OWN = {
    "slime full": (ONE, FULL, {}, (0,)),
    "slime tp2 full": (TP2, FULL, {}, (0,)),
    "slime pp2 full": (PP2, FULL, {}, (0,)),
    "nemo_rl padded": (ONE, {}, {}, (0,)),
    "nemo_rl packed full": (ONE, FULL, PACKED, (0,)),
    "nemo_rl pp2 packed full": (PP2, FULL, PACKED, (0,)),
    "miles padded": (ONE, {}, BSHD, (75, 129)),
    "miles packed full": (ONE, FULL, {}, (0,)),
    "miles pp2 padded": (PP2, {}, BSHD, (75, 129)),
    "miles pp2 full": (PP2, FULL, {}, (0,)),
    "miles pp2 vpp2": (VPP2, {}, {}, (0,)),
    "skyrl padded": (ONE, {}, {}, (129,)),
    "skyrl packed full": (ONE, FULL, PACKED, (0,)),
    "skyrl pp2 padded": (PP2, {}, {}, (129,)),
    "skyrl pp2 packed full": (PP2, FULL, PACKED, (0,)),
    "miles images full": (ONE, FULL | {"vlm": vlms.of_megatron_bridge}, {}, (0,)),
    "slime images full": (CP2, FULL | {"vlm": vlms.of_slime}, {}, (0,)),
}
"""Case -> layout, recompute, flags, wrong decisions of a pass, of 138, or of NeMo-RL's 132; before August, too.

A trainer that lays the routes of a padded batch out sample by sample is wrong: routers see it position by position.
"""

PLANTED = [case for case in OWN if not {"padded", "nemo_rl", "tp2", "images"} & set(case.split())]
"""Cases whose third row has a route on each rank."""


@pytest.mark.parametrize(
    ("case", "plants"),
    [*((case, 0) for case in OWN), *((case, 1) for case in PLANTED)],
)
def test_the_audit_of_a_trainers_own_replay_counts_what_the_oracle_counts(case, plants, unedited, on_ranks):
    trainer, (layout, options, flags, wrong) = trainer_of(case), OWN[case]
    skip_without(options.get("vlm"))
    step = partial(trainer.step, audits=True, **({"plants": True} if plants else {}))
    ranks = on_ranks(layout.world_size, audited, step, "1", unedited(trainer), layout, options, flags)
    right, wrongs, first = Counter(), 0, []
    for (_, *parts), findings in ranks:
        for each, part in zip(findings, parts, strict=True):  # log-probs, training
            forward = [sum(part[name][i] for name in ("no grad", "train")) for i in range(2)]
            assert [each.compared, each.wrong] == forward
            assert (each.recomputed, each.recomputed_wrong) == part["recompute"]
            assert each.not_found == 0
        wrongs += findings[0].wrong
        right["log-probs"] += findings[0].compared - findings[0].wrong
        right["training"] += findings[1].compared - findings[1].wrong
        first += [findings[0].first] if findings[0].first else []
    planted = plants * layout.world_size  # one on each rank
    assert right["log-probs"] + wrongs == (132 if trainer is nemo_rl else 138)
    assert wrongs - planted in wrong
    assert right["training"] == right["log-probs"] + planted * (trainer is skyrl)  # miles' queues serve both passes
    assert len(first) == planted if plants else bool(first) == any(wrong)
    for text in first if plants else []:
        assert re.match(r"layer [23], sample \d, position 2, token \d+: the router used experts \[", text)


@pytest.mark.parametrize(
    ("trainer", "flags", "wrong"), [(roll, {}, 138), (ms_swift, {}, 129), (ms_swift, PACKED, 0)], ids=str
)
def test_the_audit_of_a_replay_by_rows_counts_what_the_oracle_counts(trainer, flags, wrong, unedited, workers_1):
    """Of ROLL and ms-swift, with the dispatcher that takes rows of fewer experts; in log-probs, and in training."""
    options = {"moe_token_dispatcher_type": "allgather"}
    step = partial(trainer.step, audits=True)
    (((_, log_probs, train), findings),) = workers_1.run(audited, step, "1", unedited(trainer), ONE, options, flags)
    assert (log_probs["no grad"], train["train"]) == ((138, wrong), (138, wrong))
    *before, last = findings  # ms-swift has a pass for the log-probs of each micro-batch
    assert (sum(each.compared for each in before), sum(each.wrong for each in before)) == (138, wrong)
    assert (last.compared, last.wrong, sum(each.not_found for each in findings)) == (138, wrong, 0)


def test_an_audit_compares_each_training_step_of_an_ms_swift_rollout(unedited, on_ranks):
    """Of two, with sequence parallelism: the routes in ms-swift's own batches are those of one rank's rows."""
    options, flags = {"moe_token_dispatcher_type": "allgather"}, PACKED | {"steps": 2}
    step = partial(ms_swift.step, audits=True)
    for (*_, first, second), findings in on_ranks(2, audited, step, "1", unedited(ms_swift), TP2, options, flags):
        assert [(each.compared, each.wrong) for each in findings[-2:]] == [first["train"], second["train"]]
        assert first["train"][0]


def test_an_audit_raises_if_it_is_asked_to(unedited, workers_1):
    with pytest.raises(
        WorkersError, match="MRR811: audit of SkyRL's replay, forward-only pass 1: 129 of 138 decisions"
    ):
        workers_1.run(audited, partial(skyrl.step, audits=True), "raise", unedited(skyrl), ONE, {}, {})


@pytest.mark.parametrize("name", [*TRAINERS, "verl"])
def test_whatever_a_trainer_renames_is_named(name, tmp_path, capsys):
    source = TRAINERS[name].SOURCE if name in TRAINERS else Source(name=name, packages=(name,))
    check_renames(name, str(source.unedited(tmp_path / "copy")), capsys)
