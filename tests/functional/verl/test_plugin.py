"""verl finds the plug-in by itself, and it takes verl's engine over only where it may."""

import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: make test-verl")

from megatron_router_replay.trainers import token_layers
from tests.functional.verl import cases
from tests.support.workers import WorkersError

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


@pytest.mark.parametrize("as_list", [False, True])
def test_verls_agent_loop_adds_the_ids_of_tokens_to_routes(as_list, workers_1):
    ids = torch.tensor([5, 6, 7, 70_000])
    (((off, _), (carried, laid_out)),) = workers_1.run(cases.agent_loop, ["disabled", "R3"], as_list)
    workers_1.close()  # its process has stand-ins
    assert off.tolist() == cases.ROUTES
    assert torch.equal(carried, token_layers.add(torch.tensor(cases.ROUTES).short(), ids, sample=0))
    # Rows that verl fills with zeros have no route.
    assert token_layers.remove(laid_out, ids, sample=0)[:, 0].tolist() == [[3, 1], [0, 2], [2, 1], [-1, -1]]
