"""Expert ids: their dtype, filler, and the check that they can be routes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_router_replay.errors import TraceError
from megatron_router_replay.trace.ids import (
    check_topk_indices,
    fill_unrouted,
    find_invalid_routes,
    has_repeats,
    index_dtype,
)


@pytest.mark.parametrize(
    ("num_experts", "dtype"),
    [(1, torch.uint8), (256, torch.uint8), (257, torch.int16), (32768, torch.int16)],
)
def test_the_dtype_is_the_smallest_that_holds_the_highest_id(num_experts, dtype):
    assert index_dtype(num_experts) is dtype
    highest = torch.tensor(num_experts - 1)
    assert int(highest.to(dtype)) == num_experts - 1


@pytest.mark.parametrize("num_experts", [0, -1, 32769])
def test_numbers_of_experts_that_no_dtype_holds_are_refused(num_experts):
    with pytest.raises(TraceError, match=rf"num_experts={num_experts}: it must lie in 1\.\.32768"):
        index_dtype(num_experts)


@given(st.integers(0, 40), st.integers(1, 8), st.integers(8, 20))
def test_rows_without_a_route_name_distinct_experts_and_load_all_evenly(num_rows, topk, num_experts):
    rows = torch.zeros(num_rows, 1, topk, dtype=torch.uint8)
    fill_unrouted(rows, torch.zeros(num_rows, dtype=torch.bool), num_experts=num_experts)
    assert all(len(set(row)) == topk for row in rows[:, 0].tolist())
    load = torch.bincount(rows.reshape(-1).long(), minlength=num_experts)
    assert int(load.max()) <= -(-num_rows * topk // num_experts)


@given(st.data())
def test_repeats_are_found_for_every_topk_wherever_they_stand(data):
    # 1 to 10 covers the words of 2, 4 and 8 and the planes of the others; few experts make repeats likely.
    topk = data.draw(st.integers(1, 10))
    dtype = data.draw(st.sampled_from([np.uint8, np.int16, np.int64]))
    values = st.lists(st.integers(0, 2 * topk), min_size=topk, max_size=topk)
    routes = data.draw(st.lists(values | values.map(lambda row: list(range(topk))), min_size=2, max_size=12))
    rows = np.array(routes[: len(routes) // 2 * 2], dtype).reshape(-1, 2, topk)
    assert has_repeats(rows) == any(len(set(route)) < topk for row in rows.tolist() for route in row)


@pytest.mark.parametrize(
    ("num_experts", "dtype"),
    [(4, np.uint8), (4, np.int64), (256, np.int16), (256, np.int64), (300, np.int16), (300, np.int32)],
)
def test_an_id_equal_to_num_experts_is_outside(num_experts, dtype):
    # 256 of 256 in uint8 would be expert 0.
    rows = np.array([[[0, num_experts - 1]], [[1, num_experts]]]).astype(dtype)
    fault = find_invalid_routes(rows, num_experts=num_experts)
    assert fault.cause == "outside"
    assert fault.invalid.tolist() == [[False], [True]]
    assert find_invalid_routes(rows[:1], num_experts=num_experts) is None


def test_the_fault_is_described_by_row_layer_ids_and_count():
    rows = np.array([[[0, 1], [2, 3]], [[1, 0], [3, 3]], [[2, 2], [0, 0]]], np.uint8)
    fault = find_invalid_routes(rows, num_experts=4)
    assert fault.describe((5, 9), first_row=100) == (
        "row 101, layer 9 of topk_indices is [3, 3]: an expert is named twice (3 such routes in layers [5, 9])."
    )
    for layers, listed in ((8, "[1, 2, 3, 4, 5, 6, 7, 8]"), (9, "[1 to 9]")):
        many = find_invalid_routes(np.full((1, layers, 1), -1), num_experts=4)
        described = many.describe(range(1, layers + 1))
        assert described.endswith(f"an id lies outside 0..3 ({layers} such routes in layers {listed}).")


def test_rows_without_a_route_are_not_looked_at_and_keep_the_count_of_rows():
    indices = torch.tensor([[[7, 7]], [[0, 1]], [[-1, 9]], [[2, 2]]])
    mask = torch.tensor([False, True, False, True])
    with pytest.raises(TraceError, match=r"row 3, layer 6 of topk_indices is \[2, 2\]: an expert is named twice"):
        check_topk_indices(indices, num_experts=4, layer_numbers=(6,), replay_mask=mask)
    mask[3] = False
    check_topk_indices(indices, num_experts=4, layer_numbers=(6,), replay_mask=mask)


@pytest.mark.parametrize("fault", [[5, 5], [5, 8], [-1, 5]], ids=str)
@pytest.mark.parametrize("row", [0, 29_999])
def test_a_fault_in_any_block_is_found_and_named_by_its_row(row, fault):
    # 30,000 rows of 20 layers and top-2 in int64 are five blocks; rows 0..9,999 and 15,000..15,999 have no route.
    indices = torch.tensor([0, 1]).expand(30_000, 20, 2).clone()
    mask = torch.ones(30_000, dtype=torch.bool)
    mask[15_000:16_000] = False
    indices[15_500] = 99
    indices[row, 13] = torch.tensor(fault)
    with pytest.raises(TraceError, match=rf"row {row}, layer 14 of topk_indices is "):
        check_topk_indices(indices, num_experts=8, layer_numbers=range(1, 21), replay_mask=mask)


@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (0, 0, 1)])
def test_nothing_is_valid(shape):
    check_topk_indices(torch.empty(shape, dtype=torch.uint8), num_experts=4, layer_numbers=range(shape[1]))


def test_expert_256_of_257_is_not_taken_for_expert_0():
    assert find_invalid_routes(np.array([[[0, 256]]]), num_experts=257) is None
    fault = find_invalid_routes(np.array([[[256, 256]]]), num_experts=257)
    assert fault.cause == "repeated"
