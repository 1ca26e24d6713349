"""Requests come, share a prompt, are aborted or refused; a call that was refused changes nothing."""

import pytest
from torch import nn

from megatron_router_replay.capture import CaptureError, RouterSite, create_capturer
from tests.unit.capture.echo import Echo, make, routes_of, rows


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
