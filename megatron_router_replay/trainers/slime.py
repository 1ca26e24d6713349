"""slime: `--use-rollout-routing-replay --custom-megatron-init-path megatron_router_replay.trainers.slime.init`.

slime's own replay is off in this process: no router registers a queue. Its stage (ROUTING_REPLAY_STAGE) stays the switch, and
the samples come in where slime fills its queues.
"""

from __future__ import annotations

import os
from typing import Any

from megatron_router_replay.trainers.seams import Seam, hook, take

ACTOR = "slime.backends.megatron_utils.actor"
FILL = Seam(
    module=ACTOR,
    name="MegatronTrainRayActor.fill_routing_replay",
    parameters="self data_iterator num_microbatches rollout_data",
    words="rollout_routed_experts",
)
STAGE = Seam(
    module=ACTOR,
    name="MegatronTrainRayActor.train_actor",
    words="fill_routing_replay ROUTING_REPLAY_STAGE fallthrough replay_forward replay_backward",
)
REGISTER = Seam(module="slime.utils.routing_replay", name="register_routing_replay", words="ENABLE_ROUTING_REPLAY")
STEP = Seam(module="slime.backends.megatron_utils.model", name="train_one_step", words="loss_reduced")
SEAMS = (FILL, STAGE, REGISTER, STEP)


def init(args: Any, **options: Any) -> None:
    """Install the replay if slime's own is on. slime calls it before it builds the model.

    Args:
        args: slime's arguments.
        options: of `mrr.replay`; an init function of your own may call this one with them.
    """
    if not getattr(args, "use_rollout_routing_replay", False):
        return
    from megatron_router_replay.trainers import follow

    options = {"padding_token_ids": [0], **options}  # slime pads with 0
    if getattr(args, "allgather_cp", False):
        options = {"cp_partition_mode": "contiguous", **options}
    replay = follow.install("slime", replays, options)
    if not replay.audits:
        os.environ["ENABLE_ROUTING_REPLAY"] = "0"

    def filling(original: Any) -> Any:
        def fill_routing_replay(self: Any, data_iterator: Any, num_microbatches: Any, rollout_data: Any) -> None:
            follow.active().enter(self.model, lambda: take(FILL, rollout_data, "tokens", "rollout_routed_experts"))
            if replay.audits:
                original(self, data_iterator, num_microbatches, rollout_data)
            else:
                del rollout_data["rollout_routed_experts"]

        return fill_routing_replay

    hook(REGISTER, None)
    hook(FILL, filling)
    hook(STAGE, None)
    hook(STEP, follow.reporting)


def replays() -> bool:
    """Return whether the pass that begins now replays, as slime sets its stage."""
    return os.environ.get("ROUTING_REPLAY_STAGE", "fallthrough") != "fallthrough"
