"""R2 in the containers of RL trainers (jagged nested tensors, padded batches, lists): rows of tokens, and what they recorded.

    batch["routing_rows"] = number_batch(batch["input_ids"])          the first pass; laid out like the tokens
    with mrr.record(model_chunks) as recording: ...                   the model was attached once (`mrr.attach`)
    batch["routed_experts"] = recorded_routes(recording, like=batch["input_ids"])

An engine's routes, and those of a recording in later passes, are stamped and fed (`mrr.stamp_batch`, `mrr.microbatch`).
`pack_rows` sends rows through a packer that fills with 0. Only `trainers.verl` knows a trainer's own package.
"""

from typing import TYPE_CHECKING

from megatron_router_replay.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_router_replay.trainers.packing import pack_rows
    from megatron_router_replay.trainers.recordings import number_batch, recorded_routes

__all__ = ["number_batch", "pack_rows", "recorded_routes"]

# Not imported at once: verl imports `trainers.verl` in all its processes, and hides what fails then.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "number_batch": "recordings",
        "pack_rows": "packing",
        "recorded_routes": "recordings",
    },
)
