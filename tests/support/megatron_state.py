"""Forget what one case leaves behind in Megatron-Core's module globals, so that the next starts as in a new process."""

import functools
import gc
import inspect
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist


def seed_everything() -> None:
    """Let every case draw the same random numbers."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1234)


@contextmanager
def new_case() -> Iterator[None]:
    """Run the block as in a new process; its models are empty afterwards."""
    reset_megatron_state()
    seed_everything()
    with _emptied_at_the_end():
        yield
    reset_megatron_state()


@contextmanager
def _emptied_at_the_end() -> Iterator[None]:
    """Empty the block's models, so that they and their process groups are freed.

    A MoE layer's dispatcher keeps probabilities, and with them their graph, whose checkpoints and DistributedDataParallel's
    hooks keep the layer: a cycle through C++, which garbage collection does not see. Each process group that stays alive has
    three threads, and one of them polls a hundred times a second.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.moe.moe_layer import MoELayer

    made: WeakSet[Any] = WeakSet()

    def noting(build: Any) -> Any:
        @functools.wraps(build)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            made.add(self)
            build(self, *args, **kwargs)

        return init

    with ExitStack() as stack:
        for kind in (DistributedDataParallel, MoELayer):
            stack.enter_context(mock.patch.object(kind, "__init__", noting(kind.__init__)))
        try:
            yield
        finally:
            for each in made:
                vars(each).clear()


def reset_megatron_state() -> None:
    """Destroy the model-parallel groups and reset every global of Megatron-Core that training fills.

    The groups' processes must all call it. The default process group stays.
    """
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils, router_replay
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

    RotaryEmbedding.forward.cache_clear()  # its keys hold modules and process groups
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        parallel_state._global_process_group_list = None
    num_microbatches_calculator.unset_num_microbatches_calculator()
    megatron_random._CUDA_RNG_STATE_TRACKER = None
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
    if find_spec("megatron.core.transformer.moe.moe_logging"):  # since 0.19
        import_module("megatron.core.transformer.moe.moe_logging").destroy_moe_metrics_tracker()
    else:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)
    MTPLossLoggingHelper.tracker.clear()
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None
    # Of the class that bears the name now: `install()` may have put ours in its place.
    router_replay.RouterReplay.global_router_replay_instances.clear()
    gc.collect()


def destroy_groups() -> None:
    """Destroy every process group, all at once: one waits 5 ms for the thread that polls, and Megatron-Core makes 20."""
    boxes = [[group] for group in dist.distributed_c10d._world.pg_map]
    dist.destroy_process_group()
    threads = [threading.Thread(target=box.clear) for box in boxes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def megatrons_context_parallel_split(batch: dict[str, Any], **group: Any) -> dict[str, Any]:
    """Return a context-parallel rank's part of a batch, cut by Megatron-Core; since 0.18 it asks of what kind it is."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters:
        group["is_hybrid_cp"] = False
    part: dict[str, Any] = get_batch_on_this_cp_rank(batch, **group)
    return part
