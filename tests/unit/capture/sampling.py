"""Tiny random transformers MoE models, a batched sampling loop with a KV cache, and a recompute of its sequences."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from megatron_router_replay import RoutingTrace, engines
from megatron_router_replay.capture import Capturer, token_positions


def tiny(config, layer_numbers, num_experts, /, **sizes) -> tuple[Any, tuple[int, ...], int]:
    """Return (config, MoE layer numbers, num_experts) of a model that takes milliseconds."""
    common = {"vocab_size": 320, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    common |= {"max_position_embeddings": 512, "initializer_range": 0.2, "num_experts_per_tok": 2}
    return config(**(common | sizes)), layer_numbers, num_experts


QWEN3 = {"moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [1]}
GROUPED = {"intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 4, "first_k_dense_replace": 1}
GROUPED |= {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.0}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
FOUR = {"head_dim": 32, "intermediate_size": 64, "num_local_experts": 4}
MODELS = {
    "qwen3_moe": tiny(
        transformers.Qwen3MoeConfig, (1, 3, 4), 8,
        head_dim=32, intermediate_size=128, num_hidden_layers=4, num_experts=8, **QWEN3,
    ),
    "mixtral": tiny(transformers.MixtralConfig, (1, 2, 3), 4, num_hidden_layers=3, **FOUR),
    "deepseek_v3": tiny(transformers.DeepseekV3Config, (2, 3, 4), 8, num_key_value_heads=4, **GROUPED, **LATENT),
    "glm4_moe": tiny(
        transformers.Glm4MoeConfig, (2, 3, 4), 8, head_dim=32, norm_topk_prob=True, use_qk_norm=True, **GROUPED
    ),
    "gpt_oss": tiny(transformers.GptOssConfig, (1, 2), 4, num_hidden_layers=2, sliding_window=128, **FOUR),
}  # fmt: skip


def build_model(name: str, dtype: torch.dtype = torch.float32, **fields: Any) -> nn.Module:
    transformers.set_seed(1234)
    config = copy.deepcopy(MODELS[name][0])
    config.update(fields)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.data.normal_(0, 0.01)
    return model


def pad(prompts: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
    """Return (input_ids, attention_mask) [batch, longest prompt]."""
    longest = max(map(len, prompts))
    ids, mask = torch.zeros(2, len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        where = slice(longest - len(prompt), longest) if side == "left" else slice(0, len(prompt))
        ids[row, where], mask[row, where] = torch.tensor(prompt), 1
    return ids, mask


@torch.no_grad()
def sample(
    model: nn.Module, prompts: list[list[int]], lengths: list[int], capturer: Capturer, *, side: str = "left"
) -> tuple[list[list[int]], dict[int, RoutingTrace | None]]:
    """Sample lengths[i] >= 1 tokens after prompts[i]; finished rows stay in the batch. Return sequences and routes."""
    generator = torch.Generator().manual_seed(0)
    ids, mask = pad(prompts, side)
    for row, prompt in enumerate(prompts):
        capturer.add_request(row, num_prompt_tokens=len(prompt))
    positions = token_positions(mask)
    position_ids = torch.from_numpy(positions).clamp(min=0)
    batch: list[int | None] = list(range(len(prompts)))
    with capturer.forward(batch, positions):
        output = model(input_ids=ids, attention_mask=mask, position_ids=position_ids, use_cache=True)
    logits = output.logits[torch.arange(len(prompts)), torch.from_numpy(positions.argmax(axis=1))]
    sequences = [list(prompt) for prompt in prompts]
    traces: dict[int, RoutingTrace | None] = {}
    while True:
        tokens = torch.softmax(logits.float(), dim=-1).multinomial(1, generator=generator)
        step = [len(sequence) for sequence in sequences]
        for row in [row for row in batch if row is not None]:
            sequences[row].append(int(tokens[row]))
            if len(sequences[row]) == len(prompts[row]) + lengths[row]:
                traces[row] = capturer.finish(row, sequences[row])
                batch[row] = None
        if not any(row is not None for row in batch):
            return sequences, traces
        mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=mask.dtype)], dim=1)
        with capturer.forward(batch, step):
            output = model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=torch.tensor(step)[:, None],
                past_key_values=output.past_key_values,
                use_cache=True,
            )
        logits = output.logits[:, -1]


@torch.no_grad()
def recompute(model: nn.Module, sequence: list[int]) -> RoutingTrace:
    """Return the routes of a forward over the whole sequence, read by hooks that are not the package's."""
    seen: dict[int, Any] = {}
    handles = []
    for name, module in model.named_modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            number = int(name.split("layers.")[1].split(".")[0]) + 1
            handles.append(
                module.register_forward_hook(lambda _, args, output, number=number: seen.__setitem__(number, output))
            )
    model(torch.tensor([sequence]))
    for handle in handles:
        handle.remove()
    numbers, axes = sorted(seen), ("token", "layer", "expert")
    indices = torch.stack([seen[number][2] for number in numbers], dim=1)  # of (logits, scores, indices)
    given = {"model": model.config, "axes": axes, "layer_numbers": numbers, "token_ids": sequence}
    return engines.array.decode(indices, **given, last_token_routed=True)


def experts_of(trace: RoutingTrace) -> Tensor:
    """Return the experts of every (token, layer) as sets: sorted, without the last token."""
    return trace.topk_indices[:-1].sort(dim=-1)[0]
