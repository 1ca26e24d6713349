"""NeMo-RL: `import megatron_router_replay.trainers.nemo_rl` in the driver's process and in those of its Megatron workers.

NeMo-RL's own replay is off in this process. `policy.router_replay.enabled` stays the switch, and the samples come in with the
batch of each pass. Where message logs are complete, the id of each row's token is added to the routes, as more layers, so
that NeMo-RL's padding and packing of routes is compared with that of tokens. Megatron-Core is not imported before NeMo-RL
imports it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.errors import PayloadError
from megatron_router_replay.trainers import replayer, token_layers
from megatron_router_replay.trainers.seams import Seam, bind, hook, take, when_imported

FIELD = "routed_experts"
DRIVER = Seam(
    "nemo_rl.algorithms.grpo",
    "add_grpo_token_loss_masks_and_generation_logprobs",
    "message_logs",
    words="token_ids token_loss_mask",
)
BATCH = Seam("nemo_rl.models.megatron.data", "get_microbatch_iterator", "data")
PASS = Seam(
    "nemo_rl.models.megatron.train",
    "megatron_forward_backward",
    "model forward_only use_router_replay",
    words="get_forward_backward_func",
)
STATISTICS = Seam("nemo_rl.models.megatron.train", "aggregate_training_statistics", words="all_mb_metrics")
SEAMS = (DRIVER, BATCH, PASS, STATISTICS)


_newest: dict[str, Any] = {}
"""The newest batch that was cut into micro-batches; the next pass runs them."""


_step: list[dict[str, float]] = []
"""Metrics of the training passes of the step that runs now; a SingleController's step has several."""


def install(**options: Any) -> None:
    """Install the hooks as soon as their modules are imported. Importing this module calls it.

    Args:
        options: of `mrr.replay`.
    """
    hook(DRIVER, _add_masks)
    when_imported(PASS.module, lambda module: replayer.install("NeMo-RL", None, options))
    hook(BATCH, _keep_batch)
    hook(PASS, _run_pass)
    hook(STATISTICS, _add_metrics)


# ---- the driver
def _add_masks(original: Any, *args: Any, **kwargs: Any) -> Any:
    message_logs = bind(original, *args, **kwargs).arguments["message_logs"]
    # The mask that this function adds to a message shows that its ids were added by an earlier call.
    new = [(i, log) for i, log in enumerate(message_logs) if not any("token_loss_mask" in each for each in log)]
    result = original(*args, **kwargs)  # newer ones add rows of -1 where a message has no routes
    for i, log in new:
        _add_tokens(log, sample=i)
    return result


def _add_tokens(message_log: list[dict[str, Any]], *, sample: int) -> None:
    """Add the ids of tokens to the routes of a sample's messages, in place."""
    messages = [each for each in message_log if FIELD in each]
    lengths = [len(each["token_ids"]) for each in messages]
    for each, length in zip(messages, lengths):
        if len(each[FIELD]) != length:
            raise PayloadError(
                f"MRR802: sample {sample} has a message of {length} tokens with {len(each[FIELD])} rows of routes."
            )
    if sum(lengths):  # messages without tokens get the layers as well, because NeMo-RL joins all messages
        ids, routes = (torch.cat([each[name] for each in messages]) for name in ("token_ids", FIELD))
        values = token_layers.add(routes, ids, sample=sample)
        for each, part in zip(messages, torch.split(values, lengths)):
            each[FIELD] = part


# ---- the workers
def _keep_batch(original: Any, *args: Any, **kwargs: Any) -> Any:
    call = bind(original, *args, **kwargs)
    data = _newest["batch"] = call.arguments["data"]
    if FIELD in data:
        call.arguments["data"] = data = copy.copy(data)
        routes = data.pop(FIELD)
        # Its own code would pack them for its own replay, and refuses to where a multimodal model packs inside.
        if replayer.is_installed() and replayer.active().audits:
            data[FIELD] = token_layers.without(routes)  # as it has them, without ids
    return original(*call.args, **call.kwargs)


def _run_pass(original: Any, *args: Any, **kwargs: Any) -> Any:
    call, replay = bind(original, *args, **kwargs), replayer.active()
    given = call.arguments
    if not given["use_router_replay"]:
        return original(*args, **kwargs)
    replay.enter(given["model"], lambda: _samples(_newest["batch"]))
    replay.padding_token_ids = _padding_tokens(_newest["batch"])
    given["use_router_replay"] = replay.audits  # without the flag, NeMo-RL sets no targets of its own
    with replay.in_pass("replay"):
        results = original(*call.args, **call.kwargs)
    if not given["forward_only"]:
        _step.append(replay.metrics)
    return results


def _add_metrics(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Add the mean of a step's passes to its statistics.

    Not to the metrics of micro-batches, which `train` and `finish_train_step` (a SingleController's) scale differently.
    """
    from megatron.core import parallel_state

    statistics = original(*args, **kwargs)
    for name in {name: None for metrics in _step for name in metrics}:
        values = [metrics[name] for metrics in _step if name in metrics]
        # NeMo-RL's driver adds up the lists of all data-parallel ranks, and each rank has the metrics of all.
        statistics[0][name] = [sum(values) / len(values) / parallel_state.get_data_parallel_world_size()]
    _step.clear()
    return statistics


def _samples(batch: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return tokens [T] and routes [T, layers, topk] of each sample, -1 where NeMo-RL has none."""
    ids, values, lengths = take(BATCH, batch, "input_ids", FIELD, "input_lengths")
    tokens = [row[:length] for row, length in zip(ids, lengths.tolist())]
    routes = [
        token_layers.remove(rows[: len(part)], part, sample=i, at_least=len(part))
        for i, (rows, part) in enumerate(zip(values, tokens))
    ]
    for rows in routes:
        # The last token, and messages of an environment after the last generation, have the experts 0, 1, ..., topk - 1.
        rows[(rows == torch.arange(rows.shape[2])).flatten(1).all(1)] = -1
    return tokens, routes


def _padding_tokens(batch: Any) -> list[int]:
    """Return the tokens of padding: those that a batch has past its lengths, and 0, which NeMo-RL fills packed rows with."""
    ids, lengths = take(BATCH, batch, "input_ids", "input_lengths")
    is_padding = torch.arange(ids.shape[1], device=ids.device) >= lengths.to(ids.device).unsqueeze(1)
    return sorted({0, *ids[is_padding].tolist()})


install()
