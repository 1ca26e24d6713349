"""Run Megatron's own pipeline schedules over dict micro-batches, and compare what they leave: losses and gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.testing.attention import cu_seqlens_in_memory, row_positions
from megatron_router_replay.testing.global_parameters import (
    is_expert,
    iterate_global_parameters,
    merge_parameter,
)
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
    """Return micro-batches of random tokens: tokens, labels (the next token), loss_mask and position_ids, [b, s]."""
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


def split_microbatch(microbatch: Mapping[str, Any], *, cp_rank: int, cp_size: int) -> Microbatch:
    """Return this context-parallel rank's zigzag part of every [b, s] tensor; the rest unchanged.

    With packed_seq_params (b = 1) every packed sequence is split by itself. Without, the result equals Megatron's
    get_batch_on_this_cp_rank; a test compares them.
    """
    cu_seqlens = cu_seqlens_in_memory(microbatch.get("packed_seq_params"))
    length = microbatch["tokens"].shape[1]
    sequences, positions = row_positions(length, cp_rank=cp_rank, cp_size=cp_size, cu_seqlens=cu_seqlens)
    rows = positions if cu_seqlens is None else cu_seqlens[sequences] + positions
    return {
        key: value[:, rows] if isinstance(value, Tensor) and value.shape[1:2] == (length,) else value
        for key, value in microbatch.items()
    }


def pack_microbatch(sequences: Sequence[Tensor], *, pad_to_multiple: int = 1) -> Microbatch:
    """Return one packed (THD) micro-batch of token sequences [s + 1] each: s tokens and their next tokens.

    Args:
        sequences: token ids; the last of each is a label only.
        pad_to_multiple: each sequence is padded to a multiple of this; padding has loss_mask 0. It must be
            2 * cp_size under context parallelism, times tp_size under sequence parallelism.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    tokens, labels, loss_mask, position_ids, starts = [], [], [], [], [0]
    for sequence in sequences:
        length = sequence.numel() - 1
        padding = -length % pad_to_multiple
        tokens.append(torch.nn.functional.pad(sequence[:-1], (0, padding)))
        labels.append(torch.nn.functional.pad(sequence[1:], (0, padding)))
        loss_mask.append(torch.nn.functional.pad(torch.ones(length), (0, padding)))
        position_ids.append(torch.arange(length + padding))
        starts.append(starts[-1] + length + padding)
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    return {
        "tokens": torch.cat(tokens)[None],
        "labels": torch.cat(labels)[None],
        "loss_mask": torch.cat(loss_mask)[None],
        "position_ids": torch.cat(position_ids)[None],
        "packed_seq_params": PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
    }


def run_schedule(
    chunks: Sequence[Any],
    layout: ParallelSizes,
    microbatches: Sequence[Microbatch],
    *,
    forward_only: bool = False,
    forward_step: ForwardStep | None = None,
    before_forward: Callable[[Microbatch, Any], None] | None = None,
) -> list[Any]:
    """Run Megatron's schedule for this layout over the micro-batches, with gradients from zero.

    Args:
        chunks: this rank's model chunks.
        layout: parallel sizes; chooses no, 1F1B or interleaved pipelining through Megatron's parallel state.
        microbatches: the same list on every pipeline stage and tensor-parallel rank, already this rank's under context
            parallelism (`split_microbatch`); all of one shape.
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


def gradients(chunks: Sequence[Any]) -> dict[str, Tensor]:
    """Return the gradients of this rank's parameters by global name, unsplit, as one process would have them.

    Reduced as Megatron's finalize_model_grads does: summed over tensor-parallel ranks for parameters that each rank
    used on its part of the sequence or heads, over the stages that share an embedding, averaged over data-parallel
    and summed over context-parallel ranks. Then tensor-parallel shards are merged. Every rank calls it; the model's own
    .grad stays as it is. A rank returns its own layers and experts: `merge_by_name` unites the ranks.
    """
    from megatron.core import parallel_state

    tp_group = parallel_state.get_tensor_model_parallel_group()
    expert_tp_group = parallel_state.get_expert_tensor_parallel_group()
    dp_cp_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    result: dict[str, Tensor] = {}
    sharing = {}
    for name, chunk, parameter in iterate_global_parameters(chunks):
        # What no token reached has no gradient; its ranks must take part in the sums below all the same.
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if name in result:  # the embedding of an MTP layer in the first stage's last chunk
            gradient += result[name]
        result[name] = gradient
        sharing[name] = chunk
    if any(chunk.config.mtp_num_layers for chunk in chunks):
        _sum_shared_embedding(result)
    for name, gradient in result.items():
        config = sharing[name].config
        if is_expert(name):
            dist.all_reduce(gradient, group=parallel_state.get_expert_data_parallel_group())
            group = expert_tp_group
        else:
            if _is_partial_over_tp(name, sharing[name], config):
                dist.all_reduce(gradient, group=tp_group)
            dist.all_reduce(gradient, group=dp_cp_group)
            group = tp_group
        # Megatron's schedules multiply the loss by cp_size, so the mean over data- and context-parallel ranks is right.
        gradient /= dp_cp_group.size()
        shards = [torch.empty_like(gradient) for _ in range(group.size())]
        dist.all_gather(shards, gradient.contiguous(), group=group)
        result[name] = merge_parameter(name, shards, gated=config.gated_linear_unit)
    return result


def _is_partial_over_tp(name: str, chunk: Any, config: Any) -> bool:
    """Tell whether each tensor-parallel rank has only its own tokens' or heads' part of a replicated gradient."""
    if "q_layernorm" in name or "k_layernorm" in name:
        return True
    replicated = "norm." in name or "router." in name or "gate_weight" in name
    return bool(config.sequence_parallel) and replicated


def _sum_shared_embedding(result: dict[str, Tensor]) -> None:
    """Sum the embedding's gradient over the first stage and the one with the MTP layers."""
    from megatron.core import parallel_state

    group = parallel_state.get_embedding_group(check_initialized=False)
    name = "embedding.word_embeddings.weight"
    if group is None or dist.get_rank() not in dist.get_process_group_ranks(group) or group.size() == 1:
        return
    if name in result:
        dist.all_reduce(result[name], group=group)
