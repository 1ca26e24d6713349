"""Routes from rollout workers to training ranks.

    engines -> rollout side (decode, one trace per worker) -> TP rank 0 of each stage -> its TP group

Each training rank gets its own data-parallel samples and its own pipeline stage's layers, in the compact dtype, nothing
else; `plan` computes who gets what, `distributed` (torch.distributed) and `ray` move it, `prefetching` feeds micro-batches,
`timing` says which leg is slow.

**Why a relay, and not sends from engines to trainers.** (1) An engine does not know who trains on its samples: the
partition depends on the lengths of all samples, after filtering. (2) Sends and receives are matched: a send inside an
engine waits until training asks, perhaps a whole step later. A data-parallel engine rank that waits so cannot enter its
next expert all-to-all, and its peers wait for it for ever. (3) Making the send asynchronous does not help with NCCL: a
pending operation in the engine's CUDA context can hold up the default stream, where its kernels are launched. The rollout
side is a process (or several) of its own, so it can wait for training while engines generate, and what it waits for is
visible in its leg times.
"""

from megatron_router_replay.header import TraceFormat
from megatron_router_replay.routes import MicrobatchRoutes
from megatron_router_replay.transport.collect import decode_responses
from megatron_router_replay.transport.distributed import DistributedReceiver, DistributedSender
from megatron_router_replay.transport.errors import TransportError
from megatron_router_replay.transport.memory import TraceMemory
from megatron_router_replay.transport.partition import partition_samples
from megatron_router_replay.transport.plan import ParallelLayout, Part, Place, TransportPlan, plan_routes
from megatron_router_replay.transport.prefetching import prefetch, prefetch_batches
from megatron_router_replay.transport.rows import RowSource, TraceRows
from megatron_router_replay.transport.store_server import open_store
from megatron_router_replay.transport.timing import LegReport, LegTimes

__all__ = [
    "DistributedReceiver",
    "DistributedSender",
    "LegReport",
    "LegTimes",
    "MicrobatchRoutes",
    "ParallelLayout",
    "Part",
    "Place",
    "RowSource",
    "TraceFormat",
    "TraceMemory",
    "TraceRows",
    "TransportError",
    "TransportPlan",
    "decode_responses",
    "open_store",
    "partition_samples",
    "plan_routes",
    "prefetch",
    "prefetch_batches",
]
