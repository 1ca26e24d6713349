"""One training step in Megatron-Core in each of the demo's processes, observed by hooks on Megatron's own routers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes, load_qwen3_moe

Microbatch = dict[str, Tensor]

PADDING_TOKEN = 0
"""`pad_sequence` fills the demo's batches with it."""


@dataclass(kw_only=True)
class StepResult:
    """Observations of a rank in a training step.

    Args:
        used: layer_number -> [num_rows, num_experts] bool, the routing map of each trace row in the forward.
        recomputes, recomputes_identical: router recomputes, and those with the routing map of their forward.
        logprobs: [num_rows] of the token behind each row, last stage only; NaN elsewhere.
        report: the session's report, empty without replay.
    """

    used: dict[int, Tensor] = field(default_factory=dict)
    recomputes: int = 0
    recomputes_identical: int = 0
    logprobs: Tensor | None = None
    report: dict[str, Any] = field(default_factory=dict)


def watched_step(
    checkpoint: str,
    layout: ParallelSizes,
    microbatches: list[Microbatch],
    trace: mrr.RoutingTrace | None,
    num_rows: int,
) -> StepResult:
    """Run one step, with the routes replayed or (trace None) live, and return the routers' outputs."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    layout.initialize()
    chunks = load_qwen3_moe(
        checkpoint, layout, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    )
    maps: dict[tuple[int, bool], list[Tensor]] = defaultdict(list)

    def watch(router: Any, args: Any, output: tuple[Tensor, Tensor]) -> None:
        is_recompute = torch._C._current_graph_task_id() != -1
        maps[router.layer_number, is_recompute].append(output[1].clone())

    with ExitStack() as stack:
        for router in _routers(chunks):
            stack.callback(router.register_forward_hook(watch).remove)
        session = (
            None if trace is None else stack.enter_context(mrr.replay(chunks, trace, padding_token_ids=[PADDING_TOKEN]))
        )
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=chunks,
            num_microbatches=len(microbatches),
            seq_length=microbatches[0]["tokens"].shape[1],
            micro_batch_size=microbatches[0]["tokens"].shape[0],
            forward_only=False,
        )
    result = StepResult(report={} if session is None else session.report.to_dict())
    # Hooks on Megatron's own routers see the routing maps without the bookkeeping that the demo has to prove.
    for (layer, is_recompute), of_layer in maps.items():
        if is_recompute:
            result.recomputes += len(of_layer)
            forward = maps[layer, False]
            result.recomputes_identical += sum(torch.equal(one, other) for one, other in zip(forward, of_layer))
            continue
        used = torch.zeros(num_rows, of_layer[0].shape[1], dtype=torch.bool)
        for microbatch, routing_map in zip(microbatches, of_layer):
            rows = microbatch["rows"].t().reshape(-1)  # routers see tokens s-major
            used[rows[rows >= 0]] = routing_map[rows >= 0]
        result.used[layer] = used
    if losses:
        result.logprobs = torch.full((num_rows,), float("nan"))
        for microbatch, loss in zip(microbatches, losses):
            rows = microbatch["rows"]
            result.logprobs[rows[rows >= 0]] = -loss[rows >= 0]
    return result


def forward_step(data_iterator: Iterator[Microbatch], model: Any) -> tuple[Tensor, Any]:
    """Megatron's forward step; replay adds nothing to it."""
    batch = next(data_iterator)
    output = model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=None,
        labels=batch["labels"],
    )

    def mean_loss(token_losses: Tensor) -> tuple[Tensor, Tensor]:
        mask = batch["loss_mask"]
        return (token_losses * mask).sum() / mask.sum(), token_losses.detach()

    return output, mean_loss


def _routers(chunks: list[Any]) -> list[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
