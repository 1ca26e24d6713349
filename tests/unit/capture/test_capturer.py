"""What a capturer keeps and hands out, with a module that returns the routes it is given: values are written by hand."""

import gc
import tracemalloc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from megatron_router_replay import engines
from megatron_router_replay.capture import CaptureError, RouterSite, create_capturer, write_routes
from tests.unit.capture.echo import Echo, make, routes_of, rows


def test_prompt_and_generation_are_split_and_joined_as_engines_send_them():
    capturer, forward = make(num_layers=2)
    capturer.add_request("a", num_prompt_tokens=2)
    with capturer.forward(["a"], [[0, 1]]):
        forward(rows(0, 1))
    with capturer.forward(["a"], [2]):
        forward(rows(2))
    captured = capturer.finish("a", token_ids=[50, 51, 52, 53])
    prompt, generation = captured.split()
    assert (prompt.dtype, generation.dtype) == (np.int16, np.int16)
    assert prompt.tolist() == [[[0, 1], [1, 2]], [[1, 2], [2, 3]]]
    assert generation.tolist() == [[[2, 3], [3, 4]]]
    assert captured.base64_int32() == (
        "AAAAAAEAAAABAAAAAgAAAAEAAAACAAAAAgAAAAMAAAACAAAAAwAAAAMAAAAEAAAA"  # int32 0 1 1 2 | 1 2 2 3 | 2 3 3 4
    )
    trace = captured.trace(weight_version=7, sample_id="x")
    assert trace.replay_mask.tolist() == [True, True, True, False]
    assert trace.weight_version.tolist() == [7] * 4
    assert trace.sample_ids == ("x",)


def test_dense_layers_are_zero_columns_in_the_joined_shape_and_absent_in_the_split_one():
    site = RouterSite(module=Echo(), layer_number=2, num_experts=4, topk=2, select=lambda m, args, output: output)
    capturer = create_capturer(routers=[site], num_layers=3, max_num_tokens=4)
    capturer.add_request("a", num_prompt_tokens=2)
    with capturer.forward(["a"], [[0, 1]]):
        site.module(torch.tensor([[3, 1], [2, 0]]))
    captured = capturer.finish("a", num_tokens=3)
    info = engines.ModelRoutingInfo(num_layers=3, moe_layer_numbers=(2,), num_experts=4, topk=2)
    decoded = engines.sglang.decode(captured.base64_int32(), model=info, num_tokens=3)
    assert decoded.topk_indices[:2].tolist() == [[[3, 1]], [[2, 0]]]
    assert captured.split()[0].tolist() == [[[3, 1]], [[2, 0]]]


@pytest.mark.parametrize(
    ("num_experts", "dtype", "stored"),
    [(8, None, torch.uint8), (256, None, torch.uint8), (257, None, torch.int16), (8, torch.int16, torch.int16)],
)
def test_the_buffer_is_the_smallest_dtype_that_holds_every_id(num_experts, dtype, stored):
    capturer, forward = make(num_experts=num_experts, dtype=dtype)
    assert capturer.buffer.tensor.dtype is stored
    assert capturer.buffer.tensor.shape == (2, 16, 2)
    top = num_experts - 1
    capturer.add_request("a", num_prompt_tokens=1)
    with capturer.forward(["a"], [0]):
        forward([[[top, 0], [0, top]]])
    captured = capturer.finish("a", num_tokens=2)
    assert routes_of(captured) == [[[top, 0], [0, top]]]
    assert captured.trace().topk_indices[0].tolist() == [[top, 0], [0, top]]


def test_a_dtype_that_cannot_hold_the_ids_is_refused():
    with pytest.raises(CaptureError, match=r"num_experts=257 in torch\.uint8"):
        make(num_experts=257, dtype=torch.uint8)


def test_each_layer_of_compiled_code_has_a_contiguous_view_of_one_buffer():
    capturer, _ = make()
    address = capturer.buffer.tensor.data_ptr()
    for i, view in enumerate(capturer.buffer.views):
        assert view.is_contiguous()
        assert view.data_ptr() == address + i * 16 * 2


def test_a_prompt_alone_has_all_its_rows():
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=3)
    with capturer.forward(["a"], [[0, 1, 2]]):
        forward(rows(0, 1, 2))
    captured = capturer.finish("a", token_ids=[9, 9, 9])
    prompt, generation = captured.split()
    assert prompt.tolist() == rows(0, 1, 2)
    assert len(generation) == 0
    assert captured.trace().replay_mask.tolist() == [True, True, True]
    info = engines.ModelRoutingInfo(num_layers=2, moe_layer_numbers=(1, 2), num_experts=8, topk=2)
    decoded = engines.sglang.decode(captured.base64_int32(), model=info, num_tokens=3)
    assert decoded.topk_indices[:2].tolist() == rows(0, 1)


def test_all_tensor_parallel_ranks_hold_the_buffer_and_rank_0_publishes():
    ranks = [make(tp_rank=rank) for rank in (0, 1)]
    results = []
    for capturer, forward in ranks:
        capturer.add_request("a", num_prompt_tokens=2)
        with capturer.forward(["a"], [[0, 1]]):
            forward(rows(0, 1))
        assert capturer.buffer.tensor.shape == (2, 16, 2)
        results.append((capturer.host_bytes > 0, capturer.finish("a", num_tokens=3)))
        assert capturer.num_requests == 0
    assert routes_of(results[0][1]) == rows(0, 1)
    assert results[0][0] is True
    assert results[1] == (False, None)


def test_the_seam_costs_one_attribute_check_where_nothing_is_captured():
    asked = []

    class Counting(nn.Module):
        def __getattr__(self, name):
            asked.append(name)
            raise AttributeError(name)

    module = Counting()
    write_routes(module, None)  # what it would write is not even looked at
    assert asked == ["routed_experts_seam"]


def test_requests_leave_no_memory_behind():
    """40 requests, finished or aborted, of 2000 prompt tokens and 100 generated ones: 336 kB if they stayed."""
    capturer, forward = make(max_num_tokens=2000)
    prompts = []
    routes = rows(*range(2100))

    def one_request(number):
        capturer.add_request(number, num_prompt_tokens=2000)
        with capturer.forward([number], [list(range(2000))]):
            forward(routes[:2000])
        for position in range(2000, 2100, 10):
            with capturer.forward([number], [list(range(position, position + 10))]):
                forward(routes[position : position + 10])
        if number % 2:
            capturer.abort(number)
        else:
            prompts.append(weakref.ref(capturer.finish(number, num_tokens=2101).prompt))

    tracemalloc.start()
    one_request(0)
    one_request(1)
    capturer.drain()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(2, 42):
        one_request(number)
    capturer.drain()  # the last one was aborted: its steps wait in the log, without its rows
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert (capturer.num_requests, capturer.host_bytes) == (0, 0)
    assert [prompt() for prompt in prompts] == [None] * len(prompts)
    assert grown < 60_000  # 40 requests have five times that


def test_host_arrays_grow_geometrically():
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=1)
    with capturer.forward(["a"], [0]):
        forward(rows(0))
    sizes = set()
    for position in range(1, 1001):
        with capturer.forward(["a"], [position]):
            forward(rows(position))
        sizes.add(capturer.host_bytes)
    capturer.drain()
    token = 9  # two layers of two ids, whether it was forwarded, and the id of the token
    assert sorted(sizes) == [token, *(token + token * rows for rows in (64, 128, 256, 512, 1024))]
    assert routes_of(capturer.finish("a", num_tokens=1002))[1:] == rows(*range(1, 1001))
