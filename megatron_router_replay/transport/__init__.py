"""Routes from rollout processes to training ranks, where the trainer does not carry them in its batch.

    engines -> rollout side (decode, one trace per worker) -> TP rank 0 of each stage -> its TP group

Each training rank gets its own data-parallel samples and its own pipeline stage's layers, in the compact dtype, nothing
else. `plan` computes each rank's rows and layers, `collective` (torch.distributed) and `ray` move them, `timing` counts the
seconds of each step. A trainer with routes in its batches needs none of this.

**Why a relay, and not sends from engines to trainers.** (1) An engine has no target for its samples: the
partition depends on the lengths of all samples, after filtering. (2) Sends and receives are matched: a send inside an
engine waits until training receives, perhaps a whole step later. A data-parallel engine rank that waits so cannot enter its
next expert all-to-all, and its peers wait for it for ever. (3) Making the send asynchronous does not help with NCCL: a
pending operation in the engine's CUDA context can block the default stream, where its kernels are launched. The rollout
side is a process (or several) of its own, so it can wait for training while engines generate.
"""

from megatron_router_replay.transport.collective import RouteGroup
from megatron_router_replay.transport.gather import RowSource
from megatron_router_replay.transport.group import open_store
from megatron_router_replay.transport.plan import ParallelLayout, Place, TransportError
from megatron_router_replay.transport.timing import TransportTimes

__all__ = [
    "ParallelLayout",
    "Place",
    "RouteGroup",
    "RowSource",
    "TransportError",
    "TransportTimes",
    "open_store",
]
