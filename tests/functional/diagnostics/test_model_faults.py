"""What `diff_traces` says of faults in a model is true, or open about several causes; of rounding it states no fact.

`python -m tests.functional.diagnostics.model_faults --texts` shows each text beside the truth.
"""

from collections import Counter

import pytest

import megatron_router_replay as mrr
from tests.functional.diagnostics.model_faults import (
    BIASED,
    GROUP_SHARES,
    group_cases,
    model_cases,
    random_samples,
    record_routes,
)
from tests.functional.diagnostics.rare_faults import rare_cases

pytestmark = pytest.mark.slow


def judge(cases):
    verdicts = {case.name: case.judge(str(mrr.diff_traces(*case.make()))) for case in cases}
    return Counter(verdicts.values()), [name for name, verdict in verdicts.items() if verdict != "right"]


@pytest.mark.parametrize("sizes", [{}, {"num_moe_experts": 16, "moe_router_topk": 2}])
def test_a_fault_in_a_model_is_named_or_left_open(megatron, sizes):
    verdicts, others = judge(model_cases(**sizes))
    assert verdicts["WRONG"] == 0, others
    assert verdicts["right"] >= 37, others  # of 39


@pytest.mark.parametrize("seed", [0, 1])
def test_a_rare_fault_is_named_or_left_open(megatron, seed):
    verdicts, others = judge(rare_cases(seed))
    assert verdicts["WRONG"] == 0, others
    assert verdicts["right"] >= 36, others  # of 40


@pytest.mark.parametrize("keep_ids", [True, False])
@pytest.mark.parametrize("prompt_share", GROUP_SHARES)
def test_a_fault_in_a_batch_of_groups_is_named(megatron, prompt_share, keep_ids):
    _, others = judge(group_cases(prompt_share, keep_ids))
    assert others == []


@pytest.mark.parametrize(("num_experts", "topk"), [(32, 4), (128, 8), (8, 2)])
def test_bf16_has_no_fact_and_no_place(megatron, num_experts, topk):
    for seed in range(4):
        options = {
            "num_moe_experts": num_experts,
            "moe_router_topk": topk,
            "seed": seed,
            **(BIASED if seed % 2 else {}),
        }
        samples = random_samples(seed=seed)
        diff = mrr.diff_traces(record_routes(samples, **options), record_routes(samples, bf16=True, **options))
        assert diff.facts == ()
        assert "no place stands out: " in diff.conclusion
        assert "rounding" in diff.conclusion
