"""Memory to receive into."""

import torch

from megatron_router_replay.transport.rows import Arena


def test_two_blocks_take_turns_and_grow() -> None:
    arena = Arena(device=torch.device("cpu"), pinned=False, reuse=True)
    places = [arena.take(size).data_ptr() for size in (100, 50, 80, 40)]
    assert places[0] != places[1]
    assert places[2] == places[0]
    assert places[3] != places[0]
    assert arena.take(500).numel() == 500


def test_without_reuse_a_trace_has_memory_of_its_own() -> None:
    arena = Arena(device=torch.device("cpu"), pinned=False, reuse=False)
    blocks = [arena.take(1000) for _ in range(3)]
    assert len({block.data_ptr() for block in blocks}) == 3
