"""What a loop announces is compared with what the model really ran: other tokens, more of them, twice, or another beam's."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from megatron_router_replay.capture import CaptureError, RouterSite, create_capturer, token_positions, write_routes
from tests.unit.capture.sampling import build_model, experts_of, pad, recompute

PROMPTS = [[5, 6, 7], [8]]


@pytest.fixture(scope="module")
def mixtral():
    return build_model("mixtral")


@pytest.fixture
def model(mixtral):
    return copy.deepcopy(mixtral)


def announce_prompts(capturer):
    for row, prompt in enumerate(PROMPTS):
        capturer.add_request(row, num_prompt_tokens=len(prompt))


@torch.no_grad()
def test_a_left_padded_batch_announced_as_if_it_were_not_padded_is_refused_by_its_mask(model):
    """Row 1 is [pad, pad, 8]: announced at 0, 1, 2, the route of a pad would become that of token 8."""
    capturer = create_capturer(model, max_num_tokens=8)
    announce_prompts(capturer)
    ids, mask = pad(PROMPTS, "left")
    with capturer.forward([0, 1], [[0, 1, 2], [0, 1, 2]]):
        model(input_ids=ids, attention_mask=mask)
    with pytest.raises(CaptureError, match=r"1: attention_mask hides 2 of the 3 tokens .* token_positions"):
        capturer.drain()


@torch.no_grad()
def test_a_left_padded_batch_announced_as_if_it_were_not_padded_is_refused_by_its_tokens(model):
    capturer = create_capturer(model, max_num_tokens=8)
    announce_prompts(capturer)
    ids, _ = pad(PROMPTS, "left")
    with capturer.forward([0, 1], [[0, 1, 2], [0, 1, 2]]):
        model(ids)
    capturer.finish(0, token_ids=[5, 6, 7, 9])
    with pytest.raises(CaptureError, match=r"1: the model ran token 0 at position 0, token_ids has 8"):
        capturer.finish(1, token_ids=[8, 0, 8, 9])


@pytest.mark.parametrize("announced", [[0], [None, 0]])
@torch.no_grad()
def test_more_requests_than_announced_are_refused(model, announced):
    """Which of the batch's rows is request 0's cannot be known."""
    capturer = create_capturer(model, max_num_tokens=16)
    capturer.add_request(0, num_prompt_tokens=2)
    with (
        pytest.raises(CaptureError, match=r"input_ids \[3, 2\] .* announced"),
        capturer.forward(announced, [[0, 1]] * len(announced)),
    ):
        model(torch.tensor([[5, 6], [7, 8], [9, 10]]))


class SmallMoE(nn.Module):
    """Two layers that call the seam themselves."""

    def __init__(self):
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(16, 8, bias=False) for _ in range(2))

    def forward(self, hidden):
        for gate in self.gates:
            write_routes(gate, gate(hidden).topk(2).indices)
        return hidden


def small_moe():
    torch.manual_seed(0)
    model = SmallMoE()
    sites = [
        RouterSite(module=gate, layer_number=i + 1, num_experts=8, topk=2, select=None)
        for i, gate in enumerate(model.gates)
    ]
    capturer = create_capturer(routers=sites, max_num_tokens=16)
    capturer.add_request("a", num_prompt_tokens=3)
    return model, capturer


@pytest.mark.parametrize("num_tokens", [2, 4, 17])
@torch.no_grad()
def test_a_router_that_sees_another_number_of_tokens_than_announced_is_refused(num_tokens):
    model, capturer = small_moe()
    with (
        pytest.raises(CaptureError, match=f"layer_number 1 routed {num_tokens} tokens, 3 were announced"),
        capturer.forward(["a"], [[0, 1, 2]]),
    ):
        model(torch.randn(num_tokens, 16))


@torch.no_grad()
def test_two_forwards_in_one_announced_step_are_refused(model):
    capturer = create_capturer(model, max_num_tokens=16)
    capturer.add_request(0, num_prompt_tokens=3)
    capturer.begin_forward([0], [[0, 1, 2]])
    model(torch.tensor([[5, 6, 7]]))
    with pytest.raises(CaptureError, match="a second forward"):
        model(torch.tensor([[8, 9, 10]]))
    capturer.cancel_forward()


@torch.no_grad()
def test_two_forwards_in_one_announced_step_are_refused_at_the_seam():
    model, capturer = small_moe()
    capturer.begin_forward(["a"], [[0, 1, 2]])
    model(torch.randn(3, 16))
    with pytest.raises(CaptureError, match="layer_number 1 was run a second time"):
        model(torch.randn(3, 16))
    capturer.cancel_forward()


@pytest.mark.parametrize("calls", [(3,), (2,), (4,), (3, 3)])
@torch.no_grad()
def test_compiled_code_is_counted_too(calls):
    """No Python of ours runs there, so the graph itself counts."""
    torch._dynamo.reset()
    model, capturer = small_moe()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    hidden = torch.randn(4, 16)
    compiled(hidden)  # not announced
    with capturer.forward(["a"], [[0, 1, 2]]):
        for num_tokens in calls:
            compiled(hidden[:num_tokens])
    compiled(hidden)
    torch._dynamo.reset()
    if calls == (3,):
        trace = capturer.finish("a", num_tokens=4).trace()
        expected = [gate(hidden[:3]).topk(2).indices.tolist() for gate in model.gates]
        assert trace.topk_indices[:3].transpose(0, 1).tolist() == expected
        return
    found = "2 times" if len(calls) == 2 else f"{calls[0]} of 3 tokens"
    with pytest.raises(CaptureError, match=rf"compiled code ran layers \[1, 2\] .*{found}"):
        capturer.finish("a", num_tokens=4)


@torch.no_grad()
def test_an_eager_forward_beside_a_compiled_one_is_refused():
    torch._dynamo.reset()
    model, capturer = small_moe()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with capturer.forward(["a"], [[0, 1, 2]]):
        compiled(torch.randn(3, 16))
        model(torch.randn(3, 16))
    torch._dynamo.reset()
    with pytest.raises(CaptureError, match=r"compiled code ran layers \[1, 2\]"):
        capturer.finish("a", num_tokens=4)


@torch.no_grad()
def test_routes_that_are_changed_in_place_behind_the_router_are_refused():
    """As a remapping to physical experts would."""
    layer = nn.Identity()
    site = RouterSite(module=layer, layer_number=1, num_experts=8, topk=2, select=lambda module, args, output: output)
    capturer = create_capturer(routers=[site], max_num_tokens=4)
    capturer.add_request("a", num_prompt_tokens=1)
    with pytest.raises(CaptureError, match="written to in place"), capturer.forward(["a"], [0]):
        layer(torch.tensor([[3, 4]])).add_(1)
    with torch.inference_mode():  # nothing counts writes there, so a copy is taken
        with capturer.forward(["a"], [0]):
            layer(torch.tensor([[3, 4]])).add_(1)
        assert capturer.finish("a", num_tokens=2).split()[0].tolist() == [[[3, 4]]]


@torch.no_grad()
def test_ids_that_are_no_experts_are_refused_before_they_wrap():
    """300 would be 44 in a byte, an expert of this layer."""
    layer = nn.Identity()
    site = RouterSite(module=layer, layer_number=2, num_experts=64, topk=2, select=lambda module, args, output: output)
    capturer = create_capturer(routers=[site], max_num_tokens=4)
    capturer.add_request("a", num_prompt_tokens=1)
    with capturer.forward(["a"], [0]):
        layer(torch.tensor([[300, 4]]))
    with pytest.raises(CaptureError, match=r"'a': expert id 300 in layer_number 2, position 0: num_experts is 64"):
        capturer.drain()


def beam_search(model, capturer, prompt, num_beams, steps):
    """Return the beams' sequences; after each step every row continues the beam it was chosen from, as the cache does."""
    for beam in range(num_beams):
        capturer.add_request(beam, num_prompt_tokens=len(prompt))
    names = list(range(num_beams))
    sequences = torch.tensor([prompt] * num_beams)
    scores = torch.tensor([0.0] + [-1e9] * (num_beams - 1))
    with capturer.forward(names, [list(range(len(prompt)))] * num_beams):
        output = model(sequences, use_cache=True)
    parents_seen = []
    for step in range(steps):
        total = scores[:, None] + output.logits[:, -1].float().log_softmax(dim=-1)
        scores, best = total.flatten().topk(num_beams)
        parents, tokens = best // total.shape[1], best % total.shape[1]
        parents_seen.append(parents.tolist())
        sequences = torch.cat([sequences[parents], tokens[:, None]], dim=1)
        if step == steps - 1:
            return sequences.tolist(), parents_seen
        output.past_key_values.reorder_cache(parents)
        with capturer.forward(names, [len(prompt) + step] * num_beams):
            output = model(tokens[:, None], past_key_values=output.past_key_values, use_cache=True)
    raise AssertionError


@torch.no_grad()
def test_a_beam_whose_tokens_were_another_beams_is_refused_and_the_others_are_right(model):
    capturer = create_capturer(model, max_num_tokens=16)
    sequences, parents = beam_search(model, capturer, [7, 8, 9, 10], 3, 8)
    assert any(step != [0, 1, 2] for step in parents[1:])  # beams did change rows
    errors = []
    for beam, sequence in enumerate(sequences):
        try:
            captured = capturer.finish(beam, token_ids=sequence)
        except CaptureError as error:
            errors.append(str(error))
        else:
            assert torch.equal(experts_of(captured.trace()), experts_of(recompute(model, sequence)))
    assert errors
    assert all("was the batch reordered, as in beam search" in error for error in errors)


@torch.no_grad()
def test_tokens_of_another_request_are_refused(model):
    """The batch was sorted, the names were not."""
    capturer = create_capturer(model, max_num_tokens=16)
    for name in "ab":
        capturer.add_request(name, num_prompt_tokens=2)
    with capturer.forward(["a", "b"], [[0, 1]] * 2):
        model(torch.tensor([[7, 8], [5, 6]]))
    with pytest.raises(CaptureError, match="'a': the model ran token 7 at position 0, token_ids has 5"):
        capturer.finish("a", token_ids=[5, 6, 9])
    capturer.abort("a")
    assert capturer.finish("b", token_ids=[5, 6, 9]) is not None


@torch.no_grad()
def test_a_loop_whose_model_is_not_seen_may_say_the_tokens_itself():
    model, capturer = small_moe()
    with capturer.forward(["a"], [[0, 1, 2]], input_ids=torch.tensor([[5, 6, 7]])):
        model(torch.randn(3, 16))
    with pytest.raises(CaptureError, match="ran token 7 at position 2, token_ids has 8"):
        capturer.finish("a", token_ids=[5, 6, 8, 9])
    assert capturer.finish("a", token_ids=[5, 6, 7, 9]).num_tokens == 4
    capturer.add_request("a", num_prompt_tokens=3)
    with pytest.raises(CaptureError, match=r"input_ids \[3, 2\] .* announced"):
        capturer.begin_forward(["a"], [[0, 1, 2]], input_ids=torch.zeros(3, 2))


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_batches_announced_by_their_mask_are_right(model, side):
    capturer = create_capturer(model, max_num_tokens=8)
    announce_prompts(capturer)
    ids, mask = pad(PROMPTS, side)
    positions = token_positions(mask)
    with capturer.forward([0, 1], positions):
        model(input_ids=ids, attention_mask=mask, position_ids=torch.from_numpy(positions).clamp(min=0))
    for row, prompt in enumerate(PROMPTS):
        trace = capturer.finish(row, token_ids=[*prompt, 9]).trace()
        assert torch.equal(experts_of(trace), experts_of(recompute(model, [*prompt, 9])))
