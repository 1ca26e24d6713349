"""The memory that traces are received into."""

from __future__ import annotations

import gc

import torch

from megatron_router_replay.transport.rows import Arena

CPU = torch.device("cpu")


def test_memory_is_used_again_once_its_trace_is_gone_and_never_before() -> None:
    arena = Arena(device=CPU, pinned=False, reuse=True)
    first, second = arena.take(3 << 20), arena.take(3 << 20)
    addresses = {first.data_ptr(), second.data_ptr()}
    assert len(addresses) == 2
    kept = first[5:]
    del first, second
    gc.collect()
    third = arena.take(3 << 20)
    assert third.data_ptr() in addresses - {kept.data_ptr() - 5}
    fourth = arena.take(3 << 20)
    assert fourth.data_ptr() not in addresses, "the first is still looked into"
    assert third.shape == fourth.shape == (3 << 20,)


def test_without_reuse_every_trace_gets_memory_of_its_own() -> None:
    arena = Arena(device=CPU, pinned=False, reuse=False)
    assert arena._memory is None
    assert arena.take(5).shape == (5,)
