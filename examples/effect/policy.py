"""The policy: the Qwen3-MoE of examples/grpo with more experts, and the weights that its engine gets.

Engine and trainer of a model of 48 MoE layers disagree on about 10 % of the decisions, and send nearly every token elsewhere
in some layer. Four layers reach neither, and one flip among them changes little, unless decisions are closer and weigh more.
So there are 64 experts, and what they add to the hidden state starts three times as large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from examples.grpo.weights import CONFIG, hf_tensors, random_hf_weights
from megatron_router_replay.testing.global_parameters import iterate_global_parameters

POLICY: dict[str, Any] = CONFIG | {"num_experts": 64, "num_experts_per_tok": 2, "mlp_only_layers": []}
"""Four MoE layers of 64 experts, top-2."""

EXPERT_SCALE = 3.0


def initial_weights(seed: int) -> dict[str, Tensor]:
    """Return the random weights that a run starts from, by Hugging Face names."""
    weights = random_hf_weights(seed, POLICY)
    return {name: weight * EXPERT_SCALE if "down_proj" in name else weight for name, weight in weights.items()}


def current_weights(models: Sequence[Any]) -> dict[str, Tensor]:
    """Return copies of an undivided model's parameters by Hugging Face names."""
    parameters = [(name, parameter.detach()) for name, _, parameter in iterate_global_parameters(models)]
    return {name: part.clone() for of, whole in parameters for name, part in hf_tensors(of, whole, POLICY)}


def int8_rounded(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights as an engine with int8 weights has them: the matrices of attention and experts, a scale a row.

    Routers, embeddings, norms and the output layer stay as they are, as engines leave them.

    Args:
        weights: by Hugging Face names, fp32.
    """
    return {name: _rounded(weight) if "_proj." in name else weight for name, weight in weights.items()}


def _rounded(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / scale).round() * scale
