"""R1: how many rows are legal for S tokens asked from `start`, per engine and form; one row more or less is a shift."""

import numpy as np
import pytest
import torch

from megatron_router_replay import engines
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import (
    DATA,
    config,
    int32_base64,
    npy_base64,
    read_json,
    routes,
    sglang_result,
    tokens,
    vllm_output,
)

MODEL = engines.ModelRoutingInfo(num_layers=3, moe_layer_numbers=(1, 2, 3), num_experts=16, topk=2)
P, G = 7, 5
S = P + G
PROMPT, OUTPUT = tokens(P), tokens(G, seed=2)
IDS = PROMPT + OUTPUT
ROWS = routes(S + 4, 3, num_experts=16, topk=2).astype(np.uint8)

FORMS = {
    "vllm object": ("vllm", lambda rows, **o: vllm_output(rows, PROMPT, OUTPUT)),
    "vllm completions": (
        "vllm",
        lambda rows, **o: {
            "id": "a",
            "choices": [
                {"index": 0, "token_ids": OUTPUT, "prompt_token_ids": PROMPT, "routed_experts": npy_base64(rows)}
            ],
        },
    ),
    "vllm array": ("vllm", lambda rows, **o: rows),
    "vllm npy text": ("vllm", lambda rows, **o: npy_base64(rows)),
    "sglang generate": ("sglang", lambda rows, **o: sglang_result(rows, P, OUTPUT)),
    "sglang text": ("sglang", lambda rows, **o: int32_base64(rows)),
    "sglang array": ("sglang", lambda rows, **o: rows.astype(np.int32)),
    "sglang openai": (
        "sglang",
        lambda rows, **o: {"choices": [{"index": 0}], "sglext": {"routed_experts": int32_base64(rows)}},
    ),
    "sglang-jax completions": (
        "sglang_jax",
        lambda rows, **o: {"choices": [{"index": 0, "routed_experts": int32_base64(rows)}]},
    ),
    "megatron request": (
        "megatron",
        lambda rows, **o: {"prompt_tokens": PROMPT, "generated_tokens": OUTPUT, "routing_indices": rows},
    ),
    "megatron array": ("megatron", lambda rows, **o: rows),
}


def decode(form, num_rows, **options):
    engine, build = FORMS[form]
    first = options.get("start", 0)
    return getattr(engines, engine).decode(build(ROWS[first : first + num_rows]), model=MODEL, token_ids=IDS, **options)


@pytest.mark.parametrize("form", FORMS)
def test_exactly_s_minus_1_rows_are_legal(form):
    trace = decode(form, S - 1)
    assert trace.replay_mask.tolist() == [True] * (S - 1) + [False]
    assert torch.equal(trace.topk_indices[:-1], torch.from_numpy(ROWS[: S - 1]))
    for wrong in (0, 1, S - 2, S, S + 1):
        with pytest.raises(PayloadError, match=rf"{wrong} rows|bytes"):
            decode(form, wrong)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("start", [1, 3, S - 2, S - 1])
def test_exactly_s_minus_1_minus_start_rows_are_legal(form, start):
    trace = decode(form, S - 1 - start, start=start)
    assert trace.replay_mask.tolist() == [False] * start + [True] * (S - 1 - start) + [False]
    with pytest.raises(PayloadError):
        decode(form, S - start, start=start)
    if S - 2 - start >= 0:
        with pytest.raises(PayloadError):
            decode(form, S - 2 - start, start=start)


@pytest.mark.parametrize("form", FORMS)
def test_a_start_that_is_off_by_one_is_refused(form):
    """The server left out 4 rows, the caller says 3 or 5: S - start rows, or one too few."""
    engine, build = FORMS[form]
    for said in (3, 5):
        with pytest.raises(PayloadError):
            getattr(engines, engine).decode(build(ROWS[4 : S - 1]), model=MODEL, token_ids=IDS, start=said)


@pytest.mark.parametrize("form", [form for form in FORMS if form.split()[1] in ("array", "text", "npy", "openai")])
def test_ids_without_the_bos_token_are_refused(form):
    """The engine put a BOS token in front; ids tokenised without it are one fewer, and every row would shift."""
    engine, build = FORMS[form]
    with pytest.raises(PayloadError):
        getattr(engines, engine).decode(build(ROWS[: S - 1]), model=MODEL, token_ids=IDS[1:])


@pytest.mark.parametrize("form", [form for form in FORMS if not form.startswith("megatron")])
def test_surplus_rows_are_dropped_only_when_asked(form):
    for surplus in (1, 2, 4):
        with pytest.raises(PayloadError):
            decode(form, S - 1 + surplus)
        trace = decode(form, S - 1 + surplus, allow_surplus_rows=True)
        assert trace.replay_mask.tolist() == [True] * (S - 1) + [False]
        assert torch.equal(trace.topk_indices[:-1], torch.from_numpy(ROWS[: S - 1]))
    with pytest.raises(PayloadError):
        decode(form, S - 2, allow_surplus_rows=True)


def test_megatron_never_has_surplus_rows_behind_the_last_token():
    """Parts of a suspended request are concatenated: the surplus lies in the middle, so it cannot be cut off."""
    parts = np.concatenate([ROWS[:9], ROWS[: S - 1]])
    request = {"prompt_tokens": PROMPT, "generated_tokens": OUTPUT, "routing_indices": parts}
    for options in ({}, {"allow_surplus_rows": True}):
        with pytest.raises(PayloadError, match="suspended"):
            engines.megatron.decode(request, model=MODEL, **options)


@pytest.mark.parametrize("form", ["vllm object", "sglang generate", "megatron request"])
@pytest.mark.parametrize("num_rows", [P - 1, P])
def test_a_prompt_alone_may_have_a_row_for_its_last_token(form, num_rows):
    engine = FORMS[form][0]
    result = {
        "vllm object": vllm_output(ROWS[:num_rows], PROMPT, []),
        "sglang generate": sglang_result(ROWS[:num_rows], P, []),
        "megatron request": {"prompt_tokens": PROMPT, "generated_tokens": [], "routing_indices": ROWS[:num_rows]},
    }[form]
    trace = getattr(engines, engine).decode(result, model=MODEL, token_ids=PROMPT)
    assert trace.replay_mask.tolist() == [True] * num_rows + [False] * (P - num_rows)
    assert torch.equal(trace.topk_indices[:num_rows], torch.from_numpy(ROWS[:num_rows]))


def test_array_and_transformers_may_have_a_row_for_every_token():
    for num_rows in (S - 1, S):
        trace = engines.array.decode(ROWS[:num_rows], model=MODEL, axes=("token", "layer", "expert"), token_ids=IDS)
        assert int(trace.replay_mask.sum()) == num_rows
        seen = {number: torch.from_numpy(ROWS[:num_rows, number - 1]) for number in (1, 2, 3)}
        assert int(engines.transformers.decode(seen, model=MODEL, token_ids=IDS).replay_mask.sum()) == num_rows
    for num_rows in (0, S - 2, S + 1):
        with pytest.raises(PayloadError):
            engines.array.decode(ROWS[:num_rows], model=MODEL, axes=("token", "layer", "expert"), token_ids=IDS)
        seen = {number: torch.from_numpy(ROWS[:num_rows, number - 1]) for number in (1, 2, 3)}
        with pytest.raises(PayloadError):
            engines.transformers.decode(seen, model=MODEL, token_ids=IDS)


@pytest.mark.parametrize(("prompt", "generation", "legal"), [
    (P, G - 1, True), (P, G, True), (P, G - 2, False), (P, G + 1, False), (P - 1, G, False), (P - 1, G + 1, False),
    (P + 1, G - 1, False), (P + 1, G - 2, False), (0, S - 1, False),
])  # fmt: skip
def test_vllm_0_21_has_p_rows_and_g_minus_1_or_g(prompt, generation, legal):
    output = vllm_output(
        ROWS[P : P + generation].astype(np.int16), PROMPT, OUTPUT, prompt_array=ROWS[:prompt].astype(np.int16)
    )
    if not legal:
        with pytest.raises(PayloadError):
            engines.vllm.decode(output, model=MODEL)
        return
    trace = engines.vllm.decode(output, model=MODEL)
    assert trace.replay_mask.tolist() == [True] * (S - 1) + [False]
    assert torch.equal(trace.topk_indices[:-1], torch.from_numpy(ROWS[: S - 1]))


def test_vllm_0_21_arrays_that_were_joined_have_s_minus_1_rows():
    assert engines.vllm.decode(ROWS[: S - 1], model=MODEL, token_ids=IDS, version="0.21").replay_mask.sum() == S - 1
    with pytest.raises(PayloadError):
        engines.vllm.decode(ROWS[:S], model=MODEL, token_ids=IDS, version="0.21")


def test_start_beyond_the_tokens_is_refused():
    for engine in ("vllm", "sglang", "sglang_jax", "megatron"):
        with pytest.raises(PayloadError, match="start="):
            getattr(engines, engine).decode(ROWS[:0], model=MODEL, token_ids=IDS, start=S + 1)


def test_an_aborted_sample_without_ids_has_only_rows_without_a_route():
    trace = engines.sglang.decode(sglang_result(None, P, [], finish="abort"), model=MODEL)
    assert trace.token_ids is None
    assert trace.sequence_lengths == (P,)
    assert not trace.replay_mask.any()
    assert all(len(set(route)) == 2 for route in trace.topk_indices[:, 0].tolist())


def test_the_trace_keeps_no_buffer_of_the_caller():
    ids, rows = np.array(IDS, np.int32), ROWS[: S - 1].copy()
    for engine in ("vllm", "sglang", "sglang_jax", "megatron"):
        trace = getattr(engines, engine).decode(rows, model=MODEL, token_ids=ids)
        before = trace.token_ids.clone(), trace.topk_indices.clone()
        ids += 1
        rows[:] = rows[:, :, ::-1].copy()
        assert torch.equal(trace.token_ids, before[0])
        assert torch.equal(trace.topk_indices, before[1])
        ids -= 1


def test_all_captured_arrays_have_s_minus_1_minus_start_rows():
    """The captures of real engines obey the rule, and one row more is refused for each of them."""
    counted = 0
    for name in sorted(path.stem for path in DATA.glob("*.npz")):
        meta, arrays = read_json(f"{name}.json"), np.load(DATA / f"{name}.npz")
        if "cases" not in meta:
            continue
        engine = {"vllm": "vllm", "sglang": "sglang", "sgljax": "sglang_jax"}[name.split("_")[0]]
        model = config("qwen3moe" if meta["ckpt"] == "qwen3moe_hd128" else meta["ckpt"])
        for case, facts in meta["cases"].items():
            if case not in arrays:
                continue
            start = facts.get("routed_experts_prompt_start", 0)
            ids = facts["prompt_token_ids"] + facts["token_ids"]
            assert len(arrays[case]) == len(ids) - 1 - start
            more = np.concatenate([arrays[case], arrays[case][-1:]])
            with pytest.raises(PayloadError):
                getattr(engines, engine).decode(more, model=model, token_ids=ids, start=start)
            counted += 1
    assert counted == 33 + 8 + 8
