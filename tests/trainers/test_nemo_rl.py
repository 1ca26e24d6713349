"""NeMo-RL, with examples/trainers/nemo_rl.patch and no other edits."""

import re

import pytest

from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import FULL
from tests.support.workers import WorkersError
from tests.trainers import nemo_rl
from tests.trainers.oracle import check_replayed

MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
PACKED, DYNAMIC = {"packs": True}, {"dynamic": True}
CASES = {
    "single": (ParallelSizes(), {}, {}),
    "single-dynamic-full": (ParallelSizes(), FULL, DYNAMIC),
    "single-packed-moe": (ParallelSizes(), MOE, PACKED),
    "tp2-full": (ParallelSizes(tp_size=2), FULL, {}),
    "tp2-packed": (ParallelSizes(tp_size=2), {}, PACKED),
    "cp2-packed-moe": (ParallelSizes(cp_size=2), MOE, PACKED),
    "dp2-ep2-packed-full": (ParallelSizes(ep_size=2), FULL, PACKED),
    "pp2-full": (ParallelSizes(pp_size=2), FULL, {}),
    "pp2-packed-moe": (ParallelSizes(pp_size=2), MOE, PACKED),
}

FORGOTTEN = {
    "the stamp": (("mrr.stamp(",), "were they stamped?"),
    "the routes": (("mrr.microbatch(",), "routed_experts layer axis does not match a supported payload layout"),
    "the experts of training": (("#1 num_experts=self",), "say num_experts=, or model="),
    "the experts of log-probs": (("#3 num_experts=self",), "say num_experts=, or model="),
    "the filler": (("filler=range",), "bears no seal"),
    "the tokens of the stamp": (("token_ids=",), "stamped=True compares the seal with the tokens: give token_ids="),
    "the word of the stamp": (("stamped=True",), "say stamped=True with token_ids="),
    "the session": (("    with (",), "no session holds this DistributedDataParallel"),
}
"""What is left out -> (texts of its added lines, what the user sees)."""


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    return nemo_rl.SOURCE.edited(tmp_path_factory.mktemp("nemo_rl") / "edited")


@pytest.mark.parametrize("name", CASES)
def test_every_decision_is_the_rollouts(name, edited, request):
    layout, options, batching = CASES[name]
    workers = request.getfixturevalue(f"workers_{layout.world_size}")
    check_replayed(
        workers.run(nemo_rl.step, str(edited), layout, options, *batching_of(batching)), recomputes=bool(options)
    )


def batching_of(batching):
    return batching.get("packs", False), batching.get("dynamic", False)


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_forgotten_line_raises(name, tmp_path, workers_1):
    lines, message = FORGOTTEN[name]
    folder = nemo_rl.SOURCE.edited(tmp_path / "edited", without=lines)
    with pytest.raises(WorkersError, match=re.escape(message)):
        workers_1.run(nemo_rl.step, str(folder), ParallelSizes(), {})
