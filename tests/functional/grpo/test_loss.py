"""The tensors of GRPO and the toy task, by hand."""

import math

import pytest
import torch

from examples.grpo.loss import clipped_loss, group_advantages, k3_kl
from examples.grpo.task import ClassTask


def test_advantages_are_normalised_within_each_group():
    advantages = group_advantages(torch.tensor([1.0, 3.0, 5.0, 5.0]), [0, 0, 1, 1])
    torch.testing.assert_close(advantages, torch.tensor([-1.0, 1.0, 0.0, 0.0]), rtol=0, atol=2e-4)


def test_k3_is_zero_where_both_agree_and_positive_elsewhere():
    kl = k3_kl(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0 + math.log(2)]))
    torch.testing.assert_close(kl, torch.tensor([0.0, 2 - 1 - math.log(2)]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "is_clipped"),
    [(1.5, 1.0, -1.2, True), (1.5, -1.0, 1.5, False), (0.5, -1.0, 0.8, True), (0.5, 1.0, -0.5, False)],
)
def test_the_clip_takes_effect_only_where_the_policy_moved_as_the_advantage_says(ratio, advantage, loss, is_clipped):
    old = {"old_logprobs": torch.zeros(1), "ref_logprobs": torch.zeros(1)}
    advantages = torch.tensor([advantage])
    values, clipped, _ = clipped_loss(
        torch.tensor([math.log(ratio)]), **old, advantages=advantages, clip=0.2, kl_coef=0.0
    )
    torch.testing.assert_close(values, torch.tensor([loss]))
    assert clipped.tolist() == [is_clipped]


def test_the_reward_is_the_share_of_words_of_the_commanded_class():
    task = ClassTask(max_new_tokens=4)
    prompt = torch.tensor([1, 20, 5])  # command 5: words with id % 4 == 1
    assert task.reward(prompt, torch.tensor([9, 13, 10, 5])) == 0.5  # 10 is of another class, 5 is no word
    assert task.reward(prompt, torch.tensor([9, 2])) == 0.25
