"""Samples of the policy with log-probs and routes, and an engine that draws them: transformers in bf16 on a CPU.

An engine is anything with the methods of `Engine`; `vllm_engine.py` has the other one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from examples.grpo.modular_moe import use_modular_moe
from examples.grpo.settings import Settings
from megatron_router_replay import RoutingTrace
from megatron_router_replay.capture import Capturer, token_positions
from megatron_router_replay.transport import TransportTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """One sequence that the engine saw: prompt and answer, or all turns of an episode.

    Args:
        token_ids: [S] int64.
        generated: [S] bool, True: the engine sampled this token; only these are trained on.
        logprobs: [S] float32, the engine's log-prob of each generated token, 0 elsewhere.
        group: index of the prompt; samples of one group are compared with each other.
        reward: of the whole sample.
    """

    token_ids: Tensor
    generated: Tensor
    logprobs: Tensor
    group: int
    reward: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample(Text):
    """A text with its routes.

    Args:
        trace: routes of the S tokens; the last one was never fed back, so it has none.
    """

    trace: RoutingTrace

    @property
    def text(self) -> Text:
        """The sample without its routes."""
        return Text(**{name: getattr(self, name) for name in Text.__slots__})


class Engine(Protocol):
    """What a rollout asks of its engine.

    Args:
        times: where "collect" and "decode" are counted.
    """

    times: TransportTimes

    def load_weights(self, weights: Any) -> None:
        """Take new weights, by Hugging Face checkpoint names; the client of a server takes its address."""

    def generate(
        self, prompts: Sequence[Tensor], *, per_prompt: int, max_new_tokens: int, seed: int, first_group: int = 0
    ) -> list[Sample]:
        """Sample `per_prompt` answers to each prompt at temperature 1; the samples of a prompt stand together.

        Args:
            first_group: number of the first prompt among those of all workers; it decides the random numbers, too.
        """

    def close(self) -> None:
        """Give back what the engine holds."""


class TransformersEngine:
    """Qwen3-MoE from transformers: batched sampling with a KV cache, routes captured as it generates.

    Args:
        checkpoint: a folder with config.json; weights come by `load_weights`.
        dtype: another one than the trainer's makes routers choose differently, which replay is for.
        experts: how the experts run behind the selection: "native", transformers' own, or the "contiguous" or "batched"
            format of a modular MoE. The same routes, other arithmetic: behind the first MoE layer another kernel is
            enough for routers to choose differently.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        eos_token_id: int,
        dtype: torch.dtype = torch.bfloat16,
        experts: str = "native",
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.checkpoint = Path(checkpoint)
        self.eos_token_id = eos_token_id
        config = AutoConfig.from_pretrained(checkpoint)
        self.model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self.times = TransportTimes("rollout")
        if experts != "native":
            use_modular_moe(self.model, activation_format=experts)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy every tensor into the model; transformers 5 keeps all experts of a layer in one."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(_stacked(name, parameter, weights))

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Tensor], *, per_prompt: int, max_new_tokens: int, seed: int, first_group: int = 0
    ) -> list[Sample]:
        """Return the samples, in the order of the prompts."""
        requests = [prompt for prompt in prompts for _ in range(per_prompt)]
        tokens = _pad_left(requests, self.eos_token_id)
        mask = torch.stack([torch.arange(tokens.shape[1]) >= tokens.shape[1] - len(prompt) for prompt in requests])
        answers: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        running = torch.ones(len(requests), dtype=torch.bool)
        generator = torch.Generator().manual_seed(seed + (first_group << 32))
        capturer = Capturer(self.model, max_num_tokens=tokens.numel())
        try:
            for index, prompt in enumerate(requests):
                capturer.add_request(index, num_prompt_tokens=len(prompt))
            positions = torch.from_numpy(token_positions(mask))
            cache = None
            for _ in range(max_new_tokens):
                ids = [index if alive else None for index, alive in enumerate(running.tolist())]
                with capturer.forward(ids, positions):
                    output = self.model(
                        input_ids=tokens,
                        attention_mask=mask.long(),
                        position_ids=positions.clamp(min=0),
                        past_key_values=cache,
                        use_cache=True,
                        logits_to_keep=1,
                    )
                cache = output.past_key_values
                scores = output.logits[:, -1].float().log_softmax(dim=-1)
                tokens = torch.multinomial(scores.exp(), 1, generator=generator)
                for index in running.nonzero()[:, 0].tolist():
                    answers[index].append(int(tokens[index, 0]))
                    logprobs[index].append(float(scores[index, tokens[index, 0]]))
                running &= tokens[:, 0] != self.eos_token_id
                if not running.any():
                    break
                mask = torch.cat([mask, torch.ones(len(requests), 1, dtype=torch.bool)], dim=1)
                positions = positions[:, -1:] + 1
            samples = []
            for index, prompt in enumerate(requests):
                ids_of_sample = torch.cat([prompt, torch.tensor(answers[index], dtype=torch.int64)])
                with self.times.measure("decode"):
                    trace = capturer.finish(index, ids_of_sample)
                    assert trace is not None, "this is tp_rank 0"
                group = first_group + index // per_prompt
                samples.append(make_sample(prompt, ids_of_sample, logprobs[index], trace, group))
        finally:
            capturer.close()
        return samples

    def close(self) -> None:
        """Nothing to give back."""


def roll_out(settings: Settings, engine: Engine, step: int, *, worker: int = 0) -> list[Sample]:
    """Return a rollout worker's samples of a step, with their rewards."""
    seed = settings.seed * 1_000_003 + step
    prompts = settings.task.prompts(settings.prompts, seed=seed)
    own = settings.prompts_of(worker)
    samples = engine.generate(
        prompts[own.start : own.stop],
        per_prompt=settings.per_prompt,
        max_new_tokens=settings.task.max_new_tokens,
        seed=seed,
        first_group=own.start,
    )
    return [
        replace(sample, reward=settings.task.reward(prompts[sample.group], sample.token_ids[sample.generated]))
        for sample in samples
    ]


def make_sample(
    prompt: Tensor, token_ids: Tensor, logprobs: Sequence[float], trace: RoutingTrace, group: int
) -> Sample:
    """Return the sample of one prompt and its answer; `logprobs` has one value a generated token."""
    generated = torch.arange(len(token_ids)) >= len(prompt)
    values = torch.zeros(len(token_ids))
    values[generated] = torch.tensor(logprobs)
    return Sample(token_ids=token_ids, generated=generated, logprobs=values, trace=trace, group=group)


def _pad_left(prompts: Sequence[Tensor], fill: int) -> Tensor:
    tokens = torch.full((len(prompts), max(map(len, prompts))), fill)
    for row, prompt in zip(tokens, prompts):
        row[len(row) - len(prompt) :] = prompt
    return tokens


def _stacked(name: str, parameter: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the checkpoint tensors of one transformers parameter, the experts' stacked."""
    if name in weights:
        return weights[name]
    prefix, _, kind = name.rpartition(".")
    experts = [f"{prefix}.{expert}" for expert in range(parameter.shape[0])]
    if kind == "gate_up_proj":
        halves = [(weights[f"{expert}.gate_proj.weight"], weights[f"{expert}.up_proj.weight"]) for expert in experts]
        return torch.stack([torch.cat(pair) for pair in halves])
    return torch.stack([weights[f"{expert}.{kind}.weight"] for expert in experts])
