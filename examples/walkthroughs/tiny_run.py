"""What the walk-throughs share: a tiny MoE GPT under any parallel layout, and one batch whose rows are numbered globally."""

from typing import Any

import torch

from megatron_router_replay.testing import ParallelSizes
from tests.support.schedule import random_microbatches, run_schedule
from tests.support.tiny_gpt import build_tiny_gpt, tiny_gpt_config

MICROBATCHES, BATCH, LENGTH, LAYERS = 4, 2, 32, 6
NUM_TOKENS = MICROBATCHES * BATCH * LENGTH


def build(layout: ParallelSizes, **config: Any) -> tuple[list[Any], list[dict[str, Any]], list[int]]:
    """Return this rank's model chunks, its micro-batches, and their numbers in the batch.

    The weights and the batch are the same under every layout; data-parallel ranks take turns with the micro-batches.
    """
    from megatron.core import parallel_state

    layout.initialize()
    dense_first = [0] + [1] * (LAYERS - 1)
    chunks = build_tiny_gpt(
        tiny_gpt_config(layout, **{"num_layers": LAYERS, "moe_layer_freq": dense_first, **config}), layout
    )
    batch = random_microbatches(MICROBATCHES, batch_size=BATCH, sequence_length=LENGTH, seed=5)
    rows = torch.arange(NUM_TOKENS).view(MICROBATCHES, BATCH, LENGTH)
    for microbatch, its_rows in zip(batch, rows):
        microbatch["rows"] = its_rows
    mine = range(parallel_state.get_data_parallel_rank(), MICROBATCHES, parallel_state.get_data_parallel_world_size())
    return chunks, [batch[i] for i in mine], list(mine)


def train_step(
    layout: ParallelSizes, chunks: list[Any], microbatches: list[dict[str, Any]], session: Any = None
) -> list[float]:
    """Run forward and backward; return the losses on the last stage, nothing on the others."""

    def queue(microbatch: dict[str, Any], model: Any) -> None:
        if session is not None:
            session.microbatch(microbatch["rows"], model)

    return [float(loss) for loss in run_schedule(chunks, layout, microbatches, before_forward=queue)]


def routers_of(chunks: list[Any]) -> list[Any]:
    """Every MoE router of the chunks."""
    from megatron.core.transformer.moe.router import TopKRouter

    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
