"""The one decode and decode_batch: their names, their types and what they refuse whatever the engine."""

import dataclasses
import inspect

import numpy as np
import pytest
import torch

from megatron_router_replay import checks, engines
from megatron_router_replay.engines import options
from megatron_router_replay.engines.registry import registered
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import all_moe, choice_of, routes, tokens

MODEL = all_moe(3, 16)
ENGINES = [decoder.name for decoder in registered()]
S = 9
IDS = tokens(S)
ROWS = routes(S - 1, 3, num_experts=16, topk=2).astype(np.int32)


def array_of(engine):
    return {number: ROWS[:, number - 1] for number in (1, 2, 3)} if engine == "transformers" else ROWS


def test_the_keywords_of_decode_are_the_fields_of_its_options():
    fields = {field.name for field in dataclasses.fields(engines.DecodeOptions)}
    assert set(options.SampleOptions.__annotations__) == fields
    parameters = set(inspect.signature(engines.vllm.decode_batch).parameters)
    of_batch = set(options.SharedOptions.__annotations__) | parameters - {"result", "model", "allocate", "options"}
    assert of_batch - {"sample_ids"} == fields - {"ignore_before", "sample_id"}
    with pytest.raises(TypeError, match="tokens"):
        engines.vllm.decode(ROWS, model=MODEL, tokens=IDS)


@pytest.mark.parametrize("engine", ENGINES)
def test_options_of_a_batch_are_one_a_sample(engine):
    decode_batch, two = getattr(engines, engine).decode_batch, [array_of(engine)] * 2
    trace = decode_batch(two, model=MODEL, num_tokens=[S, S], sample_ids=["a", "b"], weight_version=3)
    assert trace.sample_ids == ("a", "b")
    assert trace.weight_version.tolist() == [3] * (2 * S)
    assert torch.equal(trace.topk_indices[: S - 1].int(), torch.from_numpy(ROWS))
    for name, values in (("num_tokens", [S]), ("sample_ids", ["a"]), ("token_ids", [IDS] * 3), ("start", [0])):
        with pytest.raises(PayloadError, match=f"{len(values)} {name} for 2 choices"):
            decode_batch(two, model=MODEL, **({"num_tokens": [S, S]} | {name: values}))
    for name, value in (("sample_ids", "ab"), ("token_ids", {0: IDS, 1: IDS}), ("start", "00")):
        with pytest.raises(PayloadError, match=f"{name} is"):
            decode_batch(two, model=MODEL, **({"num_tokens": [S, S]} | {name: value}))


def test_each_sample_of_a_batch_has_its_start():
    trace = engines.vllm.decode_batch([ROWS, ROWS[3:]], model=MODEL, num_tokens=[S, S], start=np.array([0, 3]))
    assert trace.replay_mask.tolist() == [True] * 8 + [False] + [False] * 3 + [True] * 5 + [False]


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", [1], None, np.array([1, 2])])
def test_start_is_an_integer_of_0_or_more(value):
    with pytest.raises(PayloadError, match="start="):
        engines.vllm.decode(ROWS, model=MODEL, token_ids=IDS, start=value)
    assert engines.vllm.decode(ROWS[1:], model=MODEL, token_ids=IDS, start=np.int64(1)).replay_mask.sum() == 7


@pytest.mark.parametrize("choice", [2, -1, True])
def test_a_choice_that_is_not_there(choice):
    choices = [choice_of(ROWS.astype(np.uint8), IDS[:5], IDS[5:], i) for i in range(2)]
    choices[1]["token_ids"] = IDS[4:8]
    for number, last in ((0, IDS[8]), (1, IDS[7])):
        assert engines.vllm.decode({"choices": choices}, model=MODEL, choice=number).token_ids[-1] == last
    with pytest.raises(PayloadError, match="choice="):
        engines.vllm.decode({"choices": choices}, model=MODEL, choice=choice)
    with pytest.raises(PayloadError, match="holds 2 choices"):
        engines.vllm.decode({"choices": choices}, model=MODEL)


@pytest.mark.parametrize(
    "form",
    [
        lambda prompt: prompt,
        tuple,
        np.array,
        torch.tensor,
        lambda prompt: [prompt, prompt],
        lambda prompt: np.array([prompt, prompt]),
        lambda prompt: torch.tensor([prompt, prompt]),
        lambda prompt: [np.array(prompt), torch.tensor(prompt)],
        lambda prompt: [np.int64(token) for token in prompt],
    ],
)
def test_one_prompt_is_of_all_samples_and_a_list_of_prompts_is_one_each(form):
    given = {"model": MODEL, "token_ids": [IDS, IDS]}
    assert len(engines.vllm.decode_batch([ROWS, ROWS], **given, prompt_token_ids=form(IDS[:5]))) == 2 * S
    for wrong in (IDS[1:6], [*IDS[:4], IDS[4] + 1]):
        with pytest.raises(PayloadError, match="do not begin with the prompt"):
            engines.vllm.decode_batch([ROWS, ROWS], **given, prompt_token_ids=form(wrong))


@pytest.mark.parametrize("prompts", [[], [IDS[:5]], [IDS[:5]] * 3, np.zeros((3, 2), np.int64)])
def test_another_number_of_prompts_is_refused(prompts):
    with pytest.raises(PayloadError, match=f"{len(prompts)} prompt_token_ids for 2 choices"):
        engines.vllm.decode_batch([ROWS, ROWS], model=MODEL, token_ids=[IDS, IDS], prompt_token_ids=prompts)


def test_each_prompt_is_compared_with_its_own_sample():
    other = tokens(S, seed=5)
    given = {"model": MODEL, "token_ids": [IDS, other]}
    assert len(engines.vllm.decode_batch([ROWS, ROWS], **given, prompt_token_ids=[IDS[:5], other[:2]])) == 2 * S
    with pytest.raises(PayloadError, match="do not begin with the prompt"):
        engines.vllm.decode_batch([ROWS, ROWS], **given, prompt_token_ids=[other[:2], IDS[:5]])


def aborted_reply(output, rows=None):
    return {"index": 0, "prompt_token_ids": IDS[:5], "token_ids": output, "finish_reason": "abort"} | (
        {} if rows is None else {"routed_experts": rows}
    )


def test_an_aborted_reply_without_output_has_no_routes_and_one_with_output_must():
    trace = engines.vllm.decode({"choices": [aborted_reply([])]}, model=MODEL)
    assert trace.replay_mask.tolist() == [False] * 5
    for output in (IDS[5:6], IDS[5:8]):
        with pytest.raises(PayloadError, match="missing, though the model has MoE layers"):
            engines.vllm.decode({"choices": [aborted_reply(output)]}, model=MODEL)
    with pytest.raises(PayloadError, match="missing, though the model has MoE layers"):
        engines.vllm.decode({"choices": [aborted_reply([]) | {"finish_reason": "length"}]}, model=MODEL)


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "transformers"])
def test_a_list_of_the_rows_of_one_sample_is_one_array(engine):
    trace = getattr(engines, engine).decode(list(ROWS), model=MODEL, token_ids=IDS)
    assert trace.topk_indices[:-1].tolist() == ROWS.tolist()


def test_a_trace_without_ids_is_warned_of_once(monkeypatch, recwarn):
    monkeypatch.setattr(checks, "_warned", set())
    for _ in range(2):
        engines.vllm.decode(ROWS, model=MODEL, token_ids=IDS)
    assert not list(recwarn)
    for _ in range(2):
        engines.vllm.decode(ROWS, model=MODEL, num_tokens=S)
    (shown,) = recwarn
    assert str(shown.message).startswith("a trace without token ids: nothing proves")
