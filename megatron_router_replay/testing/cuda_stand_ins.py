"""Replacements of torch.cuda's functions and classes while Megatron runs on a CPU: one stream and no device."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


class _AlwaysUpToDate:
    """A stream or an event on a CPU, which runs in program order: all earlier work is done already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def wait(self, other: Any = None) -> None:
        """Do nothing: there is nothing to wait for."""

    record = synchronize = wait_event = wait_stream = wait

    def query(self) -> bool:
        return True


class CpuEvent(_AlwaysUpToDate):
    """Replaces torch.cuda.Event."""

    def elapsed_time(self, end_event: "CpuEvent") -> float:
        return 0.0


class CpuStream(_AlwaysUpToDate):
    """Replaces torch.cuda.Stream: the CPU's one stream."""

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        return event if event is not None else CpuEvent()


_ONE_STREAM = CpuStream()


def always(value: Any) -> Callable[..., Any]:
    """Return a function that returns this value whatever it is given."""

    def constant(*args: Any, **kwargs: Any) -> Any:
        return value

    return constant


def get_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    """Replace torch.cuda's function, and Megatron's wrapper of it."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda", graph_safe: bool = False) -> None:
    """Replace torch.cuda's function, and Megatron's wrapper of it."""
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    # Not torch.manual_seed: that one calls torch.cuda.manual_seed_all.
    torch.default_generator.manual_seed(seed)


def replacements() -> list[tuple[Any, str, Any]]:
    """Return (owner, name, value) of every attribute of torch.cuda that Megatron's training path uses."""
    cuda = torch.cuda
    values: dict[str, Any] = {
        "is_available": always(False),
        "current_device": always(torch.device("cpu")),
        "set_device": always(None),
        "synchronize": always(None),
        "is_current_stream_capturing": always(False),
        "get_device_capability": always((0, 0)),
        "Stream": CpuStream,
        "Event": CpuEvent,
        "current_stream": always(_ONE_STREAM),
        "default_stream": always(_ONE_STREAM),
        "set_stream": always(None),
        "stream": lambda stream: nullcontext(),
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "empty_cache": always(None),
        "memory_allocated": always(0),
        "max_memory_allocated": always(0),
        "memory_reserved": always(0),
        "max_memory_reserved": always(0),
        "mem_get_info": always((0, 0)),
        "reset_peak_memory_stats": always(None),
    }
    nvtx = {"range_push": always(0), "range_pop": always(0), "mark": always(None)}
    random = {"get_rng_state": get_rng_state, "set_rng_state": set_rng_state}
    return [
        *((cuda, name, value) for name, value in values.items()),
        *((cuda.random, name, value) for name, value in random.items()),
        *((cuda.nvtx, name, value) for name, value in nvtx.items()),
    ]
