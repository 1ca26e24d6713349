"""slime's own actor, from the rollout's Ray box to the optimizer, on a CPU: reference pass, log-probs, training."""

from __future__ import annotations

import importlib
import inspect
import os
from types import SimpleNamespace
from typing import Any

import torch

from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.trainers import slime
from tests.functional.mcore.cases import set_in_configs
from tests.trainers import oracle, small_model, vlms
from tests.trainers.sources import Source
from tests.trainers.stand_ins import Config, trainer_imports

SOURCE = Source(name="slime", packages=("slime", "slime_plugins"))
SERVICES = ("ray", "transformers", "wandb")


def services(options: dict[str, Any]) -> tuple[str, ...]:
    """Return the packages that get a stand-in; a vision tower is transformers' own."""
    return tuple(name for name in SERVICES if name != "transformers" or "vlm" not in options)


def args(layout: ParallelSizes, **options: Any) -> Config:
    return Config(
        advantage_estimator="grpo",
        check_for_nan_in_loss_and_grad=True,
        compute_advantages_and_returns=True,
        data_pad_size_multiplier=8,
        entropy_coef=0.0,
        eps_clip=0.2,
        eps_clip_high=0.2,
        kl_coef=0.0,
        kl_loss_coef=0.1,
        kl_loss_type="low_var_kl",
        log_probs_chunk_size=-1,
        loss_type="policy_loss",
        micro_batch_size=1,
        moe_router_topk=oracle.TOPK,
        num_experts=oracle.EXPERTS,
        num_layers=oracle.LAYERS,
        moe_layer_freq=[0, 1, 1, 1],
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        seq_length=64,
        sequence_parallel=layout.sequence_parallel,
        use_kl_loss=True,
        use_rollout_routing_replay=True,
        use_routing_replay=True,
        get_mismatch_metrics=False,
        keep_old_actor=True,  # so that log-probs are computed in a pass of their own
        use_dynamic_batch_size=True,
        use_dynamic_global_batch_size=False,
        **options,
    )


def rollout_data(seed: int, steps: int, *, has_images: bool) -> dict[str, Any]:
    """What slime's rollout manager puts into a rank's box."""
    try:
        from slime.observability.rollout_data_utils import tensorize_rollout_data_for_training as tensorize
    except ModuleNotFoundError:  # before August 21, 2026
        from slime.ray.rollout import _tensorize_rollout_data_for_training as tensorize

    data = oracle.rollout_box(seed)
    data |= {"multimodal_train_inputs": vlms.images()} if has_images else {}
    data |= {"global_batch_sizes": [len(data["tokens"]) // steps] * steps, "num_microbatches": [4 // steps] * steps}
    tensorize(data)
    return data


def step(
    folder: str,
    layout: ParallelSizes,
    options: dict[str, Any],
    flags: dict[str, Any],
    *,
    audits: bool = False,
    plants: bool = False,
) -> Any:
    """Train on one rollout, in so many `steps`; {pass: (decisions, wrong)} of the reference, log-probs and training.

    Args:
        audits: slime's own replay is in the routers.
        plants: it gets one wrong row.
    """
    packages = ("slime", "slime_plugins")
    with trainer_imports(folder, packages, services=services(options)), oracle.process():
        from slime.backends.megatron_utils import actor, data, model
        from slime.utils import data as slime_data
        from slime.utils.misc import Box

        # Services: Ray's store, the trackers of a rollout, the GPU.
        slime_data.ray.get = lambda reference: reference
        try:
            from slime.observability import train_metric_utils
            from slime.utils import accelerator
        except ModuleNotFoundError:  # before August 21, 2026
            actor.log_perf_data = data.gather_log_data = lambda *args, **kwargs: None
        else:
            train_metric_utils.log_perf_data = train_metric_utils.gather_log_data = lambda *args, **kwargs: None
            accelerator.current_device = accelerator.device = lambda *args, **kwargs: torch.device("cpu")
        arguments = args(layout, **flags)
        model.get_args = lambda: arguments
        slime.init(arguments)  # --custom-megatron-init-path
        chunks = small_model.build(layout, **options)
        if arguments.allgather_cp:
            small_model.without_attention(chunks)
        if arguments.combined_1f1b:
            set_in_configs(chunks, overlap_moe_expert_parallel_comm=True)  # whose own checks want bf16
        if audits:
            _install_own_replay(chunks, plants)
        boxes = [
            Box(rollout_data(i, flags.get("steps", 1), has_images="vlm" in options))
            for i in range(actor.mpu.get_data_parallel_world_size())
        ]
        return train(actor, arguments, chunks, boxes)


def _install_own_replay(chunks: list[Any], plants: bool) -> None:
    """Have routers choose by slime's top-k, as its Megatron-LM has them; its queues are not pinned."""
    from megatron.core.transformer.moe.router import TopKRouter
    from slime.utils import routing_replay

    os.environ["ENABLE_ROUTING_REPLAY"] = "1"  # as slime's actor group starts the actors
    routing_replay.RoutingReplay.all_routing_replays.clear()
    keep = oracle.planting(_keep) if plants else _keep
    routing_replay.RoutingReplay.record = keep
    choose = routing_replay.get_routing_replay_compute_topk(lambda scores, topk, **_: scores.topk(topk, dim=1))

    def routing(logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.reshape(-1, oracle.EXPERTS).softmax(dim=1)
        chosen = choose(scores, oracle.TOPK)[1].long()
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        return scores * routing_map, routing_map

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                routing_replay.register_routing_replay(module)
                module.routing = routing


def _keep(replay: Any, topk_indices: torch.Tensor) -> None:
    replay.top_indices_list.append(topk_indices.clone())


def start(folder: str, name: str = "slime", info: str = "") -> str:
    """Run the actor's own `init` until it builds the model.

    Args:
        name: of the trainer, slime or miles.
        info: the module of miles' `IndepDPInfo`; "": its `init` takes none.
    """
    with trainer_imports(folder, (name,), services=SERVICES), oracle.process():
        modules = ("actor", "initialize", "model")
        actor, initialize, model = (
            importlib.import_module(f"{name}.backends.megatron_utils.{each}") for each in modules
        )
        # The GPUs and their groups, trackers, and NumPy 1, which Megatron-LM's optimizer needs.
        for module, names in (
            (actor, "monkey_patch_torch_dist register_default_process_group init_tracking get_gloo_group"),
            (actor, "load_hf_config load_tokenizer"),
            (initialize, "_set_random_seed init_num_microbatches_calculator register_hf_config_aliases"),
        ):
            for each in names.split():
                setattr(module, each, lambda *args, **kwargs: None)
        initialize.np = SimpleNamespace(__version__="1.26")
        model.get_model = oracle.build_model
        base = actor.MegatronTrainRayActor.__mro__[1]
        base.init = lambda self, args, *_, **__: setattr(self, "args", args)
        base._rank, base._indep_dp_store_addr = 0, None
        named = {"indep_dp_info": importlib.import_module(info).IndepDPInfo.create_trivial()} if info else {}
        sizes = dict.fromkeys(
            [f"{each}_parallel_size" for each in ("tensor_model", "pipeline_model", "context", "expert_model")]
            + ["num_distributed_optimizer_instances", "distributed_timeout_minutes", "num_gpus_per_node"],
            1,
        )
        arguments = args(
            ParallelSizes(),
            custom_megatron_init_path=f"megatron_router_replay.trainers.{name}.init",
            enable_gloo_process_groups=True,
            load="",
            lora_rank=0,
            profile_target=[],
            **sizes,
        )
        return oracle.starting(object.__new__(actor.MegatronTrainRayActor).init, arguments, "actor", **named)


def train(actor: Any, arguments: Config, chunks: list[Any], boxes: list[Any], **fields: Any) -> Any:
    """Let an actor, as its `init` leaves it but for the services, train on the boxes of the data-parallel ranks."""
    from megatron.core import parallel_state

    chunks[0].role = "actor"
    me = object.__new__(actor.MegatronTrainRayActor)
    me.args, me.role, me.model, me.optimizer = arguments, "actor", chunks, small_model.NoOptimizer()
    me.opt_param_scheduler = SimpleNamespace(step=lambda increment: None, get_lr=lambda group: 0.0)
    me.prof = SimpleNamespace(step=lambda rollout_id: None)
    me.rollout_data_postprocess, me.weight_updater = None, SimpleNamespace(pop_metrics=dict)
    vars(me).update(fields)
    ids, routes = oracle.rollout(parallel_state.get_data_parallel_rank())
    with oracle.watched(chunks, oracle.routes_of_tokens(ids, routes)) as seen:
        me.weights_backuper = SimpleNamespace(
            backup_tags={"ref", "actor", "old_actor"}, restore=lambda tag: seen.mark(), backup=lambda tag: None
        )
        me._active_model_tag = "actor"
        actor.Timer().start("train_wait")  # they do so at the end of init
        # miles asked for these before August 2026.
        named = inspect.signature(me.train).parameters
        me.train(
            0, boxes, **{name: value for name, value in {"witness_info": None, "attempt": 0}.items() if name in named}
        )
    return seen.counts()
