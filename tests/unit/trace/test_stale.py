"""One row of routes over tokens that differ: found where it cannot be chance, and nowhere else."""

import numpy as np
import pytest

from megatron_router_replay.trace.stale import StaleRows, find_stale_rows

# layers, experts, topk, tokens -> the least run that is found: fewer layers and experts need more rows
SHAPES = {
    (6, 16, 1, 512): 7,
    (6, 8, 2, 512): 7,
    (6, 32, 4, 512): 7,
    (48, 128, 8, 4096): 6,
    (3, 16, 2, 64): 9,
    (2, 32, 1, 512): 11,
}


def sample(layers, experts, topk, num_tokens, seed=0):
    rng = np.random.default_rng(seed)
    rows = rng.random((num_tokens, layers, experts)).argsort(axis=2)[:, :, :topk].astype(np.uint8)
    return rows, rng.permutation(num_tokens) + 100, np.ones(num_tokens, np.bool_)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_least_run_that_is_found_follows_from_layers_experts_and_topk(shape):
    rows, ids, mask = sample(*shape)
    assert find_stale_rows(rows, ids, mask) == []
    least = SHAPES[shape]
    for length in (least - 1, least, 60):
        stale = rows.copy()
        stale[3 : 3 + length] = stale[3]
        found = find_stale_rows(stale, ids, mask)
        assert found == ([StaleRows(3, 3 + length, length)] if length >= least else []), length


@pytest.mark.parametrize(("layers", "experts", "topk"), [(1, 4, 1), (1, 16, 1), (2, 4, 1), (1, 8, 2)])
def test_a_tiny_model_may_stay_with_one_row(layers, experts, topk):
    rows, ids, mask = sample(layers, experts, topk, 512)
    for end in (30, 400):
        rows[10:end] = rows[10]
        assert find_stale_rows(rows, ids, mask) == []


def test_a_loop_is_evidence_once_for_each_of_its_tokens():
    rows, ids, mask = sample(6, 32, 4, 512)
    ids[100:300], rows[100:300] = 7, rows[100]  # one token again and again
    ids[310:500:2], ids[311:500:2], rows[310:500] = 8, 9, rows[310]  # two tokens that share a row
    assert find_stale_rows(rows, ids, mask) == []
    ids[310:330] = np.arange(20, 40)
    assert [run.num_tokens for run in find_stale_rows(rows, ids, mask)] == [22]


def test_rows_without_a_route_end_a_run():
    rows, ids, mask = sample(6, 16, 1, 512)
    rows[50:62] = rows[50]
    mask[56] = False
    assert find_stale_rows(rows, ids, mask) == []
    assert find_stale_rows(rows, ids, np.zeros_like(mask)) == []
    assert find_stale_rows(rows[:1], ids[:1], mask[:1]) == []
    assert find_stale_rows(rows[:0], ids[:0], mask[:0]) == []


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_layers_that_agree_more_often_than_their_loads_say_are_no_fault(share):
    """Routes that follow a token's cluster alone: whole rows are equal as often as clusters are."""
    for seed in range(200):
        rng = np.random.default_rng(seed)
        table, _, _ = sample(6, 16, 2, 8, seed)
        weights = np.full(8, (1 - share) / 7)
        weights[0] = share
        rows = table[rng.choice(8, 300, p=weights)]
        assert find_stale_rows(rows, np.arange(300), np.ones(300, np.bool_)) == [], seed
