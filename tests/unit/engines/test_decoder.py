"""decode and decode_batch: their options, and the names and options of earlier versions."""

import dataclasses
import inspect

import numpy as np
import pytest
import torch

from megatron_router_replay import checks, engines
from megatron_router_replay.engines import options
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import FORMS, all_moe, decode, routes, tokens

MODEL = all_moe(3, 16)
S = 9
IDS = tokens(S)
ROWS = routes(S - 1, 3, num_experts=16, topk=2).astype(np.int32)


def test_the_keywords_of_decode_are_the_fields_of_its_options():
    fields = {field.name for field in dataclasses.fields(engines.DecodeOptions)}
    assert set(options.SampleOptions.__annotations__) == fields
    parameters = set(inspect.signature(engines.vllm.decode_batch).parameters)
    of_batch = set(options.SharedOptions.__annotations__) | parameters - {"results", "model", "options"}
    assert of_batch - {"sample_ids"} == fields - {"sample_id"}
    with pytest.raises(TypeError, match="tokens"):
        engines.vllm.decode(ROWS, model=MODEL, tokens=IDS)


def test_every_engine_has_a_form_in_the_tests():
    assert {form.split()[0] for form in FORMS} == {name for name in engines.__all__ if name.islower()} - {
        "join_prefill_decode"
    }
    assert dir(engines) == sorted(engines.__all__)


def test_an_option_that_is_misspelt_names_the_similar_one():
    for call in (engines.vllm.decode, engines.vllm.decode_batch, engines.array.decode):
        axes = {"axes": ("token", "layer", "expert")} if call is engines.array.decode else {}
        with pytest.raises(TypeError, match=r"^decode.*\(\) got an unexpected keyword .* Did you mean 'missing'\?$"):
            call(ROWS, model=MODEL, **axes, missin="live")


def test_options_of_a_batch_are_one_a_sample():
    decode_batch, two = engines.vllm.decode_batch, [ROWS, ROWS[3:]]
    given = {"model": MODEL, "num_tokens": [S, S], "start": np.array([0, 3])}
    trace = decode_batch(two, **given, sample_ids=["a", "b"], weight_version=3)
    assert trace.sample_ids == ("a", "b")
    assert trace.replay_mask.tolist() == [True] * 8 + [False] + [False] * 3 + [True] * 5 + [False]
    assert trace.weight_version.tolist() == [3] * (2 * S)
    for name, values in (("num_tokens", [S]), ("sample_ids", ["a"]), ("token_ids", [IDS] * 3), ("start", [0])):
        with pytest.raises(PayloadError, match=f"{len(values)} {name} for 2 samples"):
            decode_batch(two, **given | {name: values})
    for name, value in (
        ("sample_ids", "ab"),
        ("sample_ids", {"a", "b"}),
        ("token_ids", {0: IDS, 1: IDS}),
        ("token_ids", {0: IDS, 1: IDS}.values()),
        ("start", "00"),
        ("start", torch.tensor(0)),
        ("prompt_token_ids", set(IDS)),
    ):
        with pytest.raises(PayloadError, match=f"{name} is"):
            decode_batch(two, **given | {name: value})


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None])
def test_start_is_an_integer_of_0_or_more(value):
    with pytest.raises(PayloadError, match="start="):
        engines.vllm.decode(ROWS, model=MODEL, token_ids=IDS, start=value)
    assert engines.vllm.decode(ROWS[1:], model=MODEL, token_ids=IDS, start=np.int64(1)).replay_mask.sum() == 7


@pytest.mark.parametrize(
    "form",
    [
        list,
        np.array,
        torch.tensor,
        lambda prompt: [np.array(prompt), torch.tensor(prompt)],
        lambda prompt: np.array([prompt, prompt]),
    ],
)
def test_one_prompt_is_of_all_samples_and_a_list_of_prompts_is_one_each(form):
    given = {"model": MODEL, "token_ids": [IDS, IDS]}
    assert engines.vllm.decode_batch([ROWS, ROWS], **given, prompt_token_ids=form(IDS[:5])).num_tokens == 2 * S
    with pytest.raises(PayloadError, match="do not begin with the prompt"):
        engines.vllm.decode_batch([ROWS, ROWS], **given, prompt_token_ids=form(IDS[1:6]))
    for prompts in ([], [IDS[:5]], np.zeros((3, 2), np.int64)):
        with pytest.raises(PayloadError, match=f"{len(prompts)} prompt_token_ids for 2 samples"):
            engines.vllm.decode_batch([ROWS, ROWS], **given, prompt_token_ids=prompts)


@pytest.mark.parametrize("form", ["vllm array", "sglang array", "array array"])
def test_the_trace_keeps_no_buffer_of_the_caller(form):
    ids, rows = np.array(IDS, np.int32), ROWS.copy()
    trace = decode(form, rows, IDS[:5], IDS[5:], model=MODEL, token_ids=ids)
    before = trace.token_ids.clone(), trace.topk_indices.clone()
    ids += 1
    rows[:] = rows[:, :, ::-1].copy()
    assert torch.equal(trace.token_ids, before[0])
    assert torch.equal(trace.topk_indices, before[1])
    if "array array" not in form:  # a list of the rows of one sample is one array
        assert getattr(engines, form.split()[0]).decode(list(ROWS), model=MODEL, token_ids=IDS).num_tokens == S


def test_a_trace_without_ids_is_warned_of_once(monkeypatch, recwarn):
    monkeypatch.setattr(checks, "_warned", set())
    for _ in range(2):
        engines.vllm.decode(ROWS, model=MODEL, token_ids=IDS)
    assert not list(recwarn)
    for _ in range(2):
        engines.vllm.decode(ROWS, model=MODEL, num_tokens=S)
    (shown,) = recwarn
    assert str(shown.message).startswith("a trace without token ids: nothing proves")


def test_an_argument_that_is_no_model_says_which_is(tmp_path):
    (tmp_path / "iter_0000010").mkdir()  # as Megatron-Core saves a checkpoint
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes([136, 0, 0, 0]))
    for model, message in (
        (torch.nn.Linear(1, 1), r"got Linear. A Megatron-Core model is read by mcore.routing_info"),
        (tmp_path, r"MRR303: .*has no config.json. Give the Hugging Face folder .* Megatron-Core has none"),
        (weights, r"MRR303: .*it is no JSON. Give the config.json"),
        ("Qwen/Qwen3-30B-A3B", r"no such file or folder here\. The id of a model on a hub is not looked up"),
    ):
        with pytest.raises(PayloadError, match=message):
            engines.vllm.decode(ROWS, model=model, token_ids=IDS)
