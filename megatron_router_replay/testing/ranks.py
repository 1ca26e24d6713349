"""run_ranks(): one function as every rank of a gloo group of fresh processes."""

import multiprocessing
import os
import pickle
import random
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from megatron_router_replay.errors import RouterReplayError


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, seed: int = 1234, timeout_s: float = 3600.0
) -> list[Any]:
    """Run `function(*args)` in `world_size` new processes; return results by rank.

    Each process has one thread, a gloo group, seeds set, and is inside `megatron_on_cpu()`. The fork server of this process
    imports Megatron-Core once.

    Args:
        function: defined at the top level of a module; a script needs `if __name__ == "__main__":`.
        args: picklable; tensors are copied.
        seed: what python, numpy and torch are seeded with.
        timeout_s: for the slowest rank.

    Raises:
        RouterReplayError: time ran out.
        torch.multiprocessing.ProcessRaisedException: a rank raised; it has the traceback, the other ranks were ended.
        torch.multiprocessing.ProcessExitedException: a rank died.
    """
    from torch.multiprocessing import start_processes  # type: ignore[attr-defined]

    multiprocessing.set_forkserver_preload(["megatron_router_replay.testing.preload"])
    # Pickled here, by value: torch.multiprocessing would move tensors to shared memory.
    job = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        processes = start_processes(  # type: ignore[no-untyped-call]
            _run_rank, (world_size, folder, seed, job), world_size, join=False, start_method="forkserver"
        )
        deadline = time.monotonic() + timeout_s
        try:
            while not processes.join(timeout=1.0):
                if time.monotonic() > deadline:
                    raise RouterReplayError(
                        f"MRR904: {function.__qualname__} did not end on {world_size} ranks within {timeout_s:g} s."
                    )
        finally:
            for process in processes.processes:
                process.kill()
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]


def _end_with_parent() -> None:
    """End this process when the one that started it is gone: its own parent is the fork server, which may live on."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is started by run_ranks"

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run_rank(rank: int, world_size: int, folder: str, seed: int, job: bytes) -> None:
    import numpy as np
    import torch
    import torch.distributed as dist

    from megatron_router_replay.testing.cpu import megatron_on_cpu

    _end_with_parent()
    if os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a test machine's own name may not resolve
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    # Deprecations inside of Megatron and torch, once in every process.
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use", category=FutureWarning)
    function, args = pickle.loads(job)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timedelta(minutes=10)
    )
    with megatron_on_cpu():
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        (Path(folder) / str(rank)).write_bytes(pickle.dumps(function(*args)))
    dist.barrier()  # no rank ends while another one still sends to it
    sys.stdout.flush()
    # Python's own end would wait for the threads of process groups that Megatron's DDP keeps alive.
    os._exit(0)
