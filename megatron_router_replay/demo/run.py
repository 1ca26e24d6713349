"""The demo from the engine's response to the table."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_router_replay import engines
from megatron_router_replay.demo.checkpoint import write_checkpoint
from megatron_router_replay.demo.ranks import watched_step
from megatron_router_replay.diagnostics import logprob_mismatch
from megatron_router_replay.testing import ParallelSizes, run_ranks
from megatron_router_replay.trace import RoutingTrace

LAYOUT = ParallelSizes(pp_size=2)
SAMPLES_PER_MICROBATCH = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """Results of the demo; `--json` prints these fields.

    Args:
        samples, tokens_generated: of the engine's response.
        decisions: (token, layer) pairs with a route of the engine's.
        differ_without_replay, differ_with_replay: those for which the trainer used another set of experts.
        recomputes_checked, recomputes_identical: router recomputes, and those that used their forward's experts.
        logprob_gap_without, logprob_gap_with: mean |difference| of the generated tokens' log-probs to the engine's, nats.
        kl_without, kl_with: mean k3 estimate of KL(engine || trainer) over the same tokens, nats.
        rows_replayed, rows_live, rows_padding: token positions of the step, as its first stage saw them.
    """

    samples: int
    tokens_generated: int
    decisions: int
    differ_without_replay: int
    differ_with_replay: int
    recomputes_checked: int
    recomputes_identical: int
    rows_replayed: int
    rows_live: int
    rows_padding: int
    logprob_gap_without: float
    logprob_gap_with: float
    kl_without: float
    kl_with: float


def run_demo(on_stage: Callable[[str], None] = lambda stage: None) -> DemoResult:
    """Replay the shipped response of a real vLLM in Megatron-Core on 2 processes.

    Args:
        on_stage: called with the name of each stage when it begins.
    """
    on_stage("reading the reply of vLLM")
    response = load_response()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(folder)
        trace = engines.vllm.decode_batch(response, model=checkpoint)
        microbatches = make_microbatches(trace, prompt_lengths(response))
        size = LAYOUT.world_size
        on_stage("training step without replay, on 2 processes, pipeline parallel")
        live = run_ranks(size, watched_step, checkpoint, LAYOUT, microbatches, None, trace.num_tokens)
        on_stage("training step with replay")
        replayed = run_ranks(size, watched_step, checkpoint, LAYOUT, microbatches, trace, trace.num_tokens)
    engine_logprobs = logprobs_by_row(response)
    mismatch = [logprob_mismatch(ranks[-1].logprobs, engine_logprobs) for ranks in (live, replayed)]
    return DemoResult(
        samples=len(response["choices"]),
        tokens_generated=sum(len(choice["token_ids"]) for choice in response["choices"]),
        decisions=int(trace.replay_mask.sum()) * trace.num_layers,
        differ_without_replay=count_different(live, trace),
        differ_with_replay=count_different(replayed, trace),
        recomputes_checked=sum(rank.recomputes for rank in replayed),
        recomputes_identical=sum(rank.recomputes_identical for rank in replayed),
        rows_replayed=replayed[0].report["rows_replayed"],
        rows_live=replayed[0].report["rows_live"],
        rows_padding=replayed[0].report["rows_padding"],
        logprob_gap_without=mismatch[0].abs_difference,
        logprob_gap_with=mismatch[1].abs_difference,
        kl_without=mismatch[0].k3,
        kl_with=mismatch[1].k3,
    )


def load_response() -> dict[str, Any]:
    """Return a reply of vLLM 0.30.0: 2 prompts with 4 answers each.

    `examples/capture_vllm.py` made it with the demo's checkpoint.
    """
    file = files("megatron_router_replay.demo") / "data" / "vllm_0.30.0_bf16_response.json"
    response: dict[str, Any] = json.loads(file.read_text())["response"]
    return response


def prompt_lengths(response: dict[str, Any]) -> list[int]:
    """Return the number of prompt tokens of each choice."""
    return [len(choice["prompt_token_ids"]) for choice in response["choices"]]


def make_microbatches(trace: RoutingTrace, prompt_lengths: list[int]) -> list[dict[str, Tensor]]:
    """Return the samples as padded micro-batches of tensors [b, s]; `rows` are for the demo's own observations."""
    fields: dict[str, list[Tensor]] = {"tokens": [], "labels": [], "loss_mask": [], "position_ids": []}
    for sample, prompt_length in zip(trace.samples(), prompt_lengths):
        assert sample.token_ids is not None, "the engine's response has token ids"
        tokens = sample.token_ids.to(torch.int64)
        loss_mask = torch.zeros(len(tokens))
        loss_mask[prompt_length - 1 : -1] = 1.0  # position i predicts token i + 1
        fields["tokens"].append(tokens)
        fields["labels"].append(tokens.roll(-1))
        fields["loss_mask"].append(loss_mask)
        fields["position_ids"].append(torch.arange(len(tokens)))
    batch = {name: pad_sequence(values, batch_first=True) for name, values in fields.items()}
    rows = torch.split(torch.arange(trace.num_tokens), [len(tokens) for tokens in fields["tokens"]])
    batch["rows"] = pad_sequence(list(rows), batch_first=True, padding_value=-1)
    parts = {name: torch.split(values, SAMPLES_PER_MICROBATCH) for name, values in batch.items()}
    return [dict(zip(parts, values)) for values in zip(*parts.values())]


def logprobs_by_row(response: dict[str, Any]) -> Tensor:
    """Return the engine's log-prob of the token after each trace row, [num_rows]; NaN for a prompt's or the last."""
    rows = []
    for choice in response["choices"]:
        generated = choice["logprobs"]["token_logprobs"]
        before = [float("nan")] * (len(choice["prompt_token_ids"]) - 1)
        rows += [*before, *generated, float("nan")]
    return torch.tensor(rows)


def count_different(ranks: list[Any], trace: RoutingTrace) -> int:
    """Return how many decisions used a different set of experts than the trace, over all stages."""
    different = 0
    for rank in ranks:
        for layer, used in rank.used.items():
            expected = torch.zeros_like(used).scatter(1, trace.layer(layer).to(torch.int64), True)
            different += int((used != expected)[trace.replay_mask].any(dim=1).sum())
    return different
