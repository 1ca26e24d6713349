"""Run Megatron's own pipeline schedules over dict micro-batches."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.testing.layout import ParallelSizes

Microbatch = dict[str, Any]
ForwardStep = Callable[[Iterator[Microbatch], Any], tuple[Tensor, Callable[..., Any]]]


def random_microbatches(
    num_microbatches: int,
    *,
    batch_size: int = 1,
    sequence_length: int = 16,
    vocab_size: int = 320,
    seed: int = 0,
) -> list[Microbatch]:
    """Return micro-batches of random tokens. Each has tokens, labels (the next token), loss_mask and position_ids, [b, s]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_microbatches, batch_size, sequence_length + 1)
    tokens = torch.randint(vocab_size, shape, generator=generator)
    positions = torch.arange(sequence_length).expand(batch_size, -1)
    return [
        {
            "tokens": row[:, :-1].contiguous(),
            "labels": row[:, 1:].contiguous(),
            "loss_mask": torch.ones(batch_size, sequence_length),
            "position_ids": positions.contiguous(),
        }
        for row in tokens
    ]


def run_schedule(
    chunks: Sequence[Any],
    layout: ParallelSizes,
    microbatches: Sequence[Microbatch],
    *,
    forward_only: bool = False,
    forward_step: ForwardStep | None = None,
    before_forward: Callable[[Microbatch, Any], None] | None = None,
) -> list[Any]:
    """Run Megatron's schedule for this layout over the micro-batches. Gradients start from zero.

    Args:
        chunks: this rank's model chunks.
        layout: parallel sizes; chooses no, 1F1B or interleaved pipelining through Megatron's parallel state.
        microbatches: the same list on every pipeline stage and tensor-parallel rank, already this rank's under context
            parallelism; all of one shape.
        forward_only: no backward.
        forward_step: Megatron's `forward_step(data_iterator, model) -> (output, loss_func)` in place of ours.
        before_forward: called as `before_forward(microbatch, model)` on every stage, for every micro-batch of every
            chunk, right before the model's forward. Not called by a forward_step of your own.

    Returns:
        On the last stage one loss per micro-batch, in order (the mean over tokens with loss_mask 1, over all
        context-parallel ranks), or what the given forward_step's loss_func returned last; empty on other stages.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in chunks:
        chunk.zero_grad(set_to_none=True)
    sequence_length = microbatches[0]["tokens"].shape[1] * layout.cp_size
    iterators = [iter(microbatches) for _ in chunks]
    with torch.set_grad_enabled(not forward_only):
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step or partial(default_forward_step, before_forward=before_forward),
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(microbatches),
            seq_length=sequence_length,
            micro_batch_size=microbatches[0]["tokens"].shape[0],
            decoder_seq_length=sequence_length,
            forward_only=forward_only,
        )
    return list(outputs)


def default_forward_step(
    data_iterator: Iterator[Microbatch],
    model: Any,
    before_forward: Callable[[Microbatch, Any], None] | None = None,
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Take the next micro-batch, call the hook, call the model: the forward step that Megatron's schedules ask for."""
    microbatch = next(data_iterator)
    if before_forward is not None:
        before_forward(microbatch, model)
    output = model(
        input_ids=microbatch["tokens"],
        position_ids=microbatch["position_ids"],
        attention_mask=microbatch.get("attention_mask"),
        labels=microbatch["labels"],
        loss_mask=microbatch["loss_mask"],
        packed_seq_params=microbatch.get("packed_seq_params"),
    )
    return output, partial(masked_mean_loss, microbatch["loss_mask"])


def masked_mean_loss(loss_mask: Tensor, token_losses: Tensor) -> tuple[Tensor, Tensor]:
    """Return (this rank's part of the mean loss, the mean over all context-parallel ranks, detached)."""
    from megatron.core import parallel_state

    num_tokens = loss_mask.sum()
    group = parallel_state.get_context_parallel_group()
    dist.all_reduce(num_tokens, group=group)
    loss = (token_losses * loss_mask).sum() / num_tokens
    reported = loss.detach().clone()
    dist.all_reduce(reported, group=group)
    return loss, reported
