"""watch(): the routes of transformers' own generate(), padded batches and all, equal a recompute of its sequences."""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import megatron_router_replay as mrr
from megatron_router_replay.capture import CaptureError
from tests.unit.capture.sampling import MODELS, build_model, experts_of, pad, recompute

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [20]]
SEQUENCE = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])


@pytest.fixture(scope="module")
def mixtral():
    return build_model("mixtral")


def generate(model, ids, mask, **options):
    torch.manual_seed(0)
    return model.generate(ids, attention_mask=mask, **{"max_new_tokens": 9, "pad_token_id": 0} | options)


def assert_exact(model, trace):
    for sample in trace.samples():
        assert sample.replay_mask.tolist() == [True] * (sample.num_tokens - 1) + [False]
        assert torch.equal(experts_of(sample), experts_of(recompute(model, sample.token_ids.tolist())))


@pytest.mark.parametrize("name", MODELS)
def test_a_padded_batch_that_is_sampled_has_one_sample_a_row(name):
    model, (_, layer_numbers, num_experts) = build_model(name), MODELS[name]
    ids, mask = pad(PROMPTS, "left")
    with mrr.capture.watch(model) as seen:
        sequences = generate(model, ids, mask, do_sample=True)
    trace = seen.trace(sequences, mask, pad_token_id=0)
    assert (trace.layer_numbers, trace.num_experts, trace.topk) == (layer_numbers, num_experts, 2)
    assert trace.sequence_lengths == (14, 12, 10)
    assert trace.token_ids.tolist() == [
        t for prompt, s in zip(PROMPTS, sequences) for t in s.tolist()[-9 - len(prompt) :]
    ]
    assert_exact(model, trace)


@pytest.mark.parametrize(
    ("name", "attention", "fields"),
    [
        ("mixtral", "sdpa", {}),  # one mask, of bools
        ("mixtral", "eager", {}),  # one of numbers that are added
        ("gpt_oss", "eager", {}),  # one for each kind of layer
        ("gpt_oss", "eager", {"sliding_window": 3}),  # that of full attention is read
    ],
)
def test_padding_is_read_off_the_masks_of_a_static_cache(name, attention, fields):
    model = build_model(name, **fields)
    model.set_attn_implementation(attention)
    ids, mask = pad(PROMPTS, "left")
    with mrr.capture.watch(model) as seen:
        sequences = generate(model, ids, mask, cache_implementation="static")
    with pytest.raises(CaptureError, match=r"row 1, .* 2 of 13 tokens were never forwarded .* position 0"):
        seen.trace(sequences, torch.ones_like(mask))
    trace = seen.trace(sequences, mask, pad_token_id=0)
    assert trace.sequence_lengths == (14, 12, 10)
    assert_exact(model, trace)


def test_the_shortest_padded_prompt_is_exact(mixtral):
    ids, mask = pad([[5, 6], [10]], "left")
    with mrr.capture.watch(mixtral) as seen:
        sequences = generate(mixtral, ids, mask)
    trace = seen.trace(sequences, mask)
    assert trace.sequence_lengths == (11, 10)
    assert_exact(mixtral, trace)


def test_padding_that_a_mask_does_not_tell_from_a_window_is_refused():
    model = build_model("mixtral", sliding_window=3)
    ids, mask = pad(PROMPTS, "left")
    with pytest.raises(CaptureError, match="its padding is not known"), mrr.capture.watch(model):
        generate(model, ids, mask, cache_implementation="static")


def test_a_mask_of_an_unknown_kind_is_refused_where_a_batch_is_padded():
    model = build_model("gpt_oss")
    ids, mask = pad(PROMPTS, "left")
    with mrr.capture.watch(model) as seen:
        for batch in (ids, SEQUENCE):
            model(batch, attention_mask={"full_attention": None, "sliding_attention": None})
            sequences = torch.nn.functional.pad(batch, (0, 1), value=9)
            if batch is SEQUENCE:
                assert seen.trace(sequences, torch.ones_like(batch)).sequence_lengths == (8,)
                continue
            with pytest.raises(CaptureError, match=r"row 1: .* attention_mask, a NoneType, cannot be read"):
                seen.trace(sequences, mask)


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_lookup_num_tokens": 3},  # rejected candidates are run again
        {"use_cache": False},  # every step runs all tokens
        {"cache_implementation": "static"},
        {"num_return_sequences": 2, "do_sample": True},
        {"max_new_tokens": 1},
    ],
    ids=str,
)
def test_every_way_of_sampling_is_exact(mixtral, options):
    with mrr.capture.watch(mixtral) as seen:
        sequences = generate(mixtral, SEQUENCE, torch.ones_like(SEQUENCE), **options)
    trace = seen.trace(sequences, torch.ones(len(sequences), 7, dtype=torch.int64))
    assert trace.sequence_lengths == (sequences.shape[1],) * len(sequences)
    assert_exact(mixtral, trace)


def test_what_stands_behind_the_end_of_a_sequence_is_no_token_of_it(mixtral):
    """The first token that row 0 samples, and row 1 does not at once, becomes the end."""
    ids, mask = pad(PROMPTS[:2], "left")
    plain = generate(mixtral, ids, mask)
    eos = int(plain[0, 5])
    assert eos not in plain[1, :7]
    for pad_token_id, options in [(0, {}), (eos, {"eos_token_id": eos})]:
        with mrr.capture.watch(mixtral) as seen:
            sequences = generate(mixtral, ids, mask, eos_token_id=eos, pad_token_id=pad_token_id)
        trace = seen.trace(sequences, mask, pad_token_id=pad_token_id, **options)
        assert trace.sequence_lengths[0] == 6
        assert trace.token_ids[:6].tolist() == [*PROMPTS[0], eos]
        assert_exact(mixtral, trace)


def test_beams_are_refused_and_the_model_is_left_as_it_was(mixtral):
    mask = torch.ones_like(SEQUENCE)
    with pytest.raises(CaptureError, match="reordered, as in beam search"), mrr.capture.watch(mixtral):
        generate(mixtral, SEQUENCE, mask, num_beams=3)
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in mixtral.modules()) == 0
    with mrr.capture.watch(mixtral) as seen:
        output = mixtral(SEQUENCE, use_cache=True)
        assert "reorder_cache" in vars(output.past_key_values)
    assert "reorder_cache" not in vars(output.past_key_values)
    assert_exact(mixtral, seen.trace([[*SEQUENCE[0].tolist(), 9]], mask))


def test_one_watch_inside_another_leaves_the_model_as_it_was(mixtral):
    with mrr.capture.watch(mixtral) as outer, mrr.capture.watch(mixtral) as inner:
        cache = mixtral(SEQUENCE, use_cache=True).past_key_values
    assert "reorder_cache" not in vars(cache)
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in mixtral.modules()) == 0
    for seen in (outer, inner):
        assert_exact(mixtral, seen.trace([[*SEQUENCE[0].tolist(), 9]], torch.ones_like(SEQUENCE)))


def test_calling_the_module_names_watch():
    with pytest.raises(TypeError, match=r"^mrr\.capture is a module: with mrr\.capture\.watch\(model\) as seen"):
        mrr.capture(None)


def test_the_trace_of_a_generate_before_the_last_is_refused(mixtral):
    mask = torch.ones_like(SEQUENCE)
    with mrr.capture.watch(mixtral) as seen:
        first = generate(mixtral, SEQUENCE, mask)
        second = generate(mixtral, SEQUENCE + 1, mask)
        with pytest.raises(CaptureError, match="the model ran token 6 at position 0, token_ids has 5"):
            seen.trace(first, mask)
        assert_exact(mixtral, seen.trace(second, mask))
        generate(mixtral, SEQUENCE.expand(2, -1), mask.expand(2, -1))
        with pytest.raises(CaptureError, match="1 sequences, but the model ran 2 rows"):
            seen.trace(second, mask)


def test_a_forward_that_raised_is_no_obstacle_to_the_next(mixtral):
    mask = torch.ones_like(SEQUENCE)
    with mrr.capture.watch(mixtral, max_num_tokens=16) as seen:
        with pytest.raises(IndexError):
            mixtral(SEQUENCE + 1000)
        with pytest.raises(CaptureError, match="21 token slots does not fit max_num_tokens=16"):
            generate(mixtral, SEQUENCE.expand(3, -1), mask.expand(3, -1))
        sequences = generate(mixtral, SEQUENCE, mask)
    assert_exact(mixtral, seen.trace(sequences, mask))


def test_a_mask_that_is_not_the_one_of_the_model_is_refused(mixtral):
    ids, mask = pad(PROMPTS[:2], "left")
    with mrr.capture.watch(mixtral) as seen:
        sequences = generate(mixtral, ids, mask)
        with pytest.raises(CaptureError, match=r"row 1, .* 2 of 13 tokens were never forwarded .* position 0"):
            seen.trace(sequences, torch.ones_like(mask))
        sequences = generate(mixtral, ids, torch.ones_like(mask))
        with pytest.raises(CaptureError, match="row 1: the model ran tokens that this attention_mask hides"):
            seen.trace(sequences, mask)


def test_a_mask_has_a_row_for_each_sequence(mixtral):
    """That of two prompts has two rows, and two of four sequences were left out in silence."""
    ids, mask = pad(PROMPTS[:2], "left")
    with mrr.capture.watch(mixtral) as seen:
        sequences = generate(mixtral, ids, mask, num_return_sequences=2, do_sample=True)
    for wrong in (mask, mask[0], torch.ones(4, 20, dtype=torch.int64)):
        with pytest.raises(
            CaptureError, match=r"MRR704: attention_mask .* for sequences \[4, 14\]: .*repeat_interleave"
        ):
            seen.trace(sequences, wrong)
    trace = seen.trace(sequences, mask.repeat_interleave(2, dim=0), pad_token_id=torch.tensor(0))
    assert trace.sequence_lengths == (14, 14, 12, 12)
    assert_exact(mixtral, trace)


def test_tokens_and_models_that_cannot_be_watched_are_refused(mixtral):
    with mrr.capture.watch(mixtral), pytest.raises(CaptureError, match="without input_ids"):
        mixtral(inputs_embeds=torch.zeros(1, 2, 64))
    with pytest.raises(CaptureError, match="Linear takes no input_ids"), mrr.capture.watch(nn.Linear(2, 2)):
        raise AssertionError
    with mrr.capture.watch(mixtral):
        cache = mixtral(SEQUENCE, use_cache=True).past_key_values
        with pytest.raises(CaptureError, match="2 rows with a cache of 1"):
            mixtral(torch.tensor([[5], [6]]), past_key_values=cache)


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, **options):
        return self.model(input_ids, **options)

    def generate(self, ids, **options):
        return self.model.generate(ids, **options)  # not through `forward`


def test_a_wrapper_that_is_not_run_says_what_to_watch(mixtral):
    model, mask = Wrapper(mixtral), torch.ones_like(SEQUENCE)
    with mrr.capture.watch(model) as seen:
        sequences = generate(model, SEQUENCE, mask)
        with pytest.raises(
            CaptureError, match=r"the model ran 0 rows .* a wrapper whose generate\(\) runs the model inside"
        ):
            seen.trace(sequences, mask)
    with mrr.capture.watch(model.model) as seen:
        sequences = generate(model, SEQUENCE, mask)
    assert_exact(mixtral, seen.trace(sequences, mask))


@pytest.mark.slow
def test_compiled_code_calls_no_hook_and_is_refused(mixtral):
    mixtral.set_experts_implementation("batched_mm")  # the eager experts loop over the data, which no graph can
    compiled = torch.compile(mixtral, backend="aot_eager")
    with mrr.capture.watch(mixtral) as seen:
        compiled(SEQUENCE)
        with pytest.raises(CaptureError, match="1 sequences, but the model ran 0 rows"):
            seen.trace(SEQUENCE, torch.ones_like(SEQUENCE))
    torch._dynamo.reset()
