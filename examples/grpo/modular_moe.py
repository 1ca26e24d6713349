"""A small modular Mixture-of-Experts layer: router, prepare (dispatch), experts, finalize (combine), each replaceable.

Two activation formats go between prepare and experts:

- contiguous: the tokens as they are, [num_tokens, hidden], with topk_indices and topk_weights [num_tokens, topk];
- batched: [num_experts, max_tokens, hidden] with expert_num_tokens [num_experts]; the rows behind them are padding.

The experts or finalize multiply by the top-k weights and sum over topk. All of this comes after the experts are chosen, so
routes are captured at the router, whatever follows. The arithmetic does differ (order of sums,
place of roundings), which is how two engines of one model come to disagree about the routes of the next layer.

Source: vLLM 0.21, the facts of its modular kernel design; names and code are our own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

ActivationFormat = Literal["contiguous", "batched"]
ReducePlace = Literal["experts", "finalize"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchedTokens:
    """What prepare hands to the experts.

    Args:
        activations: [num_tokens, hidden], or batched [num_experts, max_tokens, hidden].
        topk_indices, topk_weights: [num_tokens, topk].
        expert_num_tokens: [num_experts] valid rows of each expert; batched only.
        slots: [num_tokens, topk] row of each (token, choice) in the batched rows, flattened; batched only.
    """

    activations: Tensor
    topk_indices: Tensor
    topk_weights: Tensor
    expert_num_tokens: Tensor | None = None
    slots: Tensor | None = None


WeightAndReduce = Callable[[Tensor, DispatchedTokens], Tensor]
"""(experts' output, tokens) -> [num_tokens, hidden]."""


def weight_and_reduce_nothing(output: Tensor, tokens: DispatchedTokens) -> Tensor:
    """Return the output of experts that have weighted and summed it themselves."""
    return output


def weight_and_reduce_contiguous(output: Tensor, tokens: DispatchedTokens) -> Tensor:
    """Return the weighted sum over topk of [num_tokens, topk, hidden]."""
    return (output * tokens.topk_weights.to(output.dtype).unsqueeze(-1)).sum(dim=1)


def weight_and_reduce_batched(output: Tensor, tokens: DispatchedTokens) -> Tensor:
    """Return the weighted sum over topk of [num_experts, max_tokens, hidden], accumulated in float32."""
    assert tokens.slots is not None
    chosen = output.flatten(0, 1)[tokens.slots].float()
    return (chosen * tokens.topk_weights.float().unsqueeze(-1)).sum(dim=1).to(output.dtype)


class PrepareFinalize(ABC):
    """The dispatch and combine side; in one process, so there is nothing to communicate.

    Args:
        topk_indices_dtype: the dtype that the dispatch needs its indices in; None: the router's.
    """

    activation_format: ActivationFormat

    def __init__(self, topk_indices_dtype: torch.dtype | None = None) -> None:
        self.topk_indices_dtype = topk_indices_dtype

    @abstractmethod
    def prepare(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_indices: Tensor, *, num_experts: int
    ) -> DispatchedTokens:
        """Return the tokens [num_tokens, hidden] in this side's activation format."""

    def finalize(self, output: Tensor, tokens: DispatchedTokens, weight_and_reduce: WeightAndReduce) -> Tensor:
        """Return [num_tokens, hidden], with what the experts left to do done."""
        return weight_and_reduce(output, tokens)


class ContiguousPrepareFinalize(PrepareFinalize):
    """Hands the tokens on as they are."""

    activation_format: ActivationFormat = "contiguous"

    def prepare(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_indices: Tensor, *, num_experts: int
    ) -> DispatchedTokens:
        return DispatchedTokens(activations=hidden_states, topk_indices=topk_indices, topk_weights=topk_weights)


class BatchedPrepareFinalize(PrepareFinalize):
    """Sorts the tokens by expert into [num_experts, max_tokens, hidden].

    Args:
        max_tokens: rows of each expert, at least as many as the busiest one gets; None: that many.
    """

    activation_format: ActivationFormat = "batched"

    def __init__(self, topk_indices_dtype: torch.dtype | None = None, max_tokens: int | None = None) -> None:
        super().__init__(topk_indices_dtype)
        self.max_tokens = max_tokens

    def prepare(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_indices: Tensor, *, num_experts: int
    ) -> DispatchedTokens:
        num_tokens, topk = topk_indices.shape
        chosen = functional.one_hot(topk_indices.long().flatten(), num_experts)
        counts = chosen.sum(dim=0)
        busiest = int(counts.max()) if num_tokens else 0
        max_tokens = busiest if self.max_tokens is None else self.max_tokens
        if busiest > max_tokens:
            raise ValueError(f"an expert gets {busiest} tokens, max_tokens={max_tokens}: dispatch fewer at once.")
        place = (chosen.cumsum(dim=0) * chosen).sum(dim=1) - 1
        slots = topk_indices.long().flatten() * max_tokens + place
        activations = hidden_states.new_zeros(num_experts * max_tokens, hidden_states.shape[1])
        activations[slots] = hidden_states.repeat_interleave(topk, dim=0)
        return DispatchedTokens(
            activations=activations.view(num_experts, max_tokens, -1),
            topk_indices=topk_indices,
            topk_weights=topk_weights,
            expert_num_tokens=counts,
            slots=slots.view(num_tokens, topk),
        )


class Experts(ABC):
    """The two projections of every expert.

    Args:
        weights: has gate_up_proj [num_experts, 2 * intermediate, hidden], down_proj [num_experts, hidden, intermediate]
            and act_fn, as the experts of most transformers models.
        reduces: whether `apply` multiplies by the top-k weights and sums over topk; else finalize does.
    """

    activation_format: ActivationFormat

    def __init__(self, weights: Any, *, reduces: bool) -> None:
        self.weights = weights
        self.reduces = reduces

    @abstractmethod
    def apply(self, tokens: DispatchedTokens) -> Tensor:
        """Return [num_tokens, hidden] if this reduces, else one row for each (token, choice) in the format's shape."""

    @property
    @abstractmethod
    def finalize_weight_and_reduce(self) -> WeightAndReduce:
        """What finalize has to do with the output of `apply`."""


class ContiguousExperts(Experts):
    """Runs one expert after the other on its own tokens."""

    activation_format: ActivationFormat = "contiguous"

    def apply(self, tokens: DispatchedTokens) -> Tensor:
        states, (num_tokens, topk) = tokens.activations, tokens.topk_indices.shape
        reduced = torch.zeros_like(states)
        each = states.new_empty(num_tokens * topk, states.shape[1])
        pairs = tokens.topk_indices.long().flatten()
        for expert in sorted(set(pairs.tolist())):
            mine = (pairs == expert).nonzero()[:, 0]
            rows = mine // topk
            gate, up = functional.linear(states[rows], self.weights.gate_up_proj[expert]).chunk(2, dim=-1)
            output = functional.linear(self.weights.act_fn(gate) * up, self.weights.down_proj[expert])
            if self.reduces:
                weights = tokens.topk_weights.flatten()[mine].unsqueeze(-1)
                reduced.index_add_(0, rows, (output * weights).to(reduced.dtype))
            else:
                each[mine] = output
        return reduced if self.reduces else each.view(num_tokens, topk, -1)

    @property
    def finalize_weight_and_reduce(self) -> WeightAndReduce:
        return weight_and_reduce_nothing if self.reduces else weight_and_reduce_contiguous


class BatchedExperts(Experts):
    """Runs all experts at once, padding included, as batched matrix products."""

    activation_format: ActivationFormat = "batched"

    def apply(self, tokens: DispatchedTokens) -> Tensor:
        gate, up = torch.bmm(tokens.activations, self.weights.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
        output = torch.bmm(self.weights.act_fn(gate) * up, self.weights.down_proj.transpose(1, 2))
        return weight_and_reduce_batched(output, tokens) if self.reduces else output

    @property
    def finalize_weight_and_reduce(self) -> WeightAndReduce:
        return weight_and_reduce_nothing if self.reduces else weight_and_reduce_batched


class ModularMoE(nn.Module):
    """A Mixture-of-Experts layer put together from its parts; takes the place of a transformers one.

    Args:
        gate: router, forward(hidden [num_tokens, hidden]) returns (logits, weights, topk_indices).
        experts: holder of the experts' parameters, see `Experts`.
        shared_experts: run on every token, or None.
        prepare_finalize, apply_experts: of the same activation format.

    Raises:
        ValueError: the formats differ.
    """

    def __init__(
        self,
        *,
        gate: nn.Module,
        experts: nn.Module,
        shared_experts: nn.Module | None,
        prepare_finalize: PrepareFinalize,
        apply_experts: Experts,
    ) -> None:
        super().__init__()
        if prepare_finalize.activation_format != apply_experts.activation_format:
            raise ValueError(
                f"prepare gives the {prepare_finalize.activation_format} format, the experts take the "
                f"{apply_experts.activation_format} one: choose two of the same."
            )
        self.gate = gate
        self.experts = experts
        self.shared_experts = shared_experts
        self.prepare_finalize = prepare_finalize
        self.apply_experts = apply_experts

    def select_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return (weights, indices) [num_tokens, topk], the indices in the dtype that the dispatch side asks for."""
        _, weights, indices = self.gate(hidden_states)
        wanted = self.prepare_finalize.topk_indices_dtype
        return weights, indices if wanted is None else indices.to(wanted)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the layer's output, [..., hidden] as its input."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        topk_weights, topk_indices = self.select_experts(rows)
        num_experts = int(self.apply_experts.weights.gate_up_proj.shape[0])
        tokens = self.prepare_finalize.prepare(rows, topk_weights, topk_indices, num_experts=num_experts)
        output = self.apply_experts.apply(tokens)
        output = self.prepare_finalize.finalize(output, tokens, self.apply_experts.finalize_weight_and_reduce)
        if self.shared_experts is not None:
            output = output + self.shared_experts(rows)
        return output.view_as(hidden_states)


def use_modular_moe(
    model: nn.Module,
    *,
    activation_format: ActivationFormat,
    reduce_in: ReducePlace = "finalize",
    topk_indices_dtype: torch.dtype | None = None,
) -> None:
    """Replace the MoE layers of a transformers model in place; parameters and their names stay the same.

    Raises:
        ValueError: the model has no MoE layer of the kind that Qwen3-MoE, Mixtral, DeepSeek-V3 and GLM4-MoE have.
    """
    found = False
    for name, block in list(model.named_modules()):
        gate: Any = getattr(block, "gate", None)
        experts: Any = getattr(block, "experts", None)
        if not hasattr(gate, "top_k") or not hasattr(experts, "gate_up_proj"):
            continue
        reduces = reduce_in == "experts"
        contiguous = activation_format == "contiguous"
        dispatch = ContiguousPrepareFinalize if contiguous else BatchedPrepareFinalize
        layer = ModularMoE(
            gate=gate,
            experts=experts,
            shared_experts=getattr(block, "shared_experts", None),
            prepare_finalize=dispatch(topk_indices_dtype),
            apply_experts=(ContiguousExperts if contiguous else BatchedExperts)(experts, reduces=reduces),
        )
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.train(block.training))
        found = True
    if not found:
        raise ValueError(f"{type(model).__name__} has no MoE layer with gate, experts.gate_up_proj and .down_proj.")
