"""What torch.cuda's functions and classes become while Megatron runs on a CPU: the CPU has one stream and no device."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

P = TypeVar("P")


class CpuEvent:
    """Stands in for torch.cuda.Event: everything before it has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Do nothing; a CPU runs in program order."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing; a CPU runs in program order."""

    def synchronize(self) -> None:
        """Do nothing; a CPU runs in program order."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: "CpuEvent") -> float:
        return 0.0


class CpuStream:
    """Stands in for torch.cuda.Stream: the CPU's one stream, always up to date."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        return event if event is not None else CpuEvent()

    def wait_event(self, event: CpuEvent) -> None:
        """Do nothing; a CPU runs in program order."""

    def wait_stream(self, stream: "CpuStream") -> None:
        """Do nothing; a CPU runs in program order."""

    def synchronize(self) -> None:
        """Do nothing; a CPU runs in program order."""

    def query(self) -> bool:
        return True


_ONE_STREAM = CpuStream()


def _stream(stream: Any) -> AbstractContextManager[None]:
    return nullcontext()


def _always(value: Any) -> Callable[..., Any]:
    def constant(*args: Any, **kwargs: Any) -> Any:
        return value

    return constant


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    # Not torch.manual_seed: that one calls torch.cuda.manual_seed_all.
    torch.default_generator.manual_seed(seed)


def patches(make: Callable[[Any, str, Any], P]) -> list[P]:
    """Return `make(owner, name, value)` for every attribute of torch.cuda that Megatron's training path uses."""
    cuda = torch.cuda
    values: dict[str, Any] = {
        "is_available": _always(False),
        "current_device": _always(torch.device("cpu")),
        "set_device": _always(None),
        "synchronize": _always(None),
        "is_current_stream_capturing": _always(False),
        "get_device_capability": _always((0, 0)),
        "Stream": CpuStream,
        "Event": CpuEvent,
        "current_stream": _always(_ONE_STREAM),
        "default_stream": _always(_ONE_STREAM),
        "set_stream": _always(None),
        "stream": _stream,
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed,
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "empty_cache": _always(None),
        "memory_allocated": _always(0),
        "max_memory_allocated": _always(0),
        "memory_reserved": _always(0),
        "max_memory_reserved": _always(0),
        "mem_get_info": _always((0, 0)),
        "reset_peak_memory_stats": _always(None),
    }
    nvtx = {"range_push": _always(0), "range_pop": _always(0), "mark": _always(None)}
    random = {"get_rng_state": _get_rng_state, "set_rng_state": _set_rng_state}
    return [
        *(make(cuda, name, value) for name, value in values.items()),
        *(make(cuda.random, name, value) for name, value in random.items()),
        *(make(cuda.nvtx, name, value) for name, value in nvtx.items()),
    ]
