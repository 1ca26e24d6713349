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


def span(check, rows, ids=None, first_row=0):
    rows = np.asarray(rows)
    ids = None if ids is None else np.asarray(list(ids))
    check.check_span(rows, name="all", first_row=first_row, token_ids=ids, source=SOURCE)


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


@pytest.mark.parametrize(("num_layers", "row", "is_filler"), [
    (5, [0, 1], False), (6, [0, 1], True), (6, [7, 3], False), (7, [7, 3], True), (6, [1, 0], False), (7, [1, 0], True),
])  # fmt: skip
def test_one_route_in_every_layer_is_filler_from_40_bits_on(num_layers, row, is_filler):
    """A layer has 16 x 15 routes, 7.9 bits: 0..topk-1 takes six layers, any route one more, which it could be."""
    rows = routes(4, num_layers, num_experts=16, topk=2)
    rows[2] = row
    with refused(r"1 rows 2\.\.2 are filler, the same route in every layer" if is_filler else None):
        copy(check_of(num_layers, num_experts=16), rows)


@pytest.mark.parametrize(("num_layers", "is_filler"), [(5, True), (4, False)])
def test_a_row_of_zeros_of_a_top_1_model_is_filler_from_40_bits_on(num_layers, is_filler):
    rows = routes(6, num_layers, num_experts=256, topk=1)
    rows[3] = 0
    with refused("1 rows 3..3 are filler" if is_filler else None):
        copy(check_of(num_layers, num_experts=256, topk=1), rows)


@pytest.mark.parametrize(("num_rows", "num_different", "is_refused"), [
    (31, 31, False), (32, None, True), (32, 31, False), (32, 32, True), (40, 31, False), (40, 32, True), (31, None, False),
])  # fmt: skip
def test_a_layer_is_constant_from_32_different_tokens_on(num_rows, num_different, is_refused):
    rows = np.stack([[[i % 7, 7], [3, 4]] for i in range(num_rows)])
    ids = None if num_different is None else np.arange(num_rows) % num_different
    with refused(rf"layers \[2\] .* \[3, 4\] in all {num_rows} rows 5\.\." if is_refused else None):
        span(check_of(2), rows, ids, first_row=5)
    span(check_of(2, believe=True), rows, ids)
    rows[num_rows - 1, 1] = [4, 3]
    span(check_of(2), rows, ids)


def test_a_model_that_uses_all_its_experts_has_one_route():
    span(check_of(2, num_experts=4, topk=4), np.tile(np.arange(4), (40, 2, 1)))


@pytest.mark.parametrize(("num_experts", "num_tokens", "is_refused"), [
    (16, 5, False), (16, 6, True), (64, 4, False), (64, 5, True), (4, 11, False), (4, 12, True),
])  # fmt: skip
def test_a_layer_that_copies_its_neighbour_is_refused_from_40_bits_on(num_experts, num_tokens, is_refused):
    """7.9 bits a token of 16 experts, 8 at most of 64, 3.6 of 4."""
    rows = routes(20, 3, num_experts=num_experts, topk=2)
    rows[:, 2] = rows[:, 1]
    message = r"copies of their neighbour \(3 of 2\) in all 20 rows" if is_refused else None
    with refused(message):
        span(check_of(3, num_experts), rows, np.arange(20) % num_tokens)
    with refused(r"3 of 2"):  # unknown ids count by their rows
        span(check_of(3, num_experts), rows)
    rows[19, 2] = rows[18, 1]
    span(check_of(3, num_experts), rows, range(20))


def test_layers_that_all_hold_one_layers_ids_are_refused():
    rows = np.repeat(routes(20, 1, num_experts=16, topk=2), 3, axis=1)
    with refused(r"\(2 of 1, 3 of 2\)"):
        span(check_of(3, 16), rows, range(20))


@pytest.mark.parametrize(
    ("num_layers", "standing", "is_refused"), [(3, 14, False), (3, 15, True), (9, 5, False), (9, 6, True)]
)
def test_rows_that_stand_still_are_refused_from_40_bits_on(num_layers, standing, is_refused):
    """A bit a layer for each row that equals the one before it, of another token."""
    rows = routes(40, num_layers, num_experts=16, topk=2)
    rows[10 : 10 + standing] = rows[10]
    message = (
        rf"rows 10\.\.{9 + standing} of 40 rows 0\.\.39 \(all\) are equal in every layer while their tokens differ"
    )
    with refused(message if is_refused else None):
        span(check_of(num_layers, 16), rows, range(40))
    span(check_of(num_layers, 16), rows, [7] * 40)  # one token many times may well have one route
    span(check_of(num_layers, 16), rows)
    span(check_of(num_layers, 16, believe=True), rows, range(40))


def test_without_ids_rows_stand_still_from_32_on():
    rows = routes(60, 3, num_experts=16, topk=2)
    rows[10:41] = rows[10]
    span(check_of(3, 16), rows)
    rows[41] = rows[10]
    with refused(r"rows 10\.\.41 of 60 .* are equal in every layer"):
        span(check_of(3, 16), rows)


@pytest.mark.parametrize("first", [0, 1, 6, 7])
@pytest.mark.parametrize(("pairs", "is_refused"), [(13, False), (14, True)])
def test_rows_that_come_twice_are_refused_from_40_bits_on(pairs, is_refused, first):
    rows = twice(first, pairs)
    message = rf"rows {first}\.\.{first + 2 * pairs - 1} of .* hold every row twice"
    with refused(message if is_refused else None):
        span(check_of(3, 16), rows, range(len(rows)))
    span(check_of(3, 16), rows, (np.arange(len(rows)) + first % 2) // 2)  # every token comes twice, too


@pytest.mark.parametrize(("pairs", "is_refused"), [(15, False), (16, True)])
def test_without_ids_rows_come_twice_from_32_on(pairs, is_refused):
    with refused("hold every row twice" if is_refused else None):
        span(check_of(3, 16), twice(4, pairs))


def twice(first, pairs):
    rows = routes(first + 2 * pairs + 5, 3, num_experts=16, topk=2)
    rows[first + 1 : first + 2 * pairs : 2] = rows[first : first + 2 * pairs : 2]
    return rows


def test_what_nobody_takes_for_a_route_is_filler_where_none_should_be():
    two = [[[2, 3], [4, 5]], [[2, 3], [2, 3]], [[3, 2], [2, 3]], [[2, 3], [4, -1]], [[2, 3], [5, 5]], [[0, 1], [0, 1]]]
    assert check_of(2).is_filler(np.array(two)).tolist() == [False, True, False, True, True, True]
    one = [[[0, 1]], [[1, 0]], [[2, 3]], [[4, 4]]]  # of one layer any route is the same in every layer
    assert check_of(1).is_filler(np.array(one)).tolist() == [True, False, False, True]


def test_chance_and_few_rows_are_believed():
    generator = np.random.default_rng(0)
    for _ in range(200):
        num_layers, num_experts = int(generator.integers(1, 12)), int(generator.integers(3, 40))
        rows = routes(int(generator.integers(0, 60)), num_layers, num_experts=num_experts, topk=2, seed=generator)
        check = check_of(num_layers, num_experts)
        _, routed = copy(check, rows)
        assert routed.all()
        span(check, rows, generator.integers(0, 5, len(rows)))
