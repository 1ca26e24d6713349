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
from megatron_router_replay.trainers import token_layers
from megatron_router_replay.trainers.seams import Seam, hook, take, when_imported

OWN = "nemo_rl.models.megatron.router_replay"
FIELD = "routed_experts"
DRIVER = Seam(
    module="nemo_rl.algorithms.grpo",
    name="add_grpo_token_loss_masks_and_generation_logprobs",
    parameters="message_logs",
    words="token_ids token_loss_mask",
)
BATCH = Seam(module="nemo_rl.models.megatron.data", name="get_microbatch_iterator", parameters="data")
PASS = Seam(
    module="nemo_rl.models.megatron.train",
    name="megatron_forward_backward",
    parameters="model use_router_replay",
    words="get_forward_backward_func",
)
DRIVE = tuple(
    Seam(module=OWN, name=name, parameters="model")
    for name in ("set_router_replay_forward", "set_router_replay_backward", "clear_router_replay")
)
SEAMS = (DRIVER, BATCH, PASS, *DRIVE)

_replays = False  # the pass that runs now
_batch: Any = None  # of the newest micro-batches


def install(**options: Any) -> None:
    """Install the driver's hook, and the workers' once their module is imported. Importing this module calls it.

    Args:
        options: of `mrr.replay`.
    """
    hook(DRIVER, _driving)
    when_imported(PASS.module, lambda module: _install(options))


def _driving(original: Any) -> Any:
    def add_masks(message_logs: Any, *args: Any, **kwargs: Any) -> Any:
        # The mask that this function adds to a message shows that its ids were added by an earlier call.
        new = [(i, log) for i, log in enumerate(message_logs) if not any("token_loss_mask" in each for each in log)]
        result = original(message_logs, *args, **kwargs)  # newer ones add rows of -1 where a message has no routes
        for i, log in new:
            _add_tokens(log, sample=i)
        return result

    return add_masks


def _add_tokens(message_log: list[dict[str, Any]], *, sample: int) -> None:
    """Add the ids of tokens to the routes of a sample's messages, in place."""
    messages = [each for each in message_log if FIELD in each and len(each["token_ids"])]
    if not messages:
        return
    for each in messages:
        if len(each[FIELD]) != len(each["token_ids"]):
            raise PayloadError(
                f"MRR802: sample {sample} has a message of {len(each['token_ids'])} tokens with {len(each[FIELD])} rows of "
                "routes."
            )
    ids = torch.cat([each["token_ids"] for each in messages])
    values = token_layers.add(torch.cat([each[FIELD] for each in messages]), ids, sample=sample)
    for each, part in zip(messages, torch.split(values, [len(each["token_ids"]) for each in messages])):
        each[FIELD] = part


def _install(options: dict[str, Any]) -> None:
    from megatron.core import parallel_state

    from megatron_router_replay.trainers import follow

    replay = follow.install("NeMo-RL", lambda: _replays, options)

    def batching(original: Any) -> Any:
        def get_microbatch_iterator(data: Any, *args: Any, **kwargs: Any) -> Any:
            global _batch
            _batch = data
            if FIELD in data:  # NeMo-RL's own code gets routes as it knows them, without ids
                data = copy.copy(data)
                data[FIELD] = token_layers.without(data[FIELD])
            return original(data, *args, **kwargs)

        return get_microbatch_iterator

    def passing(original: Any) -> Any:
        def megatron_forward_backward(model: Any, *args: Any, use_router_replay: bool = False, **kwargs: Any) -> Any:
            global _replays
            if use_router_replay:
                follow.active().enter(model, _samples)
            _replays = use_router_replay
            try:
                results = original(model, *args, use_router_replay=use_router_replay, **kwargs)
            finally:
                _replays = False
            if use_router_replay and not kwargs.get("forward_only"):
                # NeMo-RL adds up the micro-batches of all data-parallel ranks.
                follow.report(results, parts=len(results) * parallel_state.get_data_parallel_world_size())
            return results

        return megatron_forward_backward

    hook(BATCH, batching)
    hook(PASS, passing)
    for seam in DRIVE:
        hook(seam, None if replay.audits else lambda original: lambda *args, **kwargs: None)


def _samples() -> tuple[list[Tensor], list[Tensor]]:
    """Return tokens [T] and routes [T, layers, topk] of each sample, -1 where NeMo-RL has none."""
    ids, values, lengths = take(BATCH, _batch, "input_ids", FIELD, "input_lengths")
    tokens = [row[:length] for row, length in zip(ids, lengths.tolist())]
    routes = [
        token_layers.remove(rows[: len(part)], part, sample=i, at_least=len(part))
        for i, (rows, part) in enumerate(zip(values, tokens))
    ]
    for rows in routes:
        # The last token, and messages of an environment after the last generation, have the experts 0, 1, ..., topk - 1.
        rows[(rows == torch.arange(rows.shape[2])).flatten(1).all(1)] = -1
    return tokens, routes


install()
