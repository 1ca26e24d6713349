"""The training loop: what is replayed, what is refused, and that it goes on after a stop as if there had been none."""

import shutil
from dataclasses import replace

import pytest

from examples.grpo.loop import read_metrics, train
from megatron_router_replay.testing import ParallelSizes
from tests.functional.grpo.cases import small, without_times


def test_r3_replays_every_token_with_a_route_and_leaves_the_last_of_each_sample_live(workers_1, tmp_path):
    settings = small(tmp_path, recompute="full")
    (metrics,) = workers_1.run(train, settings)
    assert len(metrics) == 2
    for step in metrics:
        assert step["router_replay/rows_live"] == 16  # one a sample
        trained = step["router_replay/rows_replayed"] + step["router_replay/rows_live"]
        assert step["router_replay/tokens"] == trained + step["router_replay/rows_padding"]
        assert step["router_replay/replayed_share"] == (trained - 16) / trained
        assert step["router_replay/recomputes"] == step["router_replay/forwards"] == 8 * 3  # micro-batches x routers
        assert step["grad_norm"] > 0
    assert without_times(read_metrics(tmp_path / "metrics.jsonl")) == without_times(metrics)


def test_r2_fills_what_r3_misses_so_that_no_token_is_live(workers_1, tmp_path):
    (metrics,) = workers_1.run(train, small(tmp_path, fill_missing=True, steps=1))
    assert metrics[0]["router_replay/rows_live"] == 0
    assert metrics[0]["router_replay/replayed_share"] == 1.0


def test_off_and_r2_see_the_mismatch_that_r3_removes(workers_1, tmp_path):
    first = {}
    for mode in ("off", "r2", "r3"):
        (tmp_path / mode).mkdir()
        settings = small(tmp_path / mode, replay=mode, prompts=8, per_prompt=8, per_microbatch=8, steps=1)
        first[mode] = workers_1.run(train, settings)[0][0]
    assert first["off"]["reward"] == first["r2"]["reward"] == first["r3"]["reward"]  # the same rollout
    assert first["off"]["router_agreement"] == first["r3"]["router_agreement"] < 0.997
    assert first["off"]["rollout_kl"] == first["r2"]["rollout_kl"] > 4 * first["r3"]["rollout_kl"] > 0
    assert "router_replay/rows_replayed" not in first["off"]
    assert first["r2"]["router_replay/replayed_share"] == 1.0  # the trainer's own forward has a route for every token


@pytest.mark.slow
def test_a_stopped_and_resumed_run_continues_with_the_same_numbers(workers_1, tmp_path):
    whole = small(tmp_path / "whole", steps=3, checkpoint_every=2)
    whole.out.mkdir()
    (expected,) = workers_1.run(train, whole)  # one step past its checkpoint: that step is done again
    parts = replace(whole, out=tmp_path / "parts")
    shutil.copytree(whole.out, parts.out)
    with (parts.out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')  # as a killed run leaves it
    (parts.out / "checkpoints/step_00003").mkdir()  # not complete
    (resumed,) = workers_1.run(train, replace(parts, resume=True))
    assert [step["step"] for step in resumed] == [0, 1, 2]
    assert without_times(resumed) == without_times(expected)
    assert without_times(read_metrics(parts.out / "metrics.jsonl")) == without_times(expected)
    last = parts.out / "last.json"
    last.write_text(last.read_text().replace("pp_size=1", "pp_size=2"))
    with pytest.raises(Exception, match=r"its checkpoint is of ParallelSizes.*this run is ParallelSizes"):
        workers_1.run(train, replace(parts, resume=True))


LAYOUTS = {
    "cp2": ParallelSizes(cp_size=2),
    "pp2-vpp2": ParallelSizes(pp_size=2, vp_size=2),
    "tp2-pp2-ep2": ParallelSizes(tp_size=2, pp_size=2, ep_size=2),
}


@pytest.fixture(scope="module")
def of_one_process(workers_1, tmp_path_factory):
    """The settings of two steps in one process, and their metrics."""
    settings = small(tmp_path_factory.mktemp("single"), steps=2, recompute="full")
    (metrics,) = workers_1.run(train, settings)
    return settings, metrics


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_under_another_layout_is_the_step_of_one_process(name, of_one_process, tmp_path, request):
    layout = LAYOUTS[name]
    settings, expected = of_one_process
    workers = request.getfixturevalue(f"workers_{layout.world_size}")
    metrics, *rest = workers.run(train, replace(settings, out=tmp_path, layout=layout))
    assert rest == [[]] * len(rest)
    for name in ("reward", "rollout_kl", "rollout_gap", "router_agreement", "loss", "reference_kl", "grad_norm"):
        assert metrics[0][name] == pytest.approx(expected[0][name], rel=2e-3, abs=1e-5), name
    for name in ("reward", "grad_norm"):  # the second rollout is of weights that were trained and sent back
        assert metrics[1][name] == pytest.approx(expected[1][name], rel=0.05), name
