"""A whole generation, of every kind of model: what is captured is what the model used."""

import pytest
import torch

pytest.importorskip("transformers")

from megatron_router_replay import engines
from megatron_router_replay.capture import CaptureError, create_capturer, token_positions, vllm_response
from megatron_router_replay.errors import PayloadError
from tests.unit.capture.sampling import MODELS, build_model, experts_of, pad, recompute, sample

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [20]]
LENGTHS = [9, 1, 7]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_routes_of_a_batch_equal_a_recompute_of_the_finished_sequences(name, side):
    config, layer_numbers, num_experts = MODELS[name]
    model = build_model(name)
    capturer = create_capturer(model, max_num_tokens=16)
    sequences, captured = sample(model, PROMPTS, LENGTHS, capturer, side=side)
    capturer.close()
    assert [len(sequence) for sequence in sequences] == [14, 4, 8]
    for row, sequence in enumerate(sequences):
        trace = captured[row].trace()
        assert (trace.layer_numbers, trace.num_experts, trace.topk) == (layer_numbers, num_experts, 2)
        assert trace.token_ids.tolist() == sequence
        assert trace.replay_mask.tolist() == [True] * (len(sequence) - 1) + [False]
        # every (token, layer) row; the order of the ids may differ where the router's topk is unsorted
        assert torch.equal(experts_of(trace), experts_of(recompute(model, sequence)))


@pytest.mark.parametrize("name", MODELS)
def test_both_published_shapes_decode_with_the_engines_to_the_same_trace(name):
    config = MODELS[name][0].to_dict()
    model = build_model(name)
    capturer = create_capturer(model, max_num_tokens=16)
    sequences, captured = sample(model, PROMPTS, LENGTHS, capturer)
    for row, sequence in enumerate(sequences):
        trace = captured[row].trace()
        from_vllm = engines.vllm.decode(vllm_response([captured[row]]), model=config)
        reply = {"meta_info": {"routed_experts": captured[row].base64_int32()}}
        from_sglang = engines.sglang.decode(reply, model=config, token_ids=sequence)
        for decoded in (from_vllm, from_sglang):
            assert decoded.layer_numbers == trace.layer_numbers
            assert decoded.token_ids.tolist() == sequence
            assert torch.equal(decoded.replay_mask, trace.replay_mask)
            assert torch.equal(decoded.topk_indices[:-1], trace.topk_indices[:-1])


def test_nothing_is_left_behind_after_the_requests_and_after_close():
    model = build_model("mixtral")
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    attributes = [set(vars(module)) for module in model.modules()]
    capturer = create_capturer(model, max_num_tokens=16)
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks + 3
    sample(model, PROMPTS, LENGTHS, capturer)
    assert (capturer.num_requests, capturer.host_bytes) == (0, 0)
    capturer.close()
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks
    assert [set(vars(module)) for module in model.modules()] == attributes


def test_a_disabled_capturer_leaves_the_model_alone_and_the_same_loop_runs():
    model = build_model("mixtral")
    attributes = [set(vars(module)) for module in model.modules()]
    disabled = create_capturer(model, enable=False)
    assert disabled.enabled is False
    sequences, captured = sample(model, PROMPTS, LENGTHS, disabled)
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert sum(len(module._forward_hooks) for module in model.modules()) == 0
    assert captured == {0: None, 1: None, 2: None}
    enabled = create_capturer(model, max_num_tokens=16)
    assert enabled.enabled is True
    assert sample(model, PROMPTS, LENGTHS, enabled)[0] == sequences  # capturing changes no token


def test_only_requests_that_opted_in_are_captured():
    model = build_model("qwen3_moe")
    capturer = create_capturer(model, max_num_tokens=16)
    sequences, captured = sample(model, PROMPTS, LENGTHS, capturer, opted_in={2})
    assert captured[0] is None
    assert captured[1] is None
    assert torch.equal(experts_of(captured[2].trace()), experts_of(recompute(model, sequences[2])))


@torch.no_grad()
def test_n_completions_share_the_routes_of_a_prompt_that_was_forwarded_once():
    """Prefill once, expand the cache to n rows: exact, and one array of prompt routes."""
    model = build_model("qwen3_moe")
    config = MODELS["qwen3_moe"][0].to_dict()
    capturer = create_capturer(model, max_num_tokens=16)
    prompt, n = [7, 8, 9, 10], 3
    capturer.add_request("p.0", num_prompt_tokens=4)
    for index in range(1, n):
        capturer.add_request(f"p.{index}", num_prompt_tokens=4, prompt_of="p.0")
    with capturer.forward(["p.0"], [[0, 1, 2, 3]]):
        output = model(torch.tensor([prompt]), use_cache=True)
    cache = output.past_key_values
    cache.batch_repeat_interleave(n)
    names, sequences = [f"p.{index}" for index in range(n)], [list(prompt) for _ in range(n)]
    logits = output.logits[:, -1].expand(n, -1)
    generator = torch.Generator().manual_seed(3)
    for step in range(5):
        tokens = torch.softmax(logits, dim=-1).multinomial(1, generator=generator)
        for sequence, token in zip(sequences, tokens[:, 0].tolist()):
            sequence.append(token)
        if step == 4:
            break
        with capturer.forward(names, [4 + step] * n):
            output = model(tokens, past_key_values=cache, use_cache=True)
        logits = output.logits[:, -1]
    captured = [capturer.finish(name, token_ids=sequence) for name, sequence in zip(names, sequences)]
    assert len({tuple(sequence) for sequence in sequences}) == n
    prompts = [routes.split()[0] for routes in captured]
    assert all(array is prompts[0] for array in prompts)
    batch = engines.vllm.decode_batch(vllm_response(captured), model=config)
    assert batch.sequence_lengths == (9, 9, 9)
    for sequence, decoded, routes in zip(sequences, batch.samples(), captured):
        expected = experts_of(recompute(model, sequence))
        assert torch.equal(experts_of(decoded), expected)
        assert torch.equal(experts_of(routes.trace()), expected)


def test_a_batch_that_repeats_the_prompt_may_share_its_routes_too():
    model = build_model("qwen3_moe")
    capturer = create_capturer(model, max_num_tokens=16)
    capturer.add_request(0, num_prompt_tokens=4)
    capturer.add_request(1, num_prompt_tokens=4, prompt_of=0)
    alone = capturer.host_bytes
    with torch.no_grad(), capturer.forward([0, 1], token_positions([[1, 1, 1, 1]] * 2)):
        model(torch.tensor([[7, 8, 9, 10]] * 2))
    first, second = capturer.finish(0, num_tokens=5), capturer.finish(1, num_tokens=5)
    assert alone == 4 * 3 * 2 + 4 + 16  # one prompt: ids of 4 tokens, 3 layers, 2 experts; a byte a token; token ids
    assert first.split()[0] is second.split()[0]
    assert torch.equal(experts_of(first.trace()), experts_of(recompute(model, [7, 8, 9, 10, 0])))


@torch.no_grad()
def test_prefix_cached_tokens_have_no_route_and_the_rest_do():
    """The second request takes its first 3 tokens from the cache of the first."""
    model = build_model("qwen3_moe")
    config = MODELS["qwen3_moe"][0].to_dict()
    capturer = create_capturer(model, max_num_tokens=16)
    sequence = [5, 6, 7, 8, 9, 10]
    cache = model(torch.tensor([sequence[:3]]), use_cache=True).past_key_values
    capturer.add_request("b", num_prompt_tokens=5, num_cached_tokens=3)
    with capturer.forward(["b"], [[3, 4]]):
        model(torch.tensor([sequence[3:5]]), past_key_values=cache, use_cache=True)
    captured = capturer.finish("b", token_ids=sequence)
    trace = captured.trace()
    assert captured.num_missing == 3
    assert trace.replay_mask.tolist() == [False, False, False, True, True, False]
    assert torch.equal(experts_of(trace)[3:], experts_of(recompute(model, sequence))[3:])
    prompt, generation = captured.split()
    assert (prompt[:3] == -1).all()
    assert (prompt[3:] >= 0).all()
    assert generation.shape == (0, 3, 2)
    # SGLang's start leaves them out; sent along they are refused by name, never read as routes.
    partial = engines.sglang.decode(captured.base64_int32(start=3), model=config, token_ids=sequence, start=3)
    assert torch.equal(partial.replay_mask, trace.replay_mask)
    assert torch.equal(partial.topk_indices[3:5], trace.topk_indices[3:5])
    with pytest.raises(PayloadError, match="Negative ids mark rows without data"):
        engines.vllm.decode(vllm_response([captured]), model=config)


@torch.no_grad()
def test_a_forward_that_is_not_announced_changes_nothing():
    model = build_model("mixtral")
    capturer = create_capturer(model, max_num_tokens=8)
    capturer.add_request("a", num_prompt_tokens=3)
    with capturer.forward(["a"], [[0, 1, 2]]):
        model(torch.tensor([[5, 6, 7]]))
    model(torch.tensor([[100, 101, 102]]))
    model(torch.arange(40)[None])  # larger than the buffer: training on the same model
    trace = capturer.finish("a", token_ids=[5, 6, 7, 8]).trace()
    assert torch.equal(experts_of(trace), experts_of(recompute(model, [5, 6, 7, 8])))


@torch.no_grad()
def test_a_token_forwarded_outside_begin_and_end_is_reported():
    model = build_model("mixtral")
    capturer = create_capturer(model, max_num_tokens=8)
    capturer.add_request("a", num_prompt_tokens=3)
    with capturer.forward(["a"], [[0, 1, -1]]):
        model(torch.tensor([[5, 6, 0]]))
    model(torch.tensor([[7]]))
    with pytest.raises(CaptureError, match=r"'a': 1 of 3 tokens were never forwarded .* the first at position 2"):
        capturer.finish("a", token_ids=[5, 6, 7, 8])


@torch.no_grad()
def test_a_router_that_bypasses_the_capture_is_reported_by_layer():
    model = build_model("qwen3_moe")
    capturer = create_capturer(model, max_num_tokens=8)
    gate = model.model.layers[2].mlp.gate
    # as a fused kernel does: the router's module is never called
    gate._forward_hooks.clear()
    capturer.add_request("a", num_prompt_tokens=3)
    with capturer.forward(["a"], [[0, 1, 2]]):
        model(torch.tensor([[5, 6, 7]]))
    with pytest.raises(CaptureError, match=r"'a'\]: no route was handed over in layers \[3\] in a forward of 3 tokens"):
        capturer.finish("a", token_ids=[5, 6, 7, 8])


@torch.no_grad()
def test_wrong_positions_do_not_pass_the_recompute():
    """The comparison of the tests above can fail: swap two tokens and it does."""
    model = build_model("qwen3_moe")
    capturer = create_capturer(model, max_num_tokens=8)
    capturer.add_request("a", num_prompt_tokens=4)
    with capturer.forward(["a"], [[1, 0, 2, 3]]):
        model(torch.tensor([[5, 6, 7, 8]]))
    trace = capturer.finish("a", num_tokens=5).trace()  # with token_ids it is refused
    assert not torch.equal(experts_of(trace), experts_of(recompute(model, [5, 6, 7, 8, 9])))


def test_positions_of_left_and_right_padding():
    prompts = [[5, 6, 7], [8]]
    assert token_positions(pad(prompts, "left")[1]).tolist() == [[0, 1, 2], [-1, -1, 0]]
    assert token_positions(pad(prompts, "right")[1]).tolist() == [[0, 1, 2], [0, -1, -1]]
