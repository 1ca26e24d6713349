"""ROLL's own Megatron strategy, from its collation of a generation to the loss, on a CPU: log-probs, training."""

from __future__ import annotations

import os
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.trainers import roll
from tests.trainers import oracle, small_model, vlms
from tests.trainers.sources import Source
from tests.trainers.stand_ins import Config, trainer_imports

SOURCE = Source(name="roll", packages=("roll", "mcore_adapter/src/mcore_adapter"))
PACKAGES = ("roll", "mcore_adapter")
SERVICES = ("ray", "transformers", "peft", "datasets")
PROMPT = 7  # tokens of a padded prompt


def length() -> int:
    """Return the number of tokens in a padded row."""
    return max(map(len, oracle.rollout(0)[0])) + PROMPT + 1


def worker_config(*, dynamic: bool = False, packs: bool = False, size: int = 2) -> Config:
    return Config(
        name="actor_train",
        router_replay=Config(mode="R3"),
        use_sequence_packing=packs,
        use_dynamic_batching_in_infer=dynamic,
        use_dynamic_batching_in_train=dynamic,
        training_args=Config(per_device_train_batch_size=size),
        strategy_args=Config(strategy_config={}),
        sequence_packing_args=Config(
            algorithm="none",
            max_packed_sequence_length_forward=2 * length(),
            max_packed_sequence_length_train=2 * length(),
            min_num_micro_batches_forward=1,
            min_num_micro_batches_train=1,
        ),
    )


def batch(seed: int, flags: dict[str, Any], *, has_images: bool = False) -> Any:
    """Return ROLL's own batch of a generation; the second half of the prompts is padded on the left."""
    from roll.distributed.scheduler.protocol import DataProto
    from roll.utils.dynamic_batching import dynamic_batching_shard
    from roll.utils.functionals import concatenate_input_and_output, postprocess_generate

    ids, routes = oracle.rollout(seed)
    pad, eos, *_ = oracle.unused_tokens(seed)  # ROLL packs with 0
    prompts, answers = [], []
    for part, prompt in zip(ids, oracle.SHARDS[seed % 2][1]):
        prompts.append(torch.nn.functional.pad(part[:prompt], (PROMPT - prompt, 0), value=pad))
        answers.append(part[prompt:])
    lengths = torch.tensor([oracle.SHARDS[seed % 2][1]]).T
    mask = (torch.arange(PROMPT) >= PROMPT - lengths).long()
    request = DataProto.from_dict(
        {"input_ids": torch.stack(prompts), "attention_mask": mask, "position_ids": mask.cumsum(1) - 1}
    )
    output = concatenate_input_and_output(
        input_ids=request.batch["input_ids"],
        output_ids=torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=pad),
        num_return_sequences=1,
    )
    made = postprocess_generate(
        prompts=request,
        output=output,
        num_return_sequences=1,
        sequence_length=length(),
        eos_token_id=[eos, pad],
        pad_token_id=pad,
        routed_experts=[part.int() for part in routes],
    )
    shape = made.batch["input_ids"][:, 1:].shape
    for name in ("old_log_probs", "ref_log_probs", "advantages"):
        made.batch[name] = torch.ones(shape)
    if has_images:
        made.non_tensor_batch["multi_modal_inputs"] = np.array([each or {} for each in vlms.images()], dtype=object)
    made.meta_info = {"loss_mask_keys": ["response_mask"], "micro_batch_size": flags.get("size", 2)}
    if flags.get("dynamic"):
        made, _ = dynamic_batching_shard(made, 1, 2 * length(), 4)
        made.meta_info |= {"loss_mask_keys": ["response_mask"], "micro_batch_size": 2}
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
        flags: of `worker_config`, and `moe_layer_freq`.
        audits: ROLL's own replay is in the routers.
        plants: it gets one wrong row.
    """
    is_vlm = "vlm" in options
    with (
        _imports(folder, ("ray",) if is_vlm else SERVICES),
        oracle.process(plants=plants),
    ):
        roll.install()
        module, worker = prepare(layout)
        chunks = small_model.build(layout, moe_enable_routing_replay=audits, **options)
        me = strategy(module, chunks, worker_config(**flags), layout, is_vlm=is_vlm)
        worker.strategy = me
        ids, routes = oracle.rollout(seed := module.mpu.get_data_parallel_rank())
        with oracle.watched(chunks, oracle.routes_of_tokens(ids, routes)) as seen:
            reference = batch(seed, flags, has_images=is_vlm)
            reference.batch.pop("routed_experts")
            for made in (reference, batch(seed, flags, has_images=is_vlm)):
                with torch.no_grad():
                    me.forward_step(made, worker.forward_func_log_probs)
                seen.mark()
            metrics = me.train_step(batch(seed, flags, has_images=is_vlm), worker.loss_func)
            assert audits or metrics["router_replay/replayed_share"] > 0.8
        return seen.counts()


def prepare(layout: ParallelSizes) -> tuple[Any, Any]:
    """Return ROLL's module of strategies, with services replaced, and its actor's worker."""
    from mcore_adapter.models import model_factory
    from roll.distributed.strategy import megatron_strategy as module
    from roll.pipeline.base_worker import ActorWorker

    # Only the logging of auxiliary losses.
    module.reduce_aux_losses_tracker_across_ranks = module.clear_aux_losses_tracker = lambda *_: None
    module.get_moe_layer_wise_logging_tracker = lambda *_: {}
    model_factory.torch = without_pinned_memory()
    # An older Megatron-Core has no total_tokens, which only Transformer Engine reads.
    module.PackedSeqParams = small_model.packed_seq_params
    worker = object.__new__(ActorWorker)
    worker.pipeline_config = Config(
        enable_old_logprobs_recompute=True, pg_clip=0.2, loss_agg_mode="token-mean", entropy_loss_coef=0.0
    )
    worker._logprobs_cache = {}
    return module, worker


def strategy(module: Any, chunks: list[Any], config: Config, layout: ParallelSizes, *, is_vlm: bool = False) -> Any:
    """Return a training strategy with these chunks, as ROLL's own `initialize` leaves it."""
    from mcore_adapter.models.model_factory import PretrainedModel, VirtualModels

    for chunk in chunks:
        model = chunk.module
        model.config.moe_layer_freq = [0, 1, 1, 1]
        if not is_vlm:
            _like_rolls(model, PretrainedModel)
        # ROLL's loss changes logits in place, unless they are cast to fp32 for it.
        model.register_forward_hook(lambda module, args, output: output.bfloat16() if module.post_process else output)
    me = object.__new__(module.MegatronTrainStrategy)
    me.worker_config, me.is_multimodal, me.use_sequence_packing = config, is_vlm, config.use_sequence_packing
    me.model = object.__new__(VirtualModels)
    me.model.models, me.model.config = chunks, chunks[0].config
    me.models_wrapped, me.models_unwrapped = chunks, [chunk.module for chunk in chunks]
    me.seq_length = length()
    me.enable_router_replay, me.router_replay_mode = True, "R3"
    me.forward_backward_func = module.get_forward_backward_func()
    me.optimizer = small_model.NoOptimizer()
    me.scheduler = Config(step=lambda: None)
    me.load_states = me.offload_states = lambda **_: None
    me.megatron_train_args = Config(
        gradient_accumulation_steps=oracle.NUM_SAMPLES // config.training_args.per_device_train_batch_size
    )
    me.worker = Config(
        rank_info=Config(
            tp_rank=module.mpu.get_tensor_model_parallel_rank(),
            tp_size=layout.tp_size,
            cp_rank=module.mpu.get_context_parallel_rank(),
            cp_size=layout.cp_size,
            pp_size=layout.pp_size,
            is_pipeline_last_stage=module.mpu.is_pipeline_last_stage(),
        )
    )
    return me


def _like_rolls(model: Any, base: Any) -> None:
    """Let Megatron-Core's GPTModel do what ROLL's does: split a batch, make positions and masks by itself."""
    model.get_batch_on_this_cp_rank = types.MethodType(base.get_batch_on_this_cp_rank, model)
    model.register_forward_pre_hook(_lay_out, with_kwargs=True, prepend=True)


def without_pinned_memory() -> Any:
    """Return torch for a module whose context parallelism pins the memory of its indices, as only a GPU can."""
    module = types.ModuleType("torch")
    vars(module).update(vars(torch), tensor=lambda *args, pin_memory=False, **kwargs: torch.tensor(*args, **kwargs))
    return module


def _lay_out(model: Any, args: Any, kwargs: Any) -> Any:
    ids = kwargs["input_ids"]
    params = kwargs["packed_seq_params"]
    lengths = (
        [ids.shape[1] * model.config.context_parallel_size] if params is None else params.cu_seqlens_q.diff().tolist()
    )
    parts = [model.get_batch_on_this_cp_rank({"at": torch.arange(length)[None]})["at"] for length in lengths]
    at = torch.cat(parts, dim=1).expand_as(ids)
    return args, {**kwargs, "position_ids": at, "attention_mask": None}


@contextmanager
def _imports(folder: str, services: tuple[str, ...]) -> Iterator[None]:
    """Import ROLL and its adapter; its log goes into a folder that ends with the block."""
    source = os.path.join(folder, "mcore_adapter", "src")
    with (
        tempfile.TemporaryDirectory() as logs,
        mock.patch.dict(os.environ, ROLL_LOG_DIR=logs),
        mock.patch.object(sys, "path", [source, *sys.path]),
        trainer_imports(folder, PACKAGES, services=services),
    ):
        # Not by a patch of sys.modules, which drops each module that is imported inside. A stand-in would be an NPU.
        sys.modules["torch_npu"] = None  # type: ignore[assignment]
        try:
            yield
        finally:
            del sys.modules["torch_npu"]
