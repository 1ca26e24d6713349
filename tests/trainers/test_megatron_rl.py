"""Megatron-LM's own RL loop, unedited: each decision of its routers while this package follows their tokens."""

import pytest

from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import FULL
from tests.trainers import megatron_rl, oracle

MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
ONE, EP2, TP2, PP2 = (
    ParallelSizes(),
    ParallelSizes(ep_size=2),
    ParallelSizes(tp_size=2),
    ParallelSizes(pp_size=2),
)
PACKED, TWO = {"packs": True}, {"steps": 2}
CASES = {
    "padded": (ONE, {}, {}),
    "padded full": (ONE, FULL, {}),
    "packed moe": (ONE, MOE, PACKED),
    "packed two steps": (ONE, {}, PACKED | TWO),
    "dp2 ep2 full two steps": (EP2, FULL, TWO),
    "dp2 ep2 packed moe": (EP2, MOE, PACKED),
    "tp2 packed full": (TP2, FULL, PACKED),
    "pp2 full": (PP2, FULL, {}),
    "pp2 packed moe": (PP2, MOE, PACKED),
    "pp2, no router in the first stage": (PP2, {"dense": 2}, {}),
}


@pytest.fixture(scope="module")
def folder():
    return megatron_rl.checkout()


@pytest.mark.parametrize("case", CASES)
def test_every_decision_is_the_engines(case, folder, on_ranks):
    layout, options, flags = CASES[case]
    ranks = on_ranks(layout.world_size, megatron_rl.step, folder, layout, options, flags)
    print(ranks)
    # The old policy's pass comes before the reference model's, which is live.
    oracle.check_replayed(
        [[reference, old, *train] for (old, reference, *train), *_ in ranks],
        recomputes="recompute_granularity" in options,
    )
