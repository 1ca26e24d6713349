"""What went wrong elsewhere, one test each: payloads and tokens that must raise by name or decode exactly."""

import numpy as np
import pytest
import torch

from megatron_router_replay import engines
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import (
    int32_base64,
    npy_base64,
    routes,
    sglang_result,
    tokens,
    vllm_output,
    with_dense,
)

DENSE = engines.ModelRoutingInfo(
    num_layers=4, moe_layer_numbers=(2, 3, 4), num_experts=16, topk=2, num_shared_experts=1
)
ALL = engines.ModelRoutingInfo(num_layers=3, moe_layer_numbers=(1, 2, 3), num_experts=16, topk=2)
P, G = 50, 41
S = P + G
PROMPT, OUTPUT = tokens(P), tokens(G, seed=2)
IDS = PROMPT + OUTPUT
GOOD = routes(S - 1, 3, num_experts=16, topk=2).astype(np.uint8)


def decode(array, *, model=ALL, **options):
    return engines.vllm.decode(vllm_output(array, PROMPT, OUTPUT), model=model, **options)


def changed(where, value):
    array = GOOD.copy()
    array[where] = value
    return array


def refused(match, array, **options):
    """The error names engine, field and sample first, and has `match`."""
    with pytest.raises(PayloadError, match=r"^vLLM: routed_experts of choice 0 of r0: .*" + match):
        decode(array, **options)


# Rows


@pytest.mark.parametrize("rows", [0, 1, S - 2])
def test_fewer_rows_than_tokens(rows):
    refused(
        rf"has {rows} rows for tokens 0\.\.{S - 1}: expected {S - 1} \(the last token has no route\)\. Are these",
        GOOD[:rows],
    )


def test_s_minus_1_rows_leave_the_last_token_to_the_live_router():
    trace = decode(GOOD)
    assert trace.replay_mask.tolist() == [True] * (S - 1) + [False]
    assert torch.equal(trace.topk_indices[:-1], torch.from_numpy(GOOD))


def test_a_row_of_the_last_token_is_refused_for_it_looks_like_a_shift():
    refused(r"has 91 rows.*ids without their BOS token or a start that is off by one", np.concatenate([GOOD, GOOD[:1]]))


def test_surplus_rows_are_dropped_only_when_asked():
    surplus = np.concatenate([GOOD, GOOD[:3]])
    refused("Surplus rows come from speculative decoding", surplus)
    assert torch.equal(decode(surplus, allow_surplus_rows=True).topk_indices[:-1], torch.from_numpy(GOOD))
    refused("has 89 rows", GOOD[:-1], allow_surplus_rows=True)


def test_rows_before_start_are_missing():
    trace = decode(GOOD[30:], start=30)
    assert trace.replay_mask.tolist() == [False] * 30 + [True] * (S - 31) + [False]
    assert torch.equal(trace.topk_indices[30:-1], torch.from_numpy(GOOD[30:]))
    assert trace.token_ids.tolist() == IDS


def test_server_that_ignored_start_is_named():
    refused("The server ignored start and sent every row: decode with start=0", GOOD, start=30)
    refused("Was start passed on", GOOD[30:])


@pytest.mark.parametrize("start", [-1, S + 1, True, 1.0, "3"])
def test_start_must_be_a_row(start):
    with pytest.raises(PayloadError, match="start="):
        decode(GOOD, start=start)


@pytest.mark.parametrize("routed", [None, GOOD[:0]])
def test_aborted_request_without_output_is_a_span_without_routes(routed):
    output = vllm_output(routed, PROMPT, [], finish_reason="abort")
    trace = engines.vllm.decode(output, model=ALL)
    assert trace.replay_mask.tolist() == [False] * P
    assert trace.token_ids.tolist() == PROMPT
    reply = sglang_result(None, P, [], finish="abort")
    assert not engines.sglang.decode(reply, model=ALL, prompt_token_ids=PROMPT).replay_mask.any()
    with pytest.raises(PayloadError):
        engines.vllm.decode(vllm_output(routed, PROMPT, [], finish_reason="stop"), model=ALL)


@pytest.mark.parametrize(
    ("engine", "result"),
    [
        ("vllm", {"choices": [{"index": 0, "token_ids": OUTPUT, "prompt_token_ids": PROMPT}]}),
        ("vllm", vllm_output(None, PROMPT, OUTPUT)),
        ("vllm", None),
        ("vllm", {}),
        ("sglang", sglang_result(None, P, OUTPUT)),
        ("sglang", None),
        ("sglang_jax", {"choices": [{"index": 0}], "usage": {"prompt_tokens": P, "completion_tokens": G}}),
        ("megatron", {"prompt_tokens": PROMPT, "generated_tokens": OUTPUT}),
    ],
)
def test_missing_routes_raise_for_a_moe_model(engine, result):
    with pytest.raises(PayloadError, match="missing, though the model has MoE layers"):
        getattr(engines, engine).decode(result, model=ALL, token_ids=IDS)


def test_unknown_number_of_tokens_raises_instead_of_being_guessed():
    with pytest.raises(PayloadError, match=r"cannot tell how many tokens.*token_ids=.*num_tokens="):
        engines.vllm.decode(GOOD, model=ALL)
    assert engines.vllm.decode(GOOD, model=ALL, num_tokens=S).token_ids is None
    assert not engines.vllm.decode(GOOD, model=ALL, num_tokens=S).replay_mask[-1]


def test_arrays_of_other_requests_have_other_row_counts():
    """SGLang 0.5.7 to 0.5.12 swapped the arrays of requests in one batch."""
    replies = [
        sglang_result(GOOD[:20], 10, tokens(11), request="a"),
        sglang_result(GOOD[:10], 20, tokens(1), request="b"),
    ]
    with pytest.raises(PayloadError, match="SGLang: routed_experts of sample 1, request b: has 10 rows"):
        engines.sglang.decode_batch(replies, model=ALL)


def test_an_aborted_reply_cannot_claim_more_tokens_than_memory_holds():
    with pytest.raises(PayloadError, match="claims 1000000000000 prompt tokens"):
        engines.sglang.decode(sglang_result(None, 10**12, [], finish="abort"), model=ALL)


# Width, layers, ids


def test_wrong_topk():
    refused(r"has 3 experts a token, the model's topk is 2", np.concatenate([GOOD, GOOD[:, :, :1]], axis=2))
    refused(r"has 1 experts a token", GOOD[:, :, :1])


def test_appended_shared_experts_are_named():
    wide = np.concatenate([with_dense(GOOD, 4, [1, 2, 3]), np.full((S - 1, 4, 1), 16, np.uint8)], axis=2)
    refused("The 1 more are the shared experts", wide, model=DENSE)
    with pytest.raises(PayloadError, match="shared experts, which are not routed, are appended"):
        engines.sglang.decode(int32_base64(wide), model=DENSE, token_ids=IDS)


def test_wrong_number_of_layers():
    refused("has 4 layers, the model has 3", np.concatenate([GOOD, GOOD[:, :1]], axis=1))
    with pytest.raises(PayloadError, match="the MoE layers only"):
        engines.sglang.decode(int32_base64(GOOD), model=DENSE, token_ids=IDS)
    with pytest.raises(PayloadError, match="Each pipeline stage records its own layers only"):
        engines.megatron.decode(GOOD[:, :2], model=ALL, token_ids=IDS)


@pytest.mark.parametrize("filler", [0, -1])
def test_dense_layers_are_dropped_and_never_read_as_routes(filler):
    array = with_dense(GOOD.astype(np.int32), 4, [1, 2, 3], filler)
    for engine in (engines.vllm, engines.sglang, engines.sglang_jax):
        trace = engine.decode(array, model=DENSE, token_ids=IDS)
        assert trace.layer_numbers == (2, 3, 4)
        assert torch.equal(trace.topk_indices[:-1], torch.from_numpy(GOOD))


def test_ids_on_a_dense_layer_mean_another_model():
    array = with_dense(GOOD, 4, [0, 1, 3])
    refused(r"layer_number 1 is dense by the model's config, but row 0 holds", array, model=DENSE)


def test_sglang_qwen3_moe_sends_ids_on_dense_layers():
    values = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 2}
    values |= {"decoder_sparse_step": 1, "mlp_only_layers": [0]}
    array = np.concatenate([GOOD[:, :1], GOOD], axis=1).astype(np.int32)
    trace = engines.sglang.decode(array, model=values, token_ids=IDS)
    assert torch.equal(trace.topk_indices[:-1], torch.from_numpy(GOOD))
    with pytest.raises(PayloadError, match="layer_number 1 is dense"):
        engines.vllm.decode(array, model=values, token_ids=IDS)


def test_physical_ids_are_named_as_the_likely_cause():
    refused(
        r"row 7, layer 2 of topk_indices is \[3, 16\].*0\.\.15.*physical ids.*expert load balancing",
        changed((7, 1), [3, 16]),
    )
    refused(r"row 7, layer 2 of topk_indices is \[3, 300\].*physical ids", _int32_with((7, 1), [3, 300]))


def _int32_with(where, value):
    array = GOOD.astype(np.int32)
    array[where] = value
    return array


def test_negative_ids_are_lost_rows():
    refused(r"row 3, layer 1 of topk_indices is \[-1, -1\].*lost", _int32_with(3, -1))


def test_more_than_256_experts_do_not_wrap():
    model = engines.ModelRoutingInfo(num_layers=3, moe_layer_numbers=(1, 2, 3), num_experts=384, topk=8)
    array = routes(S - 1, 3, num_experts=384, topk=8)
    assert array.max() > 300
    for form in (array.astype(np.uint16), array.astype(np.int32), npy_base64(array.astype(np.uint16)), array.tolist()):
        trace = engines.vllm.decode(form, model=model, token_ids=IDS)
        assert trace.topk_indices.dtype is torch.int16
        assert torch.equal(trace.topk_indices[:-1].long(), torch.from_numpy(array))
    short = array[:4] % 256
    short[(short[:, :, None] == short[:, :, :, None]).sum(3).max(2) > 1] = np.arange(8)
    trace = engines.vllm.decode(short.astype(np.uint8), model=model, token_ids=IDS[:5])
    assert trace.topk_indices.dtype is torch.int16  # by the model, never by the values of one payload


@pytest.mark.parametrize("row", [0, 7, S - 2])
def test_a_repeated_expert(row):
    refused(
        rf"1 routes name an expert twice, in layers \[2\], row {row} .*layer_number 2 = \[5, 5\]", changed((row, 1), 5)
    )


# Lost data


def test_all_zero_payload_of_the_right_shape():
    refused(r"270 routes are all zero, in layers \[1, 2, 3\], rows 0\.\.89 \(prompt and generation\)", GOOD * 0)


def test_only_the_prompt_is_zero():
    refused(r"150 routes are all zero, in layers \[1, 2, 3\], rows 0\.\.49 \(prompt\)", changed(slice(0, P), 0))


def test_only_the_generation_of_one_layer_is_zero():
    refused(r"40 routes are all zero, in layers \[3\], rows 50\.\.89 \(generation\)", changed((slice(P, None), 2), 0))


def test_a_single_lost_row_is_found():
    refused(r"3 routes are all zero.*row 17 \(prompt\)", changed(17, 0))


def test_one_row_repeated_in_the_generation():
    array = changed((slice(P, None), 1), [4, 9])
    refused(r"layers \[2\] hold the same route \[4, 9\] in all 40 rows 50\.\.89 \(generation\)", array)
    assert decode(array, allow_constant_layers=True).replay_mask[:-1].all()


def test_one_row_repeated_in_the_prompt():
    refused(r"\(prompt\)", changed((slice(0, P), 2), [4, 9]))


def test_short_or_degenerate_samples_with_constant_layers_are_believed():
    array = np.broadcast_to(GOOD[:1], (31, 3, 2))
    assert engines.vllm.decode(array, model=ALL, num_tokens=32).replay_mask.sum() == 31
    loop = [7, 8] * (S // 2)
    array = np.broadcast_to(GOOD[:1], (len(loop) - 1, 3, 2))
    assert engines.vllm.decode(array, model=ALL, token_ids=loop).replay_mask.sum() == len(loop) - 1


def test_top_1_is_judged_by_layer_knowledge():
    model = engines.ModelRoutingInfo(num_layers=13, moe_layer_numbers=tuple(range(2, 14)), num_experts=16, topk=1)
    array = with_dense(routes(S - 1, 12, num_experts=16, topk=1), 13, list(range(1, 13))).astype(np.uint8)
    trace = decode(array, model=model)
    assert torch.equal(trace.topk_indices[:-1], torch.from_numpy(array[:, 1:]))
    assert (trace.topk_indices[:-1] == 0).any()  # zero is a valid id, never "missing"
    lost = array.copy()
    lost[20:23] = 0
    refused(r"3 rows 20\.\.22 \(prompt\) are 0 in all 12 MoE layers", lost, model=model)
    constant = array.copy()
    constant[:, 5] = 0
    refused(r"layers \[6\] hold the same route \[0\]", constant, model=model)


# Tokens


def test_routes_of_other_tokens_are_refused():
    other = [*IDS[:-1], IDS[-1] + 1]
    with pytest.raises(PayloadError, match="do not end with the output of the response"):
        decode(GOOD, token_ids=other)
    with pytest.raises(PayloadError, match="do not begin with the prompt"):
        decode(GOOD, token_ids=[IDS[0] + 1, *IDS[1:]])
    with pytest.raises(PayloadError, match="are not the prompt of the response"):
        decode(GOOD, prompt_token_ids=PROMPT[1:])
    with pytest.raises(PayloadError, match="the token ids=92, but the prompt"):
        decode(GOOD, token_ids=[*PROMPT, *OUTPUT[:1], *OUTPUT])
    with pytest.raises(PayloadError, match="num_tokens=90, but 91"):
        decode(GOOD, num_tokens=90)


def test_truncated_and_permuted_samples_keep_routes_with_their_tokens():
    trace = engines.vllm.decode_batch(
        [vllm_output(GOOD, PROMPT, OUTPUT), vllm_output(GOOD[:9], PROMPT[:5], OUTPUT[:5])], model=ALL
    )
    moved = trace.select_samples([1, 0]).truncate_samples([10, 60])
    assert moved.token_ids.tolist() == PROMPT[:5] + OUTPUT[:5] + IDS[:60]
    assert torch.equal(moved.topk_indices[10:], torch.from_numpy(GOOD[:60]))
    assert moved.replay_mask.tolist() == [True] * 9 + [False] + [True] * 60


def test_rows_without_a_route_are_spread_over_all_experts():
    trace = decode(GOOD[30:], start=30)
    counts = torch.bincount(trace.topk_indices[:30, 0].flatten().long(), minlength=16)
    assert counts.max() <= -(-30 * 2 // 16) + 1


def test_the_payload_is_copied_not_kept():
    array = GOOD.copy()
    trace = decode(array)
    array[:] = 0
    assert torch.equal(trace.topk_indices[:-1], torch.from_numpy(GOOD))


def test_arrays_name_their_axes():
    array = np.moveaxis(GOOD, 0, 2)[None]  # [1, layer, expert, token]
    trace = engines.array.decode(array, model=ALL, axes=("batch", "layer", "expert", "token"), num_tokens=S)
    assert torch.equal(trace.topk_indices[:-1], torch.from_numpy(GOOD))
    shuffled = engines.array.decode(
        GOOD[:, [2, 0, 1]], model=ALL, axes=("token", "layer", "expert"), layer_numbers=(3, 1, 2), num_tokens=S
    )
    assert torch.equal(shuffled.topk_indices, trace.topk_indices)
    full = np.concatenate([GOOD, GOOD[:1]])
    assert engines.array.decode(full, model=ALL, axes=("token", "layer", "expert"), num_tokens=S).replay_mask.all()
    for axes in (("token", "layer"), ("token", "token", "expert"), ("batch", "layer", "expert")):
        with pytest.raises(PayloadError, match="axes"):
            engines.array.decode(GOOD, model=ALL, axes=axes, num_tokens=S)
    with pytest.raises(PayloadError, match=r"no routes of the MoE layers \[3\]"):
        engines.array.decode(GOOD, model=ALL, axes=("token", "layer", "expert"), layer_numbers=(1, 2, 4), num_tokens=S)


def test_transformers_layers_that_were_not_seen_are_named():
    seen = {1: GOOD[:, 0], 2: GOOD[:, 1]}
    with pytest.raises(PayloadError, match=r"missing \[3\]"):
        engines.transformers.decode(seen, model=ALL, token_ids=IDS)
    seen[3] = [(torch.zeros(1, 16), torch.zeros(1, 2), torch.from_numpy(GOOD[i : i + 1, 2])) for i in range(S - 1)]
    trace = engines.transformers.decode(seen, model=ALL, token_ids=IDS)
    assert torch.equal(trace.topk_indices[:-1], torch.from_numpy(GOOD))
