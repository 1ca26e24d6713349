"""Announcements are compared with the model's forwards: different tokens, more of them, twice, or of another beam."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from megatron_router_replay.capture import CaptureError, Capturer, token_positions
from tests.unit.capture.echo import echo_site, make, routes_of, rows
from tests.unit.capture.sampling import build_model, pad

PROMPTS = [[5, 6, 7], [8]]


@pytest.fixture(scope="module")
def mixtral():
    return build_model("mixtral")


@pytest.fixture
def model(mixtral):
    return copy.deepcopy(mixtral)


@pytest.fixture
def capturer(model):
    """Return a capturer of two requests, with the prompts above."""
    capturer = Capturer(model, max_num_tokens=16)
    for row, prompt in enumerate(PROMPTS):
        capturer.add_request(row, num_prompt_tokens=len(prompt))
    return capturer


@torch.no_grad()
def test_padding_that_was_not_announced_is_refused_by_its_mask(model, capturer):
    """Row 1 is [pad, pad, 8]: announced at 0, 1, 2, the route of a pad would become that of token 8."""
    ids, mask = pad(PROMPTS, "left")
    with capturer.forward([0, 1], [[0, 1, 2], [0, 1, 2]]):
        model(input_ids=ids, attention_mask=mask)
    with pytest.raises(CaptureError, match=r"1: attention_mask hides 2 tokens .* token_positions"):
        capturer.drain()


@pytest.mark.parametrize("announced", [[0], [None, 0]])
@torch.no_grad()
def test_more_rows_than_announced_are_refused(model, capturer, announced):
    """Request 0 may be any of the batch's rows."""
    with (
        pytest.raises(CaptureError, match=r"input_ids \[3, 2\] .* announced"),
        capturer.forward(announced, [[0, 1]] * len(announced)),
    ):
        model(torch.tensor([[5, 6], [7, 8], [9, 10]]))


@torch.no_grad()
def test_tokens_of_another_request_are_refused(model, capturer):
    """The batch was sorted, the names were not."""
    ids, mask = pad(PROMPTS, "right")
    with capturer.forward([0, 1], token_positions(mask)):
        model(ids + mask * 10, mask)
    with pytest.raises(CaptureError, match="0: the model ran token 15 at position 0, token_ids has 5"):
        capturer.finish(0, [5, 6, 7, 9])
    assert capturer.finish(1, [18, 9]) is not None


@torch.no_grad()
def test_a_router_that_bypasses_the_capture_is_reported_by_layer(model, capturer):
    model.model.layers[1].mlp.gate._forward_hooks.clear()  # as a fused kernel does: the module is never called
    with capturer.forward([0], [[0, 1, 2]]):
        model(torch.tensor([[5, 6, 7]]))
    with pytest.raises(CaptureError, match=r"\[0\]: layers \[2\] routed 0 tokens in 0 calls .* with 3 tokens"):
        capturer.finish(0, [5, 6, 7, 8])
    with pytest.raises(CaptureError, match="3 of 3 tokens were never forwarded"):
        capturer.finish(0, [5, 6, 7, 8])


@torch.no_grad()
def test_a_copy_of_the_model_is_not_captured(model, capturer):
    with capturer.forward([0], [[0, 1, 2]]):
        copy.deepcopy(model)(torch.tensor([[5, 6, 7]]))
    with pytest.raises(CaptureError, match=r"layers \[1, 2, 3\] routed 0 tokens"):
        capturer.drain()


def test_what_was_wrong_in_a_step_costs_no_other_request_and_no_other_step():
    capturer, forward = make(max_num_tokens=2048)
    for name in "abc":
        capturer.add_request(name, num_prompt_tokens=1)
    with capturer.forward(["a", "b"], [0, 0]):
        forward([*rows(0), [[1, 2], [3, 8]]])
    with capturer.forward(["c"], [0]):
        pass  # no router ran
    with (
        pytest.raises(CaptureError, match=r"\['c'\]: layers \[1, 2\] routed 0 tokens"),
        capturer.forward(["b"], [list(range(2048))]),
    ):
        forward(rows(*range(2048)))  # the log is full
    assert routes_of(capturer, "a", 2) == rows(0)
    assert routes_of(capturer, "b", 2049) == rows(*range(2048))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        *((torch.zeros(n, 2).long(), f"routed {n} tokens to 2 experts each, 3 tokens were") for n in (0, 2, 4, 17)),
        (torch.zeros(3, 1).long(), "routed 3 tokens to 1 experts each, 3 tokens were"),
        (torch.zeros(3, 2), r"handed over torch\.float32"),
    ],
)
def test_a_router_that_does_not_route_the_announced_tokens_is_refused(ids, message):
    site = echo_site()
    capturer = Capturer(routers=[site], max_num_tokens=16)
    capturer.add_request("a", num_prompt_tokens=3)
    announced = capturer.forward(["a"], [[0, 1, 2]])
    with pytest.raises(CaptureError, match=f"layer_number 1 {message}"), announced:
        site.module(ids)


@torch.no_grad()
def test_a_second_forward_in_an_announced_one_is_refused_at_once(model, capturer):
    with capturer.forward([0], [[0, 1, 2]]):
        model(torch.tensor([[5, 6, 7]]))
        with pytest.raises(CaptureError, match="a second forward of the model"):
            model(torch.tensor([[5, 6, 7]]))


def test_a_router_may_return_ids_by_sequence():
    site = echo_site()
    capturer = Capturer(routers=[site], max_num_tokens=8)
    for name in "ab":
        capturer.add_request(name, num_prompt_tokens=2)
    with capturer.forward(["a", "b"], [[0, 1], [0, 1]]):
        site.module(torch.tensor([[[1, 2], [3, 4]], [[5, 6], [7, 0]]]))  # [batch, length, topk]
    assert routes_of(capturer, "a", 3) == [[[1, 2]], [[3, 4]]]
    assert routes_of(capturer, "b", 3) == [[[5, 6]], [[7, 0]]]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_routes_are_those_of_the_router_whatever_is_done_to_its_output(mode):
    """A remapping to physical experts, in place. The ids are copied where the router returns them."""
    with mode():
        site = echo_site()
        capturer = Capturer(routers=[site], max_num_tokens=4)
        capturer.add_request("a", num_prompt_tokens=1)
        with capturer.forward(["a"], [0]):
            site.module(torch.tensor([[3, 4]], dtype=torch.uint8)).add_(1)
    with capturer.forward(["a"], [1]):  # tensors of inference mode are used outside
        site.module(torch.tensor([[5, 6]]))
    assert routes_of(capturer, "a", 3) == [[[3, 4]], [[5, 6]]]


@pytest.mark.parametrize(("names", "positions"), [(["a"], [[0, 1, 2]]), (["a", "a", "a"], [0, 1, 2])])
def test_a_loop_whose_model_is_not_seen_may_say_the_tokens_itself(names, positions):
    """Tokens of a single sequence, or of one token each, may have any shape."""
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=3)
    with capturer.forward(names, positions, input_ids=torch.tensor([[5, 2, 1]])):
        forward(rows(0, 1, 2))
    with pytest.raises(CaptureError, match="ran token 1 at position 2, token_ids has 8"):
        capturer.finish("a", [5, 2, 8, 9])
    assert capturer.finish("a", [5, 2, 1, 9]).num_tokens == 4
    with (
        pytest.raises(CaptureError, match=r"input_ids \[3, 2\] where \[2, 3\] were announced"),
        capturer.forward([None, None], [[0, 1, 2]] * 2, input_ids=torch.zeros(3, 2)),
    ):
        raise AssertionError


def test_layers_that_hold_no_input_ids_are_captured_without_comparing_tokens():
    layers = nn.Sequential(nn.Identity())
    capturer = Capturer(layers, routers=[echo_site(layers[0])], max_num_tokens=4)
    capturer.add_request("a", num_prompt_tokens=1)
    with capturer.forward(["a"], [0]):
        layers(torch.tensor([[3, 4]]))
    assert routes_of(capturer, "a", 2) == [[[3, 4]]]
