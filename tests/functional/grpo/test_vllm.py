"""The r3 loop against a real vLLM server: routes and log-probs over HTTP, new weights for every rollout."""

import pytest
import torch

from examples.grpo.vllm_engine import REPO
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
