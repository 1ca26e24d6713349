"""What NeMo-RL, SkyRL, slime, miles and a plain Megatron-LM loop hold, driven into a real GPTModel: every decision exact."""

import pytest

from megatron_router_replay.testing import ParallelSizes
from tests.functional.trainers.cases import LENGTHS, MOE, recorded_and_replayed, replayed

LAYOUTS = {
    "tp2-sp": ParallelSizes(tp_size=2),
    "pp2": ParallelSizes(pp_size=2),
    "cp2": ParallelSizes(cp_size=2),
    "ep2": ParallelSizes(ep_size=2),
}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ROUTED = sum(LENGTHS) - len(LENGTHS)


@pytest.mark.parametrize(
    ("trainer", "layout", "options"),
    [
        ("nemo_rl", "tp2-sp", FULL),
        ("nemo_rl", "pp2", SELECTIVE),
        ("nemo_rl", "cp2", {}),
        ("skyrl", "cp2", SELECTIVE),
        ("skyrl", "pp2", FULL),
        ("skyrl_unpacked", "tp2-sp", SELECTIVE),
        ("skyrl_unpacked", "ep2", {}),
        ("slime", "cp2", FULL),
        ("slime", "tp2-sp", {}),
        ("miles_bshd", "tp2-sp", FULL),
        ("miles_bshd", "cp2", SELECTIVE),
        ("miles_bshd", "pp2", {}),
    ],
)
def test_sealed_routes_in_the_trainers_container_are_replayed_exactly(trainer, layout, options, workers_2):
    ranks = workers_2.run(replayed, trainer, LAYOUTS[layout], options)
    replicas = 2 if layout == "ep2" else 1  # expert parallelism spans data-parallel ranks
    for rank in ranks:
        for phase in ("forward", "recompute") if options else ("forward",):
            looked, wrong = rank["wrong"][phase]
            assert looked > 0
            assert wrong == 0
        assert rank["live_wrong"][1] > 0.9 * rank["live_wrong"][0]  # random routes: a session that does nothing is seen
        assert rank["off_is_off"]
        assert rank["shares"][1] == 0
    # Over all ranks each token was looked at in each of its layers, once by those that share it.
    assert sum(rank["wrong"]["forward"][0] for rank in ranks) == ROUTED * len(MOE) * replicas
    assert {layer for rank in ranks for layer in rank["layers"]} == set(MOE)
    if layout == "pp2":
        assert [rank["layers"] for rank in ranks] == [(2,), (3, 4)]
    num_replayed, live, padding = ranks[0]["rows"]
    assert num_replayed == ROUTED * (2 if layout in ("pp2", "ep2") else 1)
    assert live == len(LENGTHS) * (2 if layout in ("pp2", "ep2") else 1)  # the last token of each sample
    assert padding > 0


@pytest.mark.parametrize(
    ("trainer", "layout", "options"),
    [
        ("megatron_lm", "tp2-sp", FULL),
        ("megatron_lm", "pp2", SELECTIVE),
        ("megatron_lm", "ep2", {}),
        ("nemo_rl", "cp2", SELECTIVE),
        ("skyrl_unpacked", "tp2-sp", {}),
        ("slime", "cp2", {}),
    ],
)
def test_a_recording_in_the_trainers_container_is_replayed_exactly(trainer, layout, options, workers_2):
    for rank in workers_2.run(recorded_and_replayed, trainer, LAYOUTS[layout], options):
        assert rank["recorded_layers"] == len(MOE)
        assert rank["live"][0] > 0
        assert rank["live"][1] == 0  # the container has what the routers did
        for looked, wrong in (rank["wrong"][phase] for phase in rank["wrong"] if rank["wrong"][phase][0]):
            assert looked > 0
            assert wrong == 0
        assert rank["live_positions"] == 0
