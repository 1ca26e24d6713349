"""miles: `--use-rollout-routing-replay --custom-megatron-init-path megatron_router_replay.trainers.miles.init`.

miles' own replay of routers is off in this process: no router registers a queue, and its top-k is the live one. The manager's
stage stays the switch, and the samples come in where miles fills its queues. The replay of its indexer stays as it is.
"""

from __future__ import annotations

import importlib
from typing import Any

from megatron_router_replay.trainers import replayer
from megatron_router_replay.trainers.seams import Seam, bind, hook

FIELD = "rollout_routed_experts"
BASE = "miles.utils.replay_base"
FILL = Seam(
    "miles.backends.training_utils.replay_data",
    "fill_replay_data",
    "models rollout_data data_key",
)
STAGE = Seam(
    "miles.backends.megatron_utils.actor",
    "MegatronTrainRayActor.train_actor",
    words="fill_replay_data data_key stage fallthrough replay_forward replay_backward",
)
REGISTER = Seam(BASE, "BaseReplayManager.register_to_module", "self module")
TOPK = Seam(BASE, "BaseReplayManager.get_topk_fn", "self old_topk_fn")
MODEL = "miles.backends.megatron_utils.model"
STEP = Seam(MODEL, "train_one_step", words="loss_reduced get_forward_backward_func")
FORWARD = Seam(MODEL, "forward_only", words="get_forward_backward_func")
SEAMS = (FILL, STAGE, REGISTER, TOPK, STEP, FORWARD)


def init(args: Any, **options: Any) -> None:
    """Install the replay if miles' own is on. miles calls it before it builds the model.

    Args:
        args: miles' arguments.
        options: of `mrr.replay`; an init function of your own may call this one with them.
    """
    if not getattr(args, "use_rollout_routing_replay", False):
        return
    replayer.install_by_flags("miles", args, replays, options)
    hook(FILL, _fill)
    hook(STEP, replayer.run_training_step)
    hook(FORWARD, replayer.run_forward_only)
    hook(STAGE)
    hook(REGISTER, _register)
    hook(TOPK, _choose_topk)


def _manager() -> Any:
    return importlib.import_module(BASE).routing_replay_manager


def replays() -> bool:
    """Return whether the pass that begins now replays, as miles sets its stage."""
    return bool(_manager().stage != "fallthrough")


def _fill(original: Any, *args: Any, **kwargs: Any) -> Any:
    given, replay = bind(original, *args, **kwargs).arguments, replayer.active()
    if given["data_key"] == FIELD:
        rollout_data = given["rollout_data"]
        replay.enter(given["models"], lambda: replayer.samples_of(FILL, rollout_data, FIELD), are_trained=True)
        if not replay.audits:
            del rollout_data[FIELD]
            return None
    return original(*args, **kwargs)


def _is_off(manager: Any) -> bool:
    return manager is _manager() and replayer.is_installed() and not replayer.active().audits


def _register(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    if not _is_off(self):
        original(self, *args, **kwargs)


def _choose_topk(original: Any, self: Any, old_topk_fn: Any, *args: Any, **kwargs: Any) -> Any:
    return old_topk_fn if _is_off(self) else original(self, old_topk_fn, *args, **kwargs)
