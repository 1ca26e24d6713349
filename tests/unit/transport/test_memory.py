"""Memory is used again once nobody looks into it, and not before."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from megatron_router_replay import engines
from megatron_router_replay.transport import TraceMemory


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_in_use_is_never_lent_again() -> None:
    memory = TraceMemory(block_bytes=1024)
    first = torch.from_numpy(memory.take(1000))
    address = first.data_ptr()
    row = first[10:12].view(1, 2)
    first.fill_(7)
    del first
    gc.collect()
    others = [memory.take(1000) for _ in range(5)]
    for other in others:
        other.fill(9)
    assert row.tolist() == [[7, 7]], "a view of a view keeps its block"
    del row
    gc.collect()
    assert _address(memory.take(1000)) == address, "now it is free"


def test_pieces_share_a_block_and_are_aligned() -> None:
    memory = TraceMemory(block_bytes=1024)
    pieces = [memory.take(100) for _ in range(8)]
    start = _address(pieces[0])
    assert [_address(piece) - start for piece in pieces] == [0, 128, 256, 384, 512, 640, 768, 896]
    assert start % 64 == 0
    ninth = memory.take(100)
    assert not start <= _address(ninth) < start + 1024
    del pieces[:7]
    gc.collect()
    assert not start <= _address(memory.take(1000)) < start + 1024, "the eighth still looks into the block"
    del pieces[0]
    gc.collect()
    assert _address(memory.take(1000)) == start


def test_larger_pieces_get_blocks_of_their_own_and_replace_those_too_small() -> None:
    memory = TraceMemory(block_bytes=1024)
    piece = memory.take(500)
    del piece
    large = memory.take(5000)
    assert large.shape == (5000,)
    assert large.dtype == np.uint8
    assert memory.take(0).shape == (0,)
    gc.collect()
    assert memory.take(20_000).shape == (20_000,)
    assert len(memory._free) == 0, "the block of 1024 made room"


def test_pieces_outlive_the_memory_they_come_from() -> None:
    memory = TraceMemory(block_bytes=1024)
    piece = memory.take(64)
    piece.fill(3)
    del memory
    gc.collect()
    assert piece.tolist() == [3] * 64


def test_threads_never_get_the_same_memory() -> None:
    memory = TraceMemory(block_bytes=4096)

    def work(number: int) -> bool:
        good = True
        for _ in range(300):
            piece = memory.take(700)
            piece.fill(number)
            good &= bool((piece == number).all())
            del piece
        return good

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "sglang_jax"])
@pytest.mark.parametrize("num_experts", [8, 300])
def test_decoded_traces_lie_in_it(engine: str, num_experts: int) -> None:
    model = engines.ModelRoutingInfo(num_layers=2, moe_layer_numbers=(1, 2), num_experts=num_experts, topk=2)
    rows = np.stack([np.random.default_rng(i).permutation(8)[:2] for i in range(12)]).reshape(6, 2, 2)
    decoder = getattr(engines, engine)
    memory = TraceMemory(block_bytes=1024)
    alone = decoder.decode(rows, model=model, num_tokens=7, allocate=memory.take)
    batch = decoder.decode_batch([rows, rows], model=model, num_tokens=[7, 7], allocate=memory.take)
    for trace in (alone, batch):
        assert _address(memory._block) <= trace.topk_indices.data_ptr() < _address(memory._block) + 1024
        assert torch.equal(trace.topk_indices[:6].to(torch.int64), torch.from_numpy(rows))
        assert trace.topk_indices.dtype == (torch.uint8 if num_experts == 8 else torch.int16)
