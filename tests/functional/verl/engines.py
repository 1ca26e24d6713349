"""verl's Megatron engines around a tiny GPT on a CPU: a checkpoint's parts are built here, all the rest is verl's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor
from verl.workers.config import McoreActorConfig, McoreEngineConfig
from verl.workers.config.engine import EngineRouterReplayConfig
from verl.workers.engine.megatron import MegatronEngineWithLMHead
from verl.workers.utils.losses import ppo_loss

from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.testing.packed_attention import row_positions
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
    model_config: Any
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
        chunks = build_tiny_gpt(self.tf_config, layout, vocab_size=VOCAB_SIZE, small_attention=True)
        is_multimodal = hasattr(self.model_config.hf_config, "vision_config")
        return list(map(MultimodalModel, chunks)) if is_multimodal else chunks

    def forward_step(self, batch_iter: Iterator[Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        batch = next(batch_iter)
        chunk = next(i for i, each in enumerate(self.module) if each is model)
        self.microbatches.append((chunk, [sample.tolist() for sample in batch["input_ids"].unbind()]))
        return super().forward_step(iter([batch]), model, *args, **kwargs)  # type: ignore[misc]


class MultimodalModel(torch.nn.Module):
    """A multimodal model as mbridge's: it gets [b, s] tokens with their mask, and packs embeddings inside.

    Source: verl 0.9.1, model_forward.gptmodel_forward_model_engine (`vision_model`); mbridge 10cb17f,
    qwen3_vl.model.Qwen3VLModel.
    """

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        self.language_model, self.config = language_model, language_model.config
        self.pre_process, self.post_process = language_model.pre_process, language_model.post_process
        self.share_embeddings_and_output_weights = language_model.share_embeddings_and_output_weights
        self.model_type = language_model.model_type

    def set_input_tensor(self, input_tensor: Any) -> None:
        self.language_model.set_input_tensor(input_tensor)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Any = None,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Any:
        assert attention_mask is not None, "verl gives one"
        assert position_ids is None, "verl leaves them to the model"
        local = self._packed(input_ids, attention_mask) if packed_seq_params else self._padded(input_ids)
        embedded = self.language_model.embedding(local, None) if self.pre_process else None
        return self.language_model(
            input_ids=None,
            position_ids=None,
            attention_mask=None,
            decoder_input=embedded,
            packed_seq_params=packed_seq_params,
        )

    def _padded(self, input_ids: Tensor) -> Tensor:
        rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        return input_ids[:, row_positions(input_ids.shape[1], cp_rank=rank, cp_size=size)[1]]

    def _packed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        size = parallel_state.get_context_parallel_world_size()
        multiple = parallel_state.get_tensor_model_parallel_world_size() * size * (2 if size > 1 else 1)
        parts = []
        for row, mask in zip(input_ids, attention_mask):
            tokens = row[mask]
            tokens = torch.nn.functional.pad(tokens, (0, -len(tokens) % multiple))
            parts.append(self._padded(tokens.unsqueeze(0)))
        return torch.cat(parts, dim=1)


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


def build(kind: type, config: Any, **fields: Any) -> Any:
    """Return an initialized engine; `fields` are those of `model_config`."""
    engine = kind(model_config(**fields), config, None, None)
    engine.initialize()
    return engine


def loss_function() -> Any:
    """verl's PPO loss, as verl's actor worker sets it."""
    config = McoreActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=True)
    return partial(ppo_loss, config=config)
