"""RouterReplayEngine: verl's Megatron engine, with sessions of this package in place of verl's replay.

It changes three things. verl is told at construction that replay is off, so that it patches no class and asks Megatron for no
replay objects. Around each `forward_backward_batch` that verl marks with `enable_routing_replay`, the batch gets one more
field, sealed routes (or the rows of a recording), which verl's micro-batching then carries along; and a session is open. Each
`forward_step` sends that field of its micro-batch through the packer that verl sends the tokens through.

Source: verl 0.9.1, workers/engine/megatron/transformer_impl.py; models/mcore/model_forward.py for what the packers are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine
from verl.utils import tensordict_utils as tu
from verl.utils.megatron_utils import unwrap_model
from verl.workers.engine.megatron import MegatronEngineWithLMHead

from megatron_router_replay.errors import LayoutError, PayloadError, ReplayStateError
from megatron_router_replay.mcore import record, replay
from megatron_router_replay.mcore.core.streams import collective_device
from megatron_router_replay.trace import stamp, stamp_batch
from megatron_router_replay.trainers import number_batch, pack_rows, recorded_routes
from megatron_router_replay.trainers.verl import VerlError

ROUTES, ROWS = "sealed_routes", "routing_rows"
"""The batch's fields, like its input_ids: what a replay is fed, and the rows of a recording."""


class RouterReplayEngine(MegatronEngineWithLMHead):  # type: ignore[misc]
    """verl's Megatron engine for language models; `router_replay.mode` is R2 or R3.

    R3: the batch's `routed_experts` are an engine's, as verl's agent loop lays them out: T rows a sample, zeros where the
    engine has none. R2: the old log-probs' forward is recorded, and its `routed_experts` come back with later batches.

    Attributes:
        missing: what becomes of a token whose routes were lost on the way, in R3. "raise", or "live": the live router decides
            it, and `router_replay/tokens_lost` counts it. A plug-in of your own may set it.

    Raises:
        VerlError: the configuration cannot be replayed exactly; says which field, and why.
    """

    missing = "raise"

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        _check_config(model_config, engine_config)
        off = replace(engine_config, router_replay=replace(engine_config.router_replay, mode="disabled"))
        super().__init__(model_config, off, optimizer_config, checkpoint_config)
        self.engine_config = engine_config  # verl goes on changing the one that it has
        self._session: Any = None

    def initialize(self) -> None:
        super().initialize()
        # What cannot be replayed is refused here, by name, not after the first rollout.
        record(self.module).close()

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        """As verl's; marked batches are replayed, or recorded (R2, no routes yet, forward_only).

        Raises:
            VerlError: the batch does not say whether to replay, or has no routes.
            PayloadError, LayoutError: its routes do not fit; on every rank of the job.
            ReplayStateError: as the session's end.
        """
        wanted = tu.get_non_tensor_data(data, key="enable_routing_replay", default=None)
        mode = self.engine_config.router_replay.mode
        if wanted is None:
            raise VerlError(
                f"MRR806: router_replay.mode={mode}, but the batch does not say whether to replay it: assign the non-tensor "
                "enable_routing_replay, True for the actor's own forwards (also old log-probs), False for others."
            )
        if not wanted:
            return super().forward_backward_batch(data, loss_function, forward_only=forward_only)
        _check_not_patched()  # again: a critic's engine may have been made since this one
        tokens = data["input_ids"]
        recording = mode == "R2" and forward_only and data.get("routed_experts", None) is None
        routes, num_lost = (None, 0) if recording else self._routes(data, mode)
        session: Any = record(self.module) if recording else replay(self.module)
        field = {ROWS: number_batch(tokens)} if recording else {ROUTES: routes}
        with session, _carried(data, field):
            self._session = session
            try:
                output = super().forward_backward_batch(data, loss_function, forward_only=forward_only)
            finally:
                self._session = None
        # On every rank, for both are collectives; verl reads what the last stage returns alone.
        report = session.report.reduce()
        whole = recorded_routes(session, like=tokens) if recording else None
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            if whole is not None:
                output["model_output"]["routed_experts"] = whole
            # A list, as verl has of each micro-batch: it flattens one of each data-parallel rank, and takes the mean.
            metrics = {name: [value] for name, value in report.metrics().items()}
            if not recording:
                metrics["router_replay/tokens_lost"] = [float(num_lost)]
            output["metrics"].update(metrics)
        return output

    def forward_step(
        self, batch_iter: Iterator[Any], model: Any, logits_processor_func: Any, postprocess_micro_batch_func: Any
    ) -> Any:
        """As verl's; the micro-batch's routes, or the rows of a recording, are queued for the forward that follows."""
        if self._session is None:
            return super().forward_step(batch_iter, model, logits_processor_func, postprocess_micro_batch_func)
        batch = next(batch_iter)
        if ROWS in batch:
            rows = pack_rows(lambda values: self._pack(values, batch, model), batch[ROWS])
            self._session.microbatch(rows, model, padding=rows < 0)
        else:
            tokens = batch["input_ids"]
            self._session.microbatch(
                model=model,
                routes=self._pack(batch[ROUTES], batch, model),
                token_ids=self._pack(tokens, batch, model),
                padding=self._pack(torch.ones_like(tokens), batch, model) == 0,
                stamped=True,
            )
        return super().forward_step(
            iter([batch.exclude(ROWS, ROUTES)]), model, logits_processor_func, postprocess_micro_batch_func
        )

    def _pack(self, values: Tensor, batch: Any, model: Any) -> Tensor:
        """Lay out jagged [B, T, ...] as verl's forward does the micro-batch's tokens, on every stage; filled with 0."""
        chunk = unwrap_model(model)
        fp8 = chunk.config.fp8 in ("e4m3", "hybrid")
        if self.engine_config.use_remove_padding:
            bucket = self.engine_config.pad_to_length_bucket if self.engine_config.pad_to_length else None
            layout = self._get_context_parallel_layout(chunk)
            return preprocess_thd_engine(  # type: ignore[no-any-return]
                values, pre_process=True, use_fp8_padding=fp8, pad_to_length_bucket=bucket, cp_layout=layout
            )[0]
        longest = tu.get_non_tensor_data(data=batch, key="forced_max_seqlen", default=None)
        return preprocess_bshd_engine(  # type: ignore[no-any-return]
            values, pre_process=True, use_fp8_padding=fp8, forced_max_seqlen=longest
        )[0]

    def _routes(self, data: Any, mode: str) -> tuple[Tensor, int]:
        """Seal the batch's routes; where one rank finds them wrong, all of the job raise, and none waits for it."""
        sealed, error = None, None
        try:
            sealed = self._sealed(data, mode)
        except Exception as found:  # whatever it is, the other ranks must not wait in the next collective
            error = found
        failed = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=collective_device(None))
        failed[dist.get_rank()] = error is not None
        dist.all_reduce(failed)  # one small tensor a batch; words travel where a batch is wrong
        ranks = failed.nonzero()[:, 0].tolist()
        if ranks:
            words: list[Any] = [str(error)]
            dist.broadcast_object_list(words, src=ranks[0])
            if error is not None:
                raise error
            raise PayloadError(
                f"MRR802: the routes of ranks {ranks} do not fit their batch; rank {ranks[0]}: {words[0]}"
            )
        assert sealed is not None, "without an error there are routes"
        return sealed

    def _sealed(self, data: Any, mode: str) -> tuple[Tensor, int]:
        """Return jagged [B, T, layers and seal, topk] on the tokens' device, and how many rows are lost."""
        routed_experts, tokens = data.get("routed_experts", None), data["input_ids"]
        if routed_experts is None:
            why = {
                "R3": "rollout.enable_rollout_routing_replay=True asks the engine for them.",
                "R2": "the old log-probs' forward returns them as routed_experts: keep that field in the batch.",
            }
            raise VerlError(f"MRR806: router_replay.mode={mode}, but the batch has no routed_experts: {why[mode]}")
        samples = list(zip(routed_experts.unbind(), tokens.unbind(), strict=True))
        unlike = [i for i, (routes, ids) in enumerate(samples) if len(routes) != len(ids)]
        if unlike:
            raise LayoutError(f"MRR802: sample {unlike[0]} has another number of routed_experts than of input_ids.")
        config = unwrap_model(self.module[0]).config
        counts = _num_routed(routed_experts, data) or [len(routes) - 1 for routes, _ in samples]
        stamped, lost = [], 0
        for i, ((routes, ids), count) in enumerate(zip(samples, counts, strict=True)):
            routes, ids = routes.cpu(), ids.cpu()
            if mode == "R2":
                stamped.append(stamp(routes, ids, num_experts=config.num_moe_experts))
                continue
            try:
                (sealed,) = stamp_batch(
                    [routes[:count]], [ids], num_experts=config.num_moe_experts, missing=self.missing
                )
            except LayoutError as error:
                raise LayoutError(f"MRR802: routed_experts of sample {i}: {error}") from error
            filler = 255 if sealed.dtype is torch.uint8 else -1
            lost += int((sealed == filler).flatten(1).all(1).sum())
            missing = sealed.new_full((len(ids) - len(sealed), *sealed.shape[1:]), filler)
            stamped.append(torch.cat([sealed, missing]))
        values = torch.cat(stamped).to(tokens.device)
        return torch.nested.nested_tensor_from_jagged(values, offsets=tokens.offsets()), lost


def _check_config(model_config: Any, engine_config: Any) -> None:
    mode = engine_config.router_replay.mode
    refused = {
        "dynamic_context_parallel": engine_config.dynamic_context_parallel
        and "its scheduler splits samples over groups that change with each micro-batch",
        "vision_config": hasattr(model_config.hf_config, "vision_config")
        and "a vision-language model packs its tokens inside, where the rows do not go along",
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


@contextmanager
def _carried(data: Any, field: dict[str, Any]) -> Iterator[None]:
    """Give the batch a field; verl's own replay sees no mark, and its micro-batches do not copy the routes."""
    routed_experts = data.pop("routed_experts", None)
    ((name, values),) = field.items()
    data[name] = values
    tu.assign_non_tensor(data, enable_routing_replay=False)
    try:
        yield
    finally:
        tu.assign_non_tensor(data, enable_routing_replay=True)
        data.pop(name)
        if routed_experts is not None:
            data["routed_experts"] = routed_experts


def _num_routed(routed_experts: Tensor, data: Any) -> list[int] | None:
    """Return how many first tokens of each sample have a route; None: all but the last.

    verl fills with zeros what the engine did not route: the last token, all tokens behind the last generation of a multi-turn
    sample, and whole samples that only fill up a batch. Nothing that is trained can see these. So a sample needs routes up to
    the token that predicts its last trained one, and behind that its rows end where nothing but zeros follows.
    """
    last_trained = _last_trained(data)
    samples = routed_experts.unbind()
    if last_trained is None or len(samples) != len(last_trained):
        return None
    counts = []
    for sample, needed in zip(samples, last_trained):
        behind = sample[needed:].flatten(1).any(dim=1).nonzero()
        counts.append(needed if not behind.numel() else needed + int(behind[-1]) + 1)
    return counts


def _last_trained(data: Any) -> list[int] | None:
    """Return the position of each sample's last trained token, 0 where none is; None: the batch does not say.

    The mask is of the response, right behind the prompt: jagged, or [B, R] padded on the right beside an attention mask
    [B, S] whose last R positions are the response's.
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
