"""A run recorded under one layout is saved, merged, and replayed under others: the same experts for every token."""

from pathlib import Path
from typing import Any

import pytest

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import FULL, Case, as_map, build, rows_seen, run, watched

DENSE_FIRST = {"moe_layer_freq": [0, 1, 1, 1]}


def record_part(case: Case, folder: str) -> tuple[int, ...]:
    """Record one step and save this rank's part."""
    import torch.distributed as dist

    _, chunks, microbatches = build(case)
    with mrr.record(chunks) as recording:
        run(chunks, case, microbatches, recording)
    trace = recording.trace(num_tokens=case.num_tokens)
    mrr.save_trace(trace, Path(folder) / f"rank{dist.get_rank()}.safetensors")
    return trace.layer_numbers


def replay_merged(case: Case, path: str) -> dict[str, Any]:
    """Replay a merged trace under this layout; compare every routing map with it."""
    config, chunks, microbatches = build(case)
    trace = mrr.load_trace(path)
    with watched(chunks) as seen, mrr.replay(chunks, trace, verify=True) as session:
        losses, _ = run(chunks, case, microbatches, session)
    compared = wrong = 0
    for maps_of_layer in seen.values():
        for layer, maps in maps_of_layer.items():
            for microbatch, routing_map in zip(microbatches, maps, strict=True):
                expected = as_map(trace.layer(layer)[rows_seen(case, microbatch)], config.num_moe_experts)
                compared += len(expected)
                wrong += int((expected != routing_map).any(dim=1).sum())
    report = session.report
    return {
        "compared": compared,
        "wrong": wrong,
        "live": report.rows_live,
        "losses": [float(loss) for loss in losses],
    }


TARGETS = {
    "single": Case(layout=ParallelSizes(), config=DENSE_FIRST | FULL),
    "ep2": Case(layout=ParallelSizes(ep_size=2, tp_size=2), config=DENSE_FIRST | FULL),
    "cp2": Case(layout=ParallelSizes(cp_size=2), config=DENSE_FIRST | FULL),
    "pp2": Case(layout=ParallelSizes(pp_size=2), config=DENSE_FIRST | FULL),
}


@pytest.fixture(scope="module")
def merged(workers_4, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    case = Case(layout=ParallelSizes(tp_size=2, pp_size=2, vp_size=2), config=DENSE_FIRST | FULL)
    layers = workers_4.run(record_part, case, str(folder))
    parts = [mrr.load_trace(folder / f"rank{rank}.safetensors") for rank in range(4)]
    trace = mrr.merge_traces(parts)
    path = folder / "merged.safetensors"
    mrr.save_trace(trace, path)
    return {"layers": layers, "parts": parts, "trace": trace, "path": str(path)}


def test_the_parts_of_all_ranks_merge_without_gaps(merged):
    # Virtual stages: the first pipeline rank has layers 1 and 3, the second 2 and 4; layer 1 is dense.
    assert merged["layers"] == [(3,), (3,), (2, 4), (2, 4)]
    assert merged["trace"].layer_numbers == (2, 3, 4)
    assert bool(merged["trace"].replay_mask.all())
    assert [int(part.replay_mask.sum()) for part in merged["parts"]] == [32] * 4
    assert merged["trace"].num_tokens == 64


@pytest.mark.parametrize("name", TARGETS)
def test_another_layout_uses_the_same_experts_for_every_token(name, merged, request):
    case = TARGETS[name]
    workers = request.getfixturevalue(f"workers_{case.layout.world_size}")
    results = workers.run(replay_merged, case, merged["path"])
    assert sum(rank["wrong"] for rank in results) == 0
    assert sum(rank["live"] for rank in results) == 0
    assert all(rank["compared"] > 0 for rank in results)


def test_with_the_same_experts_the_losses_of_two_layouts_agree(merged, workers_1, workers_2):
    (single,) = workers_1.run(replay_merged, TARGETS["single"], merged["path"])
    _, last_stage = workers_2.run(replay_merged, TARGETS["pp2"], merged["path"])
    assert len(single["losses"]) == 4
    assert last_stage["losses"] == pytest.approx(single["losses"], abs=1e-5)


def replay_one_ranks_part(case: Case, path: str) -> str:
    """A part of a recording, not merged: half its tokens have no route."""
    _, chunks, microbatches = build(case)
    with mrr.replay(chunks, mrr.load_trace(path)) as session:
        run(chunks, case, microbatches, session)
    return f"{session.report.replayed_share:.2f}"


def test_an_unmerged_part_is_refused_for_its_missing_layers(merged, workers_1, tmp_path):
    path = tmp_path / "part.safetensors"
    mrr.save_trace(merged["parts"][0], path)
    with pytest.raises(mrr.RouterReplayError, match=r"layer 2 .* has no routes"):
        workers_1.run(replay_one_ranks_part, TARGETS["single"], str(path))
