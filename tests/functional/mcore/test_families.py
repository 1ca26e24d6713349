"""The routing of model families that people train: tiny models with a family's routing options record, replay and recompute.

`PYTHONPATH=$FORK pytest tests/functional/mcore/test_families.py` runs the same on another Megatron-LM, a trainer's for one.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import DRAWN, FULL, MOE, MTP_RECOMPUTE, in_backward, model_inputs, moe_routers
from tests.support.families import FAMILIES, latent_projections
from tests.support.gradients import gradients
from tests.support.schedule import random_microbatches
from tests.support.tiny_gpt import build_tiny_gpt, tiny_gpt_config
from tests.support.tiny_hybrid import build_tiny_hybrid
from tests.unit.mcore.tiny_chunk import as_map, random_routes

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_query_groups": 1,
    "ffn_hidden_size": 32,
    "moe_ffn_hidden_size": 8,
}
QUICK = ("Qwen3-MoE, Qwen3-VL", "Qwen3.5, Qwen3.6", "gpt-oss", "DeepSeek-V3, V3.2", "DeepSeek-V4", "GLM-4.7-Flash")
QUICK += ("MiniMax-M2", "Nemotron-3-Super")
"""One of each shape, with an eighth of their experts; the rest is slow, and so are as many experts as a family has."""

VERSION = pytest.mark.version

Maps = dict[str, dict[str, list[Tensor]]]
"""{"forward" | "recompute": {name of the router: routing maps in order of the calls}}"""


@contextmanager
def watched(model: Any) -> Iterator[Maps]:
    """Yield what leaves the routers, of MTP layers too; cases.watched names a layer by its number alone."""
    seen: Maps = {"forward": defaultdict(list), "recompute": defaultdict(list)}
    routers = moe_routers([model]) + moe_routers([model], mtp=True)
    names = {module: name for name, module in model.named_modules()}

    def hook(router: Any, args: Any, output: tuple[Tensor, Tensor]) -> None:
        seen["recompute" if in_backward() else "forward"][names[router]].append(output[1].clone())

    handles = [router.register_forward_hook(hook) for router in routers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def build(family: str, scale: int) -> Any:
    """Return the family's model, with experts divided by `scale`; skip what this Megatron-Core does not have."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    options: dict[str, Any] = {"num_layers": 2} | SIZES | FAMILIES[family]
    options["num_moe_experts"] = max(options["num_moe_experts"] // scale, 2 * options["moe_router_topk"])
    known = {each.name: each for each in fields(MLATransformerConfig)}
    score = options.get("moe_router_score_function")
    if score == "sqrtsoftplus" and score not in str(known["moe_router_score_function"].type):
        pytest.skip("this Megatron-Core has no sqrtsoftplus")
    if hash_layers := options.pop("hash_layers", 0):
        for name in {"moe_n_hash_layers", "dsv4_n_hash_layers"} & set(known):
            options[name] = hash_layers
        for name in {"actual_vocab_size", "vocab_size"} & set(known):
            options[name] = 320
    pattern, has_bias = options.pop("pattern", None), options.pop("router_bias", False)
    if pattern:
        options["num_layers"] = len(pattern)
    layout = ParallelSizes()
    layout.initialize()
    # The stack of 0.16 has no full recompute.
    recompute = MOE if pattern else MTP_RECOMPUTE if options.get("mtp_num_layers") else FULL
    config = tiny_gpt_config(layout, **options, **recompute)
    with latent_projections() if "moe_latent_size" in options else nullcontext():
        if pattern:
            (model,) = build_tiny_hybrid(config, layout, pattern)
        else:
            (model,) = build_tiny_gpt(config, layout, small_attention=config.multi_latent_attention)
    for module in model.modules():
        if getattr(module, "tid2eid", None) is not None:  # miles' own tables are empty until a checkpoint is loaded
            module.tid2eid.data = random_routes(
                320, 1, 3, topk=config.moe_router_topk, num_experts=config.num_moe_experts
            )[:, 0].to(module.tid2eid.dtype)
    for router in moe_routers([model]) + moe_routers([model], mtp=True):
        bias = torch.randn(config.num_moe_experts, generator=torch.Generator().manual_seed(5)) / 10
        if has_bias:  # with biases in experts, too, Megatron-Core's own SequentialMLP does not recompute
            router.bias = torch.nn.Parameter(bias)
        if router.expert_bias is not None:
            router.expert_bias.copy_(bias)
    return model


def step(
    model: Any, microbatches: list[dict[str, Any]], *, disturbs: bool = False
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return losses and gradients; `disturbs`: the routers have other weights by when their forwards are repeated."""
    model.zero_grad(set_to_none=True)
    losses = []
    for microbatch in microbatches:
        # The fork of miles runs MTP layers for these labels alone; a MambaModel takes no loss_mask.
        inputs = model_inputs(microbatch) | {"mtp_kwargs": {"mtp_labels": microbatch["labels"]}}
        names = inspect.signature(type(model).forward).parameters
        losses.append(model(**{name: value for name, value in inputs.items() if name in names}).mean())
    if disturbs:
        for router in moe_routers([model]) + moe_routers([model], mtp=True):
            router.weight.data = torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(99))
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses], gradients([model])


@pytest.mark.parametrize(
    ("family", "scale"),
    [
        *(
            pytest.param(name, 8, marks=[VERSION] if name in QUICK else [VERSION, pytest.mark.slow])
            for name in FAMILIES
        ),
        *(
            pytest.param(name, 1, marks=pytest.mark.slow)  # with one version: what differs does not count experts
            for name in ("DeepSeek-V3, V3.2", "Kimi-K2, K2.5", "Nemotron-3-Super")
        ),
    ],
)
def test_a_family_records_replays_and_recomputes(family, scale, megatron):
    model = build(family, scale)
    microbatches = random_microbatches(2, batch_size=2, sequence_length=8)
    hashed = {name for name, module in model.named_modules() if getattr(module, "tid2eid", None) is not None}
    replayed = set(moe_routers([model]))
    routers = {name: module for name, module in model.named_modules() if module in replayed}
    routed = {name: router.layer_number for name, router in routers.items() if name not in hashed}
    live = step(model, microbatches)

    with watched(model) as seen, mrr.record(model, padding_token_ids=[]) as recording:
        recorded = step(model, microbatches)
    assert_same(live, recorded)
    trace = recording.trace()
    for name, number in routed.items():
        rows = torch.cat([as_samples(routing_map) for routing_map in seen["forward"][name]])
        assert torch.equal(as_map(trace.layer(number), rows.shape[-1]), rows.flatten(0, 1))
    with mrr.replay(model, trace, padding_token_ids=[]):
        replayed = step(model, microbatches)
    assert_same(live, replayed)

    samples = torch.cat([microbatch["tokens"] for microbatch in microbatches])
    config = model.config
    num_experts = config.num_moe_experts
    routes = random_routes(
        len(samples) * 7, len(routed), 7, topk=config.moe_router_topk, num_experts=num_experts
    ).unflatten(0, (len(samples), 7))
    drawn = mrr.RoutingTrace.from_samples(
        list(samples), list(routes), num_experts=num_experts, layer_numbers=sorted(routed.values())
    )
    with watched(model) as seen, mrr.replay(model, drawn, padding_token_ids=[], **DRAWN) as session:
        step(model, microbatches, disturbs=True)
    for layer, name in enumerate(sorted(routed, key=routed.__getitem__)):
        for part in seen.values():
            rows = torch.cat([as_samples(routing_map) for routing_map in part[name]])
            target = as_map(routes[:, :, layer].flatten(0, 1), num_experts)
            assert torch.equal(rows[:, :7].flatten(0, 1), target)
    assert seen["forward"].keys() == seen["recompute"].keys()
    for name, maps in seen["forward"].items():  # last tokens, MTP and hash layers too
        assert all(torch.equal(one, two) for one, two in zip(maps, seen["recompute"][name], strict=True)), name
    assert session.report.rows_replayed == len(samples) * 7


def as_samples(routing_map: Tensor) -> Tensor:
    """Return [b, s, num_experts] of the router's s-major rows of a micro-batch of two rows."""
    return routing_map.view(8, 2, -1).transpose(0, 1)


def assert_same(one: Any, two: Any) -> None:
    (losses, gradients_one), (other_losses, gradients_two) = one, two
    assert all(map(torch.equal, losses, other_losses))
    assert gradients_one.keys() == gradients_two.keys()
    assert [name for name in gradients_one if not torch.equal(gradients_one[name], gradients_two[name])] == []
