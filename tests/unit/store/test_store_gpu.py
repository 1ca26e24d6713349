import pytest
import torch

from megatron_router_replay.layout import rows_for_router, split_context_parallel
from megatron_router_replay.store import load_trace, merge_traces, save_trace
from tests.support.packing import pack_rows
from tests.unit.store.store_traces import assert_same, full_trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_a_trace_on_a_gpu_is_saved_loaded_and_merged(tmp_path):
    trace = full_trace(9000)
    on_gpu = trace.to("cuda")
    path = save_trace(on_gpu, tmp_path / "x")
    loaded = load_trace(path, device="cuda")
    assert loaded.device.type == "cuda"
    assert_same(loaded.to("cpu"), trace)
    merged = merge_traces([on_gpu.select_layers([7]), trace.select_layers([2, 3]), on_gpu])
    assert merged.device.type == "cuda"
    routed = trace.replay_mask
    assert torch.equal(merged.topk_indices.cpu()[routed], trace.topk_indices[routed])


def test_rows_on_a_gpu_are_split_and_merged_as_on_a_cpu():
    rows, _, bounds = pack_rows([5, 9, 2], multiple=4, total_multiple=8)
    moved, moved_bounds = rows.cuda(), bounds.cuda()
    parts = [split_context_parallel(moved, cp_rank=r, cp_size=2, cu_seqlens_padded=moved_bounds) for r in (0, 1)]
    for rank, part in enumerate(parts):
        expected = split_context_parallel(rows, cp_rank=rank, cp_size=2, cu_seqlens_padded=bounds)
        assert part.is_cuda
        assert torch.equal(part.cpu(), expected)
    assert torch.equal(rows_for_router(moved).cpu(), rows_for_router(rows))
