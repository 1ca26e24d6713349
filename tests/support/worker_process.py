"""What runs in each process of a GlooWorkers pool: wait for a job, run it as a case of its own, send the result."""

import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A function by name and its pickled arguments: the module is found before anything of it is unpickled."""

    module_name: str
    module_file: str | None
    qualname: str
    search_path: tuple[str, ...]
    arguments: bytes

    @classmethod
    def of(cls, fn: Callable[..., Any], args: tuple[Any, ...]) -> "Job":
        """Describe `fn(*args)`; ValueError for a function that another process cannot find."""
        if "<locals>" in fn.__qualname__ or "<lambda>" in fn.__qualname__:
            raise ValueError(f"cannot run {fn.__qualname__} in workers: define it at the top level of its module.")
        module = sys.modules[fn.__module__]
        return cls(
            module_name=fn.__module__,
            module_file=getattr(module, "__file__", None),
            qualname=fn.__qualname__,
            search_path=tuple(sys.path),
            arguments=pickle.dumps(args),
        )

    def call(self) -> Any:
        """Find the function and call it."""
        function: Any = self._module()
        for name in self.qualname.split("."):
            function = getattr(function, name)
        return function(*pickle.loads(self.arguments))

    def load(self) -> None:
        """Import the function's module, outside of the CPU patches."""
        self._module()

    def _module(self) -> Any:
        sys.path.extend(entry for entry in self.search_path if entry not in sys.path)
        if self.module_name in sys.modules:
            return sys.modules[self.module_name]
        try:
            return importlib.import_module(self.module_name)
        except ModuleNotFoundError as error:
            if self.module_file is None or error.name is None or not self.module_name.startswith(error.name):
                raise
        # pytest's importlib mode gives a test module a name that only pytest can import.
        spec = importlib.util.spec_from_file_location(self.module_name, self.module_file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module_name] = module
        spec.loader.exec_module(module)
        return module


def worker_main(pipe: Any, rank: int, world_size: int, folder: Path, seed: int) -> None:
    """Serve jobs until the parent is gone."""
    # A thread, because a rank that waits in a collective does not read its pipe and would outlive a killed parent.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(folder / f"stack_{rank}", "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
        _prepare(rank, world_size)
        pipe.send_bytes(pickle.dumps((True, None)))
        case = 0
        while True:
            try:
                job = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionError):
                return
            case += 1
            pipe.send_bytes(_run_case(job, case, rank, world_size, folder, seed))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _prepare(rank: int, world_size: int) -> None:
    """Set what a worker keeps for all its cases."""
    if "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a test machine's own name may not resolve
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    importlib.import_module("megatron_router_replay.testing.preload")  # nothing to do after a fork server did it
    import torch

    torch.set_num_threads(1)
    # What Megatron and torch tell each other about deprecations and speed, once in every worker.
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use", category=FutureWarning)


def _seed_everything(seed: int) -> None:
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _run_case(job: Job, case: int, rank: int, world_size: int, folder: Path, seed: int) -> bytes:
    """Return the pickled reply: (True, result) or (False, traceback)."""
    import torch.distributed as dist

    from megatron_router_replay.testing.cpu import megatron_on_cpu
    from tests.support.megatron_state import reset_megatron_state

    try:
        job.load()
        store = dist.FileStore(  # type: ignore[attr-defined]
            str(folder / f"store_{case}"), world_size
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=10))
        with megatron_on_cpu():
            reset_megatron_state()
            _seed_everything(seed)
            result = job.call()
            reset_megatron_state()
        # Pickled here, by value: multiprocessing would move tensors to shared memory.
        reply = pickle.dumps((True, result))
        # Models that the case left in reference cycles hold process groups; they must go before their groups do.
        del result
        gc.collect()
        dist.barrier()  # nobody tears the group down while others use it
        dist.destroy_process_group()
        return reply
    except BaseException:  # SystemExit too: a worker that ended in silence would look like one that was killed
        return pickle.dumps((False, traceback.format_exc()))
