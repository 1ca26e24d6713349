"""Metrics over log-probs, with values worked out by hand."""

import math

import pytest
import torch

from megatron_router_replay.diagnostics import logprob_mismatch
from megatron_router_replay.errors import TraceError

NAN = float("nan")


def test_mismatch_of_two_tokens_by_hand():
    # r = 3 and r = 1/2 exactly
    found = logprob_mismatch(torch.tensor([0.6, 0.25]).log(), torch.tensor([0.2, 0.5]).log())
    assert found.tokens == 2
    assert found.k1 == pytest.approx(-(math.log(3) + math.log(0.5)) / 2)
    assert found.k3 == pytest.approx(((3 - 1 - math.log(3)) + (0.5 - 1 - math.log(0.5))) / 2)
    assert found.abs_difference == pytest.approx((math.log(3) + math.log(2)) / 2)
    ratios = torch.tensor([2.1, 1.9, 1 / 1.9, 1 / 2.1], dtype=torch.float64).log()
    assert logprob_mismatch(ratios - 3, torch.full((4,), -3.0)).ratio_above_2 == 0.5
    # k3 keeps its digits where the two nearly agree.
    engine = torch.full((1000,), -1.0, dtype=torch.float64)
    assert logprob_mismatch(engine + 1e-7, engine).k3 == pytest.approx(0.5e-14, rel=1e-3)


def test_masked_and_nan_tokens_are_not_counted():
    trainer, engine = torch.tensor([-1.0, NAN, -5.0, -2.0]), torch.tensor([-1.0, -1.0, -1.0, NAN])
    found = logprob_mismatch(trainer, engine, mask=torch.tensor([True, True, False, True]))
    assert (found.tokens, found.abs_difference) == (1, 0.0)
    # A loss mask is often of integers or floats, which index or fail where a mask of bools selects.
    for mask in (torch.tensor([1, 1, 0, 1]), torch.tensor([1.0, 1.0, 0.0, 1.0])):
        assert logprob_mismatch(trainer, engine, mask=mask) == found
    nothing = logprob_mismatch(trainer, engine, mask=torch.zeros(4, dtype=torch.bool))
    assert (nothing.tokens, nothing.k3) == (0, 0.0)


def test_wrong_shapes_types_and_probabilities_raise():
    engine = torch.tensor([-0.5, -2.0, -1.0])
    with pytest.raises(TraceError, match="one shape"):
        logprob_mismatch(engine, engine[:2])
    with pytest.raises(TraceError, match="must be tensors, got list and Tensor"):
        logprob_mismatch([-1.0], engine)
    with pytest.raises(TraceError, match="mask must be a tensor, got list"):
        logprob_mismatch(engine, engine, mask=[True] * 3)
    logprob_mismatch(engine + 0.5, engine)  # a probability of 1, with its rounding
    trainer = torch.tensor([-0.5, 2.0, -1.0])
    for arguments in ((trainer, engine), (engine, trainer)):
        with pytest.raises(TraceError, match=r"log-probs reach 2, and none is above 0: give log\(p\)"):
            logprob_mismatch(*arguments)
