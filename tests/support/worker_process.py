"""What runs in each process of a GlooWorkers pool: wait for a job, run it as a case of its own, send the result."""

import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
import warnings
from datetime import timedelta
from multiprocessing import parent_process
from pathlib import Path
from typing import Any


def worker_main(pipe: Any, rank: int, world_size: int, folder: Path) -> None:
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
                job = pipe.recv_bytes()
            except (EOFError, ConnectionError):
                return
            case += 1
            pipe.send_bytes(_run_case(job, folder / f"store_{case}", rank, world_size))


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


def _run_case(job: bytes, store_file: Path, rank: int, world_size: int) -> bytes:
    """Return the pickled reply: (True, result) or (False, traceback)."""
    import torch.distributed as dist

    from megatron_router_replay.testing.cpu import megatron_on_cpu
    from tests.support.megatron_state import destroy_groups, new_case

    try:
        search_path, module_name, call = pickle.loads(job)
        sys.path.extend(entry for entry in search_path if entry not in sys.path)
        importlib.import_module(module_name)  # outside of the CPU patches
        store = dist.FileStore(str(store_file), world_size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=10))
        with megatron_on_cpu(), new_case():
            fn, args = pickle.loads(call)
            result = fn(*args)
        # Pickled here, by value: multiprocessing would move tensors to shared memory.
        reply = pickle.dumps((True, result))
        # Models that the case left in reference cycles hold process groups; they must go before their groups do.
        del result, args
        gc.collect()
        dist.barrier()  # nobody tears the group down while others use it
        destroy_groups()
        return reply
    except BaseException:  # SystemExit too: a worker that ended in silence would look like one that was killed
        return pickle.dumps((False, traceback.format_exc()))
