"""Rows of each request, whatever batches its tokens are forwarded in; values are written by hand."""

from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_router_replay.capture import CaptureError, Capturer
from megatron_router_replay.errors import TraceError
from tests.unit.capture.echo import echo_site, host_bytes, make, routes_of, rows


def test_a_request_becomes_a_trace_whose_last_token_has_no_route():
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=2)
    with capturer.forward(["a"], [[0, 1]]):
        forward(rows(0, 1))
    with capturer.forward(["a"], [2]):
        forward(rows(2))
    trace = capturer.finish("a", [50, 51, 52, 53])
    assert trace.topk_indices[:3].tolist() == [[[0, 1], [1, 2]], [[1, 2], [2, 3]], [[2, 3], [3, 4]]]
    assert trace.replay_mask.tolist() == [True, True, True, False]
    assert (trace.token_ids.tolist(), trace.sequence_lengths) == ([50, 51, 52, 53], (4,))
    assert (trace.layer_numbers, trace.num_experts) == ((1, 2), 8)


def test_the_last_token_of_a_prompt_alone_may_lack_its_row_but_no_other():
    capturer, forward = make()
    for name, num_prompt_tokens in (("a", 3), ("b", 1)):
        capturer.add_request(name, num_prompt_tokens=num_prompt_tokens)
    with capturer.forward(["a"], [[0, 1]]):
        forward(rows(0, 1))
    assert routes_of(capturer, "a", 3) == rows(0, 1)
    with pytest.raises(CaptureError, match="1 of 1 tokens were never forwarded"):
        capturer.finish("b", [9])


@pytest.mark.parametrize(
    ("num_experts", "device_bytes", "host_bytes_"),
    [(8, 1, 1), (255, 1, 1), (256, 2, 1), (257, 2, 2), (32767, 2, 2), (32768, 4, 2)],
)
def test_ids_have_the_narrowest_dtype_of_all_experts_and_on_the_device_of_one_more(
    num_experts, device_bytes, host_bytes_
):
    capturer, forward = make(num_experts=num_experts)
    assert capturer._buffer.routes.element_size() == device_bytes
    top = num_experts - 1
    capturer.add_request("a", num_prompt_tokens=1)
    with capturer.forward(["a"], [0]):
        forward([[[top, 0], [0, top]]])
    capturer.drain()
    assert host_bytes(capturer) == 4 * host_bytes_ + 4 + 4 + 1  # two layers of two ids, position, token, whether it ran
    assert routes_of(capturer, "a", 2) == [[[top, 0], [0, top]]]


@pytest.mark.parametrize(
    ("num_experts", "wrong", "dtype"),
    [
        *((n, n + more, torch.int64) for n in (8, 255, 256, 32768) for more in (0, 1, 2**8 - 1, 2**16, 2**32)),
        (8, -1, torch.int64), (256, -1, torch.int32), (8, 8, torch.uint8), (255, 255, torch.uint8),
    ],
)  # fmt: skip
def test_an_id_that_a_cast_would_wrap_to_an_experts_is_refused(num_experts, wrong, dtype):
    capturer, forward = make(num_experts=num_experts)
    capturer.add_request("a", num_prompt_tokens=1)
    with capturer.forward(["a"], [0]):
        forward(torch.tensor([[[wrong, 1], [1, 0]]], dtype=dtype))
    with pytest.raises(CaptureError, match=f"outside of 0..{num_experts - 1} in layer_number 1, position 0"):
        capturer.finish("a", [9, 9])


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_schedule_of_any_requests_gives_each_position_its_last_row(data):
    """Chunks, padding, strangers, positions that run again (rejected drafts, preemption), surplus rows, ids used again.

    Every token slot has a route of its own, which says where it came from.
    """
    capturer, forward = make(num_experts=30_000, topk=1, num_layers=1, max_num_tokens=64)
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4), label="tokens of each request")
    slot, last = count(), [{} for _ in lengths]
    steps, aborted_after = (
        count(1),
        data.draw(st.integers(0, 3), label="steps until request 0 is aborted; 0: it is not"),
    )
    for request, length in enumerate(lengths):
        capturer.add_request(request, num_prompt_tokens=data.draw(st.integers(1, length)))
    while unfinished := [i for i, length in enumerate(lengths) if len(last[i]) < length]:
        ids, positions, routes = [None], [0], [next(slot)]
        for i in data.draw(st.lists(st.sampled_from(unfinished), min_size=1, unique=True)):
            done = len(last[i])  # of which drafts were rejected, or all after a preemption
            first = data.draw(st.sampled_from([done, done, max(0, done - 2), 0]))
            own = list(range(first, first + data.draw(st.integers(1, 4))))
            padding = [-1] * data.draw(st.integers(0, 2))
            chunk = padding + own if data.draw(st.booleans()) else own + padding
            numbers = [next(slot) for _ in chunk]
            last[i] |= {position: number for position, number in zip(chunk, numbers) if position >= 0}
            ids, positions, routes = ids + [i] * len(chunk), positions + chunk, routes + numbers
        with capturer.forward(ids, positions):
            forward([[[number]] for number in routes])
        if next(steps) == aborted_after:
            capturer.abort(0)  # while its rows are on their way: they are not those of the next request of this name
            capturer.add_request(0, num_prompt_tokens=1)
            last[0] = {}
    for i, length in enumerate(lengths):
        assert routes_of(capturer, i, length + 1) == [[[last[i][position]]] for position in range(length)]


def test_steps_wait_for_a_full_log():
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=1)
    sizes, token = [], 13  # two layers of two ids, the position and the id of the token, whether it was forwarded
    for position in range(1500):
        with capturer.forward(["a"], [position]):
            forward(rows(position))
        if position in (0, 33):
            capturer.drain()
        sizes.append(host_bytes(capturer))
    # After position 33 the log has 1024 steps: 2 stamps, a token and 4 ids each, in the memory of 2048 tokens at once.
    assert sizes == [token] * 33 + [34 * token] * (1 + 1024) + [1058 * token] * 442
    assert routes_of(capturer, "a", 1501) == rows(*range(1500))
    assert host_bytes(capturer) == 0


def test_a_shared_prompt_is_held_once_and_outlives_the_abort_of_its_owner():
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=2)
    capturer.add_request("b", num_prompt_tokens=2, prompt_of="a")
    with capturer.forward(["a"], [[0, 1]]):
        forward(rows(0, 1))
    capturer.drain()
    assert host_bytes(capturer) == 2 * 13
    capturer.abort("a")
    assert routes_of(capturer, "b", 3) == rows(0, 1)


@pytest.mark.parametrize(("tp_rank", "trace_rows"), [(0, rows(0, 1)), (1, None)])
def test_all_tensor_parallel_ranks_hold_the_buffer_and_rank_0_alone_keeps_requests(tp_rank, trace_rows):
    capturer, forward = make(tp_rank=tp_rank)
    capturer.add_request("a", num_prompt_tokens=2)
    with capturer.forward(["a"], [[0, 1]]):
        forward(rows(0, 1))
    capturer.drain()
    assert capturer._buffer.routes.shape == (2, 16, 2)
    assert (host_bytes(capturer) > 0) is (tp_rank == 0)
    trace = capturer.finish("a", [9, 9, 9])
    assert (trace and trace.topk_indices[:2].tolist()) == trace_rows


def test_a_forward_that_raises_leaves_the_capturer_ready_for_the_next():
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=1)
    with pytest.raises(IndexError), capturer.forward(["a"], [0]):
        forward(rows(4, num_layers=1))  # fails in the second layer
    with capturer.forward(["a"], [0]):
        forward(rows(0))
    assert routes_of(capturer, "a", 2) == rows(0)


@pytest.mark.parametrize("wrong", [[], [[[9, 1], [1, 0]]]], ids=["a bypass", "an id"])
def test_a_forward_that_went_wrong_ends_the_row_of_an_earlier_one(wrong):
    """Position 1 ran as a draft, then again; the second run went wrong, and the draft's route took its place."""
    capturer, forward = make()
    for name in ("a", "b"):
        capturer.add_request(name, num_prompt_tokens=1)
    with capturer.forward(["a"], [[0, 1]]):
        forward(rows(0, 1))
    with capturer.forward(["a"], [1]):
        if wrong:
            forward(wrong)
    capturer.abort("b")
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"1 of 2 tokens were never forwarded .* position 1"):
            capturer.finish("a", [9, 9, 9])
    with capturer.forward(["a"], [1]):
        forward(rows(5))
    assert routes_of(capturer, "a", 3) == rows(0, 5)


def test_a_request_of_no_legal_routes_or_tokens_stays():
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=1)
    with capturer.forward(["a"], [0]):
        forward([[[1, 1], [1, 0]]])
    with pytest.raises(TraceError, match="named twice"):
        capturer.finish("a", [9, 9])
    with capturer.forward(["a"], [0]):
        forward(rows(0))
    with pytest.raises(TraceError, match="int32 cannot hold"):
        capturer.finish("a", [9, 2**40])
    with pytest.raises(CaptureError, match="must be an array, got list"):
        capturer.finish("a", [[9], [9, 9]])
    assert routes_of(capturer, "a", 2) == rows(0)


def test_finish_can_be_repeated_after_it_refused():
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=2)
    with capturer.forward(["a"], [[0, 1]]):
        forward(rows(0, 1))
    with pytest.raises(CaptureError, match=r"1 of 3 tokens were never forwarded .* the first at position 2"):
        capturer.finish("a", [9, 9, 9, 9])
    with pytest.raises(CaptureError, match="1 token_ids, num_prompt_tokens=2"):
        capturer.finish("a", [1])
    assert routes_of(capturer, "a", 3) == rows(0, 1)


@pytest.mark.parametrize(
    ("ids", "positions", "message"),
    [
        (["b"], [0], "'b' is not running"),
        (["a"], [[0, 1, 2, 3, 4]], "5 token slots does not fit max_num_tokens=4"),
        (["a"], [[0], [1]], r"shape \[2, 1\] do not fit 1 request ids"),
        (["a"], [[[0]]], r"shape \[1, 1, 1\] do not fit"),
        (["a"], [-2], "a position is -2"),
        (["a"], [0.5], "must be integers, got float64"),
    ],
)
def test_forwards_that_cannot_be_laid_out_are_refused(ids, positions, message):
    capturer, forward = make(max_num_tokens=4)
    capturer.add_request("a", num_prompt_tokens=1)
    with pytest.raises(CaptureError, match=message), capturer.forward(ids, positions):
        raise AssertionError
    with capturer.forward(["a"], [0]):  # as if nothing had been announced
        forward(rows(3))
        with pytest.raises(CaptureError, match="inside an announced forward"), capturer.forward([None], [0]):
            raise AssertionError
    assert routes_of(capturer, "a", 2) == rows(3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a", {"num_prompt_tokens": 2}, "in use already"),
        (None, {"num_prompt_tokens": 2}, "or None"),
        ("b", {"num_prompt_tokens": 0}, "must be 1 or more"),
        ("b", {"num_prompt_tokens": [1, 2]}, "must be an integer, got list"),
        ("b", {"num_prompt_tokens": 2, "num_cached_tokens": 2}, "the last prompt token is always forwarded"),
        ("b", {"num_prompt_tokens": 2, "num_cached_tokens": -1}, "num_cached_tokens=-1"),
        ("b", {"num_prompt_tokens": 3, "prompt_of": "a"}, "it has 2 tokens, not 3"),
        ("b", {"num_prompt_tokens": 2, "prompt_of": "c"}, "'c' is not running"),
    ],
)
def test_wrong_requests_are_refused(name, options, message):
    capturer, _ = make()
    capturer.add_request("a", num_prompt_tokens=2)
    with pytest.raises(CaptureError, match=message):
        capturer.add_request(name, **options)
    with pytest.raises(CaptureError, match="'b' is not running"):
        capturer.abort("b")


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        ([echo_site(), echo_site(layer_number=2, topk=3)], "same num_experts and topk"),
        ([echo_site(), echo_site(layer_number=2, num_experts=9)], "same num_experts and topk"),
        ([echo_site(), echo_site()], "numbers of their own"),
        ([echo_site(layer_number=0)], "from 1"),
        ([echo_site(topk=9)], r"topk=9 must lie in 1\.\.num_experts=8"),
        ([echo_site(topk=0)], "topk=0"),
        ([], "no router to capture"),
        (None, "pass the model"),
    ],
)
def test_wrong_sites_are_refused(sites, message):
    with pytest.raises(CaptureError, match=message):
        Capturer(routers=sites)


@pytest.mark.parametrize("max_num_tokens", [0, 1 << 24])
def test_a_buffer_for_no_token_or_more_than_a_stamp_counts_is_refused(max_num_tokens):
    with pytest.raises(CaptureError, match=f"max_num_tokens={max_num_tokens} must lie in"):
        Capturer(routers=[echo_site()], max_num_tokens=max_num_tokens)
    Capturer(routers=[echo_site()], max_num_tokens=1).close()
