"""Weights go from Megatron to the engine under any layout; its samples, log-probs and routes are those of the policy."""

import pytest
import torch

from examples.grpo.weights import random_hf_weights, save_hf_checkpoint
from megatron_router_replay.testing import ParallelSizes
from tests.functional.grpo.cases import rollout_against_megatron, sent_and_returned_weights, small


@pytest.mark.parametrize(
    "layout",
    [ParallelSizes(), ParallelSizes(pp_size=2), ParallelSizes(tp_size=2, ep_size=2)],
    ids=["single", "pp2", "tp2-ep2"],
)
def test_weights_come_back_bit_identical_by_name_under_any_layout(layout, tmp_path, request):
    weights = random_hf_weights(3)
    save_hf_checkpoint(tmp_path, weights)
    workers = request.getfixturevalue(f"workers_{layout.world_size}")
    first, *others = workers.run(sent_and_returned_weights, layout, tmp_path)
    assert first.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(first[name], weights[name])] == []
    assert others == [{}] * len(others)


def experts_of(trace, rows=slice(None)):
    """The experts of each decision, in the order of their ids."""
    return trace.topk_indices[rows].sort(dim=2).values


def test_in_fp32_the_engine_agrees_with_megatron_in_log_probs_and_routes(workers_1, tmp_path):
    (seen,) = workers_1.run(rollout_against_megatron, small(tmp_path), torch.float32)
    assert seen["repeats"]
    mask, routed = seen["mask"], seen["trace"].replay_mask
    torch.testing.assert_close(seen["rollout"][mask], seen["live"][mask], rtol=0, atol=1e-4)
    assert torch.equal(experts_of(seen["trace"], routed), experts_of(seen["recorded"], routed))
    for sample in seen["samples"]:
        answer = sample.token_ids[sample.generated]
        assert 1 <= len(answer) <= 6
        assert 2 not in answer[:-1].tolist()  # nothing behind the end of an answer
        assert len(answer) == 6 or answer[-1] == 2
        assert sample.trace.replay_mask.tolist() == [True] * (len(sample.token_ids) - 1) + [False]


def test_in_bf16_routers_disagree_and_replay_brings_the_log_probs_closer(workers_1, tmp_path):
    (seen,) = workers_1.run(rollout_against_megatron, small(tmp_path, prompts=8, per_prompt=8), torch.bfloat16)
    mask, routed = seen["mask"], seen["trace"].replay_mask
    ours, theirs = experts_of(seen["recorded"], routed), experts_of(seen["trace"], routed)
    differing = int((ours != theirs).any(dim=2).sum())
    assert 10 <= differing <= 0.1 * ours.shape[0] * ours.shape[1]
    live = (seen["live"] - seen["rollout"])[mask].abs()
    replayed = (seen["replayed"] - seen["rollout"])[mask].abs()
    assert replayed.mean() < 0.7 * live.mean()
    assert replayed.max() < 0.3 * live.max()
