"""The check for repeated experts, against comparing every pair."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from megatron_router_replay.engines.checks import has_repeats


@pytest.mark.parametrize("topk", [1, 2, 3, 4, 6, 8, 10])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_every_pair_of_places_is_compared(topk: int, dtype: type) -> None:
    # Neighbouring routes share ids at every distance: only those within a route count.
    rows = (np.arange(3 * 2 * topk) % topk).reshape(3, 2, topk).astype(dtype)
    rows[1::2] = rows[1::2, :, ::-1]
    assert not has_repeats(rows)
    for row in range(3):
        for layer in range(2):
            for one, other in combinations(range(topk), 2):
                repeated = rows.copy()
                repeated[row, layer, other] = repeated[row, layer, one]
                assert has_repeats(repeated), (row, layer, one, other)


def test_ids_that_differ_in_their_high_byte_only_are_different() -> None:
    assert not has_repeats(np.array([[[1, 257, 513, 2]]], np.int16))
    assert has_repeats(np.array([[[1, 257, 513, 257]]], np.int16))


def test_no_rows_repeat_nothing() -> None:
    assert not has_repeats(np.zeros((0, 2, 8), np.uint8))
