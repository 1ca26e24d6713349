"""What the ranks of a replay judge together when it ends, from the numbers that each of them tells the others."""

import itertools
import math
from typing import get_args

import pytest

import megatron_router_replay as mrr
from megatron_router_replay.mcore.balance import AuxLoss, Balance, ExpertBias
from megatron_router_replay.mcore.replaying import _bits
from tests.unit.mcore.tiny_chunk import Chunk, random_trace


def numbers(replayed=0, live=0, padding=0, *, not_kept=0, stale=0, weighed=0, left=0, bounds=(None, None), choice=0):
    of_session, of_balance = [replayed, live, padding, 8], [choice, -1, 0]
    return [*of_session, *of_balance, not_kept, stale, weighed, left, *map(_bits, bounds)]


def judge(*ranks, **options):
    chunk = Chunk()
    session = mrr.replay(chunk, random_trace(8), **options)
    try:
        return session._judge({2 + rank: of_rank for rank, of_rank in enumerate(ranks)})  # ranks 2, 3, ... of the job
    finally:
        mrr.close_sessions(chunk)


def test_the_numbers_of_a_session_are_these():
    chunk = Chunk()
    session = mrr.replay(chunk, random_trace(8), min_margin=0.25)
    expected = numbers(bounds=(0.25, math.inf))
    expected[3] = 0  # no row was queued
    assert session._numbers() == expected
    mrr.close_sessions(chunk)


def test_a_rank_of_padding_alone_is_in_order_beside_one_that_replays():
    assert judge(numbers(0, 0, 8), numbers(6, 2, 0)) == []
    assert judge(numbers(0, 8), numbers(1, 7)) == []
    assert judge(numbers(0, 0, 8), numbers(0, 0, 8)) == []


def test_ranks_that_replayed_nothing_raise_together():
    (problem,) = judge(numbers(0, 5), numbers(0, 3))
    assert problem.startswith("none of 8 tokens was replayed on 2 ranks; the trace has no route for any of them")
    (problem,) = judge(numbers(0, 5))
    assert problem.startswith("none of 5 tokens was replayed on this rank;")
    (problem,) = judge(numbers(0, 5, not_kept=2), numbers(0, 3, stale=1))
    assert problem.startswith(
        "none of 8 tokens was replayed on 2 ranks: 2 not kept, 1 older than max_age; others have no"
    )
    assert judge(numbers(0, 5, not_kept=5), numbers(0, 3, stale=3), min_replayed=0) == []
    # Decisions that margins left live count as rows that were not replayed: all of them, and half of them.
    (problem,) = judge(numbers(6, 2, weighed=18, left=18), numbers(2, 0, weighed=6, left=6))
    assert problem.startswith("none of 10 tokens was replayed on 2 ranks: 24 of 24 decisions by their margin;")
    assert judge(numbers(6, 2, weighed=18, left=17)) == []


@pytest.mark.parametrize(("share", "enough"), [(0.75, True), (0.76, False)])
def test_the_least_share_is_that_of_all_ranks_together(share, enough):
    problems = judge(numbers(8, 0), numbers(4, 4, 100), min_replayed=share)
    expected = "75.0000% of 16 tokens were replayed on 2 ranks, less than min_replayed=0.76."
    assert problems == ([] if enough else [expected])


def test_margins_lower_the_share_by_the_decisions_that_they_left_live():
    ranks = numbers(8, 0, weighed=24, left=6), numbers(4, 4, weighed=12, left=3)
    assert judge(*ranks, min_replayed=0.5625) == []  # 12 of 16, three quarters of their decisions
    (problem,) = judge(*ranks, min_replayed=0.6)
    assert problem == (
        "56.2500% of 16 tokens were replayed on 2 ranks, less than min_replayed=0.6 (live by choice: 9 of 36 decisions by "
        "their margin)."
    )


@pytest.mark.parametrize(
    "others", [(0.25, None), (None, 0.5), (0.25, math.nextafter(0.5, 1)), (0.5, 0.25), (None, None)]
)
def test_ranks_with_other_margins_raise_before_any_share_is_judged(others):
    same = numbers(0, 8, bounds=(0.25, 0.5))
    (problem,) = judge(same, numbers(0, 8, bounds=others), same)
    assert problem.startswith("ranks [3] replay with another min_margin or max_margin than rank 2")
    assert judge(numbers(8, bounds=(0.25, 0.5)), numbers(8, bounds=(0.25, 0.5))) == []


def test_ranks_that_balance_otherwise_raise_first():
    (problem,) = judge(numbers(0, 8, choice=0, bounds=(0.1, None)), numbers(0, 8, choice=1))
    assert problem == "ranks replay with different expert_bias= or aux_loss=: give all of them the same."


def test_every_choice_of_balance_has_a_number_of_its_own():
    choices = itertools.product(get_args(ExpertBias), get_args(AuxLoss))
    assert len({Balance(expert_bias=bias, aux_loss=loss).number for bias, loss in choices}) == 9
