"""The r3 loop against a real vLLM server: routes and log-probs over HTTP, new weights for every rollout."""

import sys
from pathlib import Path

import pytest
import torch

from examples.grpo.vllm_engine import REPO, VllmEngine, VllmError, VllmServer
from examples.grpo.weights import random_hf_weights, save_hf_checkpoint
from megatron_router_replay.testing import ParallelSizes
from tests.functional.grpo.cases import small, vllm_steps

PYTHON = REPO / ".venv-vllm/bin/python"


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: run `make venv-vllm`")
def test_workers_of_one_vllm_refuse_damaged_routes_and_send_right_ones(workers_2, tmp_path):
    settings = small(
        tmp_path,
        engine="vllm",
        transport="distributed",
        rollout_workers=2,
        recompute="full",
        layout=ParallelSizes(pp_size=2),
    )
    ranks = workers_2.run(vllm_steps, settings, timeout_s=1800)
    for rank, layer_numbers in zip(ranks, [(1,), (3, 4)], strict=True):
        assert "layer 3 of topk_indices is [0, 0]" in rank["message"], rank["message"]
        assert rank["trained"] == [False, True]
        assert rank["server_ended"]
        for step, received in zip(rank["metrics"], rank["received"], strict=True):
            assert received["layer_numbers"] == layer_numbers
            assert int((~received["replay_mask"]).sum()) == 16
            assert step["router_replay/rows_live"] == 16  # the last token of each sample; all others have a route
            assert step["router_replay/rows_replayed"] > 16 * 4
            assert step["router_replay/transport/rollout_decode_s"] > 0
            # In the second step a server that kept old weights, or garbled new ones, is some 0.1 away.
            assert 0 < step["rollout_kl"] < 2e-3
    first, last = (rank["received"] for rank in ranks)
    assert len(first) == 2
    for on_first, on_last in zip(first, last, strict=True):
        assert torch.equal(on_first["token_ids"], on_last["token_ids"])
        assert torch.equal(on_first["replay_mask"], on_last["replay_mask"])


def test_a_server_that_does_not_start_says_why(tmp_path):
    save_hf_checkpoint(tmp_path, random_hf_weights(0))
    with pytest.raises(VllmError, match="Run `make venv-vllm` first"):
        VllmServer(tmp_path, python=tmp_path / "no/python")
    # This environment has no vLLM: the process ends at once.
    with pytest.raises(VllmError, match=r"(?s)ended with exit code 1 before it answered.*No module named 'vllm'"):
        VllmServer(tmp_path, python=Path(sys.executable), start_timeout_s=60)


def test_a_request_without_a_server_is_refused(tmp_path):
    with pytest.raises(VllmError, match="no server is running"):
        VllmEngine(tmp_path, eos_token_id=2).post("/inference/v1/generate", {})
