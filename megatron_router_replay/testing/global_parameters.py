"""Parameters by global name: the same tensors for every parallel layout, split into each rank's part, and merged back.

A global name is Megatron's own parameter name with the decoder layer and expert counted over the whole model, from 0:
`decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight`. Shapes are those of an unsplit model.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.errors import RouterReplayError

_LOCAL_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def split_axis(parameter: Any) -> int | None:
    """Return the axis of a parameter that tensor parallelism splits; None if every rank has the whole.

    Source: Megatron-Core 0.16.1, tensor_parallel.layers.set_tensor_model_parallel_attributes.
    """
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def split_parameter(whole: Tensor, axis: int | None, *, tp_rank: int, tp_size: int, gated: bool = False) -> Tensor:
    """Return one tensor-parallel rank's part of a parameter.

    Args:
        whole: the unsplit parameter. linear_fc1 is [gate; up], linear_qkv is by query group [q..., k, v].
        axis: of `split_axis`.
        tp_rank, tp_size: the place in the tensor-parallel group, or for an expert's parameter in the expert one.
        gated: of `is_gated`: each rank has a part of both projections.

    Source: Megatron-Core 0.16.1, mlp.MLP.sharded_state_dict, attention.SelfAttention.get_query_key_value_tensors.
    """
    if axis is None:
        return whole
    blocks = whole.chunk(2, dim=axis) if gated else (whole,)
    return torch.cat([block.chunk(tp_size, dim=axis)[tp_rank] for block in blocks], dim=axis)


def merge_parameter(shards: Sequence[Tensor], axis: int | None, *, gated: bool = False) -> Tensor:
    """Return the unsplit parameter from the shards of all tensor-parallel ranks: the inverse of split_parameter."""
    if axis is None:
        return shards[0]
    blocks = [shard.chunk(2, dim=axis) if gated else (shard,) for shard in shards]
    return torch.cat([part for of_block in zip(*blocks) for part in of_block], dim=axis)


def is_gated(name: str, chunk: Any) -> bool:
    """Return if a parameter of this name in this chunk is gate and up projections in one tensor."""
    return bool(chunk.config.gated_linear_unit) and ".linear_fc1." in name


def is_expert(name: str) -> bool:
    """Return if the parameter belongs to one routed expert."""
    return ".local_experts." in name


def iterate_global_parameters(chunks: Iterable[Any]) -> Iterable[tuple[str, Any, torch.nn.Parameter]]:
    """Yield (global name, chunk, parameter) for every parameter of this rank's chunks."""
    for chunk in chunks:
        for local_name, parameter in chunk.named_parameters():
            yield _global_name(chunk, local_name), chunk, parameter


def load_global_parameters(chunks: Iterable[Any], whole: Callable[[str, torch.Size], Tensor]) -> None:
    """Fill this rank's chunks with their parts of global parameters.

    Args:
        chunks: this rank's model chunks.
        whole: `whole(global_name, unsplit_shape)` returns the unsplit parameter.

    Raises:
        RouterReplayError: a parameter of another shape.
    """
    with torch.no_grad():
        for name, chunk, parameter in iterate_global_parameters(chunks):
            tp_rank, tp_size = _tensor_parallel_place(name)
            axis, shape = split_axis(parameter), list(parameter.shape)
            if axis is not None:
                shape[axis] *= tp_size
            tensor = whole(name, torch.Size(shape))
            if tensor.shape != torch.Size(shape):
                raise RouterReplayError(
                    f"MRR904: cannot load {name}: the model wants shape {shape}, the source has {list(tensor.shape)}. "
                    "The config does not fit the checkpoint."
                )
            gated = is_gated(name, chunk)
            parameter.copy_(split_parameter(tensor, axis, tp_rank=tp_rank, tp_size=tp_size, gated=gated))


def _global_name(chunk: Any, local_name: str) -> str:
    """Return the layout-independent name of a parameter of this chunk."""
    from megatron.core import parallel_state

    if match := _LOCAL_LAYER.match(local_name):
        layer_index = chunk.decoder.layers[int(match[1])].layer_number - 1
        local_name = f"decoder.layers.{layer_index}.{local_name[match.end() :]}"
    if match := _LOCAL_EXPERT.search(local_name):
        num_local_experts = chunk.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        expert = parallel_state.get_expert_model_parallel_rank() * num_local_experts + int(match[1])
        local_name = f"{local_name[: match.start()]}.local_experts.{expert}.{local_name[match.end() :]}"
    return local_name


def _tensor_parallel_place(name: str) -> tuple[int, int]:
    """Return (rank, size) of the tensor-parallel group that splits this parameter."""
    from megatron.core import parallel_state

    if is_expert(name):
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
