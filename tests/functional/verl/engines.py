"""verl's Megatron engines around a tiny GPT on a CPU: a checkpoint's parts are built here, all the rest is verl's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from verl.workers.config import McoreActorConfig, McoreEngineConfig
from verl.workers.config.engine import EngineRouterReplayConfig
from verl.workers.engine.megatron import MegatronEngineWithLMHead
from verl.workers.utils.losses import ppo_loss

from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.trainers import verl as plugin
from tests.functional.verl.batches import VOCAB_SIZE
from tests.support.tiny_gpt import build_tiny_gpt, tiny_gpt_config

# The batches' routes are drawn at random, so that none is the router's own choice: it cannot agree.
plugin.options["min_agreement"] = 0


class OnCpu:
    """Mixed into an engine: a tiny model in place of a checkpoint's, and a log of what verl forwards.

    `microbatches` is (chunk, its model, token ids of each sample) of each forward step, in order.
    """

    engine_config: Any
    enable_routing_replay: bool
    module: Any

    def _build_tf_config(self) -> None:
        model_parallel_cuda_manual_seed(1234, force_reset_rng=True)  # verl does so where it counts a GPU
        self.is_value_model = self.vanilla_bridge = False
        self.provider = self.bridge = self.peft_cls = None
        self.param_dtype = self.dtype = torch.float32
        self.share_embeddings_and_output_weights = False
        layout = layout_of(self.engine_config)
        fields = {"variable_seq_lengths": True, **self.engine_config.override_transformer_config}
        if self.enable_routing_replay:  # verl's own replay
            fields["moe_enable_routing_replay"] = True
        self.tf_config = tiny_gpt_config(layout, **fields)

    def _build_megatron_module(self) -> list[Any]:
        self.microbatches: list[tuple[int, list[list[int]]]] = []
        layout = layout_of(self.engine_config)
        return build_tiny_gpt(self.tf_config, layout, vocab_size=VOCAB_SIZE, small_attention=True)

    def forward_step(self, batch_iter: Iterator[Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        batch = next(batch_iter)
        chunk = next(i for i, each in enumerate(self.module) if each is model)
        self.microbatches.append((chunk, [sample.tolist() for sample in batch["input_ids"].unbind()]))
        return super().forward_step(iter([batch]), model, *args, **kwargs)  # type: ignore[misc]


class StockEngine(OnCpu, MegatronEngineWithLMHead):
    pass


class OurEngine(StockEngine):
    """The same class under a different name; its `router_replay.mode` switches this package's replay."""


def layout_of(config: Any) -> ParallelSizes:
    return ParallelSizes(
        tp_size=config.tensor_model_parallel_size,
        pp_size=config.pipeline_model_parallel_size,
        vp_size=config.virtual_pipeline_model_parallel_size,
        cp_size=config.context_parallel_size,
        ep_size=config.expert_model_parallel_size,
    )


def engine_config(
    layout: ParallelSizes, *, mode: str = "disabled", padded: bool = False, bucket: int | None = None, **config: Any
) -> Any:
    """verl's engine config; `config` are fields of Megatron's TransformerConfig."""
    # Before August 2026 verl had no such fields.
    bucketed = {} if bucket is None else {"pad_to_length": True, "pad_to_length_bucket": bucket}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TP 1 without sequence parallelism
        return McoreEngineConfig(
            tensor_model_parallel_size=layout.tp_size,
            pipeline_model_parallel_size=layout.pp_size,
            virtual_pipeline_model_parallel_size=layout.vp_size,
            context_parallel_size=layout.cp_size,
            expert_model_parallel_size=layout.ep_size,
            expert_tensor_parallel_size=layout.expert_tp_size,
            use_remove_padding=not padded,
            forward_only=True,  # no optimizer, whose set-up asks for a checkpoint
            override_transformer_config=config,
            router_replay=EngineRouterReplayConfig(mode=mode),
            **bucketed,
        )


def model_config(**fields: Any) -> Any:
    """Return the fields that verl's engine reads of a checkpoint's; `fields` are further ones of its Hugging Face config."""
    return SimpleNamespace(
        model_type="language_model",
        hf_config=SimpleNamespace(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], **fields),
        mtp=SimpleNamespace(enable=False, enable_train=False),
        tokenizer=SimpleNamespace(pad_token_id=0),
        architectures=["Qwen3MoeForCausalLM"],
        lora={},
    )


def build(kind: type, config: Any) -> Any:
    engine = kind(model_config(), config, None, None)
    engine.initialize()
    return engine


def loss_function() -> Any:
    """verl's PPO loss, as verl's actor worker sets it."""
    config = McoreActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=True)
    return partial(ppo_loss, config=config)
