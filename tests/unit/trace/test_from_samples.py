"""Samples of a rollout -> a trace."""

import numpy as np
import pytest
import torch

from megatron_router_replay import RoutingTrace
from megatron_router_replay.errors import TraceError

ONE, TWO = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], [[[1, 0], [3, 2]]]
SIZES = {"num_experts": 8, "layer_numbers": [2, 4]}


def test_samples_follow_one_another_and_the_last_token_has_no_route() -> None:
    trace = RoutingTrace.from_samples([[5, 0, 7], [8]], [ONE, TWO], **SIZES, sample_ids=["a", "b"], weight_version=3)
    assert trace.token_ids.tolist() == [5, 0, 7, 8]
    assert trace.sequence_lengths == (3, 1)
    assert trace.replay_mask.tolist() == [True, True, False, False], "of sample 1, a row for its last token is no route"
    assert trace.topk_indices[:2].tolist() == ONE
    assert (trace.sample_ids, trace.weight_version.tolist()) == (("a", "b"), [3] * 4)
    for version in (np.int64(3), torch.tensor(3)):
        again = RoutingTrace.from_samples(
            [[5, 0, 7], [8]], [ONE, TWO], **SIZES, sample_ids=["a", "b"], weight_version=version
        )
        assert again == trace


def test_a_forward_that_ran_all_tokens_has_a_route_for_each() -> None:
    trace = RoutingTrace.from_samples([[5, 6], [8]], [ONE, TWO], **SIZES, last_token="routed")
    assert trace.replay_mask.all()
    assert trace.topk_indices.tolist() == ONE + TWO
    with pytest.raises(TraceError, match="MRR302: sample 0: 2 rows of routes for 3 tokens: expected 3"):
        RoutingTrace.from_samples([[5, 6, 7]], [ONE], **SIZES, last_token="routed")


def test_rows_of_minus_one_and_masked_rows_have_no_route() -> None:
    routes = np.array([[[-1, -1], [-1, -1]], [[4, 5], [6, 7]], [[9, 9], [9, 9]]], dtype=np.int16)
    masks = [[True, True, False, True]]
    trace = RoutingTrace.from_samples(
        [[5, 6, 7, 8]], [routes], **SIZES, replay_mask=masks, weight_version=[[1, 1, 2, 2]]
    )
    assert trace.replay_mask.tolist() == [False, True, False, False]
    assert trace.weight_version.tolist() == [1, 1, 2, 2]


def test_layers_that_are_not_named_are_dropped() -> None:
    every = torch.arange(8).repeat(1, 1).view(1, 4, 2)
    trace = RoutingTrace.from_samples([[5, 6]], [every], **SIZES)
    assert trace.topk_indices[0].tolist() == [[2, 3], [6, 7]]


@pytest.mark.parametrize(
    ("second", "options", "match"),
    [
        ([[[0, 1], [2, 3]]], {}, "MRR302: sample 1: 1 rows of routes for 3 tokens: expected 3 or 2"),
        ([[[0, 8], [2, 3]]] * 2, {}, "MRR103: sample 1: row 0, layer 2"),
        ([[[0, 0], [2, 3]]] * 2, {}, "MRR103: sample 1: .*twice"),
        ([[[0, -1], [2, 3]]] * 2, {}, "MRR103: sample 1"),
        ([[[0, 1]]] * 2, {}, "MRR302: sample 1: routes have 1 layers"),
        ([[[0, 1]] * 3] * 2, {}, "MRR302: sample 1: routes have 3 layers"),
        (ONE, {"layer_numbers": [4]}, "MRR302: sample 0: routes have 2 layers"),
        ([[0, 1]] * 2, {}, r"MRR102: sample 1: .*tokens must be \[T\] and routes \[T, layers, topk\]"),
        (
            torch.zeros(2, 2, 2, dtype=torch.uint8),
            {"num_experts": 257},
            "MRR101: sample 1: .* too narrow for the ids of 257",
        ),
        (ONE, {"weight_version": [1, [1, 1]]}, r"MRR102: sample 1: .*one or \[3\], got \[2\]"),
        ([[[0], [2]]] * 2, {}, "MRR102: sample 1 has topk=1"),
        ([[[0, 1], [2]]] * 2, {}, "MRR101: sample 1: routes must be an array, got list"),
    ],
)
def test_what_no_router_can_have_chosen_names_its_sample(second: object, options: dict, match: str) -> None:
    with pytest.raises(TraceError, match=match):
        RoutingTrace.from_samples([[5, 6, 7], [5, 6, 7]], [ONE, second], **(SIZES | options))


def test_the_narrowest_dtype_that_holds_every_expert_is_taken() -> None:
    routes = torch.tensor([[[0, 255], [2, 3]]], dtype=torch.uint8)
    trace = RoutingTrace.from_samples([[5, 6]], [routes], **(SIZES | {"num_experts": 256}))
    assert trace.topk_indices[0].tolist() == [[0, 255], [2, 3]]


def test_a_stage_without_moe_layers_has_rows_as_well() -> None:
    routes = torch.zeros(2, 0, 2, dtype=torch.int64)
    trace = RoutingTrace.from_samples([[5, 6, 7]], [routes], num_experts=8, layer_numbers=[])
    assert trace.replay_mask.tolist() == [True, True, False]


def test_lists_of_different_lengths_and_other_options() -> None:
    with pytest.raises(TraceError, match="2 samples of tokens, and 1 of routes"):
        RoutingTrace.from_samples([[5], [6]], [TWO], **SIZES)
    with pytest.raises(TraceError, match="a sample at least"):
        RoutingTrace.from_samples([], [], **SIZES)
    with pytest.raises(TraceError, match="last_token='none'"):
        RoutingTrace.from_samples([[5]], [TWO], **SIZES, last_token="none")
    with pytest.raises(TraceError, match="sample 0: token -1 at position 0"):
        RoutingTrace.from_samples([[-1]], [TWO], **SIZES)


def random_rows(num_rows: int) -> np.ndarray:
    return np.random.default_rng(0).random((num_rows, 2, 8)).argsort(axis=2)[:, :, :2]


def test_a_route_of_the_last_token_means_that_rows_may_be_late() -> None:
    rows, ids = random_rows(7), list(range(20, 27))
    with pytest.raises(
        TraceError,
        match=r"MRR302: sample 0: 7 rows of routes for 7 tokens.*\(BOS\) is missing, every row is one token late",
    ):
        RoutingTrace.from_samples([ids], [rows], **SIZES)
    for last, expected in (("unrouted", 6), ("routed", 7)):
        assert RoutingTrace.from_samples([ids], [rows], **SIZES, last_token=last).replay_mask.sum() == expected
    mask = [[True] * 6 + [False]]
    assert RoutingTrace.from_samples([ids], [rows], **SIZES, replay_mask=mask).replay_mask.sum() == 6
    for filler in (-1, 0, [0, 1], [[0, 1], [0, 0]]):  # none, or what clients fill in
        rows[-1] = filler
        assert RoutingTrace.from_samples([ids], [rows], **SIZES).replay_mask.sum() == 6


def test_one_row_of_minus_one_in_front_of_routes_is_refused_and_more_are_a_message() -> None:
    rows, ids = random_rows(7), list(range(20, 28))
    rows[0] = -1
    for options in ({}, {"last_token": "unrouted"}):
        with pytest.raises(TraceError, match=r"MRR302: sample 0: row 0 alone is -1.*one token late"):
            RoutingTrace.from_samples([ids], [rows], **SIZES, **options)
    trace = RoutingTrace.from_samples([ids], [rows], **SIZES, replay_mask=[[False] + [True] * 7])
    assert trace.replay_mask.tolist() == [False] + [True] * 6 + [False]
    rows[1] = -1
    assert RoutingTrace.from_samples([ids], [rows], **SIZES).replay_mask.tolist() == [False] * 2 + [True] * 5 + [False]
    rows[:] = -1  # a sample without any route
    assert not RoutingTrace.from_samples([ids], [rows], **SIZES).replay_mask.any()


def test_one_row_over_many_tokens_is_stale() -> None:
    sizes, ids = {"num_experts": 16, "layer_numbers": range(1, 7)}, list(range(20, 101))
    rows = np.random.default_rng(0).random((80, 6, 16)).argsort(axis=2)[:, :, :2]
    rows[10:70] = rows[10]
    message = r"MRR103: sample 0: rows 10 to 69 are one and the same row .* 60 different tokens"
    with pytest.raises(TraceError, match=message):
        RoutingTrace.from_samples([ids], [rows], **sizes)
    rows[10:70] = -1
    assert RoutingTrace.from_samples([ids], [rows], **sizes).replay_mask.sum() == 20


def test_routes_with_layers_first_are_named():
    with pytest.raises(TraceError, match=r"MRR302: .*Give \[T, layers, topk\]: the tokens are on axis 1"):
        RoutingTrace.from_samples(
            [[5, 6, 7, 8, 9, 4]], [torch.zeros(2, 5, 2, dtype=torch.int64)], num_experts=8, layer_numbers=[1, 2]
        )
