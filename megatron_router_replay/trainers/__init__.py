"""What RL trainers hold (jagged nested tensors, padded batches, lists) -> a trace and the rows of its tokens, and back.

    routes = take_routes(batch["routed_experts"], model_chunks, tokens=batch["input_ids"])     R3: an engine's routes, or R2's
    batch["routing_rows"] = routes.rows                   one more field, laid out like the tokens, by the trainer's own code
    with mrr.replay(model_chunks, routes.trace): ...      the model was attached once (`mrr.attach`)

    batch["routing_rows"] = number_batch(batch["input_ids"])                                    R2, the first pass
    with mrr.record(model_chunks) as recording: ...
    batch["routed_experts"] = recorded_routes(recording, like=batch["input_ids"])

`pack_rows` sends rows through a packer that fills with 0. Only `trainers.verl` knows a trainer's own package.
"""

from typing import TYPE_CHECKING

from megatron_router_replay.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_router_replay.trainers.packing import pack_rows
    from megatron_router_replay.trainers.recordings import number_batch, recorded_routes
    from megatron_router_replay.trainers.take import BatchRoutes, take_routes

__all__ = ["BatchRoutes", "number_batch", "pack_rows", "recorded_routes", "take_routes"]

# Not imported at once: verl imports `trainers.verl` in all its processes, and hides what fails then.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "BatchRoutes": "take",
        "number_batch": "recordings",
        "pack_rows": "packing",
        "recorded_routes": "recordings",
        "take_routes": "take",
    },
)
