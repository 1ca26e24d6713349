"""Score modes, inputs and a float64 formula that shares nothing with the code under test."""

import torch
from torch import Tensor

MODES: dict[str, dict] = {
    "softmax": {},
    "softmax-scaled": {"scaling_factor": 2.5},
    "pre-softmax": {"use_pre_softmax": True},
    "pre-softmax-scaled": {"use_pre_softmax": True, "scaling_factor": 0.3},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid-scaled": {"score_function": "sigmoid", "scaling_factor": 2.5},
}
SHAPES = {
    "x".join(map(str, shape)): shape for shape in [(64, 32, 4), (33, 60, 6), (24, 512, 10), (50, 16, 1), (9, 8, 8)]
}


def inputs(num_tokens: int, num_experts: int, topk: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, the indices of random distinct experts (a strided view in a compact dtype) and weights of a loss."""
    generator = torch.Generator().manual_seed(num_tokens)
    logits = (3 * torch.randn(num_tokens, num_experts, generator=generator)).to(dtype)
    routes = torch.rand(num_tokens, 3, num_experts, generator=generator).argsort(dim=2)[:, :, :topk]
    routes = routes.to(torch.uint8 if num_experts <= 256 else torch.int16)
    weights = torch.randn(num_tokens, num_experts, generator=generator).to(dtype)
    return logits, routes[:, 1], weights


def outcome(function, logits: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities, map and the gradient of (probabilities * weights).sum()."""
    leaf = logits.clone().requires_grad_()
    probs, routing_map = function(leaf)
    (probs * weights).sum().backward()
    assert leaf.grad is not None
    return probs.detach(), routing_map, leaf.grad


def formula(logits: Tensor, topk_indices: Tensor, mode: dict) -> tuple[Tensor, Tensor]:
    """The probabilities by definition, float64, and the map."""
    routing_map = (topk_indices.long()[:, :, None] == torch.arange(logits.shape[1])).any(dim=1)
    logits = logits.double()
    if mode.get("score_function") == "sigmoid":
        scores = 1 / (1 + torch.exp(-logits))
        norm = (scores * routing_map).sum(dim=1, keepdim=True) if topk_indices.shape[1] > 1 else 1
    else:
        scores = torch.exp(logits)
        among = torch.ones_like(routing_map) if mode.get("use_pre_softmax") else routing_map
        norm = (scores * among).sum(dim=1, keepdim=True)
    return scores * routing_map / norm * (mode.get("scaling_factor") or 1), routing_map


def largest_error(actual: tuple[Tensor, Tensor, Tensor], expected: tuple[Tensor, Tensor, Tensor]) -> float:
    """Largest difference of probabilities and gradients; infinite if the maps differ."""
    if not torch.equal(actual[1], expected[1]):
        return float("inf")
    return max(float((actual[i].double() - expected[i].double()).abs().max()) for i in (0, 2))
