"""ms-swift: `--external_plugins FILE.py`, a file with the line `import megatron_router_replay.trainers.ms_swift`.

Its `--router_replay_mode R3` stays the switch: where it sets Megatron's REPLAY_FORWARD, the pass replays here, and no router
gets an action. The samples come in with each micro-batch of log-probs and with all micro-batches of a training step.
Megatron-Core is not imported before ms-swift imports it.

Source: ms-swift 3602360a5, megatron/trainers/{base,rollout_mixin,utils}.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.errors import PayloadError, ReplayStateError
from megatron_router_replay.trainers import replayer
from megatron_router_replay.trainers.seams import Seam, bind, hook, take, when_imported

FIELD = "routed_experts"
TRAINERS = "swift.megatron.trainers"
LOGPS = Seam(
    f"{TRAINERS}.utils",
    "compute_per_token_logps_fn",
    "model args data_iterator enable_routing_replay",
    words=f"{FIELD} is_replay_forward_action forward_step_helper prepare_batch",
)
BATCH = Seam(f"{TRAINERS}.utils", "prepare_batch", "data", words="seq_lens text_position_ids position_ids")
STEP = Seam(
    f"{TRAINERS}.base",
    "BaseMegatronTrainer.train_step",
    "self",
    words="_replace_data_iterator set_global_router_replay_action REPLAY_FORWARD get_forward_backward_func wrapped_models",
)
FORWARD = Seam(
    f"{TRAINERS}.grpo_trainer",
    "MegatronGRPOTrainer.forward_step",
    "data_iterator",
    words=f"{FIELD} is_replay_forward_action set_router_replay_data",
)
DATA = tuple(
    Seam(f"{TRAINERS}.{module}", f"{name}._replace_data_iterator", "self data_iterator")
    for module, name in (("base", "BaseMegatronTrainer"), ("rollout_mixin", "MegatronRolloutMixin"))
)
SEAMS = (LOGPS, BATCH, STEP, FORWARD, *DATA)
ACTIONS = "megatron.core.transformer.moe.router_replay"
SET_ACTION = Seam(ACTIONS, "RouterReplay.set_global_router_replay_action")
CLEAR_ACTION = Seam(ACTIONS, "RouterReplay.clear_global_router_replay_action")

_is_forward = [False]
"""Whether ms-swift set REPLAY_FORWARD. Kept here, because a pipeline stage of dense layers has no router to read it from."""

_audited: list[Mapping[str, Any]] = []
"""Micro-batches of the newest rollout's log-probs, for all of its training steps (steps_per_generation); under an audit only
these have the rollout's own routes."""

_is_trained = [False]
"""Whether a training step took these, so that the next log-probs are of another rollout."""


def install(**options: Any) -> None:
    """Install the hooks as soon as their modules are imported. Importing this module calls it.

    Args:
        options: of `mrr.replay`.
    """
    _audited.clear()
    _is_forward[0] = _is_trained[0] = False
    # Not before ms-swift itself is imported: the actions are Megatron-Core's, which any program may set.
    when_imported(STEP.module, lambda module: _hook_actions(options))
    hook(LOGPS, _compute_logps)
    for seam in DATA:
        hook(seam, _replace_data)
    for seam in (BATCH, STEP, FORWARD):
        hook(seam)


# ---- the switch
def _hook_actions(options: dict[str, Any]) -> None:
    replayer.install("ms-swift", lambda: _is_forward[0], options)
    hook(SET_ACTION, _set_action)
    hook(CLEAR_ACTION, _clear_action)


def _set_action(original: Any, *args: Any, **kwargs: Any) -> None:
    (action,) = bind(original, *args, **kwargs).arguments.values()
    if action.name == "RECORD":
        raise ReplayStateError(
            "MRR806: --router_replay_mode R2 records with ms-swift's own replay, which this module does not replace. "
            "Take R3, or run R2 without this module."
        )
    _is_forward[0] = action.name == "REPLAY_FORWARD"
    if replayer.active().audits:
        original(*args, **kwargs)


def _clear_action(original: Any, *args: Any, **kwargs: Any) -> None:
    _is_forward[0] = False
    original(*args, **kwargs)


# ---- the passes
def _compute_logps(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a pass for log-probs of one micro-batch, which ms-swift runs without a schedule."""
    if not _is_forward[0]:  # the reference's
        return original(*args, **kwargs)
    call = bind(original, *args, **kwargs)
    replay, model, data = replayer.active(), call.arguments["model"], dict(next(call.arguments["data_iterator"]))
    _enter(replay, model, [data])
    if replay.audits:
        if _is_trained[0]:
            _audited.clear()
            _is_trained[0] = False
        _audited.append(data)
    call.arguments["data_iterator"] = iter([dict(data)])

    def forward(**_: Any) -> Any:
        return original(*call.args, **call.kwargs)

    log_probs, routes = replay.run(forward, model=model, forward_only=True)
    # ms-swift keeps these routes for the training step; its own are only those of this rank's rows and layers.
    return log_probs, routes if replay.audits else data[FIELD]


def _replace_data(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the samples of the micro-batches that a training step gets."""
    self, kept = bind(original, *args, **kwargs).arguments["self"], (list(_audited), _is_trained[0])
    iterator = original(*args, **kwargs)
    if getattr(self.args, "router_replay_mode", "") != "R3" or not self.unwrapped_models[0].training:
        _audited[:], _is_trained[0] = kept  # an evaluation's log-probs are not trained
        return iterator
    replay, batches = replayer.active(), []
    while (batch := next(iterator, None)) is not None:  # no `for`: Megatron-Core's RerunDataIterator is not iterable
        batches.append(dict(batch))
    _enter(replay, self.wrapped_models, list(_audited) or batches, are_trained=True)
    _is_trained[0] = True
    if not replay.audits:
        for each in batches:
            del each[FIELD]
    return iter(batches)


def _enter(
    replay: replayer.TrainerReplay, chunks: Any, batches: Sequence[Mapping[str, Any]], *, are_trained: bool = False
) -> None:
    padding: set[int] = {0}

    def samples() -> tuple[list[Tensor], list[Tensor]]:
        tokens, routes = [], []
        for batch in batches:
            for ids, rows in _samples(batch, padding):
                tokens.append(ids)
                routes.append(rows)
        return tokens, routes

    replay.enter(chunks, samples, are_trained=are_trained)
    replay.padding_token_ids = sorted(padding)


def _samples(batch: Mapping[str, Any], padding: set[int]) -> list[tuple[Tensor, Tensor]]:
    """Return tokens [T] and routes [T - 1, layers, topk] of each sample of a micro-batch, padded or packed.

    Args:
        padding: gets the tokens past the samples.
    """
    if batch.get(FIELD) is None:
        raise PayloadError(
            f"MRR802: a micro-batch has no {FIELD}: the rollout came without routes. vLLM sends them with "
            "enable_return_routed_experts, which ms-swift sets with --router_replay_mode R3."
        )
    ids, experts, lengths = take(BATCH, batch, "input_ids", FIELD, "seq_lens")
    ids, experts = ids.cpu(), experts.cpu()
    starts = [(i, 0) for i in range(len(lengths))]
    if len(ids) != len(lengths):  # packed: positions restart at each sample, and at each token of padding after them
        positions = batch["text_position_ids"] if "text_position_ids" in batch else batch["position_ids"]
        starts = [(0, int(at)) for at in (positions.cpu().view(-1) == 0).nonzero()[: len(lengths)]]
    is_padding = torch.ones_like(ids, dtype=torch.bool)
    samples = []
    for (row, start), length in zip(starts, map(int, lengths), strict=True):
        is_padding[row, start : start + length] = False
        # The engine did not run the last token, whose row is ms-swift's zeros.
        samples.append((ids[row, start : start + length], experts[row, start : start + length - 1]))
    padding.update(ids[is_padding].tolist())
    return samples


install()
