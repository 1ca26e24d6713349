"""A whole generation by a loop that announces its forwards: captured routes are those that the model used."""

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from megatron_router_replay.capture import CaptureError, Capturer, token_positions
from tests.unit.capture.echo import host_bytes
from tests.unit.capture.sampling import build_model, experts_of, pad, recompute, sample

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [20]]
LENGTHS = [9, 1, 7]


@pytest.mark.parametrize("side", ["left", "right"])
def test_routes_of_a_batch_equal_a_recompute_of_the_finished_sequences(side):
    """Every (token, layer) row; the order of the ids may differ where the router's topk is unsorted."""
    model = build_model("qwen3_moe")
    capturer = Capturer(model, max_num_tokens=16)
    sequences, traces = sample(model, PROMPTS, LENGTHS, capturer, side=side)
    assert host_bytes(capturer) == 0
    capturer.close()
    assert [len(sequence) for sequence in sequences] == [14, 4, 8]
    for row, sequence in enumerate(sequences):
        assert traces[row].layer_numbers == (1, 3, 4)
        assert traces[row].token_ids.tolist() == sequence
        assert traces[row].replay_mask.tolist() == [True] * (len(sequence) - 1) + [False]
        assert torch.equal(experts_of(traces[row]), experts_of(recompute(model, sequence)))


def test_a_captured_model_samples_the_same_and_is_as_before_after_close():
    model = build_model("mixtral")
    attributes = [set(vars(module)) for module in model.modules()]
    capturer = Capturer(model, max_num_tokens=16)
    assert sum(len(module._forward_hooks) for module in model.modules()) == 3
    before = sample(model, PROMPTS, LENGTHS, capturer)[0]
    capturer.close()
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert sum(hooks) == 0
    assert [set(vars(module)) for module in model.modules()] == attributes
    second = Capturer(model, max_num_tokens=16, tp_rank=1)  # captures nothing
    assert sample(model, PROMPTS, LENGTHS, second)[0] == before


@torch.no_grad()
def test_n_completions_share_the_routes_of_a_prompt_that_was_forwarded_once():
    """Prefill once, expand the cache to n rows: exact, and one array of prompt routes."""
    model = build_model("qwen3_moe")
    capturer = Capturer(model, max_num_tokens=16)
    prompt, n = [7, 8, 9, 10], 3
    capturer.add_request(0, num_prompt_tokens=4)
    for index in range(1, n):
        capturer.add_request(index, num_prompt_tokens=4, prompt_of=0)
    with capturer.forward([0], [[0, 1, 2, 3]]):
        output = model(torch.tensor([prompt]), use_cache=True)
    cache = output.past_key_values
    cache.batch_repeat_interleave(n)
    sequences = [list(prompt) for _ in range(n)]
    logits = output.logits[:, -1].expand(n, -1)
    generator = torch.Generator().manual_seed(3)
    for step in range(5):
        tokens = torch.softmax(logits, dim=-1).multinomial(1, generator=generator)
        for sequence, token in zip(sequences, tokens[:, 0].tolist()):
            sequence.append(token)
        if step < 4:
            with capturer.forward(range(n), [4 + step] * n):
                output = model(tokens, past_key_values=cache, use_cache=True)
            logits = output.logits[:, -1]
    assert len({tuple(sequence) for sequence in sequences}) == n
    for index, sequence in enumerate(sequences):
        assert torch.equal(experts_of(capturer.finish(index, sequence)), experts_of(recompute(model, sequence)))


@torch.no_grad()
def test_prefix_cached_tokens_have_no_route_and_the_rest_do():
    """The second request takes its first 3 tokens from the cache of the first."""
    model = build_model("qwen3_moe")
    capturer = Capturer(model, max_num_tokens=16)
    sequence = [5, 6, 7, 8, 9, 10]
    cache = model(torch.tensor([sequence[:3]]), use_cache=True).past_key_values
    capturer.add_request("b", num_prompt_tokens=5, num_cached_tokens=3)
    with capturer.forward(["b"], [[3, 4]]):
        model(torch.tensor([sequence[3:5]]), past_key_values=cache, use_cache=True)
    trace = capturer.finish("b", sequence)
    assert trace.replay_mask.tolist() == [False, False, False, True, True, False]
    assert torch.equal(experts_of(trace)[3:], experts_of(recompute(model, sequence))[3:])


@torch.no_grad()
def test_a_forward_that_is_not_announced_changes_nothing():
    model = build_model("mixtral")
    capturer = Capturer(model, max_num_tokens=8)
    capturer.add_request("a", num_prompt_tokens=3)
    with capturer.forward(["a"], [[0, 1, 2]]):
        model(torch.tensor([[5, 6, 7]]))
    with capturer.forward([None], [[0, 1, 2]]):  # of no request
        model(torch.tensor([[100, 101, 102]]))
    model(torch.tensor([[100, 101, 102]]))
    model(torch.arange(40)[None])  # larger than the buffer: training on the same model
    trace = capturer.finish("a", [5, 6, 7, 8])
    assert torch.equal(experts_of(trace), experts_of(recompute(model, [5, 6, 7, 8])))


@torch.no_grad()
def test_the_order_of_tokens_does_not_pass_the_recompute():
    """The comparison of the tests above can fail: swap two tokens and it does. With their ids it is refused."""
    model = build_model("qwen3_moe")
    capturer = Capturer(model, max_num_tokens=8)
    capturer.add_request("a", num_prompt_tokens=4)
    with capturer.forward(["a"], [[1, 0, 2, 3]]):
        model(torch.tensor([[5, 6, 7, 8]]))
    with pytest.raises(CaptureError, match="the model ran token 6 at position 0, token_ids has 5"):
        capturer.finish("a", [5, 6, 7, 8, 9])
    trace = capturer.finish("a", [6, 5, 7, 8, 9])
    assert not torch.equal(experts_of(trace), experts_of(recompute(model, [6, 5, 7, 8, 9])))


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor])
def test_positions_of_left_and_right_padding(kind):
    prompts = [[5, 6, 7], [8]]
    assert token_positions(kind(pad(prompts, "left")[1].tolist())).tolist() == [[0, 1, 2], [-1, -1, 0]]
    assert token_positions(kind(pad(prompts, "right")[1].tolist())).tolist() == [[0, 1, 2], [0, -1, -1]]
