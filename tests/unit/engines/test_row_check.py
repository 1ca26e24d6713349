"""The one check of rows, each fault at its boundary; what decoders make of them is in their own tests."""

import contextlib

import numpy as np
import pytest

from megatron_router_replay.engines import vllm
from megatron_router_replay.engines.payload import Source
from megatron_router_replay.engines.row_check import copy_routes
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import all_moe, routes

SOURCE = Source(engine="E", field="f")
TWO = [[0, 1], [2, 3]]


def refused(message):
    """The body raises this message, or nothing where it is None."""
    return contextlib.nullcontext() if message is None else pytest.raises(PayloadError, match=message)


def copy(rows, *, num_experts=8, **options):
    """Return (what was copied, which rows have a route)."""
    rows = np.asarray(rows)
    layers = tuple(range(rows.shape[1]))
    model = all_moe(len(layers), num_experts, rows.shape[2])
    out = np.zeros(rows.shape, np.uint8)
    return out, copy_routes(rows, out, columns=layers, model=model, source=SOURCE, **options)


@pytest.mark.parametrize(
    ("route", "cause"),
    [([0, 7], None), ([0, 8], "physical ids"), ([-1, 7], "Negative ids"), ([-1, 8], "physical ids")],
)
def test_ids_from_0_to_the_last_expert_are_legal(route, cause):
    with refused(cause and rf"row 6, layer 2 of topk_indices is \[{route[0]}, {route[1]}\].*{cause}"):
        copy([[[1, 2], [3, 4]], [[1, 2], route]], first_row=5)


@pytest.mark.parametrize(("bad_rows", "where"), [([1], r"rows 11\.\.11; first: row 11"), ([1, 2], r"rows 11\.\.12")])
def test_repeats_are_explained_by_their_rows_and_layers(bad_rows, where):
    rows = np.array([TWO] * 4)
    rows[bad_rows, 1] = 3
    with refused(rf"{len(bad_rows)} routes name an expert twice, in layers \[2\], {where}.*layer_number 2 = \[3, 3\]"):
        copy(rows, first_row=10)


def test_zeros_are_explained_as_lost():
    with refused(
        r"1 routes are all zero, in layers \[1, 2\], rows 0\.\.1; first: row 0, layer_number 2 .*missing='live'"
    ):
        copy([[[0, 1], [0, 0]], [[5, 5], [2, 3]]])


def test_what_is_missing_has_no_route_where_that_is_allowed():
    out, routed = copy([TWO, [[-1, -1]] * 2, [[4, 4], [2, 3]], [[6, 7], [0, 1]]], missing="live")
    assert routed.tolist() == [True, False, False, True]
    assert out[[0, 3]].tolist() == [TWO, [[6, 7], [0, 1]]]
    with refused("row 1, layer 1 .* outside"):  # a row is -1 altogether or not at all
        copy([TWO, [[-1, -1], [0, 1]]], missing="live")


@pytest.mark.parametrize(("dtype", "num_experts", "fits"), [
    (np.uint8, 256, True), (np.uint8, 257, False), (np.int8, 128, True), (np.int8, 129, False), (np.int16, 32768, True),
])  # fmt: skip
def test_a_dtype_that_cannot_hold_the_experts_has_wrapped_them(dtype, num_experts, fits):
    with refused(None if fits else f"which cannot hold the ids of {num_experts} experts: a cast has wrapped them"):
        copy(np.array([TWO], dtype), num_experts=num_experts)


@pytest.mark.parametrize("hot", [0.0, 0.5, 0.9, 0.95])
@pytest.mark.parametrize("num_layers", [1, 2, 6, 48])
@pytest.mark.parametrize("topk", [1, 2])
def test_legal_routes_that_look_odd_are_all_believed(hot, num_layers, topk):
    """Hot experts, one token many times, loops: a trained model does all of it, and no rule of chance may refuse it."""
    model = all_moe(num_layers, 16, topk)
    for num_rows in (1, 39, 997, 4096, 131_071) if num_layers == 1 else (1, 39, 997, 4096):
        rng = np.random.default_rng([num_rows, num_layers, topk])
        drawn = routes(num_rows, num_layers, num_experts=16, topk=topk, seed=rng).astype(np.uint8)
        skewed = np.where(rng.random((num_rows, num_layers, 1)) < hot, np.arange(topk, dtype=np.uint8), drawn)
        looped = np.arange(num_rows) % 7 % num_rows
        for rows, ids in (
            (skewed, rng.integers(0, 50_000, num_rows + 1)),
            (np.repeat(skewed[:1], num_rows, axis=0), np.full(num_rows + 1, 220)),  # a run of one token
            (skewed[looped], np.append(looped, 0)),  # n-grams again and again
            (np.repeat(skewed[:, :1], num_layers, axis=1), np.arange(num_rows + 1)),  # each layer as the first one
        ):
            for given in ({"token_ids": ids}, {"num_tokens": len(ids)}):
                trace = vllm.decode(rows, model=model, **given)
                assert int(trace.replay_mask.sum()) == num_rows
                assert np.array_equal(trace.topk_indices[:-1].numpy(), rows)
