"""verl loads the plug-in as an entry point, and the plug-in hooks only engines with R2 or R3."""

import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: make test-verl")

from megatron_router_replay.trainers import token_layers
from tests.functional.verl import cases
from tests.support.workers import WorkersError


@pytest.fixture(scope="module")
def fresh_process():
    """The output of a process without Megatron-Core that loads the plug-in, and then one for a verl with a moved engine."""
    code = (
        "import json, sys, verl; before = 'megatron' in sys.modules; "
        "import megatron_router_replay.trainers.seams as seams, megatron_router_replay.trainers.verl as ours; "
        "print(json.dumps([before, ours.ENGINE in seams._finder.waiting])); "
        "import verl.workers.engine.megatron.transformer_impl as engine; "
        "print(json.dumps(hasattr(engine.MegatronEngine.__init__, 'mrr_original'))); "
        "del engine.MegatronEngine; ours._hook_or_warn(ours.INIT, ours._construct, 'Not replayed.'); print('went on')"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)


def test_verl_loads_it_as_an_entry_point_and_nothing_of_megatron_with_it(fresh_process):
    waits, is_hooked, _ = fresh_process.stdout.splitlines()[-3:]
    assert json.loads(waits) == [False, True]
    assert json.loads(is_hooked)


def test_verls_mode_is_the_switch(workers_1):
    assert [workers_1.run(cases.chosen, mode) for mode in ("disabled", "R2", "R3")] == [[False], [True], [True]]


def test_a_verl_that_packs_in_another_way_is_refused_unless_replay_is_off(workers_1):
    assert workers_1.run(cases.chosen, "disabled", {}, cases.preprocess_bshd_engine) == [False]
    with pytest.raises(WorkersError, match=r"preprocess_bshd_engine has the parameters \['input_ids', 'interleave'\]"):
        workers_1.run(cases.chosen, "R3", {}, cases.preprocess_bshd_engine)


def test_a_verl_whose_engine_moved_goes_on_with_a_warning(fresh_process):
    assert fresh_process.stdout.splitlines()[-1] == "went on"
    assert (
        "MRR808: verl.workers.engine.megatron.transformer_impl.MegatronEngine.__init__ is gone" in fresh_process.stderr
    )
    assert "Not replayed." in fresh_process.stderr


def test_a_multimodal_model_replays(workers_1):
    assert workers_1.run(cases.chosen, "R3", {"vision_config": {}}) == [True]


def test_it_refuses_to_run_beside_verls_own_patch(workers_1):
    (message,) = workers_1.run(cases.patched_by_verl)
    workers_1.close()  # its process is patched
    assert "apply_router_replay_patch" in message


def test_an_audit_is_refused(workers_1):
    with pytest.raises(WorkersError, match="cannot be exact with MRR_AUDIT"):
        workers_1.run(cases.chosen_under_audit)


@pytest.mark.parametrize("as_list", [False, True])
def test_verls_agent_loop_adds_the_ids_of_tokens_to_routes(as_list, workers_1):
    ids = torch.tensor([5, 6, 7, 70_000])
    (((off, _), (carried, laid_out)),) = workers_1.run(cases.agent_loop, ["disabled", "R3"], as_list)
    workers_1.close()  # its process has stand-ins
    assert off.tolist() == cases.ROUTES
    assert torch.equal(carried, token_layers.add(torch.tensor(cases.ROUTES).short(), ids, sample=0))
    # Rows that verl fills with zeros have no route; before August 2026 it did so later.
    laid_out = torch.nn.functional.pad(laid_out, (0, 0, 0, 0, 0, len(ids) - len(laid_out)))
    assert token_layers.remove(laid_out, ids, sample=0)[:, 0].tolist() == [[3, 1], [0, 2], [2, 1], [-1, -1]]
