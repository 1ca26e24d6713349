"""Megatron-Core's inference engine on a CPU: its requests decode to the routes of a forward over the finished sequence.

FlashAttention's two kernels are replaced by the same attention in torch, and einops by a view, because no CPU has them. All
else is Megatron's: the scheduler, the blocks of the cache, the recording of routes and the finished requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.errors import PayloadError, UnsupportedRouterError
from tests.functional.mcore.cases import DRAWN, MEGATRON, Case, build, moe_routers, random_trace, run, same, watched

pytestmark = [
    pytest.mark.version,
    pytest.mark.usefixtures("megatron"),
    pytest.mark.skipif(MEGATRON < (0, 17), reason="Megatron-Core records routes in inference since 0.17"),
]
LAYERS = (1, 3, 4)
INFO = mrr.engines.ModelRoutingInfo(num_layers=4, moe_layer_numbers=LAYERS, num_experts=8, topk=2)
PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13], [*range(20, 39)], [*range(20, 39), 50], [*range(100, 190)]]
NUM_OUTPUT = 9


class Tokenizer:
    """Numbers for words."""

    vocab_size, eod, bos, pad = 320, 319, 1, 0

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, ids: list[int], **unused: Any) -> str:
        return " ".join(map(str, ids))


def attend(query: Tensor, key_cache: Tensor, value_cache: Tensor, blocks: Tensor, num_keys: int) -> Tensor:
    """Return causal attention of [queries, heads, d] over the first keys of the blocks of a request."""
    key, value = (
        cache[blocks.long()].flatten(0, 1)[:num_keys].repeat_interleave(query.shape[1] // cache.shape[2], 1)
        for cache in (key_cache, value_cache)
    )
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    mask = torch.ones(len(query), num_keys, dtype=torch.bool).tril(num_keys - len(query))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), value)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *sizes: int,
    block_table: Tensor,
    **unused: Any,
) -> Tensor:
    out = torch.zeros_like(q)
    for i, blocks in enumerate(block_table[: len(cu_seqlens_q) - 1]):
        rows, num_keys = slice(*cu_seqlens_q[i : i + 2].tolist()), int(cu_seqlens_k[i + 1] - cu_seqlens_k[i])
        if rows.stop > rows.start:
            out[rows] = attend(q[rows], k, v, blocks, num_keys)
    return out


def flash_attn_with_kvcache(
    *, q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor, **unused: Any
) -> Tensor:
    out = torch.zeros_like(q)
    for i, num_keys in enumerate(cache_seqlens.tolist()[: len(q)]):
        if num_keys:
            out[i] = attend(q[i], k_cache, v_cache, block_table[i], num_keys)
    return out


@pytest.fixture
def model() -> Iterator[Any]:
    """Build a model with a dense layer whose routers record, as install() lets Megatron build it."""
    from megatron.core.inference.contexts import dynamic_context
    from megatron.core.transformer import attention

    stand_ins = {
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "flash_attn_with_kvcache": flash_attn_with_kvcache,
        "is_fa_min_version": lambda *version, **unused: True,
        "rearrange": lambda tensor, pattern: tensor.flatten(2),
    }
    mrr.install()
    try:
        config = {"moe_enable_routing_replay": True, "moe_layer_freq": [1, 0, 1, 1]}
        with (
            mock.patch.multiple(attention, create=True, **stand_ins),
            mock.patch.object(dynamic_context, "triton_append_key_value_cache", None),
        ):
            _, (model,), _ = build(Case(config=config))
            yield model.eval()
    finally:
        mrr.uninstall()


def generate(model: Any, prompts: list[list[int]], **options: Any) -> list[Any]:
    """Return the finished requests of Megatron's engine, which decodes greedily."""
    from megatron.core.inference.config import InferenceConfig
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
    from megatron.core.inference.engines import DynamicInferenceEngine
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
    from megatron.core.inference.sampling_params import SamplingParams
    from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

    sizes = {
        "max_sequence_length": 128,
        "buffer_size_gb": 0.01,
        "block_size_tokens": 8,
        "max_requests": 8,
        "max_tokens": 64,
    }
    context = DynamicInferenceContext(model.config, InferenceConfig(**sizes | options))
    engine = DynamicInferenceEngine(TextGenerationController(GPTInferenceWrapper(model, context), Tokenizer()), context)
    sampling = SamplingParams(num_tokens_to_generate=NUM_OUTPUT, top_k=1, termination_id=-1)
    try:
        with torch.no_grad():
            records = engine.generate([" ".join(map(str, prompt)) for prompt in prompts], sampling)
    finally:
        with suppress(ImportError):  # the engine of 0.18 and later leaves this flag of the process set
            from megatron.core.inference.utils import InferenceMode

            InferenceMode.unset_active()
    return [record.merge() for record in records]


def routed(model: Any, ids: list[int]) -> dict[int, Tensor]:
    """Return the routing map of each layer in a forward over the whole sequence, without the engine."""
    with torch.no_grad(), watched([model]) as seen:
        model(torch.tensor([ids]), torch.arange(len(ids))[None], None)
    return {layer: maps[0] for layer, maps in seen["forward"].items()}


def check(trace: mrr.RoutingTrace, model: Any, prompt: list[int]) -> None:
    ids = trace.token_ids.tolist()
    assert ids[: len(prompt)] == prompt
    assert len(ids) == len(prompt) + NUM_OUTPUT
    assert trace.layer_numbers == LAYERS
    assert trace.replay_mask.tolist() == [True] * (len(ids) - 1) + [False]
    for layer, routing_map in routed(model, ids).items():
        chosen = torch.zeros_like(routing_map).scatter(1, trace.layer(layer).long(), True)
        assert torch.equal(chosen[:-1], routing_map[:-1]), layer


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": True}, {"enable_chunked_prefill": True}], ids=str)
def test_requests_of_the_engine_decode_to_the_routes_of_a_full_forward(model: Any, options: dict[str, Any]) -> None:
    """Prompts of different lengths share steps; two of them share two blocks of the cache, and one exceeds a step."""
    prompts = PROMPTS if "enable_chunked_prefill" in options else PROMPTS[:-1]
    requests = generate(model, prompts, **options)
    if MEGATRON < (0, 18) and "enable_prefix_caching" in options:
        # It has no rows of a cached prefix, which ends at token 16 here.
        with pytest.raises(PayloadError, match=r"has 12 rows for tokens 0\.\.28: expected 28"):
            mrr.engines.megatron.decode(requests.pop(), model=INFO)
        prompts = prompts[:-1]
    for request, prompt in zip(requests, prompts, strict=True):
        if request.routing_indices is not None:
            check(mrr.engines.megatron.decode(request, model=INFO), model, prompt)
    complete = [request for request in requests if request.routing_indices is not None]
    lengths = tuple(len(request.prompt_tokens) + NUM_OUTPUT for request in complete)
    assert mrr.engines.megatron.decode_batch(complete, model=INFO).sequence_lengths == lengths
    if len(complete) < len(requests):
        # With chunks of a prompt in the same step, 0.18 and 0.19 lose a block of another request, and say None.
        assert "enable_chunked_prefill" in options
        assert len(requests) - len(complete) == 1
        with pytest.raises(PayloadError, match=r"MRR302: .*missing, though the model has MoE layers"):
            mrr.engines.megatron.decode_batch(requests, model=INFO)


def test_serialised_requests_and_choices_of_the_server(model: Any) -> None:
    for request, prompt in zip(generate(model, PROMPTS[:2]), PROMPTS[:2], strict=True):
        result = json.loads(json.dumps(request.serialize(), default=str))
        # Since 0.19 the prompt is not sent back unless the client asks for it; its length is.
        check(mrr.engines.megatron.decode(result, model=INFO, prompt_token_ids=prompt), model, prompt)
        if "prompt_length" in result:
            with pytest.raises(PayloadError, match="prompt_length"):
                mrr.engines.megatron.decode(result, model=INFO, prompt_token_ids=prompt[1:])
        message = {"prompt_token_ids": prompt, "generation_token_ids": result["generated_tokens"]}
        choice = {"index": 0, "message": message, "moe_topk_indices": result["routing_indices"]}
        check(mrr.engines.megatron.decode({"choices": [choice]}, model=INFO), model, prompt)


# ---- the routers of Megatron's inference, in models that are trained


def with_inference_routers() -> tuple[Any, list[dict[str, Any]]]:
    """Return (model, micro-batches); its routers are those that Megatron's RL trains with."""
    from megatron.core.transformer.moe.router import InferenceTopKRouter

    _, (model,), microbatches = build(Case())
    for router in moe_routers([model]):
        router.__class__ = InferenceTopKRouter
        if MEGATRON < (0, 18):
            router.is_inference_cuda_graphed_iteration = False
    return model, microbatches


def test_inference_routers_are_replayed_while_inference_mode_is_off():
    model, microbatches = with_inference_routers()
    assert [(each.router_class, each.replayable) for each in mrr.explain(model)] == [("InferenceTopKRouter", True)] * 4
    live = run([model], Case(), microbatches)
    with mrr.record(model) as recording:
        assert same(live, run([model], Case(), microbatches, recording))
    with mrr.replay(model, recording.trace(), verify=True) as session:
        assert same(live, run([model], Case(), microbatches, session))
    assert session.report.decisions["verified"] == 4 * 64


@contextmanager
def inference_switched_on(model: Any) -> Iterator[None]:
    """Megatron's inference mode, without the compiler that its routers call there."""
    with torch.compiler.set_stance("force_eager"):
        if MEGATRON < (0, 18):
            for router in moe_routers([model]):
                router.set_inference_cuda_graphed_iteration()
            model.eval()  # the flag of 0.17 counts outside of training only
            yield
            return
        from megatron.core.inference.utils import InferenceMode

        with InferenceMode.active():
            yield


ALONE = r"router class\s+InferenceTopKRouter routes without the session while Megatron's inference mode is on"


def test_inference_routers_are_refused_while_inference_mode_is_on():
    model, _ = with_inference_routers()
    with inference_switched_on(model), pytest.raises(UnsupportedRouterError, match=r"layers? 1.*: " + ALONE):
        mrr.freeze_recompute(model)
    model.train()
    if MEGATRON >= (0, 18):
        mrr.freeze_recompute(model).close(check=False)


def test_inference_mode_that_is_switched_on_inside_a_replay_raises_and_inside_a_freeze_is_live():
    """Route as an engine's step does: tokens alone, no sequences. A frozen run may generate between its steps."""
    model, _ = with_inference_routers()
    router, hidden = moe_routers([model])[0], torch.randn(6, 1, model.config.hidden_size)
    with inference_switched_on(model), torch.no_grad():
        plain = router(hidden)[1]
    model.train()
    session = mrr.replay(model, random_trace(Case()), **DRAWN)
    session.microbatch(torch.arange(6).view(1, 6), model)
    with (
        inference_switched_on(model),
        torch.no_grad(),
        pytest.raises(UnsupportedRouterError, match="^MRR401: layer 1: " + ALONE),
    ):
        router(hidden)
    session.close(check=False)
    model.train()
    freeze = mrr.freeze_recompute(model)
    with inference_switched_on(model), torch.no_grad():
        assert torch.equal(router(hidden)[1], plain)
    freeze.close(check=False)
