"""Small runs of the GRPO example, and what the tests of it run in gloo workers."""

from __future__ import annotations

import base64
import io
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import megatron_router_replay as mrr
from examples.grpo.batch import RolloutBatch
from examples.grpo.loop import one_step
from examples.grpo.rollout import Sample, TransformersEngine, roll_out
from examples.grpo.routes import DistributedRollouts, RayRollouts, Rollouts, make_rollouts
from examples.grpo.settings import Settings
from examples.grpo.task import EOS, ClassTask
from examples.grpo.trainer import Trainer
from examples.grpo.vllm_engine import VllmClient
from examples.grpo.weights import CONFIG, gather_hf_weights, random_hf_weights, save_hf_checkpoint
from megatron_router_replay.testing import ParallelSizes, load_qwen3_moe


def small(out: Path, **changes: Any) -> Settings:
    """Return settings of a run that takes a second or two a step."""
    base = Settings(
        out=out,
        task=ClassTask(min_words=2, max_words=4, max_new_tokens=6),
        steps=2,
        prompts=4,
        per_prompt=4,
        updates=2,
        per_microbatch=2,
    )
    return replace(base, **changes)


def without_times(metrics: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Return the metrics that must be the same in another run."""
    # Which layer is asked for its agreement goes on from session to session of a process, and a resumed run is a new one.
    measured = ("seconds/", "router_replay/transport/", "router_replay/agreement", "router_replay/block_evidence")
    return [{name: value for name, value in step.items() if not name.startswith(measured)} for step in metrics]


def make_trainer(settings: Settings) -> Trainer:
    """Return this rank's trainer with the run's initial weights."""
    settings.layout.initialize(seed=settings.seed)
    initial = settings.out / "initial"
    if torch.distributed.get_rank() == 0:
        save_hf_checkpoint(initial, random_hf_weights(settings.seed))
    torch.distributed.barrier()
    return Trainer(settings, initial)


def sent_and_returned_weights(layout: ParallelSizes, folder: Path) -> dict[str, Tensor]:
    """Load a checkpoint under a layout and gather it again by Hugging Face names."""
    layout.initialize()
    return gather_hf_weights(load_qwen3_moe(folder, layout), CONFIG)


def rollout_against_megatron(settings: Settings, dtype: torch.dtype) -> dict[str, Any]:
    """Sample from transformers, run the samples through Megatron: live (recorded), and with the routes replayed."""
    trainer = make_trainer(settings)
    engine = TransformersEngine(settings.out / "initial", eos_token_id=EOS, dtype=dtype)
    engine.load_weights(random_hf_weights(settings.seed))
    samples = roll_out(settings, engine, 0)
    again = roll_out(settings, engine, 0)
    batch = RolloutBatch(samples, torch.zeros(len(samples)))
    trace = mrr.concat_traces([sample.trace for sample in samples])
    live, recorded = trainer.record(batch)
    return {
        "samples": samples,
        "repeats": all(torch.equal(a.token_ids, b.token_ids) for a, b in zip(samples, again, strict=True)),
        "trace": trace,
        "recorded": recorded,
        "rollout": batch.rollout_logprobs,
        "mask": batch.loss_mask.bool(),
        "live": live,
        "replayed": trainer.logprobs(batch, trace),
    }


class MeddledEngine(TransformersEngine):
    """Answers as vLLM does over HTTP, read by the vLLM client. Two things befall the worker that has the last prompt.

    In step 1 a layer of the last sample is lost on the way; in step 3 its process ends.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.out / "initial", eos_token_id=EOS)
        self.settings = settings

    def generate(self, prompts: Sequence[Tensor], **options: Any) -> list[Sample]:
        step, has_last = options["seed"], options["first_group"] + len(prompts) == self.settings.prompts
        if step == 3 and has_last:
            os.kill(os.getpid(), signal.SIGKILL)
        samples = super().generate(prompts, **options)
        client = VllmClient(self.checkpoint, eos_token_id=EOS)
        result = []
        for group, prompt in enumerate(prompts, options["first_group"]):
            response = vllm_response([sample for sample in samples if sample.group == group])
            if step == 1 and group == self.settings.prompts - 1:
                damage(response)
            result += client.read(response, prompt, group)
        return result


def rollouts_of(settings: Settings, trainer: Trainer, engine: type[TransformersEngine]) -> Rollouts:
    """Return the settings' way of routes with another engine."""
    ways = {"distributed": DistributedRollouts, "ray": RayRollouts}
    return ways[settings.transport](settings, trainer, worker_engine=engine)


def vllm_response(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the samples of one prompt as vLLM's /inference/v1/generate sends them."""
    choices = []
    for index, sample in enumerate(samples):
        routes = np.zeros((len(sample.token_ids) - 1, CONFIG["num_hidden_layers"], 2), np.uint8)
        for layer in sample.trace.layer_numbers:
            routes[:, layer - 1] = sample.trace.layer(layer)[:-1]
        choices.append(
            {
                "index": index,
                "token_ids": sample.token_ids[sample.generated].tolist(),
                "logprobs": {"content": [{"logprob": value} for value in sample.logprobs[sample.generated].tolist()]},
                "finish_reason": "length",
                "routed_experts": encoded(routes),
            }
        )
    return {"choices": choices}


def encoded(routes: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, routes)
    return base64.b64encode(file.getvalue()).decode()


def damage(response: dict[str, Any]) -> None:
    """Zero the routes of the third layer in the last choice, as a fused kernel that bypasses capture leaves them."""
    choice = response["choices"][-1]
    routes = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"]))).copy()
    routes[:, 2] = 0
    choice["routed_experts"] = encoded(routes)


def meddled_steps(settings: Settings) -> dict[str, Any]:
    """Train a step, one whose routes arrive damaged, a good one, and one in which a worker dies.

    Returns both errors, and whether each of the first three steps moved anything.
    """
    trainer = make_trainer(settings)
    states = [flat(trainer)]
    died = ""
    with suppress(WorkerDiedError), rollouts_of(settings, trainer, MeddledEngine) as rollouts:
        one_step(trainer, rollouts, 0)
        states.append(flat(trainer))
        damaged = refusal(trainer, rollouts, 1)
        states.append(flat(trainer))
        one_step(trainer, rollouts, 2)
        states.append(flat(trainer))
        try:
            one_step(trainer, rollouts, 3)
        except Exception as error:
            died = f"{type(error).__name__}: {error}"
            raise WorkerDiedError from error  # the run ends as one that failed
    return {"damaged": damaged, "died": died, "trained": [not torch.equal(*pair) for pair in pairwise(states)]}


class WorkerDiedError(Exception):
    """One of the run's rollout workers is gone."""


def steps_with_routes(settings: Settings) -> dict[str, Any]:
    """Train; return this rank's metrics, its parameters at the end, and the routes it got in every step."""
    trainer = make_trainer(settings)
    with make_rollouts(settings, trainer) as rollouts:
        received = keep_what_is_received(rollouts)
        metrics = [one_step(trainer, rollouts, step) for step in range(settings.steps)]
        line = rollouts.line()
    return {
        "place": rollouts.place,
        "received": received,
        "metrics": metrics,
        "line": line,
        "parameters": flat(trainer),
    }


def keep_what_is_received(rollouts: Rollouts) -> list[dict[str, Any]]:
    """Return a list that will hold the routes which this rank gets in every step from now on."""
    received = []
    receive = rollouts.receive

    def receive_and_keep() -> mrr.RoutingTrace:
        trace = receive()
        kept = {name: getattr(trace, name) for name in ("layer_numbers", "num_experts")}
        tensors = {name: getattr(trace, name).clone() for name in ("topk_indices", "replay_mask", "token_ids")}
        received.append({**kept, **tensors})
        return trace

    rollouts.receive = receive_and_keep  # type: ignore[method-assign]
    return received


def refusal(trainer: Trainer, rollouts: Rollouts, step: int) -> str:
    """Return what a step raises; empty if it trains."""
    try:
        one_step(trainer, rollouts, step)
    except mrr.RouterReplayError as error:
        return str(error)
    return ""


class MeddledVllm(VllmClient):
    """A worker's client: until it was given weights a second time, the responses to it lose a layer on the way."""

    times_loaded = 0

    def load_weights(self, weights: Any) -> None:
        self.times_loaded += 1
        super().load_weights(weights)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        response = super().post(path, body)
        if self.times_loaded < 2:
            damage(response)
        return response


def meddled_vllm(settings: Settings) -> MeddledVllm:
    return MeddledVllm(settings.out / "engine", eos_token_id=EOS)


def vllm_steps(settings: Settings) -> dict[str, Any]:
    """Take a step with routes that arrive damaged, then `settings.steps` good ones, from one real vLLM for all workers."""
    trainer = make_trainer(settings)
    with DistributedRollouts(settings, trainer, worker_engine=meddled_vllm) as rollouts:
        received = keep_what_is_received(rollouts)
        states = [flat(trainer)]
        message = refusal(trainer, rollouts, 0)
        states.append(flat(trainer))
        metrics = [one_step(trainer, rollouts, step) for step in range(settings.steps)]
        states.append(flat(trainer))
        process = rollouts.server.server.process if rollouts.is_manager else None
    return {
        "message": message,
        "trained": [not torch.equal(*pair) for pair in pairwise(states)],
        "received": received,
        "metrics": metrics,
        "server_ended": process is None or process.poll() is not None,
    }


def flat(trainer: Trainer) -> Tensor:
    """Return this rank's parameters, its optimizer's moments included, as one vector."""
    state = trainer.state_dict()
    values = [tensor.flatten() for model in state["models"] for tensor in model.values() if tensor is not None]
    for optimizer in state["optimizers"]:
        for of_parameter in optimizer["state"].values():
            values += [value.flatten().float() for value in of_parameter.values() if torch.is_tensor(value)]
    return torch.cat(values)
