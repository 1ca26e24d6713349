"""The files and folders that the commands read."""

from pathlib import Path

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.store import TraceStore
from tests.unit.store.store_traces import make_trace


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with one of everything; paths in the tests are relative to it."""
    monkeypatch.chdir(tmp_path)
    trace = make_trace(
        600, layer_numbers=(2, 3, 4), num_experts=16, token_ids=torch.arange(600), sequence_lengths=[300, 300]
    )
    mrr.save_trace(trace, "good.safetensors")
    mrr.save_trace(trace._with(topk_indices=trace.topk_indices.roll(1, 0)), "shifted.safetensors")
    mrr.save_trace(trace._with(topk_indices=trace.topk_indices.flip(2)), "reordered.safetensors")
    mrr.save_trace(make_trace(0, layer_numbers=(2, 3, 4), num_experts=16), "no_tokens.safetensors")
    Path("empty.safetensors").touch()
    damaged = bytearray(Path("good.safetensors").read_bytes())
    damaged[-700] ^= 1
    Path("damaged.safetensors").write_bytes(damaged)
    Path("text.safetensors").write_text("hello " * 100)
    Path("nothing").mkdir()
    store = TraceStore("store", run="a")
    for step in (3, 4):
        store.save(trace.select_layers([2]), step=step, rank=0)
        store.save(trace.select_layers([3, 4]), step=step, rank=1)
    return tmp_path
