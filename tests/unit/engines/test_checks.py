"""The checks of a broken engine's rows, each at its boundary."""

import contextlib

import numpy as np
import pytest

from megatron_router_replay.engines import ModelRoutingInfo
from megatron_router_replay.engines.checks import (
    check_constant_layers,
    check_lost_rows,
    check_range,
    explain_repeats,
)
from megatron_router_replay.engines.payload import Source
from megatron_router_replay.errors import PayloadError

SOURCE = Source(engine="E", field="f")


def refused(message):
    """The body raises this message, or nothing where it is None."""
    return contextlib.nullcontext() if message is None else pytest.raises(PayloadError, match=message)


def model_of(num_layers, num_experts, topk):
    layers = tuple(range(1, num_layers + 1))
    return ModelRoutingInfo(num_layers=num_layers, moe_layer_numbers=layers, num_experts=num_experts, topk=topk)


@pytest.mark.parametrize(
    ("route", "cause"),
    [([0, 7], None), ([0, 8], "physical ids"), ([-1, 7], "Negative ids"), ([-1, 8], "physical ids")],
)
def test_ids_from_0_to_the_last_expert_are_legal(route, cause):
    values = np.array([[[1, 2], [3, 4]], [[1, 2], route]])
    with refused(cause and rf"row 6, layer 9 of topk_indices is \[{route[0]}, {route[1]}\].*{cause}"):
        check_range(values, 5, (2, 9), SOURCE, model_of(2, 8, 2))


@pytest.mark.parametrize(
    ("bad_rows", "num_prompt_tokens", "span"),
    [
        ([1], None, r"row 11; first: row 11, layer_number 2 = \[3, 3\]"),
        ([1, 2], None, r"rows 11\.\.12; first: row 11"),
        ([1, 2], 12, r"rows 11\.\.12 \(prompt and generation\)"),
        ([1, 2], 13, r"rows 11\.\.12 \(prompt\)"),
        ([1, 2], 11, r"rows 11\.\.12 \(generation\)"),
        ([2], 12, r"row 12 \(generation\)"),
    ],
)
def test_repeats_are_explained_by_their_first_row_and_their_part(bad_rows, num_prompt_tokens, span):
    rows = np.array([[[0, 1], [2, 3]]] * 4)
    rows[bad_rows, 1] = 3
    error = explain_repeats(
        rows, first_row=10, num_prompt_tokens=num_prompt_tokens, model=model_of(2, 8, 2), source=SOURCE
    )
    with pytest.raises(PayloadError, match=rf"{len(bad_rows)} routes name an expert twice, in layers \[2\], {span}"):
        raise error


def test_zeros_are_explained_as_lost():
    rows = np.array([[[0, 1], [0, 0]], [[5, 5], [2, 3]]])
    error = explain_repeats(rows, first_row=0, num_prompt_tokens=None, model=model_of(2, 8, 2), source=SOURCE)
    assert str(error).startswith(
        "E: f: 1 routes are all zero, in layers [1, 2], rows 0..1; first: row 0, layer_number 2"
    )


@pytest.mark.parametrize(
    ("num_rows", "num_different", "is_refused"),
    [(31, None, False), (32, None, True), (32, 31, False), (32, 32, True), (40, 31, False), (40, 32, True)],
)
def test_a_layer_is_constant_from_32_different_tokens_on(num_rows, num_different, is_refused):
    rows = np.stack([[[i % 7, 7], [3, 4]] for i in range(num_rows)])
    token_ids = None if num_different is None else np.arange(num_rows) % num_different
    message = rf"layers \[2\] .* \[3, 4\] in all {num_rows} rows 5\.\.{5 + num_rows - 1} \(prompt\)"
    with refused(message if is_refused else None):
        check_constant_layers(
            rows, name="prompt", first_row=5, token_ids=token_ids, model=model_of(2, 8, 2), source=SOURCE
        )


def test_a_layer_that_changes_once_behind_the_first_32_rows_is_not_constant():
    rows = np.stack([[[i % 7, 7], [3, 4]] for i in range(40)])
    rows[36, 1] = [4, 3]
    check_constant_layers(rows, name="all", first_row=0, token_ids=None, model=model_of(2, 8, 2), source=SOURCE)


def test_a_model_that_uses_all_its_experts_has_one_route():
    rows = np.tile(np.arange(4), (40, 2, 1))
    check_constant_layers(rows, name="all", first_row=0, token_ids=None, model=model_of(2, 4, 4), source=SOURCE)


@pytest.mark.parametrize(
    ("num_layers", "num_experts", "is_refused"), [(5, 256, True), (5, 255, False), (4, 256, False)]
)
def test_a_row_of_zeros_is_lost_where_a_balanced_router_sends_it_once_in_2_to_40(num_layers, num_experts, is_refused):
    rows = np.ones((6, num_layers, 1), np.uint8)
    rows[2:4] = 0
    rows[4, 1:] = 0
    model = model_of(num_layers, num_experts, 1)
    with refused(r"2 rows 5\.\.6 \(prompt\) are 0 in all 5 MoE layers" if is_refused else None):
        check_lost_rows(rows, name="prompt", first_row=3, model=model, source=SOURCE)
