"""A small model, what may be changed in it, and the recording of its routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.testing.global_parameters import load_global_parameters
from megatron_router_replay.testing.gpt import build_gpt
from tests.support.tiny_gpt import random_parameter, tiny_gpt_config

LENGTHS = (70, 96, 60, 41, 55, 62, 88, 33, 77, 50, 66, 42)
SIZES: dict[str, Any] = {"num_layers": 6, "num_moe_experts": 32, "moe_router_topk": 4}
BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
Samples = Sequence[Tensor]
Change = Callable[[Any], None]


def random_samples(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Tensor]:
    """Return the token ids of each sample, [length] int64. Few tokens are frequent, as in text."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1.0 / torch.arange(3, 323)
    return [torch.multinomial(weights, length, replacement=True, generator=generator) for length in lengths]


def record_routes(
    samples: Samples,
    change: Change | None = None,
    *,
    bf16: bool = False,
    rope_base: int = 10000,
    seed: int = 1234,
    **config: Any,
) -> mrr.RoutingTrace:
    """Record the forwards of a model.

    Args:
        samples: token ids of each, in the order of the trace.
        change: changes the model before it runs.
        bf16: weights and activations in bf16; routers compute in fp32 as before.
        config: fields of TransformerConfig.
    """
    from megatron.core import parallel_state

    layout = ParallelSizes()
    if not parallel_state.is_initialized():
        layout.initialize()
    torch.manual_seed(0)
    precision = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True} if bf16 else {}
    options = {**SIZES, **precision, **config}
    (model,) = build_gpt(tiny_gpt_config(layout, **options), layout, vocab_size=320, rotary_base=rope_base)
    load_global_parameters([model], lambda name, shape: random_parameter(name, shape, seed=seed))
    with torch.no_grad():
        if change is not None:
            change(model)
        with mrr.record([model], padding_token_ids=[]) as recording:
            for ids in samples:
                positions = torch.arange(len(ids)).unsqueeze(0)
                model(input_ids=ids.unsqueeze(0), position_ids=positions, attention_mask=None)
    return recording.trace()


def noise_like(weight: Tensor, seed: int = 3) -> Tensor:
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)).to(weight.dtype)


def layer(model: Any, number: int) -> Any:
    return model.decoder.layers[number - 1]


def expert(model: Any, number: int, index: int) -> Any:
    return layer(model, number).mlp.experts.local_experts[index]


def without_ids(trace: mrr.RoutingTrace) -> mrr.RoutingTrace:
    return trace._with(token_ids=None)


def in_order(trace: mrr.RoutingTrace, order: Sequence[int]) -> mrr.RoutingTrace:
    samples = list(trace.samples())
    return mrr.concat_traces([samples[index] for index in order])


# Changes of a model.


def swap_gate_and_up(model: Any) -> None:
    for each in layer(model, 3).mlp.experts.local_experts:
        each.linear_fc1.weight.copy_(each.linear_fc1.weight.roll(len(each.linear_fc1.weight) // 2, 0))


def move_router_rows(model: Any) -> None:
    router = layer(model, 3).mlp.router
    router.weight.copy_(router.weight.roll(8, 0))


def move_experts_too(model: Any) -> None:
    move_router_rows(model)
    each = layer(model, 3).mlp.experts.local_experts
    values = [{name: value.clone() for name, value in one.state_dict().items() if value is not None} for one in each]
    for index, one in enumerate(each):
        one.load_state_dict(values[index - 8], strict=False)


def swap_two_experts(model: Any) -> None:
    one, other = expert(model, 3, 3).linear_fc2.weight, expert(model, 3, 5).linear_fc2.weight
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def swap_layers(model: Any) -> None:
    layers = model.decoder.layers
    one, other = ({k: v.clone() for k, v in layers[i].state_dict().items() if v is not None} for i in (2, 4))
    layers[2].load_state_dict(other, strict=False)
    layers[4].load_state_dict(one, strict=False)


def change_one_element(model: Any) -> None:
    layer(model, 3).self_attention.linear_proj.weight[5, 7] += 2.0


def redraw_a_tensor(model: Any) -> None:
    weight = layer(model, 3).self_attention.linear_proj.weight
    weight.copy_(noise_like(weight) * weight.std())


def redraw_an_expert(model: Any) -> None:
    weight = expert(model, 3, 3).linear_fc2.weight
    weight.copy_(noise_like(weight) * weight.std())


def redraw_an_embedding(token: int) -> Change:
    def change(model: Any) -> None:
        weight = model.embedding.word_embeddings.weight
        weight[token] = noise_like(weight[token]) * weight.std()

    return change


def scale_embeddings(model: Any) -> None:
    weight = model.embedding.word_embeddings.weight
    weight *= 1 + 0.01 * noise_like(weight).sign()


def scale_weights(model: Any) -> None:
    for index, weight in enumerate(model.parameters()):
        weight *= 1 + 0.01 * noise_like(weight, seed=index).sign()


def add_router_noise(model: Any) -> None:
    router, generator = layer(model, 3).mlp.router, torch.Generator().manual_seed(11)
    gating = router.gating
    router.gating = lambda hidden: gating(hidden) + 0.3 * torch.randn(gating(hidden).shape, generator=generator)


def round_routers(model: Any) -> None:
    for each in model.decoder.layers:
        gating = each.mlp.router.gating
        each.mlp.router.gating = lambda hidden, gating=gating: gating(hidden).bfloat16().float()


def scale_logits(model: Any) -> None:
    """Change the weights of the chosen experts, and not the choice."""
    for each in model.decoder.layers:
        gating = each.mlp.router.gating
        each.mlp.router.gating = lambda hidden, gating=gating: gating(hidden) / 0.7


def lose_experts(model: Any) -> None:
    """Lose the outputs of experts 8 to 15 in every layer, as those of a rank."""
    for number in range(1, len(model.decoder.layers) + 1):
        for index in range(8, 16):
            expert(model, number, index).linear_fc2.weight.zero_()


def add_bias(value: float) -> Change:
    def change(model: Any) -> None:
        layer(model, 3).mlp.router.expert_bias[3] += value

    return change


def rare_token(samples: Samples) -> int:
    """Return a token that occurs twice, past the first position of a sample."""
    counts = torch.bincount(torch.cat(list(samples)), minlength=320)
    first = {int(sample[0]) for sample in samples}
    return next(token for token in range(320) if counts[token] == 2 and token not in first)
