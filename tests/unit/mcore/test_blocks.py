"""The arithmetic of wrong rows, worked out by hand."""

from math import log

import numpy as np
import pytest

from megatron_router_replay.mcore.judge.blocks import (
    Block,
    ComparedRows,
    clearest_blocks,
    evidence_of,
    highest_rises,
    sums_of_kinds,
)

OUTSIDE, INSIDE, LIVE = range(3)


def rows_of(*rows, chance, live_chance=None, ends=None, kinds=None, versions=None):
    """Rows as (how many, [(expert, level), ...]), with a kind each."""
    codes = np.concatenate(
        [np.tile([[3 * expert + level] for expert, level in chosen], number) for number, chosen in rows], axis=1
    ).astype(np.int16)
    return ComparedRows(
        codes=codes,
        kinds=np.arange(codes.shape[1]) if kinds is None else np.asarray(kinds),
        ends=np.asarray(ends or [codes.shape[1]]),
        chance=np.asarray(chance, np.float32),
        live_chance=np.asarray(live_chance or chance, np.float32),
        versions=versions,
    )


def test_a_ratio_is_a_sum_over_experts_by_the_loads_of_the_micro_batch():
    rows = rows_of(
        (32, [(0, LIVE), (1, INSIDE)]),
        (32, [(2, OUTSIDE), (3, INSIDE)]),
        (32, [(0, INSIDE), (1, INSIDE)]),
        chance=[[0.5, 0.1, 0.9, 0.9], [0.9, 0.9, 0.01, 0.99], [0.2, 0.3, 0.9, 0.9]],
        ends=[32, 64, 96],
    )
    noise, which = rows.noise()
    assert noise.tolist() == [0.02], "of the better half of the windows, 0.02 at least"
    assert not which.any()
    right, wrong = log(0.5 / 0.98) + log(0.1 / 0.98), log(0.98 / 0.02) + log(0.98 / 0.98)
    third = log(0.2 / 0.98) + log(0.3 / 0.98)
    assert rows.ratios() == pytest.approx([right] * 32 + [wrong] * 32 + [third] * 32, abs=1e-5)


def test_a_ratio_is_bounded_and_0_where_no_route_is_replayed():
    rows = rows_of((32, [(0, LIVE)] * 4), (33, [(1, OUTSIDE)] * 4), chance=[[0.05, 0.05]], kinds=[*range(64), -1])
    assert rows.ratios().tolist() == [-6] * 32 + [6] * 32 + [0]
    assert rows.outside.tolist() == [0] * 32 + [4] * 33


def test_noise_explains_no_more_than_half_of_what_chance_gives():
    rows = rows_of((64, [(0, OUTSIDE)]), chance=[[0.9, 0.1]])
    assert rows.noise()[0] == pytest.approx([0.05])
    assert rows.ratios() == pytest.approx([log(0.1 / 0.05)] * 64, abs=1e-5)


@pytest.mark.parametrize(
    ("right_and_wrong", "noise"),
    [
        ([53, 10], 10 / 63),  # less than two windows: all rows
        ([54, 10], 0.02),  # the better one of two
        ([24, 8, 0, 64], 8 / 32),  # the best one of three
        ([32, 0, 24, 8, 0, 64], 8 / 64),  # the better two of four
    ],
)
def test_noise_is_that_of_the_better_half_of_windows_of_32_rows(right_and_wrong, noise):
    levels = [(0, LIVE), (0, OUTSIDE)] * 3
    parts = [(number, [level]) for number, level in zip(right_and_wrong, levels)]
    assert rows_of(*parts, chance=[[0.1]]).noise()[0] == pytest.approx([noise])


def test_a_version_of_256_rows_has_a_noise_of_its_own():
    chosen = {
        7: [(0, OUTSIDE), *[(0, LIVE)] * 3],
        8: [(0, LIVE)] * 4,
        9: [(0, OUTSIDE), (0, OUTSIDE), *[(0, LIVE)] * 2],
    }
    versions = np.repeat([7, 8, 9], [256, 256, 255])
    rows = rows_of((256, chosen[7]), (256, chosen[8]), (255, chosen[9]), chance=[[0.1] * 4], versions=versions)
    noise, which = rows.noise()
    assert noise[which[0]] == 0.25
    assert noise[which[256]] == 0.02
    assert len(noise) == 3
    assert (which[512:] == 0).all(), "too few rows: the noise of all"
    assert [len(set(part.tolist())) for part in np.split(which, [256, 512])] == [1, 1, 1]
    of_seven, of_eight = 3 * log(0.1 / 0.75) + log(0.9 / 0.25), -6
    assert rows.ratios()[[0, 256]] == pytest.approx([of_seven, of_eight], abs=1e-5)


def test_shared_experts_are_counted_beyond_chance():
    rows = rows_of(
        (3, [(0, LIVE), (1, INSIDE)]), (1, [(1, LIVE), (2, LIVE)]), chance=[[0.9] * 3], live_chance=[[0.5, 0.25, 0.125]]
    )
    by_chance = 3 * 0.75 + 0.375
    assert rows.shared(rows.number) == (5 - by_chance, 8 - by_chance)


@pytest.mark.parametrize(("num_experts", "most"), [(8, 600 / 64), (32, 8.0)])
def test_many_rows_of_a_kind_weigh_as_much_as_a_few(num_experts, most):
    kinds = [0] * 100 + [1] * 5 + [-1] * 50
    rows = rows_of((155, [(0, LIVE)]), chance=[[0.5] * num_experts], kinds=kinds)
    assert rows.weight.sum() == pytest.approx(most + 5)
    assert rows.number.sum() == 105


def test_single_rows_without_an_expert_inside_are_one_of_each_kind():
    rows = rows_of(
        (900, [(0, LIVE), (1, LIVE)]),
        (100, [(0, LIVE), (1, OUTSIDE)]),
        (30, [(2, OUTSIDE), (3, OUTSIDE)]),
        chance=[[0.5] * 4],
        kinds=[*range(1010), 5, 1000, *range(1000, 1008), *[-1] * 10],
    )
    apart, most = rows.apart()
    assert apart.nonzero()[0].tolist() == [*range(1000, 1011)], "ten kinds of them, and kind 5"
    assert most == pytest.approx(1020 * 30 * 0.05**2)
    few = rows_of((1000, [(0, LIVE), (1, LIVE)]), chance=[[0.5] * 4])
    assert few.apart()[1] == 5
    one = rows_of((9, [(0, OUTSIDE)]), chance=[[0.5]])
    assert not one.apart()[0].any(), "of a single expert, it is no rare thing"


def test_experts_that_are_outside_are_named_if_they_are_two():
    right, chance = (200, [(7, LIVE)]), [[0.1, 0.2, 0.1, *[0.5] * 5]]
    zero, one, few = ((50, [(0, OUTSIDE)]), (5, [(0, INSIDE)])), (50, [(1, OUTSIDE)]), (20, [(2, OUTSIDE)])
    wrong, evidence = rows_of(*zero, one, few, right, chance=chance).wrong_experts()
    assert wrong.tolist() == [0, 1]
    assert evidence == pytest.approx(50 * log(0.9 / 0.35) + 5 * log(0.1 / 0.65) + 50 * log(0.8 / 0.35), abs=1e-4)
    wrong, evidence = rows_of(*zero, few, right, chance=chance).wrong_experts()
    assert (wrong.tolist(), evidence) == ([], 0.0)


def test_the_loads_of_an_expert_are_those_of_its_micro_batches():
    zero, one = (40, [(0, OUTSIDE)]), (40, [(1, OUTSIDE)])
    rows = rows_of(zero, one, zero, one, chance=[[0.1, 0.4], [0.3, 0.4]], ends=[80, 160])
    _, evidence = rows.wrong_experts()
    assert evidence == pytest.approx(80 * log(0.8 / 0.35) + 80 * log(0.6 / 0.35), abs=1e-4)


# ---- blocks
def test_a_block_is_neighbouring_rows_that_rise():
    ratios = np.full(60, -1.0)
    ratios[10:30] = 6
    assert clearest_blocks(ratios, np.arange(60)) == [Block(120.0, 10, 30)]
    assert clearest_blocks(ratios, np.zeros(60)) == [Block(6.0, 10, 30)], "of one kind, as much as one row"
    ratios[40:55] = 6
    assert clearest_blocks(ratios, np.arange(60)) == [Block(120 - 10 + 90.0, 10, 55)]
    ratios[30:40] = -30
    assert clearest_blocks(ratios, np.arange(60)) == [Block(120.0, 10, 30), Block(90.0, 40, 55)]
    ratios[40:55] = 2
    assert clearest_blocks(ratios, np.arange(60)) == [Block(120.0, 10, 30)], (
        "of blocks that do not raise, the highest alone"
    )
    assert clearest_blocks(np.full(9, 8.0), np.arange(9)) == [Block(54.0, 0, 9)], "from the first row to the last"
    assert clearest_blocks(np.full(9, -1.0), np.arange(9)) == []
    assert clearest_blocks(np.zeros(0), np.zeros(0)) == []


def test_a_block_begins_where_the_sum_rises_however_little():
    assert clearest_blocks(np.array([-1.0, 0.5, -1.0]), np.arange(3)) == [Block(0.5, 1, 2)]
    ratios = np.full(20, -1.0)
    ratios[:13] = [0.5, *[6] * 12]
    assert clearest_blocks(ratios, np.arange(20)) == [Block(72.5, 0, 13)], "in the first row, too"
    ratios[0] = -0.5
    assert clearest_blocks(ratios, np.arange(20)) == [Block(72.0, 1, 13)]
    ratios[:14] = [6, -5.5, *[6] * 12]
    assert clearest_blocks(ratios, np.arange(20)) == [Block(72.5, 0, 14)], "the sum is not down in the second row"


def test_all_blocks_from_72_on_are_found():
    ratios = np.tile([-80.0, *[6.0] * 12], 10)
    assert clearest_blocks(ratios, np.arange(130)) == [
        Block(72.0, 13 * n + 1, 13 * n + 13) for n in reversed(range(10))
    ]
    ratios[1] = 5.5
    assert len(clearest_blocks(ratios, np.arange(130))) == 9


def test_a_block_is_found_before_the_sum_is_down_again():
    ratios = np.concatenate([np.repeat([6.0, -6, 6, -6, 6, -6], [20, 14, 13, 20, 15, 9])])  # 120, 36, 114, -6, 84, 30
    assert clearest_blocks(ratios, np.arange(91)) == [Block(120.0, 0, 20), Block(90.0, 67, 82), Block(78.0, 34, 47)]


def test_a_sequence_has_no_more_evidence_than_its_highest_rise():
    ratios = np.array([[1.0, -3, 2, 2, -1], [-1, -1, -1, -1, -1], [2, -1, 2, -9, 1]])
    assert highest_rises(ratios).tolist() == [4, 0, 3]


def test_kinds_add_up_over_ranks_and_each_adds_no_more_than_a_row():
    sums = sums_of_kinds(np.array([1.0, 2.5174, 4.0]), np.array([3, 70, 3]))
    assert sums == {"3": 5.0, "70": 2.52}, "in hundredths, as ranks publish them"
    assert evidence_of([10.0, 1.0]) == 7
    assert evidence_of([10.0, -10.0, 3.0]) == 3
    assert evidence_of([2.0, -10.0]) == -8
