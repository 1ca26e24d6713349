"""ms-swift's own Megatron GRPO trainer, from its collator through log-probs to a training step, on a CPU."""

from __future__ import annotations

from copy import deepcopy
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import torch

from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.trainers import ms_swift
from megatron_router_replay.trainers.seams import source_of
from tests.trainers import oracle, small_model
from tests.trainers.sources import Source
from tests.trainers.stand_ins import Config, trainer_imports

SOURCE = Source(name="ms_swift", packages=("swift",))
SERVICES = ("ray", "transformers", "peft", "datasets", "accelerate", "mcore_bridge")
ZOO = (
    "swift.model.models",
    "swift.template.templates",
    "swift.dataset",
    "swift.sequence_parallel",
    "swift.rlhf_trainers.grpo_trainer",
)
"""Modules of each architecture, of data sets and of its backend without Megatron: no case runs them."""


def bridge() -> Path | None:
    """Return the folder of mcore_bridge, None: it is not installed."""
    spec = PathFinder.find_spec("mcore_bridge")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def split_cp_inputs() -> Any:
    """Return mcore_bridge's own function."""
    return own_function("utils/megatron_utils.py", "split_cp_inputs")


def own_function(file: str, name: str, **names: Any) -> Any:
    """Return a function of mcore_bridge, without the imports of its module, which knows these names."""
    from megatron.core import parallel_state

    folder = bridge()
    assert folder is not None, "the test is skipped"
    names |= {"torch": torch, "mpu": parallel_state, "Optional": Optional, "List": list}
    exec(source_of((folder / file).read_text(), name) or "", names)
    return names[name]


def arguments(layout: ParallelSizes, *, packs: bool) -> Config:
    return Config(
        router_replay_mode="R3",
        task_type="causal_lm",
        report_to=[],
        padding_free=packs,
        tensor_model_parallel_size=layout.tp_size,
        pipeline_model_parallel_size=layout.pp_size,
        context_parallel_size=layout.cp_size,
        sequence_parallel=layout.sequence_parallel,
        num_microbatches=3,
        seq_length=24,
        micro_batch_size=2,
        global_batch_size=oracle.NUM_SAMPLES,
    )


def micro_batches(seed: int, args: Config) -> list[dict[str, Any]]:
    """Return the micro-batches that ms-swift's own collator makes of a rollout: model inputs with routes."""
    from swift.megatron.utils import get_padding_to
    from swift.rlhf_trainers.utils import collate_to_grpo_micro_batch
    from swift.template.base import Template

    template = object.__new__(Template)
    vars(template).update(
        padding_free=args.padding_free,
        padding_side="right",
        mode="train",
        use_megatron=True,
        packing=False,
        remove_unused_columns=True,
        sequence_parallel_size=args.context_parallel_size,
        task_type="causal_lm",
        tokenizer=SimpleNamespace(pad_token_id=oracle.unused_tokens(seed)[0]),
        processor=SimpleNamespace(pad_token_id=oracle.unused_tokens(seed)[0]),
    )
    # Multimodal data alone.
    template._data_collator_mm_data = lambda batch: {}
    ids, routes = oracle.rollout(seed)
    samples = [
        SimpleNamespace(
            encoded={
                "input_ids": part.tolist(),
                "labels": [-100] * prompt + part[prompt:].tolist(),
                "length": len(part),
            },
            routed_experts=rows.numpy(),
            is_truncated=False,
            rollout_logprobs=None,
        )
        for part, prompt, rows in zip(ids, oracle.SHARDS[seed % 2][1], routes)
    ]
    made = []
    for at in range(0, len(samples), 2):
        inputs, grpo_batch = collate_to_grpo_micro_batch(
            samples[at : at + 2],
            template,
            device=torch.device("cpu"),
            padding_to=get_padding_to(args),
            router_replay_mode="R3",
        )
        made.append({**inputs, "grpo_batch": grpo_batch})
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
    """The reference's log-probs, the policy's, a training step; {pass: (decisions, wrong)} of each.

    Args:
        audits: ms-swift's own replay is in the routers.
        plants: it gets one wrong row.
    """
    with trainer_imports(folder, SOURCE.packages, services=SERVICES + ZOO), oracle.process(plants=plants):
        ms_swift.install()
        from swift.megatron.trainers import base, grpo_trainer
        from swift.megatron.utils import megatron_lm_utils

        if layout.cp_size > 1:
            megatron_lm_utils.split_cp_inputs = split_cp_inputs()
        args = arguments(layout, packs=flags.get("packs", False))
        args.is_multimodal = "vlm" in options
        chunks = small_model.build(layout, moe_enable_routing_replay=audits, **options)
        for chunk in chunks:
            chunk.module.config.moe_layer_freq = [0, 1, 1, 1]
            # ms-swift's model computes them itself, and takes a mask that is True where a token is hidden.
            chunk.module.register_forward_pre_hook(_without_mask, with_kwargs=True, prepend=True)
        me = object.__new__(grpo_trainer.MegatronGRPOTrainer)
        me.args, me.template = args, SimpleNamespace(padding_free=args.padding_free)
        me.unwrapped_models, me.wrapped_models = [chunk.module for chunk in chunks], chunks
        me.enable_routing_replay, me.beta, me.temperature, me.micro_batch_size = True, 0.0, 1.0, 2
        me._has_teacher_explicit = me._is_dynamic_self_distillation = me.use_teacher_api = False
        me.compute_entropy, me._step, me.steps_per_generation = False, 0, flags.get("steps", 1)
        me.optimizer, me.opt_param_scheduler = small_model.NoOptimizer(), Config(step=lambda increment: None)
        me.loss_func = lambda output_tensor, data: (output_tensor.float().sum(), {})
        for name in ("logical_and_across_model_parallel_group", "reduce_max_stat_across_model_parallel_group"):
            setattr(base, name, lambda value: value)
        seed = grpo_trainer.mpu.get_data_parallel_rank()
        ids, routes = oracle.rollout(seed)
        with oracle.watched(chunks, oracle.routes_of_tokens(ids, routes)) as seen:
            for each in micro_batches(seed, args):
                del each["grpo_batch"]
                me.compute_per_token_logps(me.unwrapped_models[0], iter([deepcopy(each)]))
            seen.mark()

            def roll_out(data_iterator: Any) -> list[Any]:
                """Replace the generation, and what follows it in `_generate_and_score_completions`."""
                made = [me._maybe_compute_logps(each) for each in micro_batches(seed, args)]
                seen.mark()
                return [made] * me.steps_per_generation

            me._build_rollout_buffer = roll_out
            for step in range(me.steps_per_generation):
                if step:
                    seen.mark()
                me.train_step(None)
        return seen.counts()


def _without_mask(model: Any, args: Any, kwargs: Any) -> Any:
    known = ("input_ids", "position_ids", "packed_seq_params")
    return args, {name: kwargs.get(name) for name in known} | {"attention_mask": None}
