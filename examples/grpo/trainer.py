"""The policy in Megatron-Core: old-policy pass, gradient steps, checkpoints.

What router replay adds to a trainer are the lines marked "# replay".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_router_replay as mrr
from examples.grpo.batch import Microbatch, RolloutBatch
from examples.grpo.loss import clipped_loss
from examples.grpo.settings import Settings
from megatron_router_replay.testing import load_qwen3_moe
from megatron_router_replay.testing.packed_attention import PackedAttention
from megatron_router_replay.transport import ParallelLayout as RoutesLayout
from megatron_router_replay.transport import Place

LossFunc = Callable[[Microbatch, Tensor], tuple[Tensor, Tensor, Tensor]]

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}

NO_TOKENS: tuple[int, ...] = ()
"""What padding holds that cu_seqlens_q does not exclude: nothing."""


class Trainer:
    """This rank's part of the policy, its optimizer, and the reference model.

    Args:
        settings: of the run.
        checkpoint: Hugging Face folder with the initial weights.
    """

    def __init__(self, settings: Settings, checkpoint: Path) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.settings = settings
        layout = settings.layout
        load = partial(
            load_qwen3_moe,
            checkpoint,
            layout,
            core_attention=PackedAttention,  # Megatron's own on a CPU takes neither packed sequences nor context parallelism
            calculate_per_token_loss=True,
            **_RECOMPUTE[settings.recompute],
        )
        self.models = load()
        self.reference = load() if settings.kl_coef else []
        self.config = self.models[0].config
        self.config.finalize_model_grads_func = finalize_model_grads
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.chunks = [DistributedDataParallel(self.config, ddp_config, model) for model in self.models]
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            weight_decay=0.0,
            clip_grad=settings.clip_grad,
            use_distributed_optimizer=True,
        )
        self.optimizer = get_megatron_optimizer(optimizer_config, self.chunks, use_gloo_process_groups=False)
        self.place = Place(
            dp_rank=parallel_state.get_data_parallel_rank(),
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            cp_rank=parallel_state.get_context_parallel_rank(),
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        )
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self.routes_layout = self._routes_layout()
        self.counts_tokens = parallel_state.is_pipeline_last_stage(ignore_virtual=True) and self.place.tp_rank == 0

    def _routes_layout(self) -> RoutesLayout:
        """Return which MoE layers each pipeline stage has, and the sizes of the groups: who needs which routes."""
        from megatron_router_replay.mcore.model.find import find_routers

        mine = [router.layer_number for model in self.models for router in find_routers(model)]
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (self.place.pp_rank, mine))
        layers = dict(ranks)
        return RoutesLayout(
            stage_layers=tuple(tuple(layers[stage]) for stage in range(self.settings.layout.pp_size)),
            dp_size=self.dp_size,
            cp_size=self.settings.layout.cp_size,
            tp_size=self.settings.layout.tp_size,
        )

    def microbatches(self, batch: RolloutBatch, chosen: Sequence[int]) -> list[Microbatch]:
        """Return this rank's micro-batches of these samples."""
        return batch.microbatches(
            chosen,
            self.settings.layout,
            per_microbatch=self.settings.per_microbatch,
            max_tokens=self.settings.task.max_tokens,
            dp_size=self.dp_size,
            cp_rank=self.place.cp_rank,
        )

    def record(self, batch: RolloutBatch) -> tuple[Tensor, mrr.RoutingTrace]:
        """Return the live policy's log-probs by batch row, and the routes it chose for this rank's samples and layers."""
        from megatron.core import parallel_state

        with mrr.record(self.models, padding_token_ids=NO_TOKENS) as recording:  # replay
            logprobs = self._logprobs(self.chunks, batch)
        # Tensor- and context-parallel ranks have each seen some of the tokens.
        group = parallel_state.get_tensor_and_context_parallel_group()
        return logprobs, recording.gather(group)

    def logprobs(self, batch: RolloutBatch, trace: mrr.RoutingTrace) -> Tensor:
        """Return the policy's log-probs by batch row with a trace's routes."""
        with mrr.replay(self.models, trace, padding_token_ids=NO_TOKENS):  # replay
            return self._logprobs(self.chunks, batch)

    def reference_logprobs(self, batch: RolloutBatch) -> Tensor:
        """Return the initial policy's log-probs by batch row; its routers are live whatever the policy's do."""
        return self._logprobs(self.reference, batch)

    def update(self, batch: RolloutBatch, trace: mrr.RoutingTrace | None) -> dict[str, float]:
        """Train on a rollout in several gradient steps, with the routes replayed or (trace None) live.

        Returns:
            Metrics; those of the session under `router_replay/`.
        """
        if trace is None:
            return self._train(batch)
        with mrr.replay(self.models, trace, padding_token_ids=NO_TOKENS) as session:  # replay
            metrics = self._train(batch)
        return metrics | session.report.metrics()

    def _train(self, batch: RolloutBatch) -> dict[str, float]:
        """Train on a rollout in several gradient steps; replay on or off."""
        sums = torch.zeros(4)
        norms = []
        for chosen in self.settings.gradient_steps():
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            for part in self._run(self.chunks, self.microbatches(batch, chosen), self._loss):
                sums += part
            successful, norm, _ = self.optimizer.step()
            assert successful, "fp32 has no loss scale to skip a step"
            norms.append(float(norm))
        tokens, loss, clipped, kl = self._summed(sums).tolist()
        return {
            "loss": loss / tokens,
            "clipped_share": clipped / tokens,
            "reference_kl": kl / tokens,
            "grad_norm": sum(norms) / len(norms),
        }

    def _loss(self, microbatch: Microbatch, token_losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mask = microbatch["loss_mask"]
        loss, clipped, kl = clipped_loss(
            -token_losses,
            old_logprobs=microbatch["old_logprobs"],
            ref_logprobs=microbatch["ref_logprobs"],
            advantages=microbatch["advantages"],
            clip=self.settings.clip,
            kl_coef=self.settings.kl_coef,
        )
        parts = [(values.detach() * mask).sum() for values in (torch.ones_like(loss), loss, clipped.float(), kl)]
        # Megatron divides the sum over all micro-batches and ranks by the number of tokens in them.
        return (loss * mask).sum(), mask.sum().int(), torch.stack(parts)

    def _logprobs(self, chunks: Sequence[Any], batch: RolloutBatch) -> Tensor:
        """Run forward only; return the log-prob of the token behind each batch row, [num_rows], on every rank."""
        microbatches = self.microbatches(batch, range(len(batch.samples)))
        by_row = torch.zeros(batch.num_rows)

        def keep(microbatch: Microbatch, token_losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return token_losses.sum(), torch.tensor(1), -token_losses

        with torch.no_grad():
            outputs = self._run(chunks, microbatches, keep, forward_only=True)
        for microbatch, logprobs in zip(microbatches, outputs):
            is_token = ~microbatch["is_padding"]
            by_row[microbatch["batch_rows"][is_token]] = logprobs[is_token]
        return self._summed(by_row)

    def _run(
        self,
        chunks: Sequence[Any],
        microbatches: list[Microbatch],
        loss_func: LossFunc,
        *,
        forward_only: bool = False,
    ) -> list[Tensor]:
        """Run Megatron's pipeline schedule; return what loss_func reported, on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        length = microbatches[0]["input_ids"].shape[1] * self.settings.layout.cp_size
        iterators = [iter(microbatches) for _ in chunks]
        outputs = get_forward_backward_func()(
            forward_step_func=partial(forward_step, loss_func=loss_func),
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(microbatches),
            seq_length=length,
            micro_batch_size=1,
            decoder_seq_length=length,
            forward_only=forward_only,
        )
        return list(outputs)

    def _summed(self, values: Tensor) -> Tensor:
        """Sum over the ranks that each hold other tokens; the others, which hold copies, contribute nothing."""
        values = values if self.counts_tokens else torch.zeros_like(values)
        dist.all_reduce(values)
        return values

    @property
    def is_copy(self) -> bool:
        """Another rank has the same samples and layers: it is not the first of its tensor- and context-parallel group."""
        return bool(self.place.tp_rank or self.place.cp_rank)

    def share(self, some: int, of_all: int) -> float:
        """Return a share of router decisions, counted over all samples and layers."""
        counts = torch.tensor([0, 0] if self.is_copy else [some, of_all])
        dist.all_reduce(counts)
        return float(counts[0] / counts[1])

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's parameters and Adam's moments; they load under the same layout."""
        optimizers = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return {
            "models": [model.state_dict() for model in self.models],
            "optimizers": [optimizer.optimizer.state_dict() for optimizer in optimizers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned."""
        for model, of_model in zip(self.models, state["models"], strict=True):
            model.load_state_dict(of_model)
        optimizers = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        for optimizer, of_optimizer in zip(optimizers, state["optimizers"], strict=True):
            optimizer.optimizer.load_state_dict(of_optimizer)
        self.optimizer.reload_model_params()


def forward_step(data_iterator: Iterator[Microbatch], model: Any, *, loss_func: LossFunc) -> tuple[Tensor, Any]:
    """Megatron's forward step; replay adds nothing to it."""
    microbatch = next(data_iterator)
    output = model(
        input_ids=microbatch["input_ids"],
        position_ids=microbatch["position_ids"],
        attention_mask=None,
        labels=microbatch["labels"],
        packed_seq_params=microbatch["packed_seq_params"],
    )
    return output, partial(loss_func, microbatch)
