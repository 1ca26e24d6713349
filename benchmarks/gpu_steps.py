"""A small GPT's step on a GPU without a session, and under each kind of session."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import megatron_router_replay as mrr
from benchmarks.gpu_timing import time_rounds
from megatron_router_replay.testing import ParallelSizes, build_tiny_gpt, random_microbatches, tiny_gpt_config

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def time_steps(device: torch.device, *, quick: bool, recompute: bool) -> tuple[dict[str, float], list[str]]:
    """Return (ms of a GPT's step by session, what is wrong): 4 micro-batches, forward and backward."""
    sequence, hidden, experts = (16, 64, 8) if quick else (2048, 1024, 16)
    fields = {"hidden_size": hidden, "moe_ffn_hidden_size": hidden // 2, "num_moe_experts": experts}
    layout = ParallelSizes()
    config = tiny_gpt_config(layout, deterministic_mode=False, **fields, **(FULL if recompute else {}))
    (model,) = build_tiny_gpt(config, layout)
    model.to(device)
    microbatches = random_microbatches(4, batch_size=1, sequence_length=sequence)
    rows = torch.arange(4 * sequence).view(4, 1, sequence)
    on_device = [{name: value.to(device) for name, value in batch.items()} for batch in microbatches]

    def step(session: Any = None) -> Tensor:
        model.zero_grad(set_to_none=True)
        losses = []
        for its_rows, batch in zip(rows, on_device):
            if session is not None:
                session.microbatch(its_rows)
            names = {"input_ids": batch["tokens"], "position_ids": batch["position_ids"], "labels": batch["labels"]}
            loss = model(**names, attention_mask=None).mean()
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    def recorded() -> Tensor:
        with mrr.record(model) as session:
            return step(session)

    def replayed() -> Tensor:
        with mrr.replay(model, trace) as session:
            return step(session)

    def frozen() -> Tensor:
        with mrr.freeze_recompute(model):
            return step()

    with mrr.record(model) as recording:
        step(recording)
    trace = recording.trace()
    routes = torch.rand(4 * sequence, trace.num_layers, experts).topk(2, dim=2).indices
    other = mrr.RoutingTrace(topk_indices=routes, layer_numbers=trace.layer_numbers, num_experts=experts)
    with mrr.replay(model, other, verify=True) as session:
        step(session)
    wrong = [] if session.report.decisions_wrong == 0 else [f"GPT: {session.report}"]
    if not session.report.decisions_verified:
        wrong.append("GPT: no decision was verified")
    functions = {"off": step, "record": recorded, "replay": replayed, "freeze_recompute": frozen}
    off, on = step(), replayed()
    if not torch.allclose(off, on, rtol=1e-2):
        wrong.append(f"GPT: losses {on.tolist()} under replay of its own routes, {off.tolist()} without")
    repeats = 1 if quick else 15
    return time_rounds(functions, prepare={}, repeats=repeats, device=device, hide_launches=False)[0], wrong
