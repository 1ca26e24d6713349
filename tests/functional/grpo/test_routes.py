"""Whatever the transport, every training rank gets the same routes and trains the same; what fails is raised everywhere."""

from dataclasses import replace

import pytest
import torch

import megatron_router_replay as mrr
from examples.grpo.loop import train
from megatron_router_replay.testing import ParallelSizes
from tests.functional.grpo.cases import meddled_steps, small, steps_with_routes, without_times

PP2 = ParallelSizes(pp_size=2)
STAGES = {1: ((1, 3, 4),), 2: ((1,), (3, 4))}
"""pp_size -> layer numbers of the stages: layer 2 of the four is dense."""


def sharing(out, **changes):
    """Return settings of a run whose rollouts two workers share."""
    out.mkdir()
    return small(out, rollout_workers=2, **changes)


def pool_of(transport):
    if transport == "ray":
        pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")


LAYOUTS = {"pp2": PP2, "dp2": ParallelSizes()}
"""Layouts of two ranks; what tensor-parallel ranks get, the conformance tests of transport/ show."""


@pytest.fixture(scope="module")
def local_way(request, workers_2, tmp_path_factory):
    """A layout, and what every rank saw with routes that never left the rollout's process."""
    layout = LAYOUTS[request.param]
    settings = sharing(tmp_path_factory.mktemp("way") / "local", layout=layout)
    return layout, workers_2.run(steps_with_routes, settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("local_way", "transport"),
    [("dp2", "distributed"), ("pp2", "ray")],
    indirect=["local_way"],
)
def test_every_rank_gets_the_routes_of_the_local_way_and_trains_the_same(transport, local_way, workers_2, tmp_path):
    pool_of(transport)
    layout, expected = local_way
    ranks = workers_2.run(steps_with_routes, sharing(tmp_path / transport, layout=layout, transport=transport))

    for rank, local in zip(ranks, expected, strict=True):
        assert rank["place"] == local["place"]
        assert without_times(rank["metrics"]) == without_times(local["metrics"])
        assert torch.equal(rank["parameters"], local["parameters"])
        assert len(rank["received"]) == len(local["received"]) == 2
        for received, of_local in zip(rank["received"], local["received"]):
            assert (
                received["layer_numbers"] == of_local["layer_numbers"] == STAGES[layout.pp_size][rank["place"].pp_rank]
            )
            for name in ("topk_indices", "replay_mask", "token_ids"):
                assert torch.equal(received[name], of_local[name]), name
    # Nobody got more than its samples: data-parallel ranks share the rows, the last token of each has no route.
    for step in range(2):
        of_stage = {
            rank["place"]: rank["received"][step]
            for rank in ranks
            if rank["place"].pp_rank == 0 and rank["place"].tp_rank == 0
        }
        assert sum(int((~received["replay_mask"]).sum()) for received in of_stage.values()) == 16
        assert len(of_stage) == len(ranks) // layout.world_size
    for rank in ranks:
        assert rank["line"].startswith("routes: training ")
        for metrics in rank["metrics"]:
            assert metrics["router_replay/transport/training_wait_s"] >= 0
            assert metrics["router_replay/transport/rollout_decode_s"] > 0


@pytest.mark.slow
def test_saved_routes_are_the_whole_rollout_whatever_the_layout_and_transport(workers_1, workers_2, tmp_path):
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    workers_1.run(train, sharing(tmp_path / "one", steps=1, save_routes=whole))
    settings = sharing(tmp_path / "dp2", steps=1, save_routes=parts, transport="distributed")
    workers_2.run(train, settings)
    expected, saved = mrr.load_trace(whole), mrr.load_trace(parts)
    assert expected.layer_numbers == saved.layer_numbers == (1, 3, 4)
    assert expected.sequence_lengths == saved.sequence_lengths
    assert len(saved.sequence_lengths) == 16
    for name in ("topk_indices", "replay_mask", "token_ids"):
        assert torch.equal(getattr(expected, name), getattr(saved, name)), name
    assert int((~saved.replay_mask).sum()) == 16


WORKER_DIES = {"distributed": "a rollout worker died", "ray": "ActorDied"}
"""What is raised when the process of a rollout worker ends."""


@pytest.mark.slow
@pytest.mark.parametrize("transport", WORKER_DIES)
def test_damaged_routes_stop_the_step_and_a_dead_worker_the_run_on_every_rank(transport, workers_2, tmp_path):
    pool_of(transport)
    ranks = workers_2.run(meddled_steps, sharing(tmp_path / "run", layout=PP2, transport=transport))
    for rank in ranks:
        assert "layer 3 of topk_indices" in rank["damaged"], rank["damaged"]
        assert rank["trained"] == [True, False, True]
        assert WORKER_DIES[transport] in rank["died"], rank["died"]
    assert ranks[0]["damaged"] == ranks[1]["damaged"]


def test_gradient_steps_take_every_sample_once_and_the_same_number_from_every_rank(tmp_path):
    settings = replace(small(tmp_path), seed=5)
    steps = settings.gradient_steps()
    assert sorted(sample for samples in steps for sample in samples) == list(range(16))
    first, second = settings.partition(2)
    assert sorted(first + second) == list(range(16))
    for samples in steps:
        assert len(set(samples) & set(first)) == len(set(samples) & set(second)) == 4


def test_workers_share_all_prompts(tmp_path):
    settings = replace(small(tmp_path), prompts=5, per_prompt=2, rollout_workers=3)
    assert [list(settings.prompts_of(worker)) for worker in range(3)] == [[0], [1, 2], [3, 4]]
    assert [list(settings.samples_of(worker)) for worker in range(3)] == [[0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]
