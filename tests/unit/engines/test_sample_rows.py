"""The number of rows and columns that a sample's arrays may have, each at its boundary; the check and place of each row."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_router_replay import engines
from megatron_router_replay.engines import DecodeOptions, ModelRoutingInfo
from megatron_router_replay.engines.payload import Source
from megatron_router_replay.engines.row_check import copy_routes
from megatron_router_replay.engines.sample_rows import RowLayout, SampleRows, build_trace
from megatron_router_replay.engines.tokens import SampleTokens
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import all_moe, routes, sglang_result, tokens

MODEL = ModelRoutingInfo(num_layers=3, moe_layer_numbers=(1, 3), num_experts=8, topk=2)
WIDE = ModelRoutingInfo(num_layers=4, moe_layer_numbers=(2, 3), num_experts=16, topk=2)
SOURCE = Source(engine="E", field="f")


def sample(
    *parts, num_tokens=None, prompt=None, ids=None, version=None, layers=(1, 3), layout=(), may_be_empty=False, **given
):  # fmt: skip
    parts = tuple(np.asarray(part) for part in parts)
    num_rows = sum(len(part) for part in parts if part.ndim)
    return SampleRows(
        source=SOURCE,
        layout=RowLayout(arrays=parts, layer_numbers=layers, **dict(layout)),
        tokens=SampleTokens(
            num_tokens=num_rows + 1 if num_tokens is None else num_tokens,
            num_prompt_tokens=prompt,
            token_ids=None if ids is None else np.array(ids, np.int32),
            weight_version=None if version is None else np.array(version, np.int32),
        ),
        options=DecodeOptions(**given),
        may_be_empty=may_be_empty,
    )


def rows(*experts, dtype=np.uint8):
    """A row of two layers for each number e: the experts e, e + 1 and e + 2, e + 3."""
    return np.array([[[e, e + 1], [e + 2, e + 3]] for e in experts], dtype).reshape(len(experts), 2, 2)


def refused(message, *samples, model=MODEL):
    with pytest.raises(PayloadError, match=message):
        build_trace(samples, model=model)


def of_ten(num_rows, **options):
    """`num_rows` rows for ten tokens of WIDE."""
    return sample(routes(num_rows, 2, num_experts=16, topk=2), num_tokens=10, prompt=4, layers=(2, 3), **options)


@pytest.mark.parametrize(
    ("num_rows", "options", "message"),
    [
        (10, {"start": 3}, r"has 10 rows for tokens 3\.\.9: expected 6 .*ignored start .*: decode with start=0.$"),
        (9, {"start": 3}, "ignored start"),
        (8, {}, "has 8 rows .*: expected 9 .*prompt with BOS and output, and is start right.$"),
        (10, {}, "expected 9 .*BOS.*Speculative decoding of vLLM before 0.32"),
        (8, {"may_be_empty": True}, "has 8 rows"),
        (0, {}, "has 0 rows"),
        (0, {"start": 11}, r"start=11 must lie in 0\.\.10"),
        (6, {"start": 3, "layout": {"start": 4}}, "rows begin at token 4, not at start=3"),
    ],
)
def test_a_wrong_number_of_rows_is_explained(num_rows, options, message):
    refused(f"MRR305: .*{message}", of_ten(num_rows, **options), model=WIDE)


def test_each_legal_number_of_rows_is_accepted():
    stated = {"layout": {"start": 4}}
    legal = [of_ten(9), of_ten(6, start=3), of_ten(0, start=9), of_ten(0, start=10), of_ten(0, may_be_empty=True)]
    trace = build_trace([*legal, of_ten(5, **stated), of_ten(5, start=4, **stated)], model=WIDE)
    assert [int(one.replay_mask.sum()) for one in trace.samples()] == [9, 6, 0, 0, 0, 5, 5]
    build_trace([sample(num_tokens=1 << 20, may_be_empty=True)], model=MODEL)
    refused("MRR309: .*claims 1048577 tokens", sample(num_tokens=(1 << 20) + 1, may_be_empty=True))


@pytest.mark.parametrize(("last_row", "is_routed"), [("padding", False), ("route", True)])
def test_a_row_of_the_last_token_is_legal_where_an_engine_may_send_one(last_row, is_routed):
    layout = {"last_row": last_row}
    for parts in ([rows(0, 1, 2)], [rows(0), rows(1, 2)]):
        trace = build_trace([sample(*parts, num_tokens=3, layout=layout)], model=MODEL)
        assert trace.replay_mask.tolist() == [True, True, is_routed]
    assert build_trace([sample(rows(0, 1), num_tokens=3, layout=layout)], model=MODEL).replay_mask.sum() == 2
    refused("expected 2 or 3", sample(rows(0, 1, 2, 3), num_tokens=3, layout=layout))
    # Of a prompt alone the last token was forwarded.
    assert build_trace([sample(rows(0, 1, 2), num_tokens=3, prompt=3)], model=MODEL).replay_mask.tolist() == [True] * 3


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        *((shape, r"expected \[rows, layers, topk\] = \[rows, 4, 2\]") for shape in ((9, 8), (72,), (9, 4, 2, 1), ())),
        ((9, 4, 1), "has 1 experts a token, the model's topk is 2.*Shared experts are not routed"),
        ((1, 4, 3), "has 3 experts a token"),
        ((9, 3, 2), "has 3 layers, expected 4: .* pipeline stages"),
        ((9, 2, 2), r"has 2 layers, .*MoE layers alone, engines\.array\.decode names them: layer_numbers=\[2, 3\]"),
    ],
)
def test_an_array_has_three_axes_and_the_models_width_and_layers(shape, message):
    refused(f"MRR306: .*{message}", sample(np.zeros(shape, int), num_tokens=10, layers=(1, 2, 3, 4)), model=WIDE)


@pytest.mark.parametrize("filler", [0, -1])
def test_columns_of_dense_layers_hold_filler(filler):
    array = np.insert(rows(0, 1, 2, dtype=np.int32), 1, filler, axis=1)
    every = {"layers": (1, 2, 3)}
    trace = build_trace([sample(array, **every)], model=MODEL)
    assert trace.topk_indices[:3].tolist() == rows(0, 1, 2).tolist()
    for wrong in ([0, 1], [-1, 0], [1, 1]):
        broken = array.copy()
        broken[1, 1] = wrong
        refused("column 1 is of a dense layer .* but row ", sample(broken, **every))
    broken[1] = -1  # a row that was not captured, such as one of a cached prefix: the model's config is right
    refused(r"1 rows 1\.\.1 are -1 in every layer", sample(broken, **every))
    assert build_trace([sample(broken, **every, missing="live")], model=MODEL).replay_mask.tolist()[:3] == [
        True,
        False,
        True,
    ]
    broken = array.copy()
    broken[1, 1] = -1 - filler  # some rows 0 and some -1
    refused("not filler", sample(broken, **every))
    build_trace([sample(broken, **every, missing="live")], model=MODEL)
    broken[2, 1] = 5
    refused(r"row [34567] holds \[", sample(broken, num_tokens=9, start=5, **every))
    build_trace([sample(broken, **every, layout={"ids_in_dense_layers": True})], model=MODEL)


def test_columns_in_another_order_are_put_in_the_order_of_the_layers():
    trace = build_trace([sample(rows(0, 1)[:, ::-1], layers=(3, 1))], model=MODEL)
    assert trace.topk_indices[:2].tolist() == rows(0, 1).tolist()
    wrong = np.array([[[2, 3], [0, 1]], [[8, 0], [0, 1]]], np.uint8)
    refused("row 1, layer 3 of topk_indices", sample(wrong, layers=(3, 1)))


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_samples_follow_one_another_with_filler_where_there_is_no_route(dtype):
    trace = build_trace(
        [
            sample(rows(0, 1, dtype=dtype), rows(2, dtype=dtype)),
            sample(rows(3, dtype=dtype), num_tokens=4, start=2),
            sample(rows(dtype=dtype), num_tokens=1),
            sample(rows(4, 4, dtype=dtype), num_tokens=2, layout={"last_row": "route"}),
        ],
        model=MODEL,
    )
    assert trace.topk_indices.dtype is torch.uint8
    assert (trace.layer_numbers, trace.sequence_lengths) == ((1, 3), (4, 4, 1, 2))
    routed = [0, 1, 2, None, None, None, 3, None, None, 4, 4]
    assert trace.replay_mask.tolist() == [expert is not None for expert in routed]
    for row, expert in enumerate(routed):
        if expert is not None:
            assert trace.topk_indices[row].tolist() == rows(expert).tolist()[0]
    # Filler is spread by the token's place in its sample: ids 2 i and 2 i + 1, modulo 8.
    filler = [trace.topk_indices[row].tolist() for row in (3, 4, 5, 7, 8)]
    assert filler == [[[2 * i % 8, 2 * i % 8 + 1]] * 2 for i in (3, 0, 1, 3, 0)]


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, torch.uint8), (257, torch.int16)])
def test_ids_are_stored_as_narrow_as_the_model_allows(num_experts, dtype):
    model, top = all_moe(1, num_experts), num_experts - 1
    trace = build_trace([sample([[[0, top]]], layers=(1,))], model=model)
    assert (trace.topk_indices.dtype, trace.topk_indices[0].tolist()) == (dtype, [[0, top]])
    for array in ([[[0, top + 1]]], np.array([[[0, top + 1]]], np.int16)):
        refused(rf"row 0, layer 1 of topk_indices is \[0, {top + 1}\]", sample(array, layers=(1,)), model=model)


@pytest.mark.parametrize("row", [0, 262_144, 299_999])
def test_a_fault_in_any_block_is_named_by_its_row(row):
    array = np.tile(rows(0, 1, 2), (100_000, 1, 1))
    for ids in ([8, 0], [5, 5]):
        array[row, 1] = ids
        where = rf"row {row + 5}, layer 3 of topk_indices is \[{ids[0]}, {ids[1]}\]"
        refused(where, sample(array, num_tokens=300_006, start=5))
    refused("row 3, layer 1 of topk_indices", sample(rows(0, 1, 2), [[[9, 0], [1, 2]]]))  # of a second part


def test_rows_before_begin_are_neither_checked_nor_kept():
    part = np.concatenate([np.full((2, 2, 2), 99), rows(0, 1, dtype=np.int64)])
    for parts in ([part], [part[:1], part[1:3], part[3:]]):
        trace = build_trace([replace(sample(*parts), begin=2)], model=MODEL)
        assert trace.replay_mask.tolist() == [False, False, True, True, False]
        assert trace.topk_indices[2:4].tolist() == rows(0, 1).tolist()
        refused("row 1, layer 1 of topk_indices", replace(sample(*parts), begin=1))
    part[2] = 0
    refused("row 2, layer 1 of topk_indices", replace(sample(part), begin=2))


def test_ids_names_and_versions_are_of_all_samples_or_of_none():
    for noun, having in (
        ("token ids", {"ids": [1, 2]}), ("sample id", {"sample_id": "a"}), ("weight version", {"version": [3, 3]})
    ):  # fmt: skip
        for pair in ([having, {}], [{}, having]):
            refused(f"has no {noun} while others", *(sample(rows(0), **options) for options in pair))
    trace = build_trace(
        [
            sample(rows(0), ids=[5, 6], sample_id="a", version=[1, 2]),
            sample(rows(1), ids=[7, 8], sample_id="b", version=[3, 3]),
            sample(num_tokens=1, ids=[9], sample_id="c"),  # no row, so no version that is missing
        ],
        model=MODEL,
    )
    assert trace.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert trace.sample_ids == ("a", "b", "c")
    assert trace.weight_version.tolist() == [1, 2, 3, 3, -1]
    assert trace.weight_version.dtype is trace.token_ids.dtype is torch.int32
    none = build_trace([], model=MODEL)
    assert (len(none), none.sequence_lengths, none.sample_ids, none.token_ids) == (0, (), None, None)


# The check of each row

TWO = [[0, 1], [2, 3]]
REPEATED = np.array([TWO] * 4)
REPEATED[[1, 2], 1] = 3


def copy(array, *, num_experts=8, **options):
    """Return (the copied rows, which of them have a route)."""
    array = np.asarray(array)
    out, layers = np.zeros(array.shape, np.uint8), range(array.shape[1])
    model = all_moe(len(layers), num_experts, array.shape[2])
    options = {"missing": "raise", "first_row": 0} | options
    return out, copy_routes(array, out, columns=layers, model=model, source=SOURCE, **options)


@pytest.mark.parametrize(
    ("array", "options", "message"),
    [
        ([[[1, 2], [3, 4]], [[1, 2], [0, 7]]], {}, None),
        ([[[1, 2], [3, 4]], [[1, 2], [0, 8]]], {}, r"row 11, layer 2 of topk_indices is \[0, 8\].*physical ids"),
        ([[[1, 2], [3, 4]], [[1, 2], [-1, 7]]], {}, r"row 11, layer 2 .*\[-1, 7\].*Negative ids"),
        ([[[1, 2], [3, 4]], [[1, 2], [-1, 8]]], {}, "physical ids"),
        (REPEATED[:2], {}, r"row 11, layer 2 .* is \[3, 3\]: .*twice \(1 such routes in layers \[2\].*No router chooses"),
        (REPEATED, {}, r"row 11, layer 2 .*\(2 such routes in layers \[2\]"),
        ([[[0, 1], [0, 0]], [[5, 5], [2, 3]]], {},
         r"row 10, layer 2 .*\(2 .* layers \[1, 2\].*1 routes are all zero, in rows 10\.\.11.*missing='live'"),
        ([TWO, [[-1, -1]] * 2], {}, r"1 rows 11\.\.11 are -1 in every layer"),
        ([TWO, [[-1, -1], [0, 1]]], {"missing": "live"}, "row 11, layer 1 .* outside"),  # a row is -1 as a whole
        ([[[-1, -1]] * 2, TWO, [[0, 1], [8, 0]]], {"missing": "live"}, "row 12, layer 2 .* outside"),
        (np.array([TWO], np.uint8), {"num_experts": 256}, None),
        (np.array([TWO], np.uint8), {"num_experts": 257}, "cannot hold the ids of 257 experts: a cast has wrapped them"),
        (np.array([TWO], np.int8), {"num_experts": 128}, None),
        (np.array([TWO], np.int8), {"num_experts": 129}, "cannot hold the ids of 129 experts"),
    ],
)  # fmt: skip
def test_a_row_is_a_route_or_raises_with_its_place(array, options, message):
    raises = contextlib.nullcontext() if message is None else pytest.raises(PayloadError, match=message)
    with raises:
        copy(array, first_row=10, **options)


def test_rows_that_are_missing_have_no_route_where_that_is_allowed(caplog):
    out, routed = copy([TWO, [[-1, -1]] * 2, [[4, 4], [2, 3]], [[6, 7], [0, 1]]], missing="live")
    assert routed.tolist() == [True, False, False, True]
    assert out[[0, 3]].tolist() == [TWO, [[6, 7], [0, 1]]]
    build_trace([sample([TWO, [[-1, -1]] * 2, [[4, 4], [2, 3]]], missing="live")], model=MODEL)
    assert "2 rows have no route; the live router decides them" in caplog.text


def test_a_stale_row_over_many_tokens_raises_or_is_live():
    """As SGLang before #36467: one row over 67 tokens at the boundary of a chunked prefill."""
    model, ids = all_moe(6, 32, topk=4), tokens(201)
    rows = routes(200, 6, num_experts=32, topk=4).astype(np.int32)
    rows[64:131] = rows[64]
    reply = sglang_result(rows, 190, ids[190:])
    given = {"model": model, "prompt_token_ids": ids[:190]}
    with pytest.raises(
        PayloadError, match=r"MRR307: .*rows 64 to 130 are one and the same row.*67 different tokens.*#36467"
    ):
        engines.sglang.decode(reply, **given)
    trace = engines.sglang.decode(reply, **given, missing="live")
    assert trace.replay_mask.tolist() == [True] * 64 + [False] * 67 + [True] * 69 + [False]
    assert (trace.topk_indices[64:131].sort(dim=2).values.diff(dim=2) > 0).all(), "legal filler"
    # Of one token that is repeated, equal rows are right; without ids nobody knows.
    loop = ids[:64] + [5] * 67 + ids[131:]
    reply = sglang_result(rows, 190, loop[190:])
    assert engines.sglang.decode(reply, model=model, prompt_token_ids=loop[:190]).replay_mask.sum() == 200
    assert engines.sglang.decode(rows, model=model, num_tokens=201).replay_mask.sum() == 200
