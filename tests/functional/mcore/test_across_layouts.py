"""A run recorded under one layout is saved, merged, and replayed under others: the same experts for every token."""

from pathlib import Path

import pytest

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import FULL, Case, build, run, watched, wrong_replays

CONFIG = {"moe_layer_freq": [0, 1, 1, 1]} | FULL
RECORDED = Case(layout=ParallelSizes(tp_size=2, pp_size=2, vp_size=2), config=CONFIG)
TARGETS = {
    "single": Case(config=CONFIG),
    "ep2": Case(layout=ParallelSizes(ep_size=2, tp_size=2), config=CONFIG),
    "cp2": Case(layout=ParallelSizes(cp_size=2), config=CONFIG),
    "pp2": Case(layout=ParallelSizes(pp_size=2), config=CONFIG),
}


def record_part(folder: Path) -> tuple[int, ...]:
    """Record one step and save this rank's part."""
    import torch.distributed as dist

    _, chunks, microbatches = build(RECORDED)
    with mrr.record(chunks) as recording:
        run(chunks, RECORDED, microbatches, recording)
    trace = recording.trace(num_tokens=RECORDED.num_tokens)
    mrr.save_trace(trace, folder / f"rank{dist.get_rank()}.safetensors")
    return trace.layer_numbers


def replay_merged(case: Case, path: Path) -> list[float]:
    """Replay a merged trace under this layout, compare every routing map with it, and return the losses."""
    _, chunks, microbatches = build(case)
    trace = mrr.load_trace(path)
    with watched(chunks) as seen, mrr.replay(chunks, trace, verify=True) as session:
        losses, _ = run(chunks, case, microbatches, session)
    assert seen["forward"]
    assert wrong_replays(case, seen, trace, microbatches) == session.report.rows_live == 0
    return [float(loss) for loss in losses]


@pytest.fixture(scope="module")
def merged(on_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    layers = on_ranks(4, record_part, folder)
    parts = [mrr.load_trace(folder / f"rank{rank}.safetensors") for rank in range(4)]
    # Virtual stages: the first pipeline rank has layers 1 and 3, the second 2 and 4; layer 1 is dense.
    assert layers == [(3,), (3,), (2, 4), (2, 4)]
    assert [int(part.replay_mask.sum()) for part in parts] == [32] * 4
    mrr.save_trace(mrr.merge_traces(parts), folder / "merged.safetensors")
    return folder / "merged.safetensors"


def test_the_parts_of_all_ranks_merge_without_gaps(merged):
    trace = mrr.load_trace(merged)
    assert trace.layer_numbers == (2, 3, 4)
    assert (trace.num_tokens, bool(trace.replay_mask.all())) == (64, True)


@pytest.mark.parametrize("name", TARGETS)
def test_another_layout_uses_the_same_experts_for_every_token(name, merged, on_ranks):
    losses = on_ranks(TARGETS[name].layout.world_size, replay_merged, TARGETS[name], merged)[-1]
    if name == "pp2":
        (single,) = on_ranks(1, replay_merged, TARGETS["single"], merged)
        assert len(single) == 4
        assert losses == pytest.approx(single, abs=1e-5)
