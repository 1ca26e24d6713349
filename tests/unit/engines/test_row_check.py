"""The one check of rows, each fault at its boundary; the messages of decoders are in their own tests."""

import contextlib

import numpy as np
import pytest

from megatron_router_replay.engines import vllm
from megatron_router_replay.engines.payload import Source
from megatron_router_replay.engines.row_check import copy_routes
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import all_moe, routes

TWO = [[0, 1], [2, 3]]


def copy(rows, *, num_experts=8, **options):
    """Return (the copied rows, which of them have a route)."""
    rows = np.asarray(rows)
    layers = tuple(range(rows.shape[1]))
    model, source = all_moe(len(layers), num_experts, rows.shape[2]), Source(engine="E", field="f")
    out = np.zeros(rows.shape, np.uint8)
    return out, copy_routes(rows, out, columns=layers, model=model, source=source, **options)


REPEATED = np.array([TWO] * 4)
REPEATED[[1, 2], 1] = 3


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([[[1, 2], [3, 4]], [[1, 2], [0, 7]]], {}, None),
        ([[[1, 2], [3, 4]], [[1, 2], [0, 8]]], {}, r"row 11, layer 2 of topk_indices is \[0, 8\].*physical ids"),
        ([[[1, 2], [3, 4]], [[1, 2], [-1, 7]]], {}, r"row 11, layer 2 .*\[-1, 7\].*Negative ids"),
        ([[[1, 2], [3, 4]], [[1, 2], [-1, 8]]], {}, "physical ids"),
        (REPEATED[:2], {}, r"1 routes name an expert twice, in layers \[2\], rows 11\.\.11; first: row 11, .*2 = \[3, 3\]"),
        (REPEATED, {}, r"2 routes name an expert twice, in layers \[2\], rows 11\.\.12"),
        ([[[0, 1], [0, 0]], [[5, 5], [2, 3]]], {},
         r"1 routes are all zero, in layers \[1, 2\], rows 10\.\.11; first: row 10, layer_number 2 .*missing='live'"),
        ([TWO, [[-1, -1], [0, 1]]], {"missing": "live"}, "row 11, layer 1 .* outside"),  # a row is -1 as a whole
        ([[[-1, -1]] * 2, TWO, [[0, 1], [8, 0]]], {"missing": "live"}, "row 12, layer 2 .* outside"),
        (np.array([TWO], np.uint8), {"num_experts": 256}, None),
        (np.array([TWO], np.uint8), {"num_experts": 257}, "cannot hold the ids of 257 experts: a cast has wrapped them"),
        (np.array([TWO], np.int8), {"num_experts": 128}, None),
        (np.array([TWO], np.int8), {"num_experts": 129}, "cannot hold the ids of 129 experts"),
        (np.array([TWO], np.int16), {"num_experts": 32768}, None),
    ],
)  # fmt: skip
def test_a_row_is_a_route_or_raises_with_its_place(rows, options, message):
    raises = contextlib.nullcontext() if message is None else pytest.raises(PayloadError, match=message)
    with raises:
        copy(rows, first_row=10, **options)


def test_rows_that_are_missing_have_no_route_where_that_is_allowed():
    out, routed = copy([TWO, [[-1, -1]] * 2, [[4, 4], [2, 3]], [[6, 7], [0, 1]]], missing="live")
    assert routed.tolist() == [True, False, False, True]
    assert out[[0, 3]].tolist() == [TWO, [[6, 7], [0, 1]]]


@pytest.mark.parametrize("num_layers", [1, 6, 48])
@pytest.mark.parametrize("topk", [1, 2])
def test_legal_routes_that_look_odd_are_all_believed(num_layers, topk):
    """Hot experts, one token many times, loops: a trained model does all of it, and no rule of chance may refuse it."""
    model, rng = all_moe(num_layers, 16, topk), np.random.default_rng([num_layers, topk])
    for num_rows in (1, 39, 4096):
        drawn = routes(num_rows, num_layers, num_experts=16, topk=topk, seed=rng).astype(np.uint8)
        skewed = np.where(rng.random((num_rows, num_layers, 1)) < 0.9, np.arange(topk, dtype=np.uint8), drawn)
        for rows in (
            skewed,
            np.repeat(skewed[:1], num_rows, axis=0),  # a run of one token
            skewed[np.arange(num_rows) % 7 % num_rows],  # n-grams again and again
            np.repeat(skewed[:, :1], num_layers, axis=1),  # each layer as the first one
        ):
            trace = vllm.decode(rows, model=model, num_tokens=num_rows + 1)
            assert int(trace.replay_mask.sum()) == num_rows
            assert np.array_equal(trace.topk_indices[:-1].numpy(), rows)
