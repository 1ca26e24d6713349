"""Rows are copied as slices or as units of bytes: the same as torch's own indexing, in every shape and dtype."""

import pytest
import torch

from megatron_router_replay.trace.ids import fill_unrouted, index_dtype
from megatron_router_replay.trace.rows import joined_rows, put_rows, take_rows

SHAPES = [(9, 1, 1), (9, 3, 2), (9, 2, 10), (9, 0, 2), (0, 3, 2)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [[], [4], [2, 3, 4], [7, 0, 3], [8, 8, 0]], ids=str)
def test_rows_are_those_of_torch(shape, dtype, rows):
    if rows and not shape[0]:
        return
    routes, index = torch.randint(0, 100, shape).to(dtype), torch.tensor(rows, dtype=torch.int64)
    for values in (routes, routes.expand(shape), torch.cat([routes, routes], dim=1)[:, shape[1] :]):
        assert torch.equal(take_rows(values, joined_rows(index)), routes[index])
    if len(set(rows)) == len(rows):
        written = torch.randint(0, 100, (len(rows), *shape[1:])).to(dtype)
        expected = routes.clone()
        expected[index] = written
        wide = torch.full((shape[0], shape[1] + 2, shape[2]), 7, dtype=dtype)
        wide[:, 1:-1] = routes
        for source in (written, written.transpose(1, 2).contiguous().transpose(1, 2)):
            put_rows(wide[:, 1:-1], joined_rows(index), source)
            assert torch.equal(wide[:, 1:-1], expected)
            assert bool((wide[:, [0, -1]] == 7).all())


def test_neighbours_are_a_slice_and_others_are_not():
    assert joined_rows(torch.tensor([3, 4, 5])) == slice(3, 6)
    assert joined_rows(torch.tensor([], dtype=torch.int64)) == slice(0, 0)
    for rows in ([3, 5, 4, 6], [4, 3], [3, 3]):
        assert joined_rows(torch.tensor(rows)).tolist() == rows


@pytest.mark.parametrize(("topk", "num_experts"), [(2, 8), (3, 7), (8, 300)])
def test_rows_without_a_route_get_spread_experts_in_every_layer_and_others_stay(topk, num_experts):
    mask = torch.tensor([False, True, False, False, True, False] * 50)
    indices = torch.zeros(300, 4, topk, dtype=index_dtype(num_experts))
    fill_unrouted(indices, mask, num_experts=num_experts)
    spread = (torch.arange(300 * topk).view(300, topk) % num_experts).to(indices.dtype)
    assert torch.equal(indices[~mask], spread[~mask].unsqueeze(1).expand(-1, 4, -1))
    assert not indices[mask].any()
