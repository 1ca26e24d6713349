"""NeMo-RL's own Megatron worker, from a sharded batch to the optimizer, on a CPU: reference, previous log-probs, training."""

from __future__ import annotations

import typing
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import typing_extensions

from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.trainers import nemo_rl
from tests.trainers import oracle, small_model, vlms
from tests.trainers.slime import SERVICES
from tests.trainers.sources import Source
from tests.trainers.stand_ins import trainer_imports

SOURCE = Source(name="nemo_rl", packages=("nemo_rl",))
LENGTH = 24  # of the padded batch
PADDING = 318  # a token of no sample


def batch(seed: int, *, has_images: bool = False) -> dict[str, Any]:
    """What the driver sends, made by its own functions from message logs: padded on the right; no route of a last token."""
    from nemo_rl.algorithms.grpo import add_grpo_token_loss_masks_and_generation_logprobs
    from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message
    from nemo_rl.data.multimodal_utils import PackedTensor

    ids, routes = oracle.rollout(seed)
    logs = []
    for i, (part, route) in enumerate(zip(ids, routes)):
        experts = torch.arange(oracle.TOPK).expand(len(part), oracle.LAYERS, oracle.TOPK).to(torch.int8).clone()
        experts[: len(route)] = route  # vLLM's worker fills the last row so
        if i == 3:
            experts[9:11] = -1  # their sentinel of a missing route
        prompt = oracle.SHARDS[seed % 2][1][i]
        logs.append(
            [
                {"role": "user", "token_ids": part[:prompt], "routed_experts": experts[:prompt]},
                {
                    "role": "assistant",
                    "token_ids": part[prompt:],
                    "routed_experts": experts[prompt:],
                    "generation_logprobs": torch.full((len(part) - prompt,), -1.0),
                },
            ]
        )
    add_grpo_token_loss_masks_and_generation_logprobs(logs)
    flat, lengths = batched_message_log_to_flat_message(
        logs, pad_value_dict={"token_ids": PADDING}, make_sequence_length_divisible_by=LENGTH
    )
    shape = flat["token_ids"].shape
    images = {
        name: PackedTensor([each and each[name] for each in vlms.images()], dim_to_pack=0)
        for name in ("pixel_values", "image_grid_thw")
    }
    return {
        **(images if has_images else {}),
        "input_ids": flat["token_ids"],
        "input_lengths": lengths,
        "routed_experts": flat["routed_experts"],
        "token_mask": flat["token_loss_mask"],
        "sample_mask": torch.ones(len(ids)),
        "advantages": torch.ones(shape),
        "prev_logprobs": torch.full(shape, -1.0),
        "generation_logprobs": flat["generation_logprobs"],
        "reference_policy_logprobs": torch.full(shape, -1.0),
    }


def routes_of_tokens(seed: int) -> dict[int, Any]:
    ids, routes = oracle.rollout(seed)
    known = oracle.routes_of_tokens(ids, routes)
    for token in ids[3][9:11].tolist():
        del known[token]
    return known


def config(layout: ParallelSizes, *, packs: bool = False, dynamic: bool = False) -> dict[str, Any]:
    return {
        "train_global_batch_size": oracle.NUM_SAMPLES,
        "train_micro_batch_size": 2,
        "logprob_batch_size": 2,
        "make_sequence_length_divisible_by": 8,
        "router_replay": {"enabled": True},
        "generation": {"backend": "vllm"},
        "sequence_packing": {"enabled": packs},
        "dynamic_batching": {"enabled": dynamic},
        "megatron_cfg": {
            "enabled": True,
            "tensor_model_parallel_size": layout.tp_size,
            "sequence_parallel": layout.sequence_parallel,
            "pipeline_model_parallel_size": layout.pp_size,
            "context_parallel_size": layout.cp_size,
            "empty_unused_memory_level": 0,
            "moe_per_layer_logging": False,
            "freeze_moe_router": False,
        },
    }


def step(
    folder: str, layout: ParallelSizes, options: dict[str, Any], flags: dict[str, Any], *, audits: bool = False
) -> Any:
    """Reference log-probs, previous log-probs, a training step; {pass: (decisions, wrong)} of each.

    Args:
        audits: NeMo-RL's own replay is in the routers.
    """
    # Before Python 3.12, which NeMo-RL requires, pydantic needs the other TypedDict.
    newer = mock.patch.object(typing, "TypedDict", typing_extensions.TypedDict)
    is_vlm = "vlm" in options
    with newer, trainer_imports(folder, SOURCE.packages, services=SERVICES), oracle.process():
        from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict
        from nemo_rl.models.megatron import data as megatron_data
        from nemo_rl.models.megatron.router_replay import validate_router_replay_config
        from nemo_rl.models.policy.workers import megatron_policy_worker as worker

        nemo_rl.install()
        cfg = config(layout, **flags)
        validate_router_replay_config(cfg)
        # An older Megatron-Core has no total_tokens, which only Transformer Engine reads.
        megatron_data.PackedSeqParams = small_model.packed_seq_params
        chunks = small_model.build(layout, **options, moe_enable_routing_replay=audits)
        rank = worker.parallel_state.get_data_parallel_rank()
        # Megatron-Bridge and Megatron-LM's training loop, and the GPU.
        megatron_data.get_ltor_masks_and_position_ids = lambda data, **_: (
            None,
            None,
            torch.arange(data.shape[1]).expand_as(data).contiguous(),
        )
        worker.get_pg_collection = lambda model: SimpleNamespace(mp=None)
        worker.logical_and_across_model_parallel_group = lambda value, mp_group: value
        worker.reduce_max_stat_across_model_parallel_group = lambda value, mp_group: value
        worker.get_moe_metrics = lambda **_: {}
        worker.get_rerun_state_machine = _Once
        torch.cuda.get_device_name = lambda *_: "cpu"
        me = object.__new__(worker.MegatronPolicyWorkerImpl)
        me.cfg, me.model, me.dtype = cfg, chunks[0], torch.float32
        me.dp_size = worker.parallel_state.get_data_parallel_world_size()
        me.optimizer, me.scheduler = (
            small_model.NoOptimizer(),
            SimpleNamespace(step=lambda increment: None, get_lr=lambda group: 0.0, get_wd=lambda: 0.0),
        )
        me.optimizer.grad_norms_by_group, me.optimizer.param_groups = {}, [None]
        me.timer = SimpleNamespace(start=lambda name: None, stop=lambda name: None)
        me.mcore_state = SimpleNamespace(straggler_timer=None)
        me.delegate_pack_to_model, me.delegate_mtp_loss_mask_to_model = is_vlm, False
        me.model_slices_context_parallel_inputs = me.defer_fp32_logits = False
        me.media_placeholder_token_id = me.draft_model = me.sampling_params = None
        me.should_disable_forward_pre_hook = me._first_train_step_forward_pre_hook_disabled = False
        me._router_replay_enabled = True
        me._get_model_config = lambda: chunks[0].module.config
        me._uses_mxfp8_overlap_shared_param_buffer = lambda: False
        me._copy_main_params_to_param_buffer = lambda: None
        me._set_moe_grad_scale_func = me._set_mtp_grad_scale_func = lambda scale: None
        me._compute_moe_grad_scale = lambda tokens: None
        me._collect_mtp_metrics = lambda *_: None

        def shard() -> Any:
            args: dict[str, Any] = {"max_tokens_per_microbatch": 32, "input_lengths_key": "input_lengths"}
            args["input_key"] = "input_ids"
            whole = BatchedDataDict(batch(rank, has_images=is_vlm))
            if flags.get("packs"):
                args |= {"algorithm": "modified_first_fit_decreasing", "sequence_length_pad_multiple": 8}
                return whole.shard_by_batch_size(1, sequence_packing_args=args)[0][0]
            if flags.get("dynamic"):
                return whole.shard_by_batch_size(1, dynamic_batching_args=args | {"sequence_length_round": 8})[0][0]
            return whole.shard_by_batch_size(1)[0]

        with oracle.watched(chunks, routes_of_tokens(rank)) as seen:
            me.get_logprobs(data=shard(), require_router_replay=False)
            seen.mark()
            me.get_logprobs(data=shard())
            seen.mark()
            me.train(shard(), ClippedPGLossFn(ClippedPGLossConfig()), gbs=oracle.NUM_SAMPLES * me.dp_size)
        return seen.counts()


def start(folder: str) -> str:
    """Run the worker's own `__init__` until it builds the model."""
    newer = mock.patch.object(typing, "TypedDict", typing_extensions.TypedDict)
    with newer, trainer_imports(folder, SOURCE.packages, services=SERVICES), oracle.process():
        nemo_rl.install()
        from nemo_rl.models.megatron import setup
        from nemo_rl.models.policy.workers import megatron_policy_worker as worker

        ParallelSizes().initialize()
        # Ray's GPU, its groups, a checkpoint, and Megatron-Bridge's configuration.
        worker.ray = SimpleNamespace(get_gpu_ids=lambda: [0])
        worker.setup_distributed = worker.apply_transformer_engine_patch = worker.handle_model_import = (
            lambda *_, **__: None
        )
        worker.validate_model_paths = lambda config: ("", "", False)
        settings, setup.GlobalState = mock.MagicMock(), lambda: mock.MagicMock(start_time=0.0)
        worker.validate_and_set_config = lambda *_: settings
        torch.cuda.current_device = lambda: 0
        setup._patch_bridge_signal_handler_for_worker_threads = lambda: None
        setup.get_model = oracle.build_model
        me = object.__new__(worker.MegatronPolicyWorkerImpl)
        tokenizer = SimpleNamespace(pad_token="")
        return oracle.starting(me.__init__, config(ParallelSizes()), tokenizer, worker_sharding_annotations=None)


class _Once:
    """Stands for Megatron's machine that runs a step again to look for faults of the hardware: once."""

    def __init__(self) -> None:
        self._runs = 1

    def should_run_forward_backward(self, data_iterator: Any) -> bool:
        self._runs -= 1
        return self._runs >= 0
