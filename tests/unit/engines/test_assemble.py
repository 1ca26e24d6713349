"""Samples become one trace: each row where it belongs, in its dtype, checked in every block."""

import numpy as np
import pytest
import torch

from megatron_router_replay.engines import DecodeOptions, ModelRoutingInfo
from megatron_router_replay.engines.assemble import build_trace
from megatron_router_replay.engines.payload import Source
from megatron_router_replay.engines.rows import RowLayout, SampleRows
from megatron_router_replay.engines.tokens import SampleTokens
from megatron_router_replay.errors import PayloadError

MODEL = ModelRoutingInfo(num_layers=3, moe_layer_numbers=(1, 3), num_experts=8, topk=2)
LAST = {"may_have_last_row": True, "last_row_is_route": True}


def sample(*parts, num_tokens=None, prompt=None, ids=None, version=None, name="s", layout=None, **options):
    parts = tuple(np.asarray(part) for part in parts)
    rows = sum(len(part) for part in parts)
    return SampleRows(
        source=Source(engine="E", field="f", sample=name),
        layout=RowLayout(parts=parts, **({"moe_columns": (0, 1)} | (layout or {}))),
        tokens=SampleTokens(
            num_tokens=rows + 1 if num_tokens is None else num_tokens,
            num_prompt_tokens=prompt,
            token_ids=None if ids is None else np.array(ids, np.int32),
        ),
        options=DecodeOptions(**options),
        weight_version=None if version is None else np.array(version, np.int32),
    )


def rows(*experts, dtype=np.uint8):
    """A row of two layers for each number e: the experts e, e + 1 and e + 2, e + 3."""
    return np.array([[[e, e + 1], [e + 2, e + 3]] for e in experts], dtype).reshape(len(experts), 2, 2)


def refused(message, *samples, model=MODEL):
    with pytest.raises(PayloadError, match=message):
        build_trace(samples, model=model)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64])
def test_samples_stand_behind_one_another_with_filler_where_there_is_no_route(dtype):
    trace = build_trace(
        [
            sample(rows(0, 1, dtype=dtype), rows(2, dtype=dtype)),
            sample(rows(3, dtype=dtype), num_tokens=4, start=2),
            sample(rows(dtype=dtype), num_tokens=1),
            sample(rows(4, 4, dtype=dtype), num_tokens=2, layout=LAST),
        ],
        model=MODEL,
    )
    assert trace.topk_indices.dtype is torch.uint8
    assert trace.layer_numbers == (1, 3)
    assert trace.sequence_lengths == (4, 4, 1, 2)
    assert trace.replay_mask.tolist() == [True, True, True, False, False, False, True, False, False, True, True]
    routed = [0, 1, 2, None, None, None, 3, None, None, 4, 4]
    for row, expert in enumerate(routed):
        if expert is not None:
            assert trace.topk_indices[row].tolist() == rows(expert).tolist()[0]
    # Filler is spread by the token's place in its sample: ids 2 i and 2 i + 1, modulo 8.
    filler = [trace.topk_indices[row].tolist() for row in (3, 4, 5, 7, 8)]
    assert filler == [[[2 * i % 8, 2 * i % 8 + 1]] * 2 for i in (3, 0, 1, 3, 0)]


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, torch.uint8), (257, torch.int16)])
def test_ids_are_stored_as_narrow_as_the_model_allows(num_experts, dtype):
    model = ModelRoutingInfo(num_layers=1, moe_layer_numbers=(1,), num_experts=num_experts, topk=2)
    top = num_experts - 1
    trace = build_trace([sample([[[0, top]]], layout={"moe_columns": None})], model=model)
    assert trace.topk_indices.dtype is dtype
    assert trace.topk_indices[0].tolist() == [[0, top]]
    for array in ([[[0, top + 1]]], np.array([[[0, top + 1]]], np.int16)):
        refused(
            rf"row 0, layer 1 of topk_indices is \[0, {top + 1}\]",
            sample(array, layout={"moe_columns": None}),
            model=model,
        )


def test_memory_comes_from_whoever_is_asked_for_it():
    sizes = []
    memory = np.zeros(64, np.uint8)
    trace = build_trace([sample(rows(0, 1))], model=MODEL, allocate=lambda size: sizes.append(size) or memory[:size])
    assert sizes == [3 * 2 * 2]
    assert memory[:8].tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
    assert trace.topk_indices.data_ptr() == memory.ctypes.data
    wide = ModelRoutingInfo(num_layers=3, moe_layer_numbers=(1, 3), num_experts=257, topk=2)
    build_trace([sample(rows(0, 1))], model=wide, allocate=lambda size: sizes.append(size) or memory[:size])
    assert sizes[1] == 2 * sizes[0]
    assert memory[:8].view(np.int16).tolist() == [0, 1, 2, 3]


def test_surplus_rows_are_dropped_and_so_is_padding_of_the_last_token():
    trace = build_trace([sample(rows(0, 1, 2, 3), num_tokens=3, allow_surplus_rows=True)], model=MODEL)
    assert trace.replay_mask.tolist() == [True, True, False]
    assert trace.topk_indices[:2].tolist() == rows(0, 1).tolist()
    trace = build_trace([sample(rows(0), rows(1, 2), num_tokens=3, layout={"may_have_last_row": True})], model=MODEL)
    assert trace.replay_mask.tolist() == [True, True, False]
    trace = build_trace([sample(rows(0), rows(1, 2), num_tokens=3, layout=LAST)], model=MODEL)
    assert trace.replay_mask.tolist() == [True] * 3


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
@pytest.mark.parametrize("row", [0, 262_143, 262_144, 299_999])
def test_a_fault_in_any_block_is_named_by_its_row(dtype, row):
    array = np.tile(rows(0, 1, 2, dtype=dtype), (100_000, 1, 1))
    array[row, 1] = [8, 0]
    options = {"num_tokens": 300_006, "start": 5}
    refused(rf"row {row + 5}, layer 3 of topk_indices is \[8, 0\]", sample(array, **options))
    array[row, 1] = [5, 5]
    refused(
        rf"1 routes name an expert twice.* row {row + 5}; first: row {row + 5}, layer_number 3",
        sample(array, **options),
    )


def test_the_rows_of_the_second_part_are_counted_behind_those_of_the_first():
    refused("row 3, layer 1 of topk_indices", sample(rows(0, 1, 2), [[[9, 0], [1, 2]]]))
    refused(r"row 3 \(generation\); first: row 3", sample(rows(0, 1, 2), [[[1, 1], [1, 2]]], prompt=3))
    # Rows that are dropped are not looked at.
    build_trace([sample(rows(0, 1), [[[1, 1], [9, 9]]], num_tokens=3, allow_surplus_rows=True)], model=MODEL)


@pytest.mark.parametrize("filler", [0, -1])
def test_columns_of_other_layers_hold_filler(filler):
    array = np.insert(rows(0, 1, 2, dtype=np.int32), 1, filler, axis=1)
    for layout in ({"moe_columns": None}, {"moe_columns": (0, 2), "filler_columns": (1,)}):
        trace = build_trace([sample(array, layout=layout)], model=MODEL)
        assert trace.topk_indices[:3].tolist() == rows(0, 1, 2).tolist()
        for wrong in ([0, 1], [-1, 0], [1, 1]):
            broken = array.copy()
            broken[1, 1] = wrong
            where = "layer_number 2" if layout["moe_columns"] is None else "column 1"
            refused(f"{where} is dense .* but row ", sample(broken, layout=layout))
    broken = array.copy()
    broken[2, 1] = 5
    if filler == 0:
        refused(r"row 3 holds \[5, 5\]", sample(broken, num_tokens=5, start=1, layout={"moe_columns": None}))
    build_trace([sample(broken, layout={"moe_columns": None, "filler_columns": ()})], model=MODEL)


def test_columns_in_another_order_are_put_in_the_order_of_the_layers():
    trace = build_trace([sample(rows(0, 1)[:, ::-1], layout={"moe_columns": (1, 0)})], model=MODEL)
    assert trace.topk_indices[:2].tolist() == rows(0, 1).tolist()
    refused(
        "row 1, layer 3 of topk_indices", sample([[[2, 3], [0, 1]], [[8, 0], [0, 1]]], layout={"moe_columns": (1, 0)})
    )
    wide = np.array([[[2, 3], [0, 1]], [[8, 0], [0, 1]]], np.int64)
    refused("row 1, layer 3 of topk_indices", sample(wide, layout={"moe_columns": (1, 0)}))


CONSTANT = rows(*[0] * 32)
VARIED = rows(*[i % 5 for i in range(32)])


@pytest.mark.parametrize(
    ("array", "start", "prompt", "message"),
    [
        (np.concatenate([VARIED, CONSTANT]), 0, 32, r"rows 32\.\.63 \(generation\)"),
        (np.concatenate([CONSTANT, VARIED]), 0, 32, r"rows 0\.\.31 \(prompt\)"),
        (np.concatenate([CONSTANT, VARIED]), 0, None, None),
        (np.concatenate([CONSTANT, VARIED]), 0, 34, None),
        (np.concatenate([CONSTANT, CONSTANT]), 0, None, r"rows 0\.\.63 \(all\)"),
        (np.concatenate([CONSTANT, CONSTANT]), 8, None, r"rows 8\.\.71 \(all\)"),
        (CONSTANT, 0, 0, r"rows 0\.\.31 \(generation\)"),
        (CONSTANT, 9, 5, r"rows 9\.\.40 \(generation\)"),
        (CONSTANT, 68, 101, r"rows 68\.\.99 \(prompt\)"),
    ],
)
def test_each_part_is_looked_at_by_itself(array, start, prompt, message):
    given = {"start": start, "prompt": prompt, "num_tokens": start + len(array) + 1}
    ids = range(given["num_tokens"])
    if message is None:
        build_trace([sample(array, ids=ids, **given)], model=MODEL)
        return
    refused(message, sample(array, **given))
    refused(message, sample(array, ids=ids, **given))
    build_trace([sample(array, allow_constant_layers=True, **given)], model=MODEL)
    # Few different tokens: degenerate output is believed.
    build_trace([sample(array, ids=[i % 31 for i in ids], **given)], model=MODEL)


def test_lost_rows_of_a_model_that_chooses_one_expert():
    layers = tuple(range(1, 21))
    model = ModelRoutingInfo(num_layers=20, moe_layer_numbers=layers, num_experts=4, topk=1)
    array = np.random.default_rng(0).integers(0, 4, (6, 20, 1)).astype(np.uint8)
    array[:, 0] = 1
    everything = {"moe_columns": None}
    build_trace([sample(array, layout=everything)], model=model)
    array[4] = 0
    refused(r"1 rows 4\.\.4 \(generation\) are 0", sample(array, prompt=3, layout=everything), model=model)
    refused(r"1 rows 4\.\.4 \(prompt\) are 0", sample(array, prompt=6, layout=everything), model=model)


@pytest.mark.parametrize(
    ("what", "having"),
    [
        ("token ids", {"ids": [1, 2]}),
        ("sample id", {"sample_id": "a"}),
        ("weight version", {"version": [3, 3]}),
    ],
)
def test_all_samples_have_it_or_none_has(what, having):
    for pair in ([having, {}], [{}, having]):
        samples = [sample(rows(0), name=f"number {i}", **options) for i, options in enumerate(pair)]
        refused(f"number {pair.index({})}: has no {what} while others", *samples)
    assert build_trace([sample(rows(0))], model=MODEL).token_ids is None


def test_what_all_samples_have_is_joined():
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


def test_no_samples_are_a_trace_of_no_rows():
    trace = build_trace([], model=MODEL)
    assert (len(trace), trace.sequence_lengths, trace.sample_ids, trace.token_ids) == (0, (), None, None)
