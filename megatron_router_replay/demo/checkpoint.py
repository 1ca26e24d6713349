"""The demo's model: a tiny Qwen3-MoE of 4 layers, 3 of them with experts, with weights made of a seed.

The norms' weights are 1. Every other is one of 65,536 values, evenly spaced in [-11/32, 11/32), chosen by raw bits of numpy's
PCG64, a stream that numpy promises not to change. All of it is exact in float32, so every machine makes the bits that vLLM
served for the response in `data/`.
"""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

SEED = 1234
SCALE = 11 / 32 / 32768  # the weights' standard deviation is 0.2


def write_checkpoint(folder: str | os.PathLike[str]) -> str:
    """Write the demo's checkpoint in Hugging Face's format and return its folder. It takes 1.3 MB and has the same bits
    each time.

    Args:
        folder: where; it is made if it does not exist.

    Returns:
        The folder.
    """
    config = (files("megatron_router_replay.demo") / "data" / "config.json").read_text()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config)
    save_file(_weights(json.loads(config)), folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def _weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """Return every tensor of the model, fp32."""
    bits = np.random.PCG64(SEED)

    def draw(*shape: int) -> Tensor:
        drawn = (bits.random_raw(int(np.prod(shape))) >> np.uint64(48)).astype(np.float32)  # the upper 16 bits
        return torch.from_numpy((drawn - 32768) * np.float32(SCALE)).view(shape)

    hidden, head_dim, vocab_size = config["hidden_size"], config["head_dim"], config["vocab_size"]
    of_queries, of_keys = (config[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    weights = {"model.embed_tokens.weight": draw(vocab_size, hidden), "lm_head.weight": draw(vocab_size, hidden)}
    norms = {"model.norm": hidden}

    def draw_mlp(prefix: str, inner: int) -> None:
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            weights[f"{prefix}.{name}_proj.weight"] = draw(*shape)

    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        norms |= {f"{layer}.input_layernorm": hidden, f"{layer}.post_attention_layernorm": hidden}
        norms |= {f"{layer}.self_attn.{name}_norm": head_dim for name in "qk"}
        for name, size in (("q", of_queries), ("k", of_keys), ("v", of_keys)):
            weights[f"{layer}.self_attn.{name}_proj.weight"] = draw(size, hidden)
        weights[f"{layer}.self_attn.o_proj.weight"] = draw(hidden, of_queries)
        if i in config["mlp_only_layers"]:
            draw_mlp(f"{layer}.mlp", config["intermediate_size"])
            continue
        weights[f"{layer}.mlp.gate.weight"] = draw(config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            draw_mlp(f"{layer}.mlp.experts.{expert}", config["moe_intermediate_size"])
    return weights | {f"{name}.weight": torch.ones(size) for name, size in norms.items()}
