"""Cases that run as the only rank of a gloo group, in the tests' own process: pytest and `make mutate` see into them."""

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron_router_replay.testing import megatron_on_cpu
from tests.support.megatron_state import destroy_groups, new_case, reset_megatron_state
from tests.support.workers import WorkersError


@contextmanager
def only_rank() -> Iterator[None]:
    """Be the only rank of a gloo group, with Megatron-Core on a CPU and as in a new process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with mock.patch.dict("os.environ", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1"), megatron_on_cpu(), new_case():
            yield
    finally:
        reset_megatron_state()
        gc.collect()  # models in reference cycles hold process groups, which must go before the group does
        destroy_groups()


class OneRank:
    """Stands where a `GlooWorkers(1)` could: each run is a case of its own, and a failure is a `WorkersError`."""

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> list[Any]:
        """Return the result of `fn(*args)` as the only element of a list; nobody stops it after `timeout_s`."""
        with only_rank():
            try:
                return [fn(*args)]
            except Exception as error:
                failure = WorkersError(f"rank 0 raised:\n{traceback.format_exc()}")
                traceback.clear_frames(error.__traceback__)  # they hold models, and those their process groups
            raise failure
