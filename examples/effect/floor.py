"""Log-probs of a transformers model with its routers forced to given experts, without this library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from examples.grpo.rollout import Text


@torch.no_grad()
def forced_logprobs(model: Any, samples: Sequence[Text], experts: Sequence[Tensor]) -> Tensor:
    """Return the log-probs of all generated tokens, [num_generated] float32, in the order of the samples.

    Args:
        model: a Qwen3MoeForCausalLM with experts in every layer.
        samples: sequences of S tokens each.
        experts: of each sample, [S, num_layers, topk]; a row of -1 is routed by the model itself.
    """
    longest = max(len(sample.token_ids) for sample in samples)
    tokens = torch.stack([_padded(sample.token_ids, longest, 0) for sample in samples])
    wanted = torch.stack([_padded(of_sample.long(), longest, -1) for of_sample in experts])
    positions = torch.arange(longest).expand_as(tokens)
    with _forced(model, wanted.flatten(0, 1)):
        # Padding follows the tokens, where causal attention does not see it.
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    logprobs = logits[:, :-1].float().log_softmax(dim=-1).gather(2, tokens[:, 1:, None])[..., 0]
    generated = torch.stack([_padded(sample.generated, longest, False) for sample in samples])
    return logprobs[generated[:, 1:]]


@contextmanager
def _forced(model: Any, experts: Tensor) -> Iterator[None]:
    """Force the routers to experts, [num_tokens, num_layers, topk]."""
    gates = [layer.mlp.gate for layer in model.model.layers]

    def make(gate: Any, wanted: Tensor) -> Any:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
            probs = logits.float().softmax(dim=-1)
            chosen = torch.where(wanted >= 0, wanted, probs.topk(gate.top_k, dim=-1).indices)
            weights = probs.gather(1, chosen)
            return logits, (weights / weights.sum(dim=-1, keepdim=True)).to(logits.dtype), chosen

        return forward

    for index, gate in enumerate(gates):
        gate.forward = make(gate, experts[:, index])
    try:
        yield
    finally:
        for gate in gates:
            del gate.forward


def _padded(values: Tensor, length: int, fill: int | bool) -> Tensor:
    padding = values.new_full((length - len(values), *values.shape[1:]), fill)
    return torch.cat([values, padding])
