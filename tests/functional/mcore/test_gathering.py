"""Ranks of a real group gather their parts of a recording, and add up their reports."""

import torch
import torch.distributed as dist

from megatron_router_replay.mcore.sessions.gathering import gather_trace
from megatron_router_replay.mcore.sessions.report import SessionReport
from megatron_router_replay.trace.merge import merge_traces
from tests.unit.mcore.test_gathering import parts_of


def _gather_and_add_up() -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    parts = parts_of(4, 300)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    whole = gather_trace(parts[rank], None)[0]
    expected = merge_traces(parts, allow_gaps=True)
    assert torch.equal(whole.topk_indices, expected.topk_indices)
    assert whole == expected
    half = gather_trace(parts[rank], pairs[rank // 2])[0]
    assert half == merge_traces(parts[rank // 2 * 2 :][:2], allow_gaps=True)

    report = SessionReport(
        kind="freeze_recompute",
        forwards=rank,
        flips_of_layer={rank + 1: 2},
        decisions={"recomputed": 5} if rank else {},
    )
    total = report.reduce()
    assert (total.kind, total.forwards, total.decisions) == ("freeze_recompute", 6, {"recomputed": 15})
    assert total.flips_of_layer == {1: 2, 2: 2, 3: 2, 4: 2}
    assert report.reduce(pairs[rank // 2]).forwards == (1, 5)[rank // 2]


def test_four_ranks_gather_their_parts_and_add_up_their_reports(on_ranks):
    on_ranks(4, _gather_and_add_up)
