"""AReaL's own workflow and Megatron actor on a CPU, in the two classes of docs/trainers/areal.md, which carry its routes."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_router_replay.testing import ParallelSizes
from tests.trainers import oracle, small_model
from tests.trainers.sources import Source
from tests.trainers.stand_ins import Config, trainer_imports

SOURCE = Source(name="areal", packages=("areal",))
SERVICES = (
    *("ray", "transformers", "peft", "datasets", "mbridge", "megatron.bridge"),
    "areal.models.mcore.bailing_moe",  # an architecture, which replaces a function of Megatron-Core for good
)


PAGE = Path(__file__).parents[2] / "docs" / "trainers" / "areal.md"


def imports(folder: str) -> AbstractContextManager[None]:
    return trainer_imports(folder, SOURCE.packages, services=SERVICES)


def classes() -> dict[str, Any]:
    """Return the names that the page's block makes."""
    (block,) = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


class Engine:
    """An inference engine that returns one response after the other."""

    def __init__(self, responses: Sequence[Any]) -> None:
        self._responses = iter(responses)

    async def agenerate(self, request: Any) -> Any:
        return next(self._responses)


def responses(seed: int) -> list[Any]:
    """Return AReaL's own responses of a rollout, with routes [rows, layers * topk]."""
    from areal.api.io_struct import ModelResponse

    ids, routes = oracle.rollout(seed)
    return [
        ModelResponse(
            input_tokens=part[:prompt].tolist(),
            output_tokens=part[prompt:].tolist(),
            output_logprobs=[-1.0] * (len(part) - prompt),
            output_versions=[0] * (len(part) - prompt),
            routed_experts=rows.flatten(1).int().numpy(),
        )
        for part, prompt, rows in zip(ids, oracle.SHARDS[seed % 2][1], routes)
    ]


def trajectories(workflow: Any, answers: Sequence[Any]) -> list[dict[str, Tensor]]:
    """Return the trajectory that a class of RLVRWorkflow makes of each response."""

    async def reward(*args: Any, **kwargs: Any) -> float:
        return 1.0

    me = object.__new__(workflow)
    me.reward_fn = me.async_reward_fn = reward
    me.tokenizer = SimpleNamespace(decode=lambda ids: "")
    me.get_input_ids_fn = lambda *args: []
    me.data_extract_prompt_fn = lambda data: data
    me.enable_thinking = False
    me.gconfig = SimpleNamespace(new=lambda **_: None)

    async def run() -> list[Any]:
        engine = Engine(answers)
        return [await me.arun_episode(engine, {}) for _ in answers]

    return asyncio.run(run())


class ModelList(list[Any]):
    """The chunks of a model, as AReaL's own list has them."""

    def train(self, mode: bool = True) -> None:
        for each in self:
            each.train(mode)


def dropped(folder: str) -> list[list[str]]:
    """Return the fields of the trajectories of AReaL's own workflow and of its agents."""
    with imports(folder):
        from areal.experimental.openai.types import InteractionWithTokenLogpReward
        from areal.workflow.rlvr import RLVRWorkflow

        answers = responses(0)
        of_agents = InteractionWithTokenLogpReward(model_response=answers[0], reward=1.0).to_tensor_dict()
        return [sorted(each) for each in (*trajectories(RLVRWorkflow, answers), of_agents)]


def interrupted(folder: str) -> tuple[int, Tensor]:
    """Return the rows that AReaL's engine returns for 7 tokens of 2 requests, and the routes of the page's workflow."""
    with imports(folder):
        from areal.api.io_struct import ModelRequest
        from areal.engine.sglang_remote import SGLangBackend
        from areal.infra import remote_inf_engine as module

        # Three tokens of the prompt, one more before the interruption, three after it.
        replies = iter([reply(3, [7], "abort"), reply(4, [8, 9, 10], "stop")])

        async def send(**_: Any) -> Any:
            return next(replies)

        async def session() -> None:
            return None

        me = object.__new__(module.RemoteInfEngine)
        me.config = Config(return_routed_experts=True)
        me.rid_to_address, me.rid_queue, me.backend, me._version = {}, [], SGLangBackend(), 0
        me.choose_server = lambda: "server"
        me.workflow_executor = Config(is_paused=lambda: False)
        me.get_version = lambda: 0
        module.arequest_with_retry, module.workflow_context.get_aiohttp_session = send, session
        request = ModelRequest(input_ids=[4, 5, 6])
        request.gconfig.max_tokens, request.gconfig.max_new_tokens = 100, 100
        response = asyncio.run(me.agenerate(request))
        (made,) = trajectories(classes()["RoutedWorkflow"], [response])
        return len(response.routed_experts), made["routed_experts"]


def reply(num_prompt: int, tokens: list[int], stop: str) -> dict[str, Any]:
    """Return a reply of SGLang with routes of one layer, top-2."""
    rows = np.arange((num_prompt + len(tokens) - 1) * 2, dtype=np.int32)
    return {
        "meta_info": {
            "finish_reason": {"type": stop},
            "prompt_tokens": num_prompt,
            "completion_tokens": len(tokens),
            "output_token_logprobs": [(-1.0, token) for token in tokens],
            "routed_experts": base64.b64encode(rows.tobytes()).decode(),
        }
    }


def actor(kind: Any, chunks: Sequence[Any], layout: ParallelSizes) -> Any:
    """Return a MegatronPPOActor, or one of a class of it, with these chunks."""
    from areal.api.cli_args import MegatronEngineConfig, MicroBatchSpec, PPOActorConfig

    me = kind(
        PPOActorConfig(
            experiment_name="experiment",
            trial_name="trial",
            dtype="float32",
            mb_spec=MicroBatchSpec(max_tokens_per_mb=24),
            megatron=MegatronEngineConfig(),
            ppo_n_minibatches=1 if layout.pp_size > 1 else 2,  # AReaL makes twice as many micro-batches as stages
            recompute_logprob=True,
        )
    )
    me.model, me.device, me.logger = ModelList(chunks), torch.device("cpu"), Config(info=lambda text: None)
    me.parallel_strategy = Config(
        pipeline_parallel_size=layout.pp_size,
        context_parallel_size=layout.cp_size,
        tensor_parallel_size=layout.tp_size,
    )
    me.use_padded_seq = False
    me.optimizer = small_model.NoOptimizer()
    me.optimizer.param_groups = [{"lr": 0.0}]
    me.optimizer.get_loss_scale = lambda: torch.ones(1)
    return me


def step(folder: str, layout: ParallelSizes, options: dict[str, Any]) -> Any:
    """Log-probs of AReaL's actor, and log-probs and an update of the page's; {pass: (decisions, wrong)} of each."""
    with imports(folder), oracle.process():
        from areal.engine.megatron_engine import MegatronPPOActor
        from areal.utils import data as batches
        from megatron.core import parallel_state

        batches.N_TOKENS_PER_PAGE = 4  # else the second rank of sequence parallelism gets padding alone
        chunks = small_model.build(layout, **options)
        seed = parallel_state.get_data_parallel_rank()
        ids, routes = oracle.rollout(seed)
        names = classes()
        data = trajectories(names["RoutedWorkflow"], responses(seed))
        me = actor(names["RoutedActor"], chunks, layout)
        with oracle.watched(chunks, oracle.routes_of_tokens(ids, routes)) as seen:
            actor(MegatronPPOActor, chunks, layout).compute_logp(data)
            seen.mark()
            log_probs = me.compute_logp(data)
            seen.mark()
            for each, values in zip(data, log_probs):
                each["prox_logp"] = values
            me.ppo_update(me.compute_advantages(data))
        return seen.counts()
