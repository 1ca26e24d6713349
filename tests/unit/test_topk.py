"""Given experts in place of a top-k: their live scores and gradients, what is kept for the backward, and who is refused."""

import pytest
import torch

from megatron_router_replay.errors import ReplayStateError, TraceError
from megatron_router_replay.topk import as_target, check_fits, gather_topk

SCORES = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.4, 0.1, 0.2, 0.3]])
TARGET = torch.tensor([[3, 1], [0, 2]], dtype=torch.uint8)


def saved_by(like_topk):
    """Return the shapes of what a forward keeps for its backward, and the gradient of its scores."""
    shapes = []
    scores = SCORES.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda kept: (shapes.append(tuple(kept.shape)), kept)[1], lambda kept: kept
    ):
        values, indices = gather_topk(scores, TARGET, like_topk=like_topk)
    assert torch.equal(values, torch.tensor([[0.2, 0.4], [0.4, 0.2]]))
    assert (indices.tolist(), indices.dtype) == ([[3, 1], [0, 2]], torch.int64)
    (values * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    return shapes, scores.grad.tolist()


def test_given_experts_get_their_live_scores_and_these_the_gradients():
    expected = [[0.0, 2.0, 0.0, 1.0], [3.0, 0.0, 4.0, 0.0]]
    assert saved_by(False)[1] == expected
    assert saved_by(True)[1] == expected


def test_like_a_topk_it_keeps_its_indices_alone():
    # A non-reentrant checkpoint compares what forward and recompute keep, one with a top-k and the other without.
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda kept: (shapes.append(tuple(kept.shape)), kept)[1], lambda kept: kept
    ):
        SCORES.clone().requires_grad_().topk(2, dim=1)
    assert saved_by(True)[0] == shapes == [(2, 2)]


def test_unless_it_is_asked_to_it_runs_no_python_in_the_backward():
    values, _ = gather_topk(SCORES.clone().requires_grad_(), TARGET)
    assert values.grad_fn.name() == "GatherBackward0"


@pytest.mark.parametrize(
    "ids",
    [[[1, 1], [0, 2]], [[0, 2], [2, 2]], [[0, 1, 2], [3, 0, 3]], [[-1, 2], [0, 1]]],
    ids=["first row", "last row", "not the smallest", "negative"],
)
def test_a_target_that_no_router_chose_is_refused_by_its_row(ids):
    bad = next(i for i, row in enumerate(ids) if len(set(row)) < len(row) or min(row) < 0)
    with pytest.raises(TraceError, match=rf"row {bad} of the replay target"):
        as_target(ids)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_a_target_keeps_its_dtype_and_unsigned_words_are_widened(dtype):
    assert as_target(TARGET.to(dtype)).dtype is dtype
    for unsigned in (torch.uint16, torch.uint32, torch.uint64):
        widened = as_target(torch.tensor([[3, 1]], dtype=torch.int64).to(unsigned))
        assert (widened.dtype, widened.tolist()) == (torch.int64, [[3, 1]])


@pytest.mark.parametrize(
    "target", [torch.ones(2, 1, dtype=torch.bool), torch.ones(2), torch.ones(2, 2, 2).long(), torch.ones(2, 2) * 1j]
)
def test_what_is_no_table_of_integers_is_no_target(target):
    with pytest.raises(TraceError, match=r"must be \[num_tokens, topk\] integers"):
        as_target(target)


@pytest.mark.parametrize("target", ["ids", [[0, 1], [2]], None, [["a", "b"]]])
def test_what_is_no_table_at_all_is_a_trace_error_too(target):
    with pytest.raises(TraceError, match=r"must be \[num_tokens, topk\] integers, got "):
        as_target(target)


@pytest.mark.parametrize(("rows", "topk"), [(1, 2), (3, 2), (2, 1), (2, 3)])
def test_a_target_of_another_shape_than_the_forward_raises(rows, topk):
    check_fits(TARGET, SCORES, 2)
    with pytest.raises(
        ReplayStateError, match=rf"routes 2 tokens to 2 experts each, the routes to replay are \[{rows}, {topk}\]"
    ):
        check_fits(torch.zeros(rows, topk, dtype=torch.int64), SCORES, 2)
