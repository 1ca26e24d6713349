"""Parameters by global name: the same tensors for every parallel layout, split into each rank's part, and merged back.

A global name is Megatron's own parameter name with the decoder layer and expert counted over the whole model, from 0:
`decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight`. Shapes are those of an unsplit model.
"""

import math
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.errors import RouterReplayError

# Which axis tensor parallelism splits; names that match none are whole on every rank.
_SPLIT_AXIS = (
    (re.compile(r"(word_embeddings|output_layer|linear_qkv|linear_fc1|eh_proj)\.weight$"), 0),
    (re.compile(r"(linear_qkv|linear_fc1)\.bias$"), 0),
    (re.compile(r"(linear_proj|linear_fc2)\.weight$"), 1),
)
_WHOLE = re.compile(r"(norm\.(weight|bias)|router\.(weight|bias)|gate_weight|(linear_proj|linear_fc2)\.bias)$")
_LOCAL_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def split_parameter(name: str, whole: Tensor, *, tp_rank: int, tp_size: int, gated: bool = True) -> Tensor:
    """Return one tensor-parallel rank's part of a parameter.

    Args:
        name: global or local parameter name; decides the axis.
        whole: the unsplit parameter. linear_fc1 is [gate; up], linear_qkv is by query group [q..., k, v].
        tp_rank, tp_size: the place in the tensor-parallel group, or for an expert's parameter in the expert one.
        gated: linear_fc1 is gate and up projections (gated_linear_unit), and each rank has a part of both.

    Source: Megatron-Core 0.16.1, mlp.MLP.sharded_state_dict, attention.SelfAttention.get_query_key_value_tensors.
    """
    axis = _split_axis(name)
    if axis is None or tp_size == 1:
        return whole
    blocks = whole.chunk(2, dim=axis) if _is_gated(name, gated=gated) else (whole,)
    return torch.cat([block.chunk(tp_size, dim=axis)[tp_rank] for block in blocks], dim=axis)


def merge_parameter(name: str, shards: Sequence[Tensor], *, gated: bool = True) -> Tensor:
    """Return the unsplit parameter from the shards of all tensor-parallel ranks: the inverse of split_parameter."""
    axis = _split_axis(name)
    if axis is None or len(shards) == 1:
        return shards[0]
    if not _is_gated(name, gated=gated):
        return torch.cat(list(shards), dim=axis)
    halves = [shard.chunk(2, dim=axis) for shard in shards]
    return torch.cat([half[block] for block in (0, 1) for half in halves], dim=axis)


def iterate_global_parameters(chunks: Iterable[Any]) -> Iterable[tuple[str, Any, torch.nn.Parameter]]:
    """Yield (global name, chunk, parameter) for every parameter of this rank's chunks."""
    for chunk in chunks:
        for local_name, parameter in chunk.named_parameters():
            yield global_name(chunk, local_name), chunk, parameter


def global_name(chunk: Any, local_name: str) -> str:
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


def is_expert(name: str) -> bool:
    """Return if the parameter belongs to one routed expert."""
    return ".local_experts." in name


def load_global_parameters(chunks: Iterable[Any], whole: Callable[[str, torch.Size], Tensor]) -> None:
    """Fill this rank's chunks with their parts of global parameters.

    Args:
        chunks: this rank's model chunks.
        whole: `whole(global_name, unsplit_shape)` returns the unsplit parameter.

    Raises:
        RouterReplayError: a parameter that this module cannot split, or one of another shape.
    """
    with torch.no_grad():
        for name, chunk, parameter in iterate_global_parameters(chunks):
            tp_rank, tp_size = tensor_parallel_place(name)
            shape = list(parameter.shape)
            axis = _split_axis(name)
            if axis is not None:
                shape[axis] *= tp_size
            tensor = whole(name, torch.Size(shape))
            if tensor.shape != torch.Size(shape):
                raise RouterReplayError(
                    f"MRR904: cannot load {name}: the model wants shape {shape}, the source has {list(tensor.shape)}. "
                    "The config does not fit the checkpoint."
                )
            gated = chunk.config.gated_linear_unit
            parameter.copy_(split_parameter(name, tensor, tp_rank=tp_rank, tp_size=tp_size, gated=gated))


def tensor_parallel_place(name: str) -> tuple[int, int]:
    """Return (rank, size) of the tensor-parallel group that splits this parameter."""
    from megatron.core import parallel_state

    if is_expert(name):
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def random_parameter(name: str, shape: torch.Size, *, seed: int) -> Tensor:
    """Return a parameter drawn from its global name and the seed alone.

    Norm weights lie near one and biases near zero; of matrices, rows have length one on average, so that activations
    keep their size.
    """
    # By name, not in the order of construction: another layout builds its chunks in another order.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1.0 + 0.1 * noise
    if len(shape) == 1:
        return 0.02 * noise
    fan_in: int = 1 if "word_embeddings" in name else shape[-1]
    return noise * (1.0 / math.sqrt(fan_in))


def _split_axis(name: str) -> int | None:
    for pattern, axis in _SPLIT_AXIS:
        if pattern.search(name):
            return axis
    if _WHOLE.search(name):
        return None
    raise RouterReplayError(
        f"MRR904: unknown how tensor parallelism splits {name}: it is none of the parameters of a tiny GPT. "
        "Add it to _SPLIT_AXIS or _WHOLE."
    )


def _is_gated(name: str, *, gated: bool) -> bool:
    return gated and ".linear_fc1." in name
