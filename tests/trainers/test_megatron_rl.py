"""Megatron-LM's own RL loop, unedited: each decision of its routers while this package follows their tokens."""

import shutil

import pytest

from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import FULL
from tests.support.workers import WorkersError
from tests.trainers import megatron_rl, oracle
from tests.trainers.sources import check_renames

MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
ONE, EP2, TP2, CP2, PP2 = (
    ParallelSizes(),
    ParallelSizes(ep_size=2),
    ParallelSizes(tp_size=2),
    ParallelSizes(cp_size=2),
    ParallelSizes(pp_size=2),
)
PACKED, TWO = {"packs": True}, {"steps": 2}
CASES = {
    "padded": (ONE, {}, {}),
    "padded full": (ONE, FULL, {}),
    "packed moe": (ONE, MOE, PACKED),
    "packed two steps": (ONE, {}, PACKED | TWO),
    "dp2 ep2 full": (EP2, FULL, {}),
    "dp2 ep2 packed moe two steps": (EP2, MOE, PACKED | TWO),
    "tp2 packed full": (TP2, FULL, PACKED),
    "cp2 full": (CP2, FULL, {}),
    "cp2 packed two steps": (CP2, {}, PACKED | TWO),
    "pp2 full": (PP2, FULL, {}),
    "pp2 packed moe": (PP2, MOE, PACKED),
    "pp2, no router in the first stage": (PP2, {"dense": 2}, {}),
    "hybrid": (ONE, {"pattern": "*E*E"}, {}),
    "hybrid dp2 ep2 packed full": (EP2, FULL | {"pattern": "*EEM"}, PACKED),
    "hybrid pp2 packed": (PP2, {"pattern": "*E|*E"}, PACKED),
}


@pytest.fixture(scope="module")
def folder():
    return megatron_rl.checkout()


@pytest.mark.parametrize("case", CASES)
def test_every_decision_is_the_engines(case, folder, on_ranks):
    layout, options, flags = CASES[case]
    if layout.cp_size > 1 and not megatron_rl.has_context_parallelism(folder):
        pytest.skip("This commit of Megatron-LM's RL loop gives each context-parallel rank the whole rows.")
    ranks = on_ranks(layout.world_size, megatron_rl.step, folder, layout, options, flags)
    ranks = [each for each in ranks if each[0]]  # a stage without routers decides nothing
    # The old policy's pass comes before the reference model's, which is live.
    oracle.check_replayed(
        [[reference, old, *train] for (old, reference, *train), *_ in ranks],
        recomputes="recompute_granularity" in options,
    )
    assert all(sum(part["train"][0] for part in counts[2:]) > 0 for counts, *_ in ranks)
    # Rows of 3 layers and 4 experts, one byte an expert: a rank gets no more than it trains.
    assert all(received <= 73 * 3 * 4 for _, received, _ in ranks)
    assert all((received > 0) == (layout.ep_size * layout.cp_size > 1) for _, received, _ in ranks)


def test_without_hooks_that_replay_no_decision_is_the_engines(folder, on_ranks):
    ((counts, *_),) = on_ranks(1, megatron_rl.step, folder, ONE, {}, {"replays": False})
    assert counts[0]["no grad"] == counts[1]["no grad"] == counts[2]["train"] == (219, 219)


def test_a_rollout_with_other_tokens_than_its_request_raises(folder, on_ranks):
    with pytest.raises(
        WorkersError, match="MRR802: rollout 3, turn 0: the engine's request and the rollout have different"
    ):
        on_ranks(1, megatron_rl.step, folder, ONE, {}, {"other_tokens": True})


def test_a_part_that_megatron_lm_renames_is_named(capsys, tmp_path):
    source = megatron_rl.SOURCE.folder()
    check_renames("megatron_rl", copied(source, tmp_path), capsys)


def copied(source, to):
    """Copy the files that have seams."""
    for seam in megatron_rl.megatron_rl.SEAMS:
        path = f"{seam.module.replace('.', '/')}.py"
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(f"{source}/{path}", to / path)
    return str(to)
