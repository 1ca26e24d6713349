"""Rows of int32 in base64 are decoded some at a time: the same rows, the same errors, and no memory for all of them."""

import base64
import sys

import numpy as np
import pytest

from benchmarks.measure import peak_above
from megatron_router_replay import engines
from megatron_router_replay.engines import row_check
from megatron_router_replay.engines.payload import EncodedRows, Source, parse_routes
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import int32_base64, routes

SOURCE = Source(engine="E", field="f")
MODEL = engines.ModelRoutingInfo(num_layers=3, moe_layer_numbers=(2, 3), num_experts=16, topk=2)


def rows_of(num_rows, **options):
    array = np.zeros((num_rows, 3, 2), np.int32)  # layer 1 is dense
    array[:, 1:] = routes(num_rows, 2, num_experts=16, topk=2)
    return array


@pytest.mark.parametrize(("num_rows", "columns", "topk"), [(0, 3, 2), (1, 1, 1), (2, 1, 1), (3, 5, 7), (10, 3, 1)])
def test_slices_are_those_of_the_array(num_rows, columns, topk):
    array = np.random.default_rng(0).integers(-1, 1 << 20, (num_rows, columns, topk)).astype(np.int32)
    encoded = parse_routes(int32_base64(array), source=SOURCE, num_columns=columns, topk=topk)
    assert isinstance(encoded, EncodedRows)
    assert (len(encoded), encoded.shape, encoded.ndim, encoded.dtype) == (num_rows, array.shape, 3, array.dtype)
    for start in range(num_rows + 2):
        for stop in range(num_rows + 2):
            assert np.array_equal(encoded[start:stop], array[start:stop])
    assert np.array_equal(encoded[:], array)


@pytest.mark.parametrize("block_bytes", [1, 50, 1 << 20])
@pytest.mark.parametrize("missing", ["raise", "live"])
def test_a_reply_is_that_of_its_array_in_any_blocks(monkeypatch, block_bytes, missing):
    monkeypatch.setattr(row_check, "_BLOCK_BYTES", block_bytes)
    array, ids = rows_of(20), list(range(40, 61))
    if missing == "live":
        array[[4, 17]], array[9, 1] = -1, 3
    options = {"model": MODEL, "token_ids": ids, "missing": missing}
    trace = engines.sglang.decode(int32_base64(array), **options)
    assert trace == engines.sglang.decode(array, **options)
    lost = [4, 9, 17] if missing == "live" else []
    assert trace.replay_mask.tolist() == [row not in [*lost, 20] for row in range(21)]
    kept = trace.replay_mask[:20].numpy()
    assert np.array_equal(trace.topk_indices[:20].numpy()[kept], array[kept, 1:])


FAULTS = {
    "an id outside": lambda array: array.__setitem__((13, 2, 1), 16),
    "an id that a cast would wrap": lambda array: array.__setitem__((13, 2, 1), 300),
    "an expert twice": lambda array: array.__setitem__((13, 2), 5),
    "a row of -1": lambda array: array.__setitem__(13, -1),
    "a route in a dense layer": lambda array: array.__setitem__((13, 0), [1, 2]),
    "filler of two kinds": lambda array: array.__setitem__((slice(13), 0), [0, -1]),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_a_fault_is_the_one_of_the_array(monkeypatch, block_bytes, fault):
    array = rows_of(20)
    FAULTS[fault](array)
    texts = []
    for payload in (array, int32_base64(array)):
        monkeypatch.setattr(row_check, "_BLOCK_BYTES", block_bytes)
        with pytest.raises(PayloadError, match=r"MRR30[267]") as error:
            engines.sglang.decode(payload, model=MODEL, token_ids=list(range(21)))
        texts.append(str(error.value))
    assert texts[0] == texts[1]


def test_dense_layers_of_zeros_in_one_block_and_of_minus_one_in_the_next_raise(monkeypatch):
    monkeypatch.setattr(row_check, "_BLOCK_BYTES", 1)
    array = rows_of(20)
    array[9:, 0] = -1  # at the end of a block of three rows: no block has both
    with pytest.raises(PayloadError, match=r"MRR306: .*column 0 is of a dense layer"):
        engines.sglang.decode(int32_base64(array), model=MODEL, token_ids=list(range(21)))


@pytest.mark.parametrize("at", [0, 7, 200, -3])
def test_damaged_base64_is_named_wherever_it_is(monkeypatch, at):
    monkeypatch.setattr(row_check, "_BLOCK_BYTES", 1)
    text = int32_base64(rows_of(20))
    damaged = text[:at] + "\u00e9" + text[at:][1:]
    with pytest.raises(PayloadError, match=r"MRR310: .*not base64"):
        engines.sglang.decode(damaged, model=MODEL, token_ids=list(range(21)))


def test_damage_in_a_row_that_is_not_kept_raises():
    """Of a decode server's reply, the rows of the prompt are not kept."""
    prompt, text = int32_base64(rows_of(3)), int32_base64(rows_of(6))
    replies = ({"routed_experts": each} for each in (prompt, text, prompt, "*" + text[1:]))
    options = {"engine": engines.sglang, "model": MODEL, "prompt_token_ids": [5, 6, 7]}
    ids = [{"output_ids": [8]}, {"output_ids": [8, 9, 1, 2]}] * 2
    first, second, again, damaged = ({"meta_info": reply, **each} for reply, each in zip(replies, ids))
    assert engines.join_prefill_decode(first, second, **options).replay_mask.tolist() == [True] * 6 + [False]
    with pytest.raises(PayloadError, match=r"MRR310: .*not base64"):
        engines.join_prefill_decode(again, damaged, **options)


def test_two_texts_that_were_put_together_raise():
    """Each has padding at its end, so the decoder of a slice that ends there sees nothing wrong."""
    one = base64.b64encode(bytes(4)).decode()
    encoded = EncodedRows(one + one + base64.b64encode(bytes(12)).decode(), (1, 1), SOURCE)
    for row in (0, 1, 2):
        with pytest.raises(PayloadError, match=r"MRR310: .*not base64"):
            encoded[row : row + 1]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counts of memory are Linux's")
def test_a_reply_of_int32_takes_the_memory_of_its_trace_and_as_much_again_at_most():
    model = engines.ModelRoutingInfo(num_layers=48, moe_layer_numbers=tuple(range(1, 49)), num_experts=16, topk=2)
    rows = np.concatenate([routes(997, 48, num_experts=16, topk=2)] * 120)
    text, ids = int32_base64(rows), np.arange(len(rows) + 1)
    del rows
    result = len(ids) * (48 * 2 + 1 + 4)
    assert 0.9 * result <= peak_above(lambda: engines.sglang.decode(text, model=model, token_ids=ids)) <= 2 * result
