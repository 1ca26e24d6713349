"""slime: `--use-rollout-routing-replay --custom-megatron-init-path megatron_router_replay.trainers.slime.init`.

slime's own replay is off in this process: no router registers a queue. Its stage (ROUTING_REPLAY_STAGE) stays the switch, and
the samples come in where slime fills its queues.
"""

from __future__ import annotations

import os
from typing import Any

from megatron_router_replay.trainers import replayer
from megatron_router_replay.trainers.seams import Seam, bind, hook

FIELD = "rollout_routed_experts"
ACTOR = "slime.backends.megatron_utils.actor"
FILL = Seam(
    ACTOR,
    "MegatronTrainRayActor.fill_routing_replay",
    "self data_iterator num_microbatches rollout_data",
    words=FIELD,
)
STAGE = Seam(
    ACTOR,
    "MegatronTrainRayActor.train_actor",
    words="fill_routing_replay ROUTING_REPLAY_STAGE fallthrough replay_forward replay_backward",
)
REGISTER = Seam("slime.utils.routing_replay", "register_routing_replay", words="ENABLE_ROUTING_REPLAY")
MODEL = "slime.backends.megatron_utils.model"
STEP = Seam(MODEL, "train_one_step", words="loss_reduced get_forward_backward_func")
FORWARD = Seam(MODEL, "forward_only", words="get_forward_backward_func")
SEAMS = (FILL, STAGE, REGISTER, STEP, FORWARD)


def init(args: Any, **options: Any) -> None:
    """Install the replay if slime's own is on. slime calls it before it builds the model.

    Args:
        args: slime's arguments.
        options: of `mrr.replay`; an init function of your own may call this one with them.
    """
    if not getattr(args, "use_rollout_routing_replay", False):
        return
    replay = replayer.install_by_flags("slime", args, replays, options)
    if not replay.audits:
        os.environ["ENABLE_ROUTING_REPLAY"] = "0"
    hook(FILL, _fill)
    hook(STEP, replayer.run_training_step)
    hook(FORWARD, replayer.run_forward_only)
    hook(STAGE)
    hook(REGISTER)


def replays() -> bool:
    """Return whether the pass that begins now replays, as slime sets its stage."""
    return os.environ.get("ROUTING_REPLAY_STAGE", "fallthrough") != "fallthrough"


def _fill(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    replay, rollout_data = replayer.active(), bind(original, self, *args, **kwargs).arguments["rollout_data"]
    replay.enter(self.model, lambda: replayer.samples_of(FILL, rollout_data, FIELD), are_trained=True)
    if replay.audits:
        return original(self, *args, **kwargs)
    del rollout_data[FIELD]
    return None
