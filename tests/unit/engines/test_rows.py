"""The rule of rows, and the shapes that a sample's arrays may have, each at its boundary."""

import numpy as np
import pytest

from megatron_router_replay.engines import DecodeOptions, ModelRoutingInfo
from megatron_router_replay.engines.payload import Source
from megatron_router_replay.engines.rows import RowLayout, SampleRows, check_rows, find_columns, most_ids
from megatron_router_replay.engines.tokens import SampleTokens
from megatron_router_replay.errors import PayloadError

MODEL = ModelRoutingInfo(num_layers=4, moe_layer_numbers=(2, 3), num_experts=16, topk=2, num_shared_experts=1)
SOURCE = Source(engine="E", field="f")


def sample(*shapes, num_tokens=10, num_prompt_tokens=4, may_be_empty=False, token_ids=None, layout=None, **options):
    parts = tuple(np.zeros(shape, np.uint8) for shape in shapes)
    return SampleRows(
        source=SOURCE,
        layout=RowLayout(parts=parts, **(layout or {})),
        tokens=SampleTokens(num_tokens=num_tokens, num_prompt_tokens=num_prompt_tokens, token_ids=token_ids),
        options=DecodeOptions(**options),
        may_be_empty=may_be_empty,
    )


def refused(one, message):
    with pytest.raises(PayloadError, match=message):
        check_rows(one, MODEL)


@pytest.mark.parametrize("start", [0, 3, 9])
def test_s_minus_1_minus_start_rows_are_legal_and_no_others(start):
    legal = 10 - 1 - start
    for rows in {*range(12)} - {legal}:
        refused(sample((rows, 4, 2), start=start), f"has {rows} rows for tokens {start}\\.\\.9: expected {legal} ")
    check_rows(sample((legal, 4, 2), start=start), MODEL)


def test_a_start_at_the_end_has_no_rows_and_one_behind_it_is_refused():
    check_rows(sample((0, 4, 2), start=10), MODEL)
    refused(sample((0, 4, 2), start=11), r"start=11 must lie in 0\.\.10")


@pytest.mark.parametrize(
    ("rows", "options", "layout", "advice"),
    [
        (10, {"start": 3}, {}, "ignored start"),
        (9, {"start": 3}, {}, "ignored start"),
        (8, {"start": 3}, {}, "Surplus rows"),
        (7, {"start": 3}, {}, "One more"),
        (10, {}, {}, "One more"),
        (11, {}, {}, "Surplus rows"),
        (8, {}, {}, "Was start passed on"),
        (11, {"allow_surplus_rows": True}, {"explain_surplus": "Because."}, "Because"),
    ],
)
def test_a_wrong_number_of_rows_is_explained(rows, options, layout, advice):
    refused(sample((rows, 4, 2), layout=layout, **options), advice)


def test_surplus_rows_are_legal_if_allowed_and_missing_ones_never():
    for rows in (9, 10, 11, 500):
        check_rows(sample((rows, 4, 2), allow_surplus_rows=True), MODEL)
    refused(sample((8, 4, 2), allow_surplus_rows=True), "has 8 rows")


def test_a_row_of_the_last_token_is_legal_where_an_engine_may_send_one():
    for layout in ({"may_have_last_row": True}, {"may_have_last_row": True, "last_row_is_route": True}):
        check_rows(sample((10, 4, 2), layout=layout), MODEL)
        check_rows(sample((9, 4, 2), layout=layout), MODEL)
        refused(sample((11, 4, 2), layout=layout), "expected 9 .* or 10")
    nothing_generated = sample((10, 4, 2), num_prompt_tokens=10)
    check_rows(nothing_generated, MODEL)
    assert nothing_generated.last_row_is_route
    assert not sample((9, 4, 2)).last_row_is_route


def test_an_aborted_request_may_have_no_rows():
    check_rows(sample(may_be_empty=True), MODEL)
    refused(sample(), "has 0 rows")
    refused(sample((8, 4, 2), may_be_empty=True), "has 8 rows")


def test_memory_for_tokens_that_a_response_only_claims_is_bounded():
    check_rows(sample(num_tokens=1 << 20, may_be_empty=True), MODEL)
    refused(sample(num_tokens=(1 << 20) + 1, may_be_empty=True), "claims 1048577 prompt tokens")
    check_rows(sample(num_tokens=(1 << 20) + 1, may_be_empty=True, token_ids=np.zeros(1, np.int32)), MODEL)


@pytest.mark.parametrize("shape", [(9, 8), (72,), (9, 4, 2, 1), ()])
def test_an_array_has_three_axes(shape):
    refused(sample(shape), r"expected \[rows, layers, topk\] = \[rows, 4, 2\]")


@pytest.mark.parametrize(
    ("width", "message"),
    [
        (1, "has 1 experts a token.*Is this the config"),
        (3, "has 3 experts a token, the model's topk is 2. The 1 more are the shared experts"),
        (4, "has 4 experts a token.*Is this the config"),
    ],
)
@pytest.mark.parametrize("num_tokens", [2, 10])
def test_another_width_is_refused_also_of_a_single_row(width, message, num_tokens):
    refused(sample((num_tokens - 1, 4, width), num_tokens=num_tokens, num_prompt_tokens=1), message)


def test_another_number_of_layers_is_refused_also_of_a_single_row():
    refused(sample((1, 2, 2), num_tokens=2), r"has 2 layers, the model has 4 \(2 of them MoE\)")
    refused(sample((1, 0, 2), num_tokens=2), "has 0 layers")


def test_no_rows_may_have_any_width():
    check_rows(sample((0, 0, 0), (9, 4, 2)), MODEL)


@pytest.mark.parametrize(
    ("layout", "num_columns", "columns"),
    [
        ({}, 4, ((1, 2), (0, 3))),
        ({"filler_columns": ()}, 4, ((1, 2), ())),
        ({"moe_columns": (0, 1)}, 2, ((0, 1), ())),
        ({"moe_columns": (0, 1), "filler_columns": (2,)}, 3, ((0, 1), (2,))),
    ],
)
def test_the_columns_of_a_layout(layout, num_columns, columns):
    assert find_columns(sample((9, num_columns, 2), layout=layout), num_columns, MODEL) == columns
    for other in (num_columns - 1, num_columns + 1):
        with pytest.raises(PayloadError, match=f"has {other} layers"):
            find_columns(sample((9, other, 2), layout=layout), other, MODEL)


def test_a_text_may_hold_a_few_thousand_rows_too_many_and_the_shared_experts():
    tokens = SampleTokens(num_tokens=10, num_prompt_tokens=None, token_ids=None)
    assert most_ids(MODEL, tokens, DecodeOptions()) == (10 + 4096) * 4 * 3
    assert most_ids(MODEL, tokens, DecodeOptions(allow_surplus_rows=True)) == (10 + 65536) * 4 * 3
