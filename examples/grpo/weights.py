"""Megatron-Core's GPTModel <-> a Hugging Face Qwen3-MoE checkpoint: the start of a run, and the engine's next weights."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from examples.grpo.task import VOCAB_SIZE
from megatron_router_replay.testing.global_parameters import (
    is_expert,
    is_gated,
    iterate_global_parameters,
    merge_parameter,
    split_axis,
)
from megatron_router_replay.testing.qwen3_moe import EXPERT, LAYER, LAYER_NAMES, NAMES

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
"""The tiny policy: four layers, the second one dense, eight experts and top-2 in the others."""


def gather_hf_weights(chunks: Sequence[Any], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the whole model by Hugging Face names on rank 0, an empty dict elsewhere; every rank calls it.

    Args:
        chunks: this rank's unwrapped GPTModel chunks, under any parallel layout.
        config: of the checkpoint.
    """
    from megatron.core import parallel_state

    tp_group = parallel_state.get_tensor_model_parallel_group()
    expert_tp_group = parallel_state.get_expert_tensor_parallel_group()
    mine: dict[str, Tensor] = {}
    for name, chunk, parameter in iterate_global_parameters(chunks):
        group = expert_tp_group if is_expert(name) else tp_group
        shards = [torch.empty_like(parameter) for _ in range(group.size())]
        dist.all_gather(shards, parameter.detach().contiguous(), group=group)
        whole = merge_parameter(shards, split_axis(parameter), gated=is_gated(name, chunk))
        mine.update((hf_name, tensor.cpu().clone()) for hf_name, tensor in hf_tensors(name, whole, config))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, ranks if dist.get_rank() == 0 else None)
    return {name: tensor for rank in ranks if rank is not None for name, tensor in rank.items()}


def hf_tensors(name: str, whole: Tensor, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint tensors (name, values) of one unsplit GPTModel parameter.

    The inverse of `megatron_router_replay.testing.load_qwen3_moe`, where one parameter is made of these tensors.
    """
    match = LAYER.match(name)
    if match is None:
        yield NAMES[name], whole
        return
    prefix, rest = f"model.layers.{match[1]}.", match[2]
    if rest in LAYER_NAMES:
        yield prefix + LAYER_NAMES[rest], whole
    elif rest == "self_attention.linear_qkv.weight":
        groups, head = config["num_key_value_heads"], config["head_dim"]
        heads_per_group = config["num_attention_heads"] // groups
        parts = [group.split([heads_per_group * head, head, head]) for group in whole.chunk(groups)]
        for part, of_groups in zip("qkv", zip(*parts)):
            yield f"{prefix}self_attn.{part}_proj.weight", torch.cat(of_groups)
    elif rest == "mlp.linear_fc1.weight":
        for part, tensor in zip(("gate", "up"), whole.chunk(2)):
            yield f"{prefix}mlp.{part}_proj.weight", tensor
    elif expert := EXPERT.match(rest):
        prefix = f"{prefix}mlp.experts.{expert[1]}."
        parts_of = {"fc1": ("gate", "up"), "fc2": ("down",)}[expert[2]]
        for part, tensor in zip(parts_of, whole.chunk(len(parts_of))):
            yield f"{prefix}{part}_proj.weight", tensor
    else:
        raise KeyError(f"a Qwen3-MoE checkpoint has nothing for the parameter {name}.")


def save_hf_checkpoint(folder: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any] = CONFIG) -> None:
    """Write config.json and model.safetensors; whoever reads meanwhile gets the old file or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, folder / "new.safetensors", {"format": "pt"}
    )
    (folder / "new.safetensors").replace(folder / "model.safetensors")


def random_hf_weights(seed: int, config: Mapping[str, Any] = CONFIG) -> dict[str, Tensor]:
    """Return the random weights that a run starts from; each depends on the seed and its name only."""
    return {name: _draw(f"{seed}:{name}", shape) for name, shape in _shapes(config)}


def _shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    vocab, hidden, head = config["vocab_size"], config["hidden_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "lm_head.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "self_attn.q_norm.weight", (head,)
        yield prefix + "self_attn.k_norm.weight", (head,)
        yield prefix + "self_attn.q_proj.weight", (heads * head, hidden)
        yield prefix + "self_attn.k_proj.weight", (groups * head, hidden)
        yield prefix + "self_attn.v_proj.weight", (groups * head, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, heads * head)
        mlps = {prefix + "mlp.": config["intermediate_size"]}
        if layer not in config["mlp_only_layers"]:
            yield prefix + "mlp.gate.weight", (config["num_experts"], hidden)
            experts = range(config["num_experts"])
            mlps = {f"{prefix}mlp.experts.{expert}.": config["moe_intermediate_size"] for expert in experts}
        for mlp, intermediate in mlps.items():
            yield mlp + "gate_proj.weight", (intermediate, hidden)
            yield mlp + "up_proj.weight", (intermediate, hidden)
            yield mlp + "down_proj.weight", (hidden, intermediate)


def _draw(name: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    fan_in = 1 if "embed_tokens" in name else shape[-1]
    return torch.randn(shape, generator=generator) / math.sqrt(fan_in)
