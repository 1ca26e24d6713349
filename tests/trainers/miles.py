"""miles' own actor, from the rollout's stored object to the optimizer, on a CPU: reference pass, log-probs, training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megatron_router_replay.testing import ParallelSizes
from tests.trainers import oracle, small_model
from tests.trainers.slime import SERVICES, Args
from tests.trainers.slime import args as arguments_of_slime
from tests.trainers.sources import Source
from tests.trainers.stand_ins import trainer_imports

SOURCE = Source(name="miles", packages=("miles",))


def rollout_data(seed: int) -> dict[str, Any]:
    """What miles' rollout manager stores for a rank; its routes are arrays."""
    box = oracle.rollout_box(seed)
    box["rollout_routed_experts"] = [part.numpy() for part in box["rollout_routed_experts"]]
    return box | {"num_rollouts": [len(box["tokens"])], "num_microbatches": [4]}


def step(folder: str, layout: ParallelSizes, options: dict[str, Any], flags: dict[str, Any], own: bool = False) -> Any:
    """Train on one rollout; {pass: (decisions, wrong)} of the reference, log-prob and training passes.

    Args:
        own: with miles' own replay in the routers.
    """
    with trainer_imports(folder, ("miles",), services=SERVICES):
        torch._dynamo.config.disable = True
        from miles.backends.megatron_utils import actor, model, parallel
        from miles.backends.training_utils import data, log_utils
        from miles.utils.ft_utils.process_group_utils import GroupInfo
        from miles.utils.replay_base import routing_replay_manager

        chunks = small_model.build(layout, **options)
        chunks[0].role = "actor"
        arguments: Args = arguments_of_slime(layout, **{"qkv_format": "thd", "allgather_cp": False, **flags})
        arguments.pipeline_model_parallel_size = layout.pp_size
        model.get_args = parallel.get_args = lambda: arguments
        parallel.mpu.get_data_parallel_group_gloo = (
            parallel.mpu.get_data_parallel_group
        )  # gloo's are the only groups here
        model.DumperMegatronUtil = _NoDumper
        model.torch.cuda.mem_get_info = lambda device=None: (1, 1)  # there is memory
        actor.is_first_replica_megatron_main_rank = model.is_first_replica_megatron_main_rank = lambda: False
        from miles.backends.training_utils.parallel import set_parallel_state

        set_parallel_state(parallel.create_megatron_parallel_state(GroupInfo(rank=0, size=1, group=None)))
        # Services: the object store, the trackers.
        boxes = [rollout_data(i) for i in range(parallel.mpu.get_data_parallel_world_size())]
        data.process_rollout_data = lambda args, ref, rank, size, witness_info: (_shard(args, ref[rank]), _Nothing())
        log_utils.gather_log_data = actor.log_perf_data = lambda *args, **kwargs: None
        routing_replay_manager.enabled = own  # as `init` leaves it
        if own:
            _install_own_replay(chunks, routing_replay_manager)
        ids, routes = oracle.rollout(parallel.mpu.get_data_parallel_rank())
        me = object.__new__(actor.MegatronTrainRayActor)
        me.args, me.role, me.model, me.optimizer = arguments, "actor", chunks, small_model.NoOptimizer()
        me.with_ref = True
        me.opt_param_scheduler = SimpleNamespace(step=lambda increment: None, get_lr=lambda group: 0.0)
        me.prof = SimpleNamespace(step=lambda rollout_id: None)
        me.rollout_data_postprocess, me.weight_updater = None, SimpleNamespace(pop_metrics=dict)
        me._heartbeat, me._ft_test_action_executor = SimpleNamespace(bump=lambda: None), None
        with oracle.watched(chunks, oracle.routes_of_tokens(ids, routes)) as seen:
            me.weights_backuper = SimpleNamespace(
                backup_tags={"ref", "actor", "old_actor"}, restore=lambda tag: seen.mark(), backup=lambda tag: None
            )
            me._active_model_tag = "actor"
            actor.Timer().start("train_wait")  # miles does so at the end of init
            me.train(0, boxes)
        return [part.counts() for part in seen if sum(part.looked.values())]


def step_with_miles_own_replay(folder: str, flags: dict[str, Any]) -> Any:
    current_device = torch.cuda.current_device
    try:
        return step(folder, ParallelSizes(), {}, flags, own=True)
    finally:
        torch.cuda.current_device = current_device


def _install_own_replay(chunks: list[Any], manager: Any) -> None:
    """Have routers choose by miles' top-k, as its Megatron-LM has them; its queues are not pinned and stay on the CPU."""
    from megatron.core.transformer.moe.router import TopKRouter
    from miles.backends.megatron_utils.replay_utils import register_replay_list_moe
    from miles.utils.replay_base import Replay

    manager.register_replay_list_func = register_replay_list_moe
    Replay.record = lambda self, top_indices: self.top_indices_list.append(top_indices.clone())
    torch.cuda.current_device = lambda: "cpu"
    choose = manager.get_topk_fn(lambda scores, topk: scores.topk(topk, dim=1), return_probs=True)

    def routing(logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.reshape(-1, oracle.EXPERTS).softmax(dim=1)
        chosen = choose(scores, oracle.TOPK)[1].long()
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        return scores * routing_map, routing_map

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                manager.register_to_module(module, "routing_replay")
                module.routing = routing


def _shard(args: Any, stored: dict[str, Any]) -> dict[str, Any]:
    from miles.ray.rollout.train_data_conversion import process_rollout_data_shard

    shard: dict[str, Any] = process_rollout_data_shard(args, stored)
    return shard


class _NoDumper:
    """Stands for SGLang's dumper of activations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wrap_forward_step(self, forward_step: Any) -> Any:
        return forward_step

    def finalize(self, model: Any) -> None:
        pass


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass
