"""Load a Hugging Face Qwen3-MoE checkpoint into Megatron-Core's GPTModel, for any parallel layout.

Each rank reads only the tensors of its own parameters. A GPTModel parameter is made of these checkpoint tensors:

    linear_qkv   for each key-value head: its query heads, the key head, the value head
    linear_fc1   gate_proj, up_proj
    all else     one tensor, under a different name
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.engines import ModelRoutingInfo
from megatron_router_replay.errors import RouterReplayError
from megatron_router_replay.testing.global_parameters import load_global_parameters
from megatron_router_replay.testing.gpt import build_gpt, gpt_config
from megatron_router_replay.testing.layout import ParallelSizes

# GPTModel's names of parameters -> the checkpoint's; those of a layer without its prefix.
NAMES = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.linear_(fc1|fc2)\.weight$")


def qwen3_moe_config(checkpoint_dir: str | Path, layout: ParallelSizes, **overrides: Any) -> Any:
    """Return the TransformerConfig of a Hugging Face Qwen3-MoE checkpoint for this layout, in fp32.

    Args:
        checkpoint_dir: the folder of config.json.
        layout: parallel sizes.
        overrides: any field of TransformerConfig.

    Raises:
        RouterReplayError: a model that this conversion does not support, or an incomplete config.
    """
    hf = _read_config(checkpoint_dir)
    info = ModelRoutingInfo.from_hf_config(hf)
    fields: dict[str, Any] = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        # transformers writes no head_dim that nobody set.
        "kv_channels": hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        "ffn_hidden_size": hf["intermediate_size"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "num_moe_experts": info.num_experts,
        "moe_router_topk": info.topk,
        # Qwen3-MoE: a softmax over all experts, then the chosen ones normalised = a softmax over the chosen ones.
        "moe_router_pre_softmax": False,
        "moe_layer_freq": [int(i + 1 in info.moe_layer_numbers) for i in range(info.num_layers)],
        "layernorm_epsilon": hf["rms_norm_eps"],
    }
    return gpt_config(layout, **{**fields, **overrides})


def load_qwen3_moe(
    checkpoint_dir: str | Path,
    layout: ParallelSizes,
    *,
    core_attention: type | None = None,
    **config_overrides: Any,
) -> list[Any]:
    """Return this rank's GPTModel chunks with a Qwen3-MoE checkpoint's weights.

    The checkpoint is in Hugging Face's format. Weights become fp32.

    Args:
        checkpoint_dir: the folder of config.json and model.safetensors (or an index and its shards).
        layout: parallel sizes, initialised.
        core_attention: a class in the place of Megatron-Core's DotProductAttention, which refuses context parallelism
            and packed sequences.
        config_overrides: any field of TransformerConfig.
    """
    hf = _read_config(checkpoint_dir)
    config = qwen3_moe_config(checkpoint_dir, layout, **config_overrides)
    chunks = build_gpt(
        config,
        layout,
        vocab_size=hf["vocab_size"],
        rotary_base=hf["rope_theta"] if "rope_theta" in hf else hf["rope_parameters"]["rope_theta"],
        core_attention=core_attention,
    )
    read = _checkpoint_reader(Path(checkpoint_dir))

    def whole(name: str, shape: torch.Size) -> Tensor:
        return _megatron_parameter(name, read, num_query_groups=hf["num_key_value_heads"]).float()

    load_global_parameters(chunks, whole)
    return chunks


def _read_config(checkpoint_dir: str | Path) -> dict[str, Any]:
    path = Path(checkpoint_dir) / "config.json"
    hf: dict[str, Any] = json.loads(path.read_text())
    unknown = [
        f"{key}={hf.get(key)!r}"
        for key, supported in (
            ("model_type", ["qwen3_moe"]),
            ("tie_word_embeddings", [False]),
            ("attention_bias", [False, None]),
            ("norm_topk_prob", [True]),
            ("use_sliding_window", [False, None]),
            ("rope_scaling", [None]),
        )
        if hf.get(key) not in supported
    ]
    if (hf.get("rope_parameters") or {}).get("rope_type", "default") != "default":
        unknown.append(f"rope_parameters={hf['rope_parameters']!r}")
    if unknown:
        raise RouterReplayError(f"MRR904: cannot convert {path}: not supported: {', '.join(unknown)}.")
    return hf


def _checkpoint_reader(folder: Path) -> Callable[[str], Tensor]:
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] if index.exists() else {}

    def read(name: str) -> Tensor:
        with safe_open(folder / weight_map.get(name, "model.safetensors"), framework="pt", device="cpu") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    return read


def _megatron_parameter(name: str, read: Callable[[str], Tensor], *, num_query_groups: int) -> Tensor:
    """Return an unsplit GPTModel parameter, by global name, from checkpoint tensors."""
    if name in NAMES:
        return read(NAMES[name])
    match = LAYER.match(name)
    if match is None:
        raise RouterReplayError(f"MRR904: a Qwen3-MoE checkpoint has nothing for the parameter {name}.")
    prefix, rest = f"model.layers.{match[1]}.", match[2]
    if rest in LAYER_NAMES:
        return read(prefix + LAYER_NAMES[rest])
    if rest == "self_attention.linear_qkv.weight":
        heads = [read(f"{prefix}self_attn.{part}_proj.weight").chunk(num_query_groups) for part in "qkv"]
        return torch.cat([part[group] for group in range(num_query_groups) for part in heads])
    if rest == "mlp.linear_fc1.weight":
        return torch.cat([read(f"{prefix}mlp.gate_proj.weight"), read(f"{prefix}mlp.up_proj.weight")])
    if expert := EXPERT.match(rest):
        prefix = f"{prefix}mlp.experts.{expert[1]}."
        if expert[2] == "fc2":
            return read(f"{prefix}down_proj.weight")
        return torch.cat([read(f"{prefix}gate_proj.weight"), read(f"{prefix}up_proj.weight")])
    raise RouterReplayError(f"MRR904: a Qwen3-MoE checkpoint has nothing for the parameter {name}.")
