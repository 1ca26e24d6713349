"""Gradients by global name, unsplit, so that parallel layouts can be compared."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.testing.global_parameters import (
    is_expert,
    is_gated,
    iterate_global_parameters,
    merge_parameter,
    split_axis,
)


def merge_by_name(results: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Unite what the ranks return by global name (as `gradients` does).

    Raises:
        ValueError: two ranks that both hold a name disagree by more than fp32 rounding.
    """
    merged: dict[str, Tensor] = {}
    for rank, result in enumerate(results):
        for name, tensor in result.items():
            if name in merged and not torch.allclose(merged[name], tensor, rtol=1e-4, atol=1e-6):
                difference = (merged[name] - tensor).abs().max().item()
                raise ValueError(f"rank {rank} and a rank before it disagree on {name} by {difference:.3g}.")
            merged.setdefault(name, tensor)
    return merged


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
        if not parameter.is_floating_point():  # a table of tokens
            continue
        # What no token reached has no gradient; its ranks must take part in the sums below all the same.
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if name in result:  # the embedding of an MTP layer in the first stage's last chunk
            gradient += result[name]
        result[name] = gradient
        sharing[name] = chunk, parameter
    if any(chunk.config.mtp_num_layers for chunk in chunks):
        _sum_shared_embedding(result)
    for name, gradient in result.items():
        chunk, parameter = sharing[name]
        if is_expert(name):
            dist.all_reduce(gradient, group=parallel_state.get_expert_data_parallel_group())
            group = expert_tp_group
        else:
            if _is_partial_over_tp(name, chunk.config):
                dist.all_reduce(gradient, group=tp_group)
            dist.all_reduce(gradient, group=dp_cp_group)
            group = tp_group
        # Megatron's schedules multiply the loss by cp_size, so the mean over data- and context-parallel ranks is right.
        gradient /= dp_cp_group.size()
        shards = [torch.empty_like(gradient) for _ in range(group.size())]
        dist.all_gather(shards, gradient.contiguous(), group=group)
        result[name] = merge_parameter(shards, split_axis(parameter), gated=is_gated(name, chunk))
    return result


def _is_partial_over_tp(name: str, config: Any) -> bool:
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
