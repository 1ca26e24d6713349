"""miles' own actor, from the rollout's stored object to the optimizer, on a CPU: reference pass, log-probs, training."""

from __future__ import annotations

import inspect
import runpy
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.trainers import miles
from tests.trainers import oracle, slime, small_model, vlms
from tests.trainers.slime import train
from tests.trainers.sources import Source
from tests.trainers.stand_ins import trainer_imports

SOURCE = Source(name="miles", packages=("miles", "miles_plugins"))


def rollout_data(seed: int, *, has_images: bool) -> dict[str, Any]:
    """What miles' rollout manager stores for a rank; its routes are arrays."""
    box = oracle.rollout_box(seed) | ({"multimodal_train_inputs": vlms.images()} if has_images else {})
    box["rollout_routed_experts"] = [part.numpy() for part in box["rollout_routed_experts"]]
    return box | {"num_rollouts": [len(box["tokens"])], "num_microbatches": [4]}


def step(
    folder: str,
    layout: ParallelSizes,
    options: dict[str, Any],
    flags: dict[str, Any],
    *,
    audits: bool = False,
    plants: bool = False,
) -> Any:
    """Train on one rollout; {pass: (decisions, wrong)} of the reference, log-prob and training passes.

    Args:
        audits: miles' own replay is in the routers.
        plants: it gets one wrong row.
    """
    with trainer_imports(folder, SOURCE.packages, services=slime.services(options)), oracle.process():
        from miles.backends.megatron_utils import actor, model, parallel
        from miles.backends.training_utils import data, log_utils
        from miles.backends.training_utils.parallel import set_parallel_state
        from miles.utils.replay_base import routing_replay_manager

        if "pattern" in options:  # as miles' bridge of Nemotron-H does before it builds the model
            plugin = runpy.run_path(str(Path(folder, "miles_plugins/megatron_bridge/nemotron_h.py")))
            plugin["_install_nemotronh_hybrid_layer_shims"]()
            plugin["_install_mamba_model_loss_mask_shim"]()
        if "vlm" in options:  # as miles' bridge does when it is imported
            bridge = vlms.import_megatron_bridge()
            from miles_plugins.models.qwen3_vl import install_qwen3_vl_packed_mrope_patch

            install_qwen3_vl_packed_mrope_patch()
            assert bridge.Qwen3VLModel._miles_qwen3_vl_thd_mrope_patched
        chunks = small_model.build(layout, **options)
        arguments = slime.args(layout, **{"qkv_format": "thd", "allgather_cp": False, **flags})
        arguments.pipeline_model_parallel_size = layout.pp_size
        if arguments.allgather_cp:
            small_model.without_attention(chunks)
        # The actor made micro-batches before July 2026.
        arguments.global_batch_size, arguments.max_tokens_per_gpu = oracle.NUM_SAMPLES * layout.ep_size, 20
        model.get_args = parallel.get_args = lambda: arguments
        # gloo's are the only groups here
        parallel.mpu.get_data_parallel_group_gloo = parallel.mpu.get_data_parallel_group
        model.DumperMegatronUtil = _NoDumper
        model.torch.cuda.mem_get_info = lambda device=None: (1, 1)  # there is memory
        # Services: the object store, the trackers of a rollout.
        ranks = range(parallel.mpu.get_data_parallel_world_size())
        boxes = [rollout_data(i, has_images="vlm" in options) for i in ranks]
        try:
            from miles.ray.rollout.train_data_conversion import process_rollout_data_shard
            from miles.utils.ft_utils.process_group_utils import GroupInfo
        except ImportError:  # before July 2026
            from miles.utils import data as store

            set_parallel_state(parallel.create_megatron_parallel_state())
            store.ray.get = lambda reference: reference
            boxes = [SimpleNamespace(inner=box) for box in boxes]
        else:
            set_parallel_state(parallel.create_megatron_parallel_state(GroupInfo(rank=0, size=1, group=None)))
            is_pair = "store_get_result" in inspect.getsource(data.get_rollout_data)  # since August 2026

            def process_rollout_data(args: Any, ref: Any, rank: int, size: int, witness_info: Any) -> Any:
                shard = process_rollout_data_shard(args, ref[rank])
                return (shard, nullcontext()) if is_pair else shard

            data.process_rollout_data = process_rollout_data
        log_utils.gather_log_data = actor.log_perf_data = lambda *args, **kwargs: None
        actor.init_tracking(arguments, primary=False)
        miles.init(arguments)  # --custom-megatron-init-path
        routing_replay_manager.enabled = True  # as the actor's `init` leaves it
        if audits:
            _install_own_replay(chunks, routing_replay_manager, plants)
        heartbeat = SimpleNamespace(bump=lambda: None)
        return train(
            actor, arguments, chunks, boxes, with_ref=True, _heartbeat=heartbeat, _ft_test_action_executor=None
        )


def start(folder: str) -> str:
    """Run the actor's own `init` until it builds the model."""
    info = "miles.utils.ft_utils.indep_dp" if Path(folder, "miles/utils/ft_utils/indep_dp.py").exists() else ""
    return slime.start(folder, "miles", info)


def _install_own_replay(chunks: list[Any], manager: Any, plants: bool) -> None:
    """Have routers choose by miles' top-k, as its Megatron-LM has them; its queues are not pinned."""
    from megatron.core.transformer.moe.router import TopKRouter
    from miles.backends.megatron_utils.replay_utils import register_replay_list_moe
    from miles.utils.replay_base import Replay

    manager.register_replay_list_func = register_replay_list_moe
    Replay.record = lambda self, top_indices: self.top_indices_list.append(top_indices.clone())
    Replay.record = oracle.planting(Replay.record) if plants else Replay.record
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


class _NoDumper:
    """Stands for SGLang's dumper of activations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wrap_forward_step(self, forward_step: Any) -> Any:
        return forward_step

    def finalize(self, model: Any) -> None:
        pass
