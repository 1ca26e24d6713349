"""RouterReplayEngine: verl's Megatron engine, with sessions of this package in place of verl's replay.

verl's own replay is off from the engine's construction on, so it patches no class and makes no replay objects.
Each `forward_backward_batch` that verl marks with `enable_routing_replay` hands its samples to `trainers.follow`, and its
schedule runs in a session; in R2's first pass the forwards are recorded. Rows are found by tokens, however verl packs
the batch. Later pipeline stages get their tokens in the layout of the first one.

Source: verl 0.9.1, workers/engine/megatron/transformer_impl.py; models/mcore/model_forward.py for what stages are given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.engine.megatron import MegatronEngineWithLMHead

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, ReplayStateError
from megatron_router_replay.trainers import follow, token_layers
from megatron_router_replay.trainers.seams import hook
from megatron_router_replay.trainers.verl import LAYOUTS, VerlError

_replays = False  # the pass that runs now
_records = False
options: dict[str, Any] = {"padding_token_ids": [0]}  # verl's packers fill with 0
"""Of `mrr.replay`; a plug-in of your own may set them."""


class RouterReplayEngine(MegatronEngineWithLMHead):  # type: ignore[misc]
    """verl's Megatron engine for language models; `router_replay.mode` is R2 or R3.

    R3: the batch's `routed_experts` are an engine's, as verl's agent loop lays them out: T rows a sample, zeros where the
    engine has none. R2: the old log-probs' forward is recorded, and its `routed_experts` come back with later batches.

    Raises:
        VerlError: the configuration cannot be replayed exactly; names the field and the reason.
    """

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        _check_config(model_config, engine_config)
        off = replace(engine_config, router_replay=replace(engine_config.router_replay, mode="disabled"))
        super().__init__(model_config, off, optimizer_config, checkpoint_config)
        self.engine_config = engine_config  # verl changes this one later
        follow.install("verl", lambda: _replays, options)
        for seam in LAYOUTS:
            hook(seam, _laying_out)

    def initialize(self) -> None:
        super().initialize()
        # What cannot be replayed is refused here, by name, not after the first rollout.
        mrr.record(self.module).close()

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        """As verl's; marked batches are replayed, or recorded (R2, no routes yet, forward_only).

        Raises:
            VerlError: the batch does not say whether to replay, or has no routes.
            PayloadError, LayoutError, TraceError: its routes do not fit; on every rank of the job.
            ReplayStateError: as the session's end.
        """
        global _replays, _records
        marked = tu.get_non_tensor_data(data, key="enable_routing_replay", default=None)
        mode = self.engine_config.router_replay.mode
        if marked is None:
            raise VerlError(
                f"MRR806: router_replay.mode={mode}, but the batch does not say whether to replay it: assign the non-tensor "
                "enable_routing_replay, True for the actor's own forwards (also old log-probs), False for others."
            )
        if not marked:
            return super().forward_backward_batch(data, loss_function, forward_only=forward_only)
        _check_not_patched()  # again: a critic's engine may have been made since this one
        tokens = list(data["input_ids"].unbind())
        routed_experts = data.pop("routed_experts", None)
        tu.assign_non_tensor(data, enable_routing_replay=False)  # verl's own replay sees no mark
        recorded: list[Tensor] = []
        try:
            if mode == "R2" and forward_only and routed_experts is None:
                _records = True
                with follow.recorded(self.module, tokens, recorded) as session:
                    output = super().forward_backward_batch(data, loss_function, forward_only=forward_only)
                metrics = session.report.reduce().metrics()
            else:
                if routed_experts is None:
                    raise VerlError(
                        f"MRR806: router_replay.mode={mode}, but the batch has no routed_experts: {_NO_ROUTES[mode]}"
                    )
                last_token: follow.LastToken = "unrouted" if mode == "R3" else "routed"
                follow.active().enter(
                    self.module, lambda: _samples(data, tokens, routed_experts, mode), last_token=last_token
                )
                _replays = True
                output = super().forward_backward_batch(data, loss_function, forward_only=forward_only)
                metrics = follow.active().metrics
        finally:
            _replays = _records = False
            tu.assign_non_tensor(data, enable_routing_replay=True)
            if routed_experts is not None:
                data["routed_experts"] = routed_experts
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            if recorded:
                values = [
                    token_layers.add(rows, ids, sample=i)
                    for i, (rows, ids) in enumerate(zip(recorded, tokens, strict=True))
                ]
                output["model_output"]["routed_experts"] = torch.nested.nested_tensor_from_jagged(
                    torch.cat(values).to(data["input_ids"].device), offsets=data["input_ids"].offsets()
                )
            # A list, as verl has of each micro-batch: it flattens one of each data-parallel rank, and takes the mean.
            output["metrics"].update({name: [value] for name, value in metrics.items()})
        return output


_NO_ROUTES = {
    "R3": "rollout.enable_rollout_routing_replay=True makes the engine send them.",
    "R2": "the old log-probs' forward returns them as routed_experts: keep that field in the batch.",
}


def _samples(data: Any, tokens: list[Tensor], routed_experts: Any, mode: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return tokens [T] and routes [T, layers, topk] of each sample, -1 where there is no route.

    verl fills with zeros the rows that the engine did not send: the last token, all tokens after the last generation of a
    multi-turn sample, and whole samples that only fill up a batch. Nothing that is trained can see these. So a sample needs
    routes up to the token that predicts its last trained one.
    """
    values = list(routed_experts.unbind())
    unlike = [i for i, (rows, ids) in enumerate(zip(values, tokens, strict=True)) if len(rows) != len(ids)]
    if unlike:
        raise LayoutError(f"MRR802: sample {unlike[0]} has another number of routed_experts than of input_ids.")
    whole = [len(ids) if mode == "R2" else len(ids) - 1 for ids in tokens]
    needed = (_last_trained(data) if mode == "R3" else None) or whole
    routes = []
    for i, (rows, ids, at_least) in enumerate(zip(values, tokens, needed, strict=True)):
        part = token_layers.remove(rows, ids, sample=i, at_least=at_least)
        if mode == "R3":
            # An engine may send zeros for tokens that it did not run.
            sent = (part[at_least:] > 0).flatten(1).any(dim=1).nonzero()
            part[at_least + (int(sent[-1]) + 1 if sent.numel() else 0) :] = -1
        routes.append(part)
    return tokens, routes


def _laying_out(original: Any) -> Any:
    def lay_out(input_ids: Any, *args: Any, pre_process: bool = True, **kwargs: Any) -> Any:
        # Later pipeline stages need tokens for nothing else: these say which rows the stage needs.
        return original(input_ids, *args, pre_process=pre_process or _replays or _records, **kwargs)

    return lay_out


def _check_config(model_config: Any, engine_config: Any) -> None:
    mode = engine_config.router_replay.mode
    refused = {
        "dynamic_context_parallel": engine_config.dynamic_context_parallel
        and "its scheduler splits samples over groups that change with each micro-batch",
        "vision_config": hasattr(model_config.hf_config, "vision_config")
        and "a vision-language model packs its tokens inside, where nothing reads them",
    }
    for name, why in refused.items():
        if why:
            raise VerlError(f"MRR806: router_replay.mode={mode} cannot be exact with {name}: {why}.")
    _check_not_patched()


def _check_not_patched() -> None:
    if hasattr(TopKRouter, "_router_replay_patched"):
        raise VerlError(
            "MRR806: verl's own replay has patched Megatron's TopKRouter in this process (apply_router_replay_patch): "
            "routers would run verl's copy of the routing function. Which engine with router_replay.mode other than "
            "disabled is not of this package, a critic's? Disable it there."
        )


def _last_trained(data: Any) -> list[int] | None:
    """Return the position of each sample's last trained token, 0 where none is; None: the batch does not say.

    The mask is of the response, right after the prompt: jagged, or [B, R] padded on the right with an attention mask
    [B, S] of which the last R positions are the response's.
    """
    mask, lengths = data.get("response_mask", None), data["input_ids"].offsets().diff().tolist()
    if mask is None:
        return None
    if mask.is_nested:
        responses = mask.offsets().diff().tolist()
    else:
        attention_mask = data.get("attention_mask", None)
        if attention_mask is None or attention_mask.is_nested:
            return None
        responses = (attention_mask[:, -mask.shape[1] :] != 0).sum(dim=1).tolist()
    result = []
    for trained, length, response in zip(mask.unbind(), lengths, responses):
        at = (trained != 0).nonzero()
        if at.numel() and int(at[-1]) >= response:
            raise ReplayStateError(
                f"MRR802: response_mask trains token {int(at[-1])} of a response of {response} tokens: masks and "
                "tokens do not fit."
            )
        result.append(length - response + int(at[-1]) if at.numel() else 0)
    return result
