"""The one check of rows, each fault at its boundary; what trainers and decoders make of them is in their own tests."""

import contextlib

import numpy as np
import pytest

from megatron_router_replay.engines.payload import Source
from megatron_router_replay.engines.row_check import RowCheck
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import routes

SOURCE = Source(engine="E", field="f")
TWO = [[0, 1], [2, 3]]


def check_of(num_layers, num_experts=8, topk=2, **options):
    return RowCheck(layer_numbers=tuple(range(1, num_layers + 1)), num_experts=num_experts, topk=topk, **options)


def refused(message):
    """The body raises this message, or nothing where it is None."""
    return contextlib.nullcontext() if message is None else pytest.raises(PayloadError, match=message)


def copy(check, rows, *, kept=None, **options):
    """Return (what was copied, which rows have a route)."""
    rows = np.asarray(rows)
    kept = list(range(rows.shape[1])) if kept is None else kept
    out = np.zeros((len(rows), len(kept), rows.shape[2]), np.uint8)
    columns = tuple(range(rows.shape[1]))
    routed = check.copy(rows, out, columns=columns, kept=kept, source=SOURCE, **options)
    return out, routed


@pytest.mark.parametrize(
    ("route", "cause"),
    [([0, 7], None), ([0, 8], "physical ids"), ([-1, 7], "Negative ids"), ([-1, 8], "physical ids")],
)
def test_ids_from_0_to_the_last_expert_are_legal(route, cause):
    with refused(cause and rf"row 6, layer 2 of topk_indices is \[{route[0]}, {route[1]}\].*{cause}"):
        copy(check_of(2), [[[1, 2], [3, 4]], [[1, 2], route]], first_row=5)


@pytest.mark.parametrize(
    ("bad_rows", "border", "where"),
    [
        ([1], None, r"row 11; first: row 11, layer_number 2 = \[3, 3\]"),
        ([1, 2], None, r"rows 11\.\.12; first: row 11"),
        ([1, 2], 12, r"rows 11\.\.12 \(prompt and generation\)"),
        ([1, 2], 13, r"rows 11\.\.12 \(prompt\)"),
        ([1, 2], 11, r"rows 11\.\.12 \(generation\)"),
        ([2], 12, r"row 12 \(generation\)"),
    ],
)
def test_repeats_are_explained_by_their_first_row_and_their_part(bad_rows, border, where):
    rows = np.array([TWO] * 4)
    rows[bad_rows, 1] = 3
    with refused(rf"{len(bad_rows)} routes name an expert twice, in layers \[2\], {where}"):
        copy(check_of(2), rows, first_row=10, border=border)


def test_zeros_are_explained_as_lost():
    with refused(
        r"1 routes are all zero, in layers \[1, 2\], rows 0\.\.1; first: row 0, layer_number 2 .*missing='live'"
    ):
        copy(check_of(2), [[[0, 1], [0, 0]], [[5, 5], [2, 3]]])


def test_what_is_missing_is_left_out_and_counted_where_that_is_allowed():
    check = check_of(2, missing="live")
    out, routed = copy(check, [TWO, [[-1, -1]] * 2, [[4, 4], [2, 3]], [[6, 7], [0, 1]]])
    assert routed.tolist() == [True, False, False, True]
    assert out[[0, 3]].tolist() == [TWO, [[6, 7], [0, 1]]]
    assert (check.num_absent, check.num_lost) == (1, 1)
    with refused("row 1, layer 1 .* outside"):  # a row is -1 altogether or not at all
        copy(check, [TWO, [[-1, -1], [0, 1]]])


def test_rows_that_have_no_route_are_not_looked_at():
    rows = np.array([[[9, 9], [99, 0]], TWO, [[0, 0], [0, 0]]])
    out, routed = copy(check_of(2), rows, has_route=np.array([False, True, False]))
    assert routed.tolist() == [False, True, False]
    assert out[1].tolist() == TWO


def test_layers_that_are_not_kept_are_checked_all_the_same():
    out, _ = copy(check_of(2), [TWO], kept=[1])
    assert out.tolist() == [[[2, 3]]]
    with refused("layer_number 1"):
        copy(check_of(2), [[[1, 1], [2, 3]]], kept=[1])


@pytest.mark.parametrize(("dtype", "num_experts", "fits"), [
    (np.uint8, 256, True), (np.uint8, 257, False), (np.int8, 128, True), (np.int8, 129, False), (np.int16, 32768, True),
])  # fmt: skip
def test_a_dtype_that_cannot_hold_the_experts_has_wrapped_them(dtype, num_experts, fits):
    with refused(None if fits else f"which cannot hold the ids of {num_experts} experts: a cast has wrapped them"):
        check_of(1, num_experts=num_experts).check_dtype(np.dtype(dtype), SOURCE)


def test_what_nobody_takes_for_a_route_is_filler_where_none_should_be():
    two = [[[2, 3], [4, 5]], [[2, 3], [2, 3]], [[3, 2], [2, 3]], [[2, 3], [4, -1]], [[2, 3], [5, 5]], [[0, 1], [0, 1]]]
    assert check_of(2).is_filler(np.array(two)).tolist() == [False, True, False, True, True, True]
    one = [[[0, 1]], [[1, 0]], [[2, 3]], [[4, 4]]]  # of one layer any route is the same in every layer
    assert check_of(1).is_filler(np.array(one)).tolist() == [True, False, False, True]


@pytest.mark.parametrize("hot", [0.0, 0.5, 0.9, 0.95])
@pytest.mark.parametrize("num_layers", [1, 2, 6, 48])
@pytest.mark.parametrize("topk", [1, 2])
def test_legal_routes_that_look_odd_are_all_believed(hot, num_layers, topk):
    """Hot experts, one token many times, loops: a trained model does all of it, and no rule of chance may refuse it."""
    for num_tokens in (1, 40, 997, 4096):
        rng = np.random.default_rng([num_tokens, num_layers, topk])
        drawn = routes(num_tokens, num_layers, num_experts=16, topk=topk, seed=rng)
        skewed = np.where(rng.random((num_tokens, num_layers, 1)) < hot, np.arange(topk), drawn)
        for rows in (skewed, np.repeat(skewed[:1], num_tokens, axis=0), skewed[np.arange(num_tokens) % 7 % num_tokens]):
            out, routed = copy(check_of(num_layers, 16, topk), rows)
            assert routed.all()
            assert np.array_equal(out, rows)
        copied = np.repeat(skewed[:, :1], num_layers, axis=1)  # every layer chooses as the first one
        assert copy(check_of(num_layers, 16, topk), copied)[1].all()
