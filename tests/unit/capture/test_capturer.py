"""The capturer with a module that returns the routes it is given, so that every expected value is written by hand."""

import gc
import tracemalloc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatron_router_replay import engines
from megatron_router_replay.capture import CaptureError, RouterSite, create_capturer, write_routes


class Echo(nn.Module):
    """A router that chooses what it is told."""

    def forward(self, topk_indices):
        return topk_indices


def make(*, num_layers=2, num_experts=8, topk=2, max_num_tokens=16, **options):
    """Return (capturer, forward): forward(rows [num_tokens, layers, topk]) runs every layer's router."""
    layers = [Echo() for _ in range(num_layers)]
    sites = [
        RouterSite(
            module=layer, layer_number=i + 1, num_experts=num_experts, topk=topk, select=lambda m, args, output: output
        )
        for i, layer in enumerate(layers)
    ]
    capturer = create_capturer(routers=sites, max_num_tokens=max_num_tokens, **options)

    def forward(rows):
        for i, layer in enumerate(layers):
            layer(torch.as_tensor(rows)[:, i])

    return capturer, forward


def rows(*numbers, num_layers=2):
    """Return routes that tell their token: [i, i + 1] mod 8 in layer 1, one more in layer 2."""
    return [[[(n + layer) % 8, (n + layer + 1) % 8] for layer in range(num_layers)] for n in numbers]


def routes_of(captured):
    prompt, generation = captured.split()
    return np.concatenate([prompt, generation]).tolist()


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


def test_decode_steps_are_sorted_many_at_a_time():
    """The 65th step makes room. What ends a request, or another size of the batch, does not wait."""
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=1)
    with capturer.forward(["a"], [0]):
        forward(rows(0))
    before = capturer.host_bytes
    for position in range(1, 64):
        with capturer.forward(["a"], [position]):
            forward(rows(position))
        assert capturer.host_bytes == before  # copied, not yet sorted in: the generation has no array
    with capturer.forward(["a"], [64]):
        forward(rows(64))
    assert capturer.host_bytes > before
    assert routes_of(capturer.finish("a", num_tokens=66)) == rows(*range(65))  # finish waits for what is on its way


def test_steps_that_do_not_go_on_one_token_further_are_kept_apart():
    """The same batch twice at one position (a token was rejected), in another order, and with a row that ended."""
    capturer, forward = make(max_num_tokens=16)
    for name in "ab":
        capturer.add_request(name, num_prompt_tokens=1)
    for ids, positions, numbers in [
        ("ab", [0, 0], (0, 40)),
        ("ab", [1, 1], (1, 41)),
        ("ab", [2, 2], (90, 91)),
        ("ab", [2, 2], (2, 42)),
        ("ba", [3, 3], (43, 3)),
        ("ab", [4, 4], (4, 44)),
        ("ab", [-1, 5], (92, 45)),
        ("ab", [-1, 6], (93, 46)),
        ([None, "b"], [7, 7], (94, 47)),
    ]:
        with capturer.forward(ids, positions):
            forward(rows(*numbers))
    assert routes_of(capturer.finish("a", num_tokens=6)) == rows(0, 1, 2, 3, 4)
    assert routes_of(capturer.finish("b", num_tokens=9)) == rows(*range(40, 48))


def test_a_step_in_flight_is_not_overwritten_by_the_next_one():
    capturer, forward = make()
    for name in "ab":
        capturer.add_request(name, num_prompt_tokens=1)
    with capturer.forward(["a", "b"], [0, 0]):
        forward(rows(0, 5))
    with capturer.forward(["b", "a"], [1, 1]):  # the batch is in another order now
        forward(rows(6, 1))
    assert routes_of(capturer.finish("a", num_tokens=3)) == rows(0, 1)
    assert routes_of(capturer.finish("b", num_tokens=3)) == rows(5, 6)


def test_packed_and_sequence_first_batches():
    capturer, forward = make()
    for name in "ab":
        capturer.add_request(name, num_prompt_tokens=2)
    capturer.begin_forward(["a", "b"], [0, 1, 0, 1, -1], query_lengths=[2, 3])
    forward(rows(0, 1, 4, 5, 7))
    capturer.end_forward()
    with capturer.forward(["a", "b"], [[2, 2], [3, 3]], sequence_first=True):  # rows: a2 b2 a3 b3
        forward(rows(2, 6, 3, 7))
    assert routes_of(capturer.finish("a", num_tokens=5)) == rows(0, 1, 2, 3)
    assert routes_of(capturer.finish("b", num_tokens=5)) == rows(4, 5, 6, 7)


def test_rejected_speculative_tokens_are_overwritten_and_surplus_is_trimmed():
    """Drafts at 2, 3, 4: one accepted, so 3 is forwarded again; then 4, 5, 6, and the request stops behind 5."""
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=2)
    with capturer.forward(["a"], [[0, 1]]):
        forward(rows(0, 1))
    with capturer.forward(["a"], [[2, 3, 4]]):
        forward(rows(2, 30, 31))
    with capturer.forward(["a"], [[3, 4, 5, 6]]):
        forward(rows(3, 4, 32, 33))
    captured = capturer.finish("a", token_ids=[9, 9, 9, 9, 9, 9])
    assert routes_of(captured) == rows(0, 1, 2, 3, 4)
    assert captured.trace().num_tokens == 6


def test_a_prefill_in_chunks_is_one_prompt():
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=5)
    for chunk in ([0, 1], [2, 3], [4]):
        with capturer.forward(["a"], [chunk]):
            forward(rows(*chunk))
    assert routes_of(capturer.finish("a", num_tokens=6)) == rows(0, 1, 2, 3, 4)


def test_a_preempted_request_that_is_forwarded_again_has_the_later_routes():
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=2)
    with capturer.forward(["a"], [[0, 1]]):
        forward(rows(0, 1))
    with capturer.forward(["a"], [2]):
        forward(rows(2))
    with capturer.forward(["a"], [[0, 1, 2]]):
        forward(rows(3, 4, 5))
    assert routes_of(capturer.finish("a", num_tokens=4)) == rows(3, 4, 5)


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


def test_an_abort_frees_the_request_also_while_its_rows_are_on_their_way():
    capturer, forward = make()
    for name in "ab":
        capturer.add_request(name, num_prompt_tokens=1)
    with capturer.forward(["a", "b"], [0, 0]):
        forward(rows(0, 5))
    capturer.abort("a")
    capturer.add_request("a", num_prompt_tokens=1)  # the same id again: it must not get the old one's rows
    with capturer.forward(["a"], [0]):
        forward(rows(3))
    assert routes_of(capturer.finish("a", num_tokens=2)) == rows(3)
    assert routes_of(capturer.finish("b", num_tokens=2)) == rows(5)
    assert (capturer.num_requests, capturer.host_bytes) == (0, 0)
    with pytest.raises(CaptureError, match="'a' is not running"):
        capturer.abort("a")


def test_the_owner_of_a_shared_prompt_may_be_aborted():
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=2)
    capturer.add_request("b", num_prompt_tokens=2, prompt_of="a")
    with capturer.forward(["a"], [[0, 1]]):
        forward(rows(0, 1))
    capturer.abort("a")
    assert routes_of(capturer.finish("b", num_tokens=3)) == rows(0, 1)


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


def test_a_shared_prompt_keeps_the_routes_that_came_first():
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=2)
    capturer.add_request("b", num_prompt_tokens=2, prompt_of="a")
    with capturer.forward(["a", "b"], [[0, 1], [0, 1]]):
        forward(rows(0, 1, 4, 5))
    first = capturer.finish("a", num_tokens=3).split()[0]
    with capturer.forward(["b"], [[0, 1]]):
        forward(rows(6, 7))
    assert routes_of(capturer.finish("b", num_tokens=3)) == first.tolist() == rows(0, 1)


def test_a_forward_that_raises_leaves_the_capturer_ready_for_the_next():
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=1)
    with pytest.raises(IndexError), capturer.forward(["a"], [0]):
        forward(rows(4, num_layers=1))  # fails in the second layer
    with capturer.forward(["a"], [0]):
        forward(rows(0))
    assert routes_of(capturer.finish("a", num_tokens=2)) == rows(0)


def test_finish_can_be_repeated_after_it_refused():
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=2)
    with capturer.forward(["a"], [[0, 1]]):
        forward(rows(0, 1))
    with pytest.raises(CaptureError, match="give the number of prompt and output tokens together"):
        capturer.finish("a")
    with pytest.raises(CaptureError, match="1 of 3 tokens were never forwarded"):
        capturer.finish("a", num_tokens=4)
    with pytest.raises(CaptureError, match="1 token_ids"):
        capturer.finish("a", token_ids=[1])
    assert routes_of(capturer.finish("a", num_tokens=3)) == rows(0, 1)


def test_calls_in_the_wrong_order_or_with_wrong_shapes_are_refused():
    capturer, _ = make(max_num_tokens=4)
    capturer.add_request("a", num_prompt_tokens=2)
    with pytest.raises(CaptureError, match="'b' is not running"):
        capturer.begin_forward(["b"], [0])
    with pytest.raises(CaptureError, match="end_forward"):
        capturer.end_forward()
    with pytest.raises(CaptureError, match="5 token slots does not fit max_num_tokens=4"):
        capturer.begin_forward(["a"], [[0, 1, 2, 3, 4]])
    with pytest.raises(CaptureError, match=r"shape \[2, 1\] do not fit 1 requests"):
        capturer.begin_forward(["a"], [[0], [1]])
    with pytest.raises(CaptureError, match="query_lengths"):
        capturer.begin_forward(["a"], [0, 1], query_lengths=[1])
    with pytest.raises(CaptureError, match="must be integers, got float64"):
        capturer.begin_forward(["a"], [0.5])
    capturer.begin_forward(["a"], [0])
    with pytest.raises(CaptureError, match="begun already"):
        capturer.begin_forward(["a"], [0])


def test_wrong_requests_are_refused():
    capturer, _ = make()
    capturer.add_request("a", num_prompt_tokens=2)
    capturer.add_request("off", num_prompt_tokens=2, return_routed_experts=False)
    for name, options, message in [
        ("a", {"num_prompt_tokens": 2}, "in use already"),
        ("b", {"num_prompt_tokens": 0}, "must be 1 or more"),
        ("b", {"num_prompt_tokens": 2, "num_cached_tokens": 2}, "the last prompt token is always forwarded"),
        ("b", {"num_prompt_tokens": 3, "prompt_of": "a"}, "not 3 tokens long"),
        ("b", {"num_prompt_tokens": 2, "prompt_of": "off"}, "not captured"),
        ("b", {"num_prompt_tokens": 2, "prompt_of": "c"}, "'c' is not running"),
    ]:
        with pytest.raises(CaptureError, match=message):
            capturer.add_request(name, **options)


def test_wrong_sites_are_refused():
    def site(**changes):
        values = {"module": Echo(), "layer_number": 1, "num_experts": 8, "topk": 2, "select": None} | changes
        return RouterSite(**values)

    for sites, message in [
        ([site(), site(layer_number=2, topk=3)], "same num_experts and topk"),
        ([site(), site()], "numbers of their own"),
        ([site(layer_number=0)], "must lie in 1"),
        ([], "no router to capture"),
    ]:
        with pytest.raises(CaptureError, match=message):
            create_capturer(routers=sites)
    with pytest.raises(CaptureError, match="no router that is known here"):
        create_capturer(nn.Linear(2, 2))
    with pytest.raises(CaptureError, match="pass the model"):
        create_capturer()
    captured = site()
    first = create_capturer(routers=[captured], max_num_tokens=4)
    with pytest.raises(CaptureError, match="captured already"):
        create_capturer(routers=[captured], max_num_tokens=4)
    assert captured.module.routed_experts_seam.out is first.buffer.views[0]  # the refused one took nothing away
    first.close()
    create_capturer(routers=[captured], max_num_tokens=4)


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


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_schedule_of_any_requests_gives_each_its_own_rows(data):
    """Random batches of random chunks, with padding, strangers and aborts: a route says whose it is and where."""
    capturer, forward = make(num_experts=30_000, topk=1, num_layers=1, max_num_tokens=64)
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=5), label="tokens of each request")
    for request in range(len(lengths)):
        prompt = data.draw(st.integers(1, lengths[request]))
        capturer.add_request(request, num_prompt_tokens=prompt)
    capturer.add_request("stranger", num_prompt_tokens=1, return_routed_experts=False)
    done = [0] * len(lengths)
    while any(done[i] < lengths[i] for i in range(len(lengths))):
        open_requests = [i for i in range(len(lengths)) if done[i] < lengths[i]]
        batch = data.draw(st.lists(st.sampled_from(open_requests), min_size=1, unique=True))
        counts = [data.draw(st.integers(1, lengths[i] - done[i])) for i in batch]
        positions, routes = [], []
        for i, count in zip(batch, counts):
            filler = [-1] * data.draw(st.integers(0, 2))
            own = list(range(done[i], done[i] + count))
            left = data.draw(st.booleans())
            positions.append(filler + own if left else own + filler)
            routes += [[[1000 * i + p if p >= 0 else 29_999]] for p in positions[-1]]
            done[i] += count
        ids = [*batch, "stranger", None]
        positions += [[0], [0]]
        routes += [[[29_998]], [[29_997]]]
        flat = [p for one in positions for p in one]
        with capturer.forward(ids, flat, query_lengths=[len(one) for one in positions]):
            forward(routes)
    for i, length in enumerate(lengths):
        assert routes_of(capturer.finish(i, num_tokens=length + 1)) == [[[1000 * i + p]] for p in range(length)]
    assert capturer.finish("stranger") is None
