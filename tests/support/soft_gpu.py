"""A GPU made of software: tensors on cuda:0 by name, with real values, which log the device operations of a program.

Real are the values, torch's dispatcher and autograd, and that a backward runs in a thread of the device's own, as it does
on a GPU. Logged are the operations, the copies between host and device, what makes the host wait, and accesses to memory
that no event or stream orders. An operation on a host tensor and one of the device raises, as it does there.

    with SoftGpu() as gpu:            # in a process that has run no backward yet, as a `GlooWorkers(1)`
        model, tokens = to_gpu(model), tokens.to("cuda")
        with gpu.logged() as log:
            ...
    log.waits, log.pageable, log.kernels; gpu.races

What it cannot show: time, real kernels and their rounding, how often an operation really launches, the caching allocator,
CUDA graphs, NCCL, compiled code, Transformer Engine, several devices. A host that waits in a thread has waited for all
threads. What passes here can still be wrong or slow on a GPU; what fails here fails there.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from megatron_router_replay.testing import cpu
from megatron_router_replay.testing.cuda_stand_ins import replacements

CUDA, HERE, HOST_DEVICE = torch.device("cuda", 0), "gpu:0", torch.device("cpu")
_LIBRARY, _MEGATRON = "/megatron_router_replay/", "/megatron/core/"
_ALLOCATES = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
_READS = {"_local_scalar_dense", "is_nonzero", "equal"}
_WAITS = {"nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "bincount"}
"""Operations whose result has a size that only the device knows."""


class Op(NamedTuple):
    """One request to the device: kind "kernel", "h2d", "d2h" or "wait"; `ours`: of the library."""

    kind: str
    name: str
    where: str
    ours: bool
    pageable: bool


class Log:
    """The operations of a block."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def of(self, kind: str) -> list[Op]:
        return [op for op in self.ops if op.kind == kind]

    @property
    def kernels(self) -> int:
        return len(self.of("kernel"))

    @property
    def waits(self) -> list[str]:
        """Places where the host waited for the device, in the library or elsewhere."""
        return [f"{op.name} at {op.where}" for op in self.of("wait")]

    @property
    def pageable(self) -> list[str]:
        """Uploads from memory that is not page-locked: the driver stages them after all work of the stream."""
        return [f"{op.name} at {op.where}" for op in self.of("h2d") if op.pageable]


# ---- order: vector clocks of the streams, and of the host
class Clock(dict[Any, int]):
    def join(self, other: Clock) -> None:
        for agent, tick in other.items():
            self[agent] = max(tick, self.get(agent, 0))


class Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device, self.clock = CUDA, Clock()

    def step(self) -> int:
        self.clock.join(HOST.clock)  # what the host has waited for, every later operation has
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]

    def wait_event(self, event: Event) -> None:
        self.clock.join(event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.clock.join(other.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.clock = Clock()

    def record(self, stream: Stream | None = None) -> None:
        self.clock = Clock((stream or current()).clock)

    def synchronize(self) -> None:
        _log("wait", "Event.synchronize")
        HOST.clock.join(self.clock)

    def query(self) -> bool:
        """Return whether the host knows already that it has happened."""
        return all(HOST.clock.get(stream, 0) >= tick for stream, tick in self.clock.items() if stream is not HOST)

    def elapsed_time(self, other: Event) -> float:
        return 1.0


HOST = Stream()
DEFAULT = Stream()
_threads = threading.local()
_lock = threading.RLock()
_gpu: SoftGpu | None = None  # the one that is in use


def current(*args: Any) -> Stream:
    return getattr(_threads, "stream", DEFAULT)


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    before = current()
    _threads.stream = stream or before
    try:
        yield
    finally:
        _threads.stream = before


def in_use() -> SoftGpu | None:
    return _gpu


class Memory:
    """Accesses to one storage, on the device or page-locked; `size` in bytes, 0 on the host."""

    def __init__(self, where: str, size: int) -> None:
        self.where, self.stream, self.size = where, current(), size
        self.accesses: dict[tuple[Stream, bool], int] = {}  # (who, writes) -> when last
        self.recorded: set[Stream] = set()
        self.users = 0


_memory: dict[int, Memory] = {}
_allocated = {"now": 0, "peak": 0}


def _key(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _touch(agent: Stream, tensors: list[Tensor], written: list[Tensor]) -> None:
    """Note an access; a race where nothing orders it after another's write, or a write after another's read."""
    tick = agent.step()
    writes = {_key(t) for t in written}
    with _lock:
        for key in {_key(t) for t in tensors} | writes:
            memory = _memory.get(key)
            if memory is None:
                continue
            for (other, wrote), when in memory.accesses.items():
                if other is not agent and (wrote or key in writes) and agent.clock.get(other, 0) < when:
                    who = "the host" if HOST in (agent, other) else "another stream"
                    _race(f"{who} uses memory of {memory.where} at {_caller()[0]}, and nothing orders the two")
            memory.accesses[agent, key in writes] = tick


def _free(key: int) -> None:
    with _lock:
        memory = _memory.get(key)
        if memory is None:
            return
        memory.users -= 1
        if memory.users:
            return
        del _memory[key]
        _allocated["now"] -= memory.size
        for (stream, _), when in memory.accesses.items():
            known = {HOST, memory.stream} | memory.recorded
            if stream not in known and max(each.clock.get(stream, 0) for each in (HOST, memory.stream)) < when:
                _race(f"memory of {memory.where} was freed while another stream may use it: no record_stream")


def _race(what: str) -> None:
    if _gpu is not None:
        _gpu.races.append(what)


def _caller() -> tuple[str, bool]:
    """Return (innermost line of the library or of Megatron-Core, else of the program; whether it is the library's)."""
    frame: Any = sys._getframe(1)
    program = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if _LIBRARY in name and "/testing/" not in name:
            return f"{name.split(_LIBRARY)[-1]}:{frame.f_lineno}", True
        if _MEGATRON in name:
            return f"{name.split(_MEGATRON)[-1]}:{frame.f_lineno} (Megatron-Core)", False
        if not program and name != __file__ and "/torch/" not in name:
            program = f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return program, False


def _log(kind: str, name: str, *, pageable: bool = False) -> None:
    if _gpu is not None and _gpu.log is not None:
        _gpu.log.ops.append(Op(kind, name, *_caller(), pageable))


# ---- tensors
class GpuTensor(Tensor):
    """A tensor of the CPU with the device cuda:0."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, t: Tensor, requires_grad: bool = False) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, t.size(), strides=t.stride(), storage_offset=t.storage_offset(), dtype=t.dtype,
            device=torch.device(HERE), requires_grad=requires_grad,
        )  # fmt: skip

    def __init__(self, t: Tensor, requires_grad: bool = False) -> None:
        self._t, self._let_go = t, _own(self, t)

    @property
    def data(self) -> Any:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Any) -> None:  # Megatron-Core makes tensors viewless so
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._let_go()
        self._t, self._let_go = value._t, _own(self, value._t)

    def record_stream(self, stream: Any) -> None:
        _memory[_key(self._t)].recorded.add(stream)

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return _run(func, args, kwargs or {})
        except BaseException:
            if torch._C._current_graph_task_id() != -1:  # it ends the process, without a word
                traceback.print_exc()
            raise


def _own(owner: Any, t: Tensor) -> Any:
    key = _key(t)
    with _lock:
        if key not in _memory:
            size = t.untyped_storage().nbytes() if isinstance(owner, GpuTensor) else 0
            _memory[key] = Memory(_caller()[0], size)
            _allocated["now"] += size
            _allocated["peak"] = max(_allocated.values())
        _memory[key].users += 1
    return weakref.finalize(owner, _free, key)


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type in ("cuda", "gpu")


def _pin(t: Tensor) -> Tensor:
    _own(t.untyped_storage(), t)
    return t


def is_pinned(t: Tensor) -> bool:
    return not isinstance(t, GpuTensor) and _key(t) in _memory


def _unwrap(value: Any) -> Any:
    return value._t if isinstance(value, GpuTensor) else value


# An operation's arguments and results are at most lists and tuples of tensors: torch's pytree took half of all the time.
def _map(function: Any, value: Any) -> Any:
    if isinstance(value, list | tuple):
        mapped = [_map(function, each) for each in value]
        return mapped if isinstance(value, list) else tuple(mapped)
    return function(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


class _Schema(NamedTuple):
    """One operation of torch: its namespace and name, the (place, name) of arguments that it writes, whether it is a view."""

    namespace: str
    name: str
    written: list[tuple[int, str]]
    is_view: bool


@cache
def _schema(func: Any) -> _Schema:
    namespace, name = func._schema.name.split("::")
    arguments = [(place, each) for place, each in enumerate(func._schema.arguments) if each.alias_info is not None]
    returned = [each.alias_info for each in func._schema.returns if each.alias_info is not None]
    return _Schema(
        namespace=namespace,
        name=name,
        written=[(place, each.name) for place, each in arguments if each.alias_info.is_write],
        is_view=name in ("detach", "alias", "_unsafe_view", "lift_fresh")
        or not all(each.is_write for each in returned),
    )


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run one operation of torch on the CPU, as the device or the host would."""
    namespace, name, written, is_view = _schema(func)
    inner, inner_kwargs = _map(_unwrap, args), {key: _map(_unwrap, value) for key, value in kwargs.items()}
    tensors = [leaf for leaf in _leaves([args, *kwargs.values()]) if isinstance(leaf, Tensor)]
    on_device = [t for t in tensors if isinstance(t, GpuTensor)]
    to_gpu = _is_gpu(kwargs.get("device"))
    if kwargs.get("device") is not None:
        inner_kwargs["device"] = HOST_DEVICE
    page_locked = bool(inner_kwargs.pop("pin_memory", False))

    if name == "_to_copy" and kwargs.get("device") is not None and to_gpu != bool(on_device):
        copied = func(*inner, **inner_kwargs)
        copied = copied.clone() if copied.data_ptr() == inner[0].data_ptr() else copied
        non_blocking = bool(kwargs.get("non_blocking"))
        if not to_gpu and non_blocking:
            _pin(copied)  # torch allocates it so
        result = GpuTensor(copied) if to_gpu else copied
        _transfer(args[0], result, non_blocking)
        return result
    if name == "copy_" and len(on_device) == 1:
        func(*inner, **inner_kwargs)
        _transfer(args[1], args[0], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
        return args[0]

    mutated = [
        leaf
        for place, argument in written
        for leaf in _leaves(args[place] if place < len(args) else kwargs.get(argument))
        if isinstance(leaf, Tensor)
    ]
    if on_device and name.rstrip("_") in ("index", "index_put", "_index_put_impl"):
        _check_indices([leaf for leaf in _leaves(args[1:2]) if isinstance(leaf, Tensor)])
    elif on_device and namespace != "c10d":
        strange = [t for t in tensors if not isinstance(t, GpuTensor) and t.dim()]
        if strange and name not in ("set_", "copy_"):
            raise RuntimeError(f"{name}: expected all tensors on cuda:0, one {list(strange[0].shape)} is on the cpu")
    output = func(*inner, **inner_kwargs)
    if page_locked:
        _pin(output)
    if not on_device and not to_gpu:
        _touch(HOST, [t for t in tensors if is_pinned(t)], [t for t in mutated if is_pinned(t)])
        return output
    if name in _READS:
        _log("wait", name)
        HOST.clock.join(current().clock)
    if not is_view and name not in _ALLOCATES | _READS:
        _log("kernel", name)
        if name in _WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            _log("wait", name)

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        same = [t for t in on_device if t._t is value]  # in place: the same object comes back
        return same[0] if same else GpuTensor(value)

    result = output if name in _READS else _map(wrap, output)
    if not is_view and name not in _ALLOCATES:
        made = [leaf for leaf in _leaves(result) if isinstance(leaf, GpuTensor)]
        _touch(current(), [t._t for t in on_device], [_unwrap(t) for t in (*made, *mutated)])
    return result


def _check_indices(indices: list[Tensor]) -> None:
    for index in indices:
        if index.dtype in (torch.bool, torch.uint8):
            _log("wait", "index with a mask")
        if not isinstance(index, GpuTensor):
            _log("h2d", "index with a tensor of the host", pageable=True)
            _log("wait", "index with a tensor of the host")


def _transfer(source: Tensor, target: Tensor, non_blocking: bool) -> None:
    up = isinstance(target, GpuTensor)
    host = source if up else target
    pinned = is_pinned(host)
    _log("h2d" if up else "d2h", "copy", pageable=not pinned)
    ends = [_unwrap(source), _unwrap(target)]
    if pinned:
        _touch(current(), ends[:1], ends[1:])
    else:  # what the driver stages, it has read when it returns
        _touch(current(), ends[: 0 if up else 1], ends[1:] if up else [])
    if not non_blocking or (not up and not pinned):
        _log("wait", "copy up" if up else "copy down")
        HOST.clock.join(current().clock)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


# ---- in the place of torch.cuda
@cache
def _register() -> None:
    """Let autograd run the backward of these tensors in a thread of their device; before the process's first backward."""
    _setup_privateuseone_for_python_backend("gpu", backend_module=_DummyBackendModule())


class SoftGpu:
    """The device; one at a time.

    Attributes:
        races: accesses that nothing orders, in words.
    """

    def __init__(self) -> None:
        self.races: list[str] = []
        self.log: Log | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> SoftGpu:
        global _gpu
        _register()
        if cpu.is_active():  # its stand-ins send to the CPU what shall come here
            cpu._patched.close()
            self._stack.callback(cpu._apply)
        for owner, name, value in self._patches():
            self._stack.enter_context(mock.patch.object(owner, name, value, create=True))
        self._stack.enter_context(_Mode())
        _gpu = self
        return self

    def __exit__(self, *error: object) -> None:
        global _gpu
        _gpu = None
        self._stack.close()

    @contextlib.contextmanager
    def logged(self) -> Iterator[Log]:
        before, self.log = self.log, Log()
        try:
            yield self.log
        finally:
            self.log = before

    def _patches(self) -> list[tuple[Any, str, Any]]:
        # What Megatron-Core brings to the host, it does as on a GPU.
        megatron = [patch for patch in cpu._megatron_patches() if patch[1] != "maybe_move_tensor_to_cpu"]
        submit, tensor, as_tensor, move = ThreadPoolExecutor.submit, torch.tensor, torch.as_tensor, Tensor.to

        def submit_with_mode(pool: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            def call() -> Any:  # a dispatch mode is of one thread
                with _Mode():
                    return function(*args, **kwargs)

            return submit(pool, call)

        disable_modes = _python_dispatch._disable_current_modes

        @contextlib.contextmanager
        def disable_other_modes() -> Iterator[None]:
            with disable_modes(), _Mode():
                yield

        def to(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            # torch's C++ has another name for this device: a move to where the tensor is must stay no operation.
            def here(value: Any) -> Any:
                return HERE if isinstance(value, str | torch.device) and _is_gpu(value) else value

            return move(self, *map(here, args), **{name: here(value) for name, value in kwargs.items()})

        def new_tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            made = tensor(data, *args, **kwargs)  # made on the host and copied, below the dispatcher
            return made.to(device) if _is_gpu(device) else made

        def new_as_tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            made = data if isinstance(data, GpuTensor) else as_tensor(data, *args, **kwargs)
            return made if device is None else made.to(device)

        def synchronize(*args: Any) -> None:
            _log("wait", "torch.cuda.synchronize")

        cuda = {
            "Stream": Stream, "Event": Event, "stream": on_stream, "current_stream": current, "synchronize": synchronize,
            "default_stream": lambda *args: DEFAULT, "current_device": lambda: 0, "_lazy_init": lambda: None,
            "is_available": lambda: True, "is_initialized": lambda: True, "is_current_stream_capturing": lambda: False,
            "memory_allocated": lambda *args: _allocated["now"], "max_memory_allocated": lambda *args: _allocated["peak"],
            "reset_peak_memory_stats": lambda *args: _allocated.update(peak=_allocated["now"]),
        }  # fmt: skip
        return [
            *megatron,
            *replacements(),
            *((torch.cuda, name, value) for name, value in cuda.items()),
            (_python_dispatch, "_disable_current_modes", disable_other_modes),
            (ThreadPoolExecutor, "submit", submit_with_mode),
            (Tensor, "to", to),
            (torch, "tensor", new_tensor),
            (torch, "as_tensor", new_as_tensor),
            (Tensor, "pin_memory", lambda t, *args: t if is_pinned(t) else _pin(t.clone())),
            (Tensor, "is_pinned", lambda t, *args: is_pinned(t)),
        ]


def to_gpu(module: nn.Module) -> nn.Module:
    """Move a module's parameters and buffers; tied ones stay tied, and parameters keep their attributes."""
    moved: dict[int, nn.Parameter] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None and not isinstance(parameter, GpuTensor):
                if id(parameter) not in moved:
                    copy = nn.Parameter(GpuTensor(parameter.data.clone()), requires_grad=parameter.requires_grad)
                    for attribute, value in vars(parameter).items():
                        setattr(copy, attribute, value)
                    moved[id(parameter)] = copy
                each._parameters[name] = moved[id(parameter)]
        for name, buffer in each._buffers.items():
            if buffer is not None and not isinstance(buffer, GpuTensor):
                each._buffers[name] = GpuTensor(buffer.clone())
    return module
