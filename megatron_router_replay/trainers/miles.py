"""miles: `--use-rollout-routing-replay --custom-megatron-init-path megatron_router_replay.trainers.miles.init`.

miles' own replay of routers is off in this process: no router registers a queue, and its top-k is the live one. The manager's
stage stays the switch, and the samples come in where miles fills its queues. The replay of its indexer stays as it is.
"""

from __future__ import annotations

import importlib
from typing import Any

from megatron_router_replay.trainers.seams import Seam, hook, take

FIELD = "rollout_routed_experts"
BASE = "miles.utils.replay_base"
FILL = Seam(
    module="miles.backends.training_utils.replay_data",
    name="fill_replay_data",
    parameters="models rollout_data data_key",
)
STAGE = Seam(
    module="miles.backends.megatron_utils.actor",
    name="MegatronTrainRayActor.train_actor",
    words="fill_replay_data data_key stage fallthrough replay_forward replay_backward",
)
REGISTER = Seam(module=BASE, name="BaseReplayManager.register_to_module", parameters="self module")
TOPK = Seam(module=BASE, name="BaseReplayManager.get_topk_fn", parameters="self old_topk_fn")
STEP = Seam(module="miles.backends.megatron_utils.model", name="train_one_step", words="loss_reduced")
SEAMS = (FILL, STAGE, REGISTER, TOPK, STEP)


def init(args: Any, **options: Any) -> None:
    """Install the replay if miles' own is on. miles calls it before it builds the model.

    Args:
        args: miles' arguments.
        options: of `mrr.replay`; an init function of your own may call this one with them.
    """
    if not getattr(args, "use_rollout_routing_replay", False):
        return
    from megatron_router_replay.trainers import follow

    options = {"padding_token_ids": [0], **options}  # miles pads with 0
    if getattr(args, "allgather_cp", False):
        options = {"cp_partition_mode": "contiguous", **options}
    manager = importlib.import_module(BASE).routing_replay_manager
    replay = follow.install("miles", lambda: manager.stage != "fallthrough", options)

    def filling(original: Any) -> Any:
        def fill_replay_data(*, rollout_data: Any, data_key: str, models: Any, **others: Any) -> None:
            if data_key == FIELD:
                follow.active().enter(models, lambda: take(FILL, rollout_data, "tokens", FIELD))
                if not replay.audits:
                    del rollout_data[FIELD]
                    return
            original(rollout_data=rollout_data, data_key=data_key, models=models, **others)

        return fill_replay_data

    def registering(original: Any) -> Any:
        def register_to_module(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            if self is not manager:
                original(self, module, *args, **kwargs)

        return register_to_module

    def choosing(original: Any) -> Any:
        def get_topk_fn(self: Any, old_topk_fn: Any, *args: Any, **kwargs: Any) -> Any:
            return old_topk_fn if self is manager else original(self, old_topk_fn, *args, **kwargs)

        return get_topk_fn

    hook(FILL, filling)
    hook(STAGE, None)
    hook(STEP, follow.reporting)
    hook(REGISTER, None if replay.audits else registering)
    hook(TOPK, None if replay.audits else choosing)
