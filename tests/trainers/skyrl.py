"""SkyRL's own Megatron worker, from a padded batch through its micro-batching to the loss, on a CPU: log-probs, training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.trainers import skyrl
from tests.trainers import oracle, small_model, vlms
from tests.trainers.sources import Source
from tests.trainers.stand_ins import Config, trainer_imports

SOURCE = Source(name="skyrl", packages=("skyrl",))
SERVICES = ("pydantic", "ray", "transformers", "wandb")
HF_CONFIG = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": oracle.LAYERS,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": oracle.EXPERTS,
    "num_experts_per_tok": oracle.TOPK,
    "n_shared_experts": None,
}


def config(*, packs: bool = False, max_tokens: int = 0) -> Config:
    return Config(
        remove_microbatch_padding=packs,
        max_tokens_per_microbatch=max_tokens,
        micro_train_batch_size_per_gpu=2,
        micro_forward_batch_size_per_gpu=2,
        algorithm=Config(
            temperature=1.0,
            policy_loss_type="regular",
            eps_clip_low=0.2,
            eps_clip_high=0.2,
            loss_reduction="token_mean",
            use_entropy_loss=False,
            use_kl_loss=False,
            kl_loss_coef=0.0,
            entropy_loss_coef=0.0,
            off_policy_correction=Config(),
        ),
        policy=Config(
            sequence_parallel_size=1,
            megatron_config=Config(mtp_loss_weight=0.0, mtp_loss_chunk_size=1, mtp_loss_topk=1),
            model=Config(lora=Config(rank=0)),
        ),
    )


def batch(seed: int, *, has_images: bool = False) -> Any:
    """SkyRL's own tensors of a rollout, from the generator's reply by its trainer: prompts padded on the left."""
    from skyrl.train import trainer

    ids, routes = oracle.rollout(seed)
    prompts = [part[:prompt].tolist() for part, prompt in zip(ids, oracle.SHARDS[seed % 2][1])]
    responses = [part[prompt:].tolist() for part, prompt in zip(ids, oracle.SHARDS[seed % 2][1])]
    me = object.__new__(trainer.RayPPOTrainer)
    me.cfg = Config(
        trainer=Config(
            algorithm=Config(off_policy_correction=Config()),
            critic=Config(model=Config()),
            policy=Config(model=Config()),
            train_batch_size=len(ids),
            policy_mini_batch_size=len(ids),
        ),
        generator=Config(n_samples_per_prompt=1, step_wise_trajectories=False),
    )
    me.tokenizer, me.all_metrics = SimpleNamespace(pad_token_id=0), {}
    me.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 1)
    trainer.AutoConfig = SimpleNamespace(from_pretrained=lambda path: HF_CONFIG)
    reply = {
        "prompt_token_ids": prompts,
        "response_ids": responses,
        "rewards": [[0.0] * len(part) for part in responses],
        "loss_masks": [[1] * len(part) for part in responses],
        "rollout_logprobs": [[-1.0] * len(part) for part in responses],
        "rollout_expert_indices": [part.numpy().astype(np.uint8) for part in routes],
    }
    if has_images:
        first, *_ = vlms.images()
        assert first is not None
        for name, value in first.items():  # each sample of SkyRL's has images, here none
            reply[name] = [value, *[value[:0]] * (len(ids) - 1)]
    if "RoutedExpertIndices" not in Path(trainer.__file__).with_name("dataset").joinpath("preprocess.py").read_text():
        # Before August 2026 the engine's routes were lists.
        reply["rollout_expert_indices"] = [part.tolist() for part in reply["rollout_expert_indices"]]
    made = me.convert_to_training_input(reply, [str(i) for i in range(len(ids))])
    log_probs = made["rollout_logprobs"]
    for name in ("action_log_probs", "base_action_log_probs"):
        made[name] = torch.full_like(log_probs, -1.0)
    made["advantages"] = torch.ones_like(log_probs)
    return made


def step(
    folder: str,
    layout: ParallelSizes,
    options: dict[str, Any],
    flags: dict[str, Any],
    *,
    audits: bool = False,
    plants: bool = False,
) -> Any:
    """Log-probs without routes (the reference's batch), with them, a training step; {pass: (decisions, wrong)} of each.

    Args:
        audits: SkyRL's own replay is in the routers.
        plants: it gets one wrong row.
    """
    is_vlm = "vlm" in options
    with trainer_imports(folder, SOURCE.packages, services=SERVICES), oracle.process(plants=plants):
        from skyrl.backends.skyrl_train.distributed.megatron import megatron_utils
        from skyrl.backends.skyrl_train.utils.ppo_utils import ppo_policy_loss
        from skyrl.backends.skyrl_train.workers.megatron import megatron_worker as worker
        from skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper import MegatronModelWrapper

        skyrl.install()
        # An older Megatron-Core has no total_tokens, which only Transformer Engine reads.
        megatron_utils.PackedSeqParams = small_model.packed_seq_params
        if audits:
            from skyrl.backends.skyrl_train.utils.replay_utils import patch_topk_router_layer_number

            patch_topk_router_layer_number()
        chunks = small_model.build(layout, moe_enable_routing_replay=audits, **options)
        rank = worker.mpu.get_data_parallel_rank()
        me = object.__new__(worker.MegatronPolicyWorkerBase)
        me.cfg, me.actor_module = config(**flags), chunks
        me.model = MegatronModelWrapper(me.cfg, chunks, policy_loss_fn=ppo_policy_loss)
        me.enable_router_replay, me.empty_cuda_cache, me.optimizer = True, False, None
        me.is_vlm = me.model.is_vlm = is_vlm
        me.strategy = SimpleNamespace(all_reduce=lambda values, op=None, **_: values)
        worker.all_reduce_metrics = lambda status, *_, **__: status
        worker.get_moe_metrics = lambda **_: {}
        ids, routes = oracle.rollout(rank)
        with oracle.watched(chunks, oracle.routes_of_tokens(ids, routes)) as seen:
            _know_tokens(chunks, seen)
            reference = batch(rank, has_images=is_vlm)
            for name in ("rollout_expert_indices", "router_padding_mask"):
                reference.pop(name, None)
            me._forward_logprobs(reference)
            seen.mark()
            me._forward_logprobs(batch(rank, has_images=is_vlm))
            seen.mark()
            me.forward_backward(batch(rank, has_images=is_vlm))
        return seen.counts()


def start(folder: str) -> str:
    """Run the worker's own `init_model` until it builds the model."""
    with trainer_imports(folder, SOURCE.packages, services=SERVICES), oracle.process():
        skyrl.install()
        from skyrl.backends.skyrl_train.workers.megatron import megatron_worker as worker

        # A checkpoint's parts, and Megatron-Bridge.
        provider = Config(provide_distributed_model=oracle.build_model, finalize=lambda: None)
        worker.AutoBridge = SimpleNamespace(
            from_hf_pretrained=lambda *_, **__: SimpleNamespace(to_megatron_provider=lambda: provider)
        )
        worker.update_model_config = lambda config, **_: config
        me = object.__new__(worker.MegatronPolicyWorkerBase)
        me.strategy, me._rank = SimpleNamespace(), 0
        megatron = Config(
            model_config_kwargs={}, transformer_config_kwargs={}, tensor_model_parallel_size=1, lora_config=Config()
        )
        me.cfg = Config(
            gradient_checkpointing=True,
            mtp=Config(),
            policy=Config(megatron_config=megatron, model=Config(lora=Config()), inference_only_init=True),
        )
        me._is_lora = me._maybe_setup_fake_int4_qat = lambda: None
        me._is_lora = False
        return oracle.starting(me.init_model, "model")


def _know_tokens(chunks: list[Any], seen: oracle.Seen) -> None:
    """Later stages get tokens that are not laid out: work them out from theirs, by the layout that the first stage has."""
    from skyrl.backends.skyrl_train.workers.megatron import megatron_model_wrapper as wrapper

    for name in ("preprocess_packed_seqs", "remove_left_padding"):
        original = getattr(wrapper, name)

        def laid_out(tokens: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            seen.give(original(tokens, *args, **{**kwargs, "pre_process": True})[0])
            return original(tokens, *args, **kwargs)

        setattr(wrapper, name, laid_out)
