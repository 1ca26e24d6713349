"""verl finds the plug-in by itself, and it takes verl's engine over only where it may."""

import asyncio
import json
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: make test-verl")

from megatron_router_replay.trainers import token_layers
from tests.functional.verl import cases
from tests.support.workers import WorkersError

ROUTES = np.array([[[3, 1]], [[0, 2]], [[2, 1]]], dtype=np.uint8)
STOCK = "verl.workers.engine.megatron.transformer_impl.MegatronEngineWithLMHead"
OURS = "megatron_router_replay.trainers.verl.engine.RouterReplayEngine"


@pytest.fixture(scope="module")
def fresh_process():
    """What a process without Megatron-Core says of the plug-in, then of one for a verl that lacks what we know."""
    code = (
        "import json, sys, verl; before = 'megatron' in sys.modules; from verl.workers.engine import EngineRegistry; "
        "found = EngineRegistry.get_engine_cls('language_model', 'megatron'); "
        "print(json.dumps([before, found.__module__, 'megatron_router_replay.trainers.verl.engine' in sys.modules, "
        "'verl.workers.engine.megatron' in sys.modules['megatron_router_replay.trainers.seams']._finder.waiting])); "
        # What is gone is looked for when verl's engine has been imported; its own imports have had it by then.
        "import verl.workers.engine.megatron, verl.utils.device; import megatron_router_replay.trainers.verl as ours; "
        "verl.__version__ = '0.10.0'; del verl.utils.device.get_vendor, sys.modules[ours.ENGINE_MODULE]; "
        "ours.when_imported(ours.ENGINE_MODULE, ours._register_if_possible); "
        "import verl.workers.engine.megatron; print('went on')"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)


def test_verl_loads_it_as_an_entry_point_and_nothing_of_megatron_with_it(fresh_process):
    found = json.loads(fresh_process.stdout.splitlines()[-2])
    assert found == [False, "megatron_router_replay.trainers.verl", False, False]


def test_verls_mode_is_the_switch(workers_1):
    assert workers_1.run(cases.chosen, "disabled") == [STOCK]
    assert workers_1.run(cases.chosen, "R2") == [OURS]
    assert workers_1.run(cases.chosen, "R3") == [OURS]


def test_a_verl_that_packs_in_another_way_is_refused_unless_replay_is_off(workers_1):
    assert workers_1.run(cases.chosen, "disabled", {}, cases.preprocess_bshd_engine) == [STOCK]
    with pytest.raises(WorkersError, match=r"preprocess_bshd_engine has the parameters \['input_ids', 'interleave'\]"):
        workers_1.run(cases.chosen, "R3", {}, cases.preprocess_bshd_engine)


def test_a_verl_without_the_registry_that_we_know_goes_on_with_a_warning(fresh_process):
    assert fresh_process.stdout.splitlines()[-1] == "went on"
    assert "cannot register this package's engine with verl 0.10.0: ImportError" in fresh_process.stderr
    assert "verl's own replay would run, not this package's" in fresh_process.stderr


def test_a_second_plug_in_for_the_same_engine_is_refused(workers_1):
    (message,) = workers_1.run(cases.registered_twice)
    assert message.startswith("MRR806: another plug-in of verl has registered a Megatron engine")


def test_a_vision_language_model_is_refused_by_name(workers_1):
    with pytest.raises(WorkersError, match="cannot be exact with vision_config"):
        workers_1.run(cases.chosen, "R3", {"vision_config": {}})


def test_it_refuses_to_run_beside_verls_own_patch(workers_1):
    (message,) = workers_1.run(cases.patched_by_verl)
    workers_1.close()  # its process is patched
    assert "apply_router_replay_patch" in message


@pytest.mark.parametrize("mode", ["R3", "disabled"])
@pytest.mark.parametrize("as_list", [False, True])
def test_verls_agent_loop_adds_the_ids_of_tokens_to_routes(mode, as_list):
    """verl's own `_run_agent_loop`, with a loop and a postprocess in place of an engine and a store."""
    agent_loop = pytest.importorskip("verl.experimental.agent_loop.agent_loop")
    output = agent_loop.AgentLoopOutput(
        prompt_ids=[5, 6], response_ids=[7, 70_000], response_mask=[1, 1], metrics={}, routed_experts=ROUTES
    )

    class Loop:
        async def run(self, sampling_params, **kwargs):
            return [output] if as_list else output

    class Worker(agent_loop.AgentLoopWorker):
        def __init__(self):
            megatron = SimpleNamespace(router_replay=SimpleNamespace(mode=mode))
            actor = SimpleNamespace(actor=SimpleNamespace(megatron=megatron), rollout=SimpleNamespace(trace={}))
            self.config = SimpleNamespace(actor_rollout_ref=actor, data={})
            self.rollout_config = actor.rollout
            self.llm_client = self.tokenizer = self.processor = self.hf_model_type = self.dataset_cls = self.tools = (
                None
            )

        async def _agent_loop_postprocess(self, output, validate, **kwargs):
            return output

    agent_loop._agent_loop_registry["mine"] = {}
    trajectory = {"step": 0, "sample_index": 0, "rollout_n": 0, "validate": False}
    with mock.patch.object(agent_loop.hydra.utils, "instantiate", return_value=Loop()):
        done = asyncio.run(Worker()._run_agent_loop({}, trajectory, agent_name="mine", trace=False))
    (done,) = done if as_list else (done,)
    if mode == "disabled":
        assert done.routed_experts is ROUTES
        return
    ids = torch.tensor([5, 6, 7, 70_000])
    assert torch.equal(done.routed_experts, token_layers.add(torch.as_tensor(ROUTES).short(), ids, sample=0))
    # verl's other trainer takes these fields; rows that it fills with zeros have no route.
    rows = done.as_dict()["routed_experts"]
    assert token_layers.remove(rows, ids, sample=0)[:, 0].tolist() == [[3, 1], [0, 2], [2, 1], [-1, -1]]
